/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces on hugetlbfs are bound to their nodes, in turn, before they get their pages: the mapping
 * and the thread that asks. Played on one node: the calls are recorded on their way to the kernel,
 * and its files about node 1 are made up.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "segment/segment.h"
#include "segment_bench.h"

#define POOL_FILE "/proc/sys/vm/nr_hugepages"
#define NODE_1 "/sys/devices/system/node/node1/"
#define PIECE (4 * MIB)
#define PIECES 4
#define BYTES (PIECES * PIECE)

/* ld --wrap: the library's calls come to the second, and go on through the first. File offsets have
 * 64 bits, and those calls a name of their own. */
long __real_syscall(long number, ...);
int __real_open64(const char *path, int flags, ...);
int __real_fallocate64(int fd, int mode, off_t offset, off_t bytes);
long __wrap_syscall(long number, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_fallocate64(int fd, int mode, off_t offset, off_t bytes);

static atomic_uint bound, reserved, unplaced;
static struct {
    char *address;
    uint64_t bytes;
    int mode, node;
} bindings[16];
static _Thread_local int thread_node = -1;
static int fd_node[1024]; /* of the piece that was mapped with it */
static const char *node_1_folder;
static int lock_fd = -1;
static unsigned long pages_before;
static char mounted[64];

static int node_of(const unsigned long *mask) {
    return mask[0] == 1 ? 0 : mask[0] == 2 ? 1 : -1;
}

/* The wanted node is written down, and node 0 is asked for. */
long __wrap_syscall(long number, ...) {
    static const unsigned long first = 1;
    unsigned long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (unsigned i = 0; i < 6; i++)
        a[i] = va_arg(arguments, unsigned long);
    va_end(arguments);
    if (number == SYS_mbind) {
        unsigned i = atomic_fetch_add(&bound, 1) % 16;
        bindings[i].address = (char *)a[0];
        bindings[i].bytes = a[1];
        bindings[i].mode = (int)a[2];
        bindings[i].node = node_of((const unsigned long *)a[3]);
        a[3] = (unsigned long)&first;
    } else if (number == SYS_set_mempolicy) {
        thread_node = node_of((const unsigned long *)a[1]);
        a[1] = (unsigned long)&first;
    }
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int __wrap_fallocate64(int fd, int mode, off_t offset, off_t bytes) {
    struct stat piece;
    if (bytes == (off_t)PIECE && fstat(fd, &piece) == 0 && fd < 1024) {
        atomic_fetch_add(&reserved, 1);
        if (thread_node < 0)
            atomic_fetch_add(&unplaced, 1);
        fd_node[fd] = thread_node + 1;
    }
    return __real_fallocate64(fd, mode, offset, bytes);
}

int __wrap_open64(const char *path, int flags, ...) {
    char made_up[256];
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (node_1_folder != NULL && strncmp(path, NODE_1, strlen(NODE_1)) == 0) {
        snprintf(made_up, sizeof made_up, "%s/%s", node_1_folder, strrchr(path, '/') + 1);
        path = made_up;
    }
    return __real_open64(path, flags, mode);
}

static unsigned long read_pool(void) {
    unsigned long value = 0;
    FILE *file = fopen(POOL_FILE, "re");
    if (file != NULL) {
        if (fscanf(file, "%lu", &value) != 1)
            value = 0;
        fclose(file);
    }
    return value;
}

static void write_number(const char *path, unsigned long value) {
    FILE *file = fopen(path, "we");
    if (file != NULL) {
        fprintf(file, "%lu", value);
        fclose(file);
    }
}

static struct tp_config *on_two_nodes(void) {
    lock_fd = open("/tmp/hugepages.lock", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    cr_assert_geq(lock_fd, 0);
    cr_assert_eq(flock(lock_fd, LOCK_EX), 0);
    pages_before = read_pool();
    write_number(POOL_FILE, pages_before + 2 * BYTES / (2 * MIB));
    snprintf(mounted, sizeof mounted, "/tmp/tidepool-mount-XXXXXX");
    cr_assert_not_null(mkdtemp(mounted));
    if (read_pool() < pages_before + BYTES / (2 * MIB) ||
        mount("none", mounted, "hugetlbfs", 0, "pagesize=2M,mode=0700") < 0)
        cr_skip("CONFIG: no hugetlbfs to be had: %s", strerror(errno));
    struct tp_config *config = bench_config(PIECE);
    config->store.kind = TP_SEGMENT_FILES;
    config->store.wait_s = 0;
    snprintf(config->store.segment_dir, sizeof config->store.segment_dir, "%s", mounted);
    config->store.node_count = 2;
    config->store.nodes[0] = 0;
    config->store.nodes[1] = 1;
    return config;
}

static void clean(void) {
    if (mounted[0] != 0) {
        umount2(mounted, MNT_DETACH);
        rmdir(mounted);
    }
    if (lock_fd >= 0)
        write_number(POOL_FILE, pages_before);
}

TestSuite(numa_pages, .timeout = 40, .fini = clean);

Test(numa_pages, pieces_and_the_threads_that_fill_them_go_round_the_nodes) {
    struct tp_config *config = on_two_nodes();
    char *range = bench_allocate(BYTES);
    unsigned on_node[2] = {0};
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    cr_assert_eq(atomic_load(&bound), PIECES);
    for (unsigned i = 0; i < PIECES; i++) {
        cr_assert_eq(bindings[i].mode, MPOL_BIND);
        cr_assert_eq(bindings[i].node, (int)(i % 2));
        cr_assert_eq(bindings[i].bytes, PIECE);
        cr_assert_eq(bindings[i].address, bindings[0].address + i * PIECE);
    }
    cr_assert_eq(atomic_load(&reserved), PIECES);
    cr_assert_eq(atomic_load(&unplaced), 0);
    for (unsigned fd = 0; fd < 1024; fd++) {
        if (fd_node[fd] > 0)
            on_node[fd_node[fd] - 1]++;
    }
    cr_assert_eq(on_node[0], PIECES / 2);
    cr_assert_eq(on_node[1], PIECES / 2);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

/* The machine has enough, this node has not: bound memory would be SIGBUS or a late error. */
Test(numa_pages, a_node_with_too_few_pages_is_an_error_before_anything_is_made) {
    struct tp_config *config = on_two_nodes();
    char folder[] = "/tmp/tidepool-node-XXXXXX";
    char path[64];
    char *range = bench_allocate(BYTES);
    range[0] = 7;
    cr_assert_not_null(mkdtemp(folder));
    node_1_folder = folder;
    for (unsigned long have = 3; have <= 4; have++) { /* its share is 4 */
        snprintf(path, sizeof path, "%s/free_hugepages", folder);
        write_number(path, have);
        snprintf(path, sizeof path, "%s/nr_hugepages", folder);
        write_number(path, have);
        cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), have < 4 ? -ENOMEM : 0);
        cr_assert_eq(range[0], 7);
        cr_assert_eq(atomic_load(&bound), have < 4 ? 0 : PIECES);
    }
    unlink(path);
    snprintf(path, sizeof path, "%s/free_hugepages", folder);
    unlink(path);
    rmdir(folder);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}
