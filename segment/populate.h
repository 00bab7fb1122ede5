/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: give every page of a mapping its memory, in parallel, before anyone relies on
 * it. */
#ifndef TIDEPOOL_POPULATE_H
#define TIDEPOOL_POPULATE_H

#include <stdbool.h>
#include <stdint.h>

struct tp_placement;

struct tp_populate_work {
    char *address;         /* pieces lie one after the other */
    const char *copy_from; /* contents for them, or NULL */
    uint64_t bytes, piece_bytes, page_bytes;
    uint32_t piece_count;
    const int *fds;     /* of the pieces */
    bool reserve_first; /* fallocate before touching */
    const struct tp_placement *placement;
};

/*
 * 0, or -errno: -ENOMEM when there are not enough pages, -ENOSPC when the file system or the pool
 * has no more. Long populations show their progress. What was populated stays so: the caller undoes
 * everything.
 */
int tp_populate(const struct tp_populate_work *work);

#endif
