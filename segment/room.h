/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: is there room for a segment in files, and will there be? */
#ifndef TIDEPOOL_ROOM_H
#define TIDEPOOL_ROOM_H

#include <stdbool.h>
#include <stdint.h>

struct tp_need;

/* Where the pages come from. */
struct tp_room {
    const char *path; /* of the directory, for people */
    int dir_fd;
    bool hugetlb; /* hugetlbfs; else tmpfs */
    uint64_t page_bytes;
    unsigned wait_s; /* MC_STORE_SHM_SEGMENT_WAIT_S */
};

/*
 * Wait until `need` fits into the mount and, on hugetlbfs, into the kernel's pools. Pages of a
 * store that has just ended come back when its last engine lets go of them, so they are waited for,
 * with a line every few seconds; not where there would be too few even then. 0; -ENOSPC when the
 * mount is too small, -ENOMEM when the pool is, and one line was logged that says what is needed,
 * what there is, and what to do; -EINTR, with a line, when a signal asks this process to end.
 */
int tp_room_wait(const struct tp_room *room, const struct tp_need *need);

#endif
