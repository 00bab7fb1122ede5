/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside segment/: what pieces are made of. Each kind of memory is one struct tp_backing_ops;
 * segment.c and pieces.c know only this interface.
 *
 * A backing must not know: addresses of segments, who maps them, the server.
 */
#ifndef TIDEPOOL_BACKING_H
#define TIDEPOOL_BACKING_H

#include <stdbool.h>
#include <stdint.h>

#include "segment/wire.h"

struct tp_config;

/* What is to be made, known before the first piece. */
struct tp_need {
    uint64_t address;    /* where it will lie */
    uint64_t bytes;      /* as the caller asked */
    unsigned node_count; /* pieces go round-robin over these nodes */
    const int *nodes;
    uint64_t piece_bytes; /* as configured */
    uint64_t held_bytes;  /* in other segments of this process */
    bool overcommit;      /* also where less memory is available */
};

struct tp_backing;

struct tp_backing_ops {
    enum tp_wire_kind wire_kind;
    /* The page size that this configuration asks for; 4096 where it cannot be told. */
    uint64_t (*page_bytes)(const struct tp_config *config);
    /*
     * Look whether `need` can be met (alignment, room) and fill in *ret_backing. On failure one
     * line was logged that says what is missing and what to do, and nothing is left to close.
     */
    int (*open)(const struct tp_config *config, const struct tp_need *need,
                struct tp_backing *ret_backing);
    /* One piece of `bytes`, of its final size and sealed where that exists: nobody has seen it
     * before. CLOEXEC. */
    int (*create)(struct tp_backing *backing, uint64_t bytes, int *ret_fd);
    void (*close)(struct tp_backing *backing);
};

/* An open backing: lives while one segment is built. */
struct tp_backing {
    const struct tp_backing_ops *ops;
    uint64_t page_bytes;
    bool hugetlb;       /* pages of a pool: missing ones are SIGBUS, not the OOM killer */
    bool reserve_first; /* fallocate before the first touch */
    bool advise_thp;
    int dir_fd;       /* -1: none */
    char detail[64];  /* for people: "memfd, THP" */
    const char *path; /* of the directory; borrowed from the configuration */
};

extern const struct tp_backing_ops tp_backing_memfd;
extern const struct tp_backing_ops tp_backing_files;

/* How many pieces of `piece_bytes` (a multiple of page_bytes) lie on the node of index `node` of
 * `node_count`, in pages. */
uint64_t tp_need_node_pages(const struct tp_need *need, uint64_t page_bytes, unsigned node);

/* The size of all pieces but the last for this page size: as configured or 2 GiB, rounded up. */
uint64_t tp_need_piece_bytes(const struct tp_need *need, uint64_t page_bytes);

#endif
