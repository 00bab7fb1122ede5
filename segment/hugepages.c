/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel's pools of huge pages, read from sysfs, and whether a segment fits into them.
 *
 * It must not know: which kind of file the pages will belong to.
 */
#include "segment/hugepages.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "segment/backing.h"

static int read_number(const char *directory, const char *name, uint64_t *ret_value) {
    char path[256];
    char text[32];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t got = read(fd, text, sizeof text - 1);
    int result = got < 0 ? -errno : 0;
    close(fd);
    if (result < 0)
        return result;
    text[got] = 0;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || errno != 0)
        return -EINVAL;
    *ret_value = value;
    return 0;
}

static void pool_path(char path[static 160], uint64_t page_bytes, int node) {
    if (node < 0)
        snprintf(path, 160, "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB", page_bytes / 1024);
    else
        snprintf(path, 160, "/sys/devices/system/node/node%d/hugepages/hugepages-%" PRIu64 "kB",
                 node, page_bytes / 1024);
}

/* Pages that the kernel makes when the pool is empty, on whichever node. Older kernels have no such
 * figures. */
static uint64_t overcommit_left(uint64_t page_bytes) {
    char directory[160];
    uint64_t surplus = 0;
    uint64_t overcommit = 0;
    pool_path(directory, page_bytes, -1);
    (void)read_number(directory, "surplus_hugepages", &surplus);
    (void)read_number(directory, "nr_overcommit_hugepages", &overcommit);
    return overcommit > surplus ? overcommit - surplus : 0;
}

int tp_hugepages_read(uint64_t page_bytes, int node, struct tp_hugepages *ret_pool) {
    char directory[160];
    uint64_t free_pages = 0;
    uint64_t total = 0;
    uint64_t promised = 0;
    pool_path(directory, page_bytes, node);
    int result = read_number(directory, "free_hugepages", &free_pages);
    if (result == 0)
        result = read_number(directory, "nr_hugepages", &total);
    if (result < 0)
        return result;
    if (node < 0) /* promises are not a node's */
        (void)read_number(directory, "resv_hugepages", &promised);
    uint64_t left = overcommit_left(page_bytes);
    ret_pool->free = (free_pages > promised ? free_pages - promised : 0) + left;
    ret_pool->promised = promised;
    ret_pool->total = total + left; /* nr_hugepages counts surplus pages too */
    return 0;
}

/* One pool against the pages that are needed there; `held_pages` are this process's own, which it
 * will not let go. */
static bool pool_fits(uint64_t page_bytes, int node, uint64_t need_pages, uint64_t held_pages,
                      uint64_t promised_pages, struct tp_shortage *ret_shortage) {
    struct tp_hugepages pool = {0};
    int result = tp_hugepages_read(page_bytes, node, &pool);
    if (result < 0 && node >= 0)
        return true; /* no figures of nodes on this kernel: population will tell */
    pool.free += promised_pages < pool.promised ? promised_pages : pool.promised;
    if (result == 0 && pool.free >= need_pages)
        return true;
    *ret_shortage =
        (struct tp_shortage){.node = node,
                             .need_pages = need_pages,
                             .free_pages = pool.free,
                             .total_pages = pool.total > held_pages ? pool.total - held_pages : 0};
    return false;
}

bool tp_hugepages_fit(const struct tp_need *need, uint64_t page_bytes, uint64_t promised_pages,
                      struct tp_shortage *ret_shortage) {
    uint64_t held_pages = need->held_bytes / page_bytes;
    if (!pool_fits(page_bytes, -1, need->bytes / page_bytes, held_pages, promised_pages,
                   ret_shortage))
        return false;
    for (unsigned i = 0; i < need->node_count; i++) {
        if (!pool_fits(page_bytes, need->nodes[i], tp_need_node_pages(need, page_bytes, i),
                       held_pages / need->node_count, 0, ret_shortage))
            return false;
    }
    return true;
}
