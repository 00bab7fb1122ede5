/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: one connection to the server, from accept to its end. Owned by the server's
 * thread alone. */
#ifndef TIDEPOOL_SESSION_H
#define TIDEPOOL_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "segment/wire.h"

struct tp_config;

/* What a session tells about this process. The server's thread refreshes it before sessions run. */
struct tp_server_facts {
    const struct tp_config *config;
    uint8_t instance[16];
    uint64_t netns;
    char identity[96];
    uint32_t roles; /* TP_ROLE_* that are listened for */
    char name[256];
    uint64_t name_version; /* 0: never set */
};

enum tp_session_state { TP_SESSION_FREE, TP_SESSION_GREETING, TP_SESSION_ATTACHED };

struct tp_session {
    enum tp_session_state state;
    int fd;
    bool unwelcome; /* a uid that may not be our peer */
    uint32_t uid;
    int32_t pid;
    uint64_t since_ms;
    uint64_t told[TP_WIRE_MAX_SEGMENTS]; /* segment ids by slot of the table; 0: nothing */
    uint64_t told_name;                  /* name_version + 1; 0: nothing */
    bool waiting;                        /* `want` could not be answered yet */
    struct tp_msg_pieces want;
    uint64_t waiting_since_ms;
    int stats_slot; /* -1: none */
};

/* Begin with an accepted socket, which the session then owns. */
void tp_session_begin(struct tp_session *session, int fd, const struct tp_server_facts *facts,
                      uint64_t now_ms);

/*
 * Read and answer what has arrived, a few messages at most. `full`: no further client may attach.
 * 0, or -errno when the session must be ended.
 */
int tp_session_read(struct tp_session *session, const struct tp_server_facts *facts, bool full,
                    uint64_t now_ms);

/* Tell an attached client what has changed: name, segments. 0 or -errno: end it. */
int tp_session_announce(struct tp_session *session, const struct tp_server_facts *facts);

/* Deadlines, and another try for a WANT that had to wait. 0 or -errno: end it. */
int tp_session_tick(struct tp_session *session, uint64_t now_ms);

/* Close the connection and free the slot; `reason` is what the functions above returned. */
void tp_session_end(struct tp_session *session, int reason);

#endif
