/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: one connection to a store, from HELLO to end of file, and the slot that it fills. The peer thread only.
 */
#ifndef TIDEPOOL_LINK_H
#define TIDEPOOL_LINK_H

#include <stdbool.h>
#include <stdint.h>

struct tp_config;
struct tp_peer;

struct tp_link {
    int fd; /* -1: unused */
    uint8_t instance[16];
    bool welcome; /* WELCOME has come */
    uint32_t wants; /* WANT messages not answered yet */
    uint32_t turn;  /* the segment whose pieces are asked for next */
    uint64_t since_ms;
    uint64_t netns;
    struct tp_peer *peer;
};

/* What became of a connection. */
enum tp_link_end {
    TP_LINK_LIVES,
    TP_LINK_LOST,    /* closed by the store, or silent: worth trying again */
    TP_LINK_REFUSED, /* by either side: not again under this instance id */
};

/* Connect to `socket_name` in `dir_fd` and say HELLO; fills `link`, whose peer the caller has set. 0, or -errno with nothing left open. */
int tp_link_open(struct tp_link *link, int dir_fd, const char *socket_name, const uint8_t instance[16], uint64_t now_ms,
                 const struct tp_config *config);

/* Read what is there (a bounded number of messages) and act on it. */
enum tp_link_end tp_link_read(struct tp_link *link, const struct tp_config *config);

/* Ask for pieces: those that requests have missed first, then in order. */
enum tp_link_end tp_link_ask(struct tp_link *link);

/* One bounded slice of page tables ahead of use. true: there is more to do. */
bool tp_link_prefault(struct tp_link *link);

/* Close; the peer is dead from here on, its memory is dropped by tp_link_drop_memory. */
void tp_link_close(struct tp_link *link);

/*
 * Drop segments that nothing refers to: withdrawn ones, and all when the peer is `dead` (closed). true: nothing is left to drop, and
 * of a dead peer the slot may be used again.
 */
bool tp_link_drop_memory(struct tp_peer *peer, bool dead);

#endif
