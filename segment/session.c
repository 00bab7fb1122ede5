/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection to the server: the handshake, announcements, and pieces on demand.
 *
 * It must not know: epoll, the other connections, how segments are made.
 *
 * Nothing here blocks. A client that does not read loses its connection when the kernel's buffer is
 * full; only an answer to WANT may wait for a while, since honest engines ask for many pieces at
 * once and the number of fds in flight is limited for all.
 */
#include "segment/session.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "segment/lease.h"
#include "segment/table.h"

#define READ_AT_ONCE 8     /* messages, before others get their turn */
#define UNREAD_BYTES 65536 /* answers that a client may leave unread before it has to wait */
#define WAIT_MS 10000      /* a client that has not read by then is dropped */
#define SEND_BUFFER (208 * 1024)

static int refuse(struct tp_session *session, enum tp_refusal reason, const char *text) {
    struct tp_msg message = {.type = TP_MSG_REFUSED};
    message.body.refused.reason = reason;
    snprintf(message.body.refused.text, sizeof message.body.refused.text, "%s", text);
    (void)tp_wire_send(session->fd, &message, NULL, 0);
    tp_count(TP_CLIENTS_REFUSED, 1);
    return -EACCES;
}

static int refuse_uid(struct tp_session *session) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char text[256];
    if (tp_host_uid_is_ambiguous(session->uid))
        snprintf(text, sizeof text,
                 "uid %u stands for every user that is not mapped in this store's user namespace: "
                 "map the user, or run both as mapped ones",
                 session->uid);
    else
        snprintf(text, sizeof text,
                 "uid %u is neither root nor uid %u: add it to TIDEPOOL_ALLOW_UIDS", session->uid,
                 (unsigned)geteuid());
    tp_log_once(&said, TP_LOG_WARN, "refused a process of this host (pid %d): %s", session->pid,
                text);
    return refuse(session, TP_REFUSED_UID, text);
}

void tp_session_begin(struct tp_session *session, int fd, const struct tp_server_facts *facts,
                      uint64_t now_ms) {
    int bytes = SEND_BUFFER;
    *session = (struct tp_session){
        .state = TP_SESSION_GREETING, .fd = fd, .since_ms = now_ms, .stats_slot = -1};
    (void)tp_fork_close_add(fd);
    /* Announcements of all segments must fit at once, whatever net.core.wmem_default is. */
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    session->unwelcome = tp_wire_check_peer(fd, facts->config, &session->uid, &session->pid) < 0;
}

/* `page`: the lease page for a client that attaches, or -1. */
static int send_welcome(struct tp_session *session, const struct tp_server_facts *facts, int page) {
    struct tp_msg message = {.type = TP_MSG_WELCOME};
    struct tp_msg_welcome *welcome = &message.body.welcome;
    memcpy(welcome->instance, facts->instance, sizeof welcome->instance);
    memcpy(welcome->identity, facts->identity, sizeof welcome->identity);
    welcome->roles = facts->roles;
    welcome->netns = facts->netns;
    return tp_wire_send(session->fd, &message, &page, page >= 0);
}

static int send_name(struct tp_session *session, const struct tp_server_facts *facts) {
    struct tp_msg message = {.type = TP_MSG_NAME};
    memcpy(message.body.name.name, facts->name, sizeof message.body.name.name);
    return tp_wire_send(session->fd, &message, NULL, 0);
}

static int send_page(struct tp_session *session) {
    struct tp_msg message = {.type = TP_MSG_PAGE};
    int page;
    int result = tp_stats_open(&page);
    if (result == 0)
        result = tp_wire_send(session->fd, &message, &page, 1);
    return result;
}

static void show_client(struct tp_session *session) {
    struct tp_stats_page *page = tp_stats_page();
    for (int i = 0; i < TP_STATS_CLIENTS; i++) {
        struct tp_stats_client *slot = &page->clients[i];
        if (atomic_load(&slot->state) != TP_SLOT_EMPTY)
            continue;
        slot->uid = session->uid;
        slot->pid = session->pid;
        slot->pieces_sent = 0;
        slot->since_s = (uint64_t)time(NULL);
        atomic_store_explicit(&slot->state, TP_SLOT_LIVE, memory_order_release);
        session->stats_slot = i;
        return;
    }
}

static int refuse_identity(struct tp_session *session, const struct tp_msg_hello *hello,
                           const struct tp_server_facts *facts) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char text[256];
    snprintf(text, sizeof text,
             "host identity %.60s is not %.60s; containers of one host with different "
             "/etc/machine-id need MC_TENT_MACHINE_ID=boot_id on both sides",
             hello->identity, facts->identity);
    tp_log_once(&said, TP_LOG_WARN, "refused a client (pid %d): %s", session->pid, text);
    return refuse(session, TP_REFUSED_IDENTITY, text);
}

static int attach(struct tp_session *session, const struct tp_msg_hello *hello,
                  const struct tp_server_facts *facts, bool full) {
    if ((facts->roles & TP_ROLE_STORE) == 0)
        return refuse(session, TP_REFUSED_ROLE, "this process shares no segments");
    if (facts->identity[0] == 0) /* not to be read for now: the engine comes again */
        return -EBUSY;
    if (strcmp(hello->identity, facts->identity) != 0)
        return refuse_identity(session, hello, facts);
    if (full)
        return refuse(session, TP_REFUSED_FULL, "this store has as many clients as it takes");
    int page;
    int result = tp_lease_open(facts->config->store.socket_dir, &page);
    if (result == 0)
        result = send_welcome(session, facts, page);
    if (result < 0)
        return result;
    session->state = TP_SESSION_ATTACHED;
    show_client(session);
    tp_count(TP_CLIENTS_ACCEPTED, 1);
    tp_log(TP_LOG_INFO, "engine attached: pid %d, uid %u, %s", session->pid, session->uid,
           hello->program);
    return tp_session_announce(session, facts);
}

static int greet(struct tp_session *session, const struct tp_msg *message,
                 const struct tp_server_facts *facts, bool full) {
    const struct tp_msg_hello *hello = &message->body.hello;
    if (message->type != TP_MSG_HELLO)
        return -EPROTO;
    if (session->unwelcome) /* said now and not at once: a client that has not sent HELLO yet would
                               see EPIPE */
        return refuse_uid(session);
    if (hello->purpose == TP_PURPOSE_ATTACH)
        return attach(session, hello, facts, full);
    if (hello->purpose != TP_PURPOSE_STATUS)
        return -EPROTO;
    int result = send_welcome(session, facts, -1);
    if (result == 0)
        result = send_page(session);
    return result < 0 ? result : -ENODATA; /* answered: the end */
}

/* Answer session->want, or leave it waiting. */
static int answer_want(struct tp_session *session, uint64_t now_ms) {
    int unread = 0;
    int result = -EAGAIN;
    if (ioctl(session->fd, SIOCOUTQ, &unread) < 0 || unread < UNREAD_BYTES)
        result = tp_table_send_pieces(session->fd, &session->want);
    /* ETOOMANYREFS: this user has as many fds in flight as RLIMIT_NOFILE allows, until readers take
     * theirs. */
    if (result == -EAGAIN || result == -ETOOMANYREFS) {
        if (!session->waiting)
            session->waiting_since_ms = now_ms;
        session->waiting = true;
        return now_ms - session->waiting_since_ms > WAIT_MS ? -EAGAIN : 0;
    }
    session->waiting = false;
    if (result == -ENOENT) /* taken back meanwhile: GONE tells the client */
        return 0;
    if (result == 0 && session->stats_slot >= 0)
        tp_stats_page()->clients[session->stats_slot].pieces_sent += session->want.count;
    return result;
}

static int handle(struct tp_session *session, const struct tp_msg *message,
                  const struct tp_server_facts *facts, bool full, uint64_t now_ms) {
    if (session->state == TP_SESSION_GREETING)
        return greet(session, message, facts, full);
    if (message->type != TP_MSG_WANT)
        return -EPROTO;
    session->want = message->body.pieces;
    return answer_want(session, now_ms);
}

int tp_session_read(struct tp_session *session, const struct tp_server_facts *facts, bool full,
                    uint64_t now_ms) {
    for (unsigned i = 0; i < READ_AT_ONCE && !session->waiting; i++) {
        struct tp_msg message;
        int result = tp_wire_receive(session->fd, &message, NULL, 0, NULL);
        if (result == -EAGAIN)
            return 0;
        if (result == -EPROTONOSUPPORT && session->state == TP_SESSION_GREETING)
            return refuse(session, TP_REFUSED_VERSION,
                          "the peer speaks another version of the protocol: use one release of "
                          "Tidepool on a host");
        if (result == 0)
            result = handle(session, &message, facts, full, now_ms);
        if (result < 0)
            return result;
    }
    return 0;
}

int tp_session_announce(struct tp_session *session, const struct tp_server_facts *facts) {
    uint64_t published[TP_WIRE_MAX_SEGMENTS];
    int result = 0;
    if (session->told_name != facts->name_version + 1) {
        result = send_name(session, facts);
        session->told_name = facts->name_version + 1;
    }
    tp_table_published(published);
    for (unsigned i = 0; result == 0 && i < TP_WIRE_MAX_SEGMENTS; i++) {
        struct tp_msg message = {0};
        if (session->told[i] == published[i])
            continue;
        if (session->told[i] != 0) {
            message.type = TP_MSG_GONE;
            message.body.gone.segment_id = session->told[i];
            session->told[i] = 0;
            result = tp_wire_send(session->fd, &message, NULL, 0);
        }
        message.type = TP_MSG_SEGMENT;
        if (result == 0 && published[i] != 0 &&
            tp_table_describe(published[i], &message.body.segment) == 0) {
            session->told[i] = published[i];
            result = tp_wire_send(session->fd, &message, NULL, 0);
        }
    }
    return result;
}

int tp_session_tick(struct tp_session *session, uint64_t now_ms) {
    /* A greeting that has come is read, however late: it may be this thread that stood still. */
    if (session->state == TP_SESSION_GREETING && now_ms - session->since_ms > TP_WIRE_HELLO_MS &&
        !tp_wire_unread(session->fd))
        return -ETIME;
    return session->waiting ? answer_want(session, now_ms) : 0;
}

void tp_session_end(struct tp_session *session, int reason) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (reason == -EPROTO || reason == -EAGAIN || reason == -ETIME) {
        tp_count(TP_CLIENTS_MISBEHAVED, 1);
        tp_log_once(&said, TP_LOG_WARN,
                    "dropped a client (pid %d, uid %u) that %s; other clients are not affected",
                    session->pid, session->uid,
                    reason == -EPROTO   ? "broke the protocol"
                    : reason == -EAGAIN ? "does not read"
                                        : "connected and said nothing");
    } else if (session->state == TP_SESSION_ATTACHED) {
        tp_log(TP_LOG_INFO, "engine detached: pid %d, uid %u", session->pid, session->uid);
    }
    if (session->stats_slot >= 0)
        atomic_store_explicit(&tp_stats_page()->clients[session->stats_slot].state, TP_SLOT_EMPTY,
                              memory_order_release);
    (void)shutdown(session->fd, SHUT_RDWR); /* a child forked just now may have the fd */
    tp_fork_close_remove(session->fd);
    close(session->fd);
    *session = (struct tp_session){.state = TP_SESSION_FREE, .fd = -1, .stats_slot = -1};
}
