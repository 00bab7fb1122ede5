/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: build the pieces of one segment and lay them over a range. */
#ifndef TIDEPOOL_PIECES_H
#define TIDEPOOL_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "segment/wire.h"

struct tp_config;

/* What other segments of this process hold already. */
struct tp_held {
    uint64_t fds, bytes;
};

struct tp_pieces {
    void *base;
    uint64_t bytes; /* whole pages */
    uint64_t page_bytes, piece_bytes;
    uint32_t count;
    int *fds; /* one a piece; ours */
    unsigned node_count;
    enum tp_wire_kind wire_kind;
    bool
        ours; /* the addresses are its own, and go with it; else somebody else's memory lay there */
    uint64_t reserved, reserved_bytes; /* CUDA VMM memory: the reservation in which it lies */
    char detail[64];
};

/*
 * Make the pieces for [address, address + bytes) elsewhere, populate them, copy the contents when
 * `keep_contents`, and only then move them over the range: until the last step nothing of the range
 * has changed, and the last step is undone when it fails. 0 or -errno with one line logged.
 */
int tp_pieces_build(void *address, size_t bytes, bool keep_contents, struct tp_held held,
                    const struct tp_config *config, struct tp_pieces *ret_pieces);

/*
 * The same at addresses of its own, multiples of `alignment` (a power of two), which no segment has
 * had before (addresses.h): all of the bytes, rounded up to whole pages. -EADDRNOTAVAIL, without a
 * line, when the system gives no such addresses.
 */
int tp_pieces_allocate(size_t bytes, size_t alignment, struct tp_held held,
                       const struct tp_config *config, struct tp_pieces *ret_pieces);

/*
 * Are there file descriptors and memory for pieces of these `bytes`, `piece_bytes` and
 * `page_bytes`? `pool`: pages of a pool, which was looked at already. `overcommit`: too little
 * memory is only a warning. 0 or -errno with one line logged.
 */
int tp_pieces_check(const struct tp_pieces *pieces, uint64_t held_fds, bool pool, bool overcommit);

/* Close the pieces and put fresh anonymous memory in their place, or nothing where the addresses
 * are their own. Neither logs nor allocates. 0 or -errno. */
int tp_pieces_remove(struct tp_pieces *pieces);

/* Close the pieces only: their addresses are somebody else's already. */
void tp_pieces_forget(struct tp_pieces *pieces);

#endif
