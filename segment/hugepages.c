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

int tp_hugepages_read(uint64_t page_bytes, int node, struct tp_hugepages *ret_pool) {
    char directory[160];
    uint64_t free_pages = 0;
    uint64_t total = 0;
    uint64_t promised = 0;
    uint64_t surplus = 0;
    uint64_t overcommit = 0;
    if (node < 0)
        snprintf(directory, sizeof directory, "/sys/kernel/mm/hugepages/hugepages-%" PRIu64 "kB",
                 page_bytes / 1024);
    else
        snprintf(directory, sizeof directory,
                 "/sys/devices/system/node/node%d/hugepages/hugepages-%" PRIu64 "kB", node,
                 page_bytes / 1024);
    int result = read_number(directory, "free_hugepages", &free_pages);
    if (result == 0)
        result = read_number(directory, "nr_hugepages", &total);
    if (result < 0)
        return result;
    if (node < 0) {
        /* Only the machine's pool has these; older kernels may lack them. */
        (void)read_number(directory, "resv_hugepages", &promised);
        (void)read_number(directory, "surplus_hugepages", &surplus);
        (void)read_number(directory, "nr_overcommit_hugepages", &overcommit);
        /* nr_hugepages counts surplus pages too. */
        total += overcommit > surplus ? overcommit - surplus : 0;
        free_pages = free_pages > promised ? free_pages - promised : 0;
        free_pages += overcommit > surplus ? overcommit - surplus : 0;
    }
    ret_pool->free = free_pages;
    ret_pool->total = total;
    return 0;
}

bool tp_hugepages_fit(const struct tp_need *need, uint64_t page_bytes,
                      struct tp_shortage *ret_shortage) {
    struct tp_hugepages pool = {0};
    uint64_t pages = need->bytes / page_bytes;
    if (tp_hugepages_read(page_bytes, -1, &pool) < 0 || pool.free < pages) {
        *ret_shortage = (struct tp_shortage){
            .node = -1, .need_pages = pages, .free_pages = pool.free, .total_pages = pool.total};
        return false;
    }
    if (need->node_count < 2)
        return true;
    for (unsigned i = 0; i < need->node_count; i++) {
        pages = tp_need_node_pages(need, page_bytes, i);
        if (tp_hugepages_read(page_bytes, need->nodes[i], &pool) < 0)
            continue; /* no per-node figures on this kernel: population will tell */
        if (pool.free < pages) {
            *ret_shortage = (struct tp_shortage){.node = need->nodes[i],
                                                 .need_pages = pages,
                                                 .free_pages = pool.free,
                                                 .total_pages = pool.total};
            return false;
        }
    }
    return true;
}
