/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: how many huge pages of a size the kernel has to give. */
#ifndef TIDEPOOL_HUGEPAGES_H
#define TIDEPOOL_HUGEPAGES_H

#include <stdbool.h>
#include <stdint.h>

struct tp_need;

struct tp_hugepages {
    uint64_t free;     /* neither used nor promised, overcommit included */
    uint64_t promised; /* to mappings and mounts that have not used them yet; not known of a node */
    uint64_t total;    /* what there would be if everybody let go */
};

/* The pool of pages of `page_bytes`; `node` -1: the whole machine. 0 or -errno (-ENOENT: the kernel
 * has no such pages). */
int tp_hugepages_read(uint64_t page_bytes, int node, struct tp_hugepages *ret_pool);

/* What is too small for a need. */
struct tp_shortage {
    bool mount; /* the file system's size=; else the kernel's pool of huge pages */
    int node;   /* of that pool; -1: the whole machine */
    uint64_t need_pages, free_pages;
    uint64_t total_pages; /* what there would be if everybody else let go */
};

/* Compare a need with the pools, the machine's and each node's. `promised_pages`: of those that are
 * promised, so many at most to the mount that the need is for. True when it fits; else
 * *ret_shortage says where it does not. */
bool tp_hugepages_fit(const struct tp_need *need, uint64_t page_bytes, uint64_t promised_pages,
                      struct tp_shortage *ret_shortage);

#endif
