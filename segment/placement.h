/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: on which NUMA node the pages of a piece lie. */
#ifndef TIDEPOOL_PLACEMENT_H
#define TIDEPOOL_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "env/env.h"

struct tp_placement {
    unsigned count; /* pieces go round-robin over these */
    int nodes[TP_MAX_NODES];
    bool chosen; /* by the user: a node that refuses is an error */
    bool strict; /* bind; false: prefer, so that a full node spills over instead of calling the OOM
                    killer */
};

/* The nodes of the configuration, or all that have memory. */
void tp_placement_choose(const struct tp_config *config, struct tp_placement *ret_placement);

struct tp_thread_policy {
    bool kept; /* false: there was no need */
    int mode;
    unsigned long nodes[1024 / (8 * sizeof(unsigned long))];
};

/* Bind where each node has room for its share (`share_bytes`), else prefer with one line. For
 * ordinary pages only. */
void tp_placement_check_room(struct tp_placement *placement, uint64_t share_bytes);

static inline int tp_placement_node(const struct tp_placement *placement, uint32_t piece) {
    return placement->nodes[piece % placement->count];
}

/*
 * Set the policy of a fresh mapping to the node of piece `piece`. A kernel or seccomp filter that
 * refuses costs one line, once; 0 then too. -errno when a node that the user chose cannot be used
 * (one line logged).
 */
int tp_placement_bind(const struct tp_placement *placement, uint32_t piece, void *address,
                      uint64_t bytes);

/*
 * The same for what the calling thread allocates: fallocate(2) on hugetlbfs looks at the thread's
 * policy, not the mapping's. For threads of the library, or between the two calls below. Failures
 * do not matter: tp_placement_bind has spoken.
 */
void tp_placement_bind_thread(const struct tp_placement *placement, uint32_t piece);

/*
 * The calling thread's own policy, kept before and put back after it was bound. False: it cannot be
 * read (a seccomp filter), so the thread must not be bound.
 */
bool tp_placement_keep_thread(const struct tp_placement *placement,
                              struct tp_thread_policy *ret_policy);
void tp_placement_put_back_thread(const struct tp_thread_policy *policy);

#endif
