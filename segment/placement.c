/* SPDX-License-Identifier: Apache-2.0 */
/*
 * On which NUMA node the pages of a piece lie. The system calls are made directly: they need no
 * library, and the masks stay plain words.
 *
 * It must not know: what a piece is made of.
 */
#include "segment/placement.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MASK_BITS 1024 /* the largest CONFIG_NODES_SHIFT is 10 */
#define WORD_BITS (8 * sizeof(unsigned long))

struct node_mask {
    unsigned long words[MASK_BITS / WORD_BITS];
};
_Static_assert(sizeof(struct node_mask) == sizeof((struct tp_thread_policy *)0)->nodes,
               "a thread's policy has room for every node");

void tp_placement_choose(const struct tp_config *config, struct tp_placement *ret_placement) {
    *ret_placement = (struct tp_placement){.chosen = config->store.node_count > 0, .strict = true};
    if (ret_placement->chosen) {
        ret_placement->count = config->store.node_count;
        memcpy(ret_placement->nodes, config->store.nodes, sizeof ret_placement->nodes);
    } else {
        ret_placement->count = tp_host_memory_nodes(ret_placement->nodes);
    }
    if (ret_placement->count == 0 || ret_placement->count > TP_MAX_NODES) {
        ret_placement->count = 1;
        ret_placement->nodes[0] = 0;
    }
}

static bool nothing_to_choose(const struct tp_placement *placement) {
    return placement->count < 2 && !placement->chosen;
}

/* Free memory of a node and the page cache that the kernel can drop there. 0 when it cannot be
 * told. */
static uint64_t node_room_bytes(int node) {
    char path[64];
    char line[128];
    uint64_t kib = 0;
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/meminfo", node);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    while (fgets(line, sizeof line, file) != NULL) {
        char name[32];
        uint64_t value;
        if (sscanf(line, "Node %*d %31[^:]: %" SCNu64, name, &value) != 2)
            continue;
        if (strcmp(name, "MemFree") == 0 || strcmp(name, "Inactive(file)") == 0 ||
            strcmp(name, "Active(file)") == 0 || strcmp(name, "SReclaimable") == 0)
            kib += value;
    }
    (void)fclose(file);
    return kib * 1024;
}

void tp_placement_check_room(struct tp_placement *placement, uint64_t share_bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (nothing_to_choose(placement))
        return;
    for (unsigned i = 0; i < placement->count; i++) {
        uint64_t room = node_room_bytes(placement->nodes[i]);
        if (room == 0 || room >= share_bytes)
            continue;
        placement->strict = false;
        tp_log_once(&said, TP_LOG_WARN,
                    "NUMA node %d has %" PRIu64 " MiB free and its share of the segment is %" PRIu64
                    " MiB: part of it may lie on other nodes",
                    placement->nodes[i], room >> 20, share_bytes >> 20);
    }
}

static void set_node(struct node_mask *mask, int node) {
    memset(mask, 0, sizeof *mask);
    if (node >= 0 && node < MASK_BITS)
        mask->words[(unsigned)node / WORD_BITS] = 1UL << ((unsigned)node % WORD_BITS);
}

static int mode_of(const struct tp_placement *placement) {
    return placement->strict ? MPOL_BIND : MPOL_PREFERRED;
}

int tp_placement_bind(const struct tp_placement *placement, uint32_t piece, void *address,
                      uint64_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    struct node_mask mask;
    int node = tp_placement_node(placement, piece);
    if (nothing_to_choose(placement))
        return 0;
    set_node(&mask, node);
    /* The kernel reads one bit less than it is told (mm/mempolicy.c, get_nodes: --maxnode). */
    if (syscall(SYS_mbind, address, bytes, mode_of(placement), mask.words, MASK_BITS + 1, 0) == 0)
        return 0;
    int result = -errno;
    if (result == -EPERM || result == -ENOSYS) {
        tp_log_once(
            &said, TP_LOG_WARN,
            "mbind is refused (%s), so segment memory is not placed on NUMA nodes: start the "
            "container with --cap-add SYS_NICE",
            strerror(-result));
        return 0;
    }
    if (!placement->chosen) {
        tp_log_once(&said, TP_LOG_WARN,
                    "segment memory cannot be placed on NUMA node %d (%s; not in this process's "
                    "cpuset?): it lies where the kernel puts it",
                    node, strerror(-result));
        return 0;
    }
    tp_log(TP_LOG_ERROR,
           "segment memory cannot be placed on NUMA node %d (%s): MC_STORE_CUMEM_NUMA_NODES must "
           "name nodes that this process may use",
           node, strerror(-result));
    return result;
}

void tp_placement_bind_thread(const struct tp_placement *placement, uint32_t piece) {
    struct node_mask mask;
    if (nothing_to_choose(placement))
        return;
    set_node(&mask, tp_placement_node(placement, piece));
    (void)syscall(SYS_set_mempolicy, mode_of(placement), mask.words, MASK_BITS + 1);
}

bool tp_placement_keep_thread(const struct tp_placement *placement,
                              struct tp_thread_policy *ret_policy) {
    struct tp_thread_policy policy = {.kept = !nothing_to_choose(placement)};
    if (policy.kept &&
        syscall(SYS_get_mempolicy, &policy.mode, policy.nodes, MASK_BITS + 1, NULL, 0) != 0)
        return false;
    *ret_policy = policy;
    return true;
}

void tp_placement_put_back_thread(const struct tp_thread_policy *policy) {
    if (policy->kept)
        (void)syscall(SYS_set_mempolicy, policy->mode, policy->nodes, MASK_BITS + 1);
}
