/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: the connection to one store, as a state machine that never waits. The peer
 * thread only.
 */
#ifndef TIDEPOOL_LINK_H
#define TIDEPOOL_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "segment/wire.h"
#include "transport/names.h"
#include "transport/slot.h"

enum tp_link_state {
    TP_LINK_FREE,
    TP_LINK_HELLO, /* connected, HELLO sent, no answer yet */
    TP_LINK_OPEN,  /* welcomed */
    TP_LINK_DRAIN, /* the connection is closed; the mappings wait for the last reference */
};

#define TP_LINK_WANTS 8     /* outstanding, also for segments that are gone meanwhile */
#define TP_LINK_IN_FLIGHT 2 /* for segments that are there */

/* How a connection ended: what the finder does about the store. */
enum tp_link_end {
    TP_LINK_LIVES,
    TP_LINK_EOF,     /* try again */
    TP_LINK_SILENT,  /* try again, ever later */
    TP_LINK_REFUSED, /* not again: another answer needs another process */
    TP_LINK_BROKEN,  /* the store does not keep to the protocol: not again */
};

struct tp_link {
    enum tp_link_state state;
    int fd;
    uint8_t instance[16];
    uint64_t deadline_ms; /* of TP_LINK_HELLO */
    uint64_t netns;
    struct tp_name *name;
    bool first_try;     /* of this store: nothing is known against it */
    bool announced;     /* in the log */
    unsigned renames;   /* not paid off yet: one a second is */
    uint64_t renamed_s; /* CLOCK_MONOTONIC */
    struct tp_want {
        uint64_t segment_id; /* 0: free */
        uint32_t first, count;
        bool gone;
    } wants[TP_LINK_WANTS];
    struct tp_peer *peer;
};

/* What this process is, said in HELLO and compared with WELCOME. */
struct tp_link_self {
    uint8_t instance[16];
    char identity[96];
    uint64_t netns;
};

/* Begin on a connected socket, which the link owns from now on. 0 or -errno (the socket is closed
 * then). */
int tp_link_begin(struct tp_link *link, int fd, const uint8_t instance[static 16],
                  const struct tp_link_self *self, uint64_t now_ms);

/* Read what has come, a bounded number of messages. */
enum tp_link_end tp_link_read(struct tp_link *link, const struct tp_link_self *self);

/* Ask for pieces, fill page tables, let go of what is gone. *ret_busy is set when there is more to
 * do at once. */
enum tp_link_end tp_link_work(struct tp_link *link, uint64_t now_ms, bool *ret_busy);

/* An import thread has ended a job of this link's peer. */
struct tp_import_job;
void tp_link_imported(struct tp_link *link, const struct tp_import_job *job);

/* The connection has ended: nothing is routed to it from here on. */
void tp_link_end(struct tp_link *link);

/* In TP_LINK_DRAIN: unmap, if nothing refers to the mappings any more. true: the link is free.
 * *ret_busy is set when there is more to do at once. */
bool tp_link_drain(struct tp_link *link, bool *ret_busy);

/* Is anything waiting for references to go: a dead peer, or a withdrawn segment? */
bool tp_link_held(const struct tp_link *link);

#endif
