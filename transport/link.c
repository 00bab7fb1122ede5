/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection to one store: greeting, its names and segments, asking for pieces, letting go.
 *
 * Everything that arrives is hostile: a message that does not fit ends the connection, and nothing
 * else happens. It must not know: the directory, when to try again, batches.
 */
#include "transport/link.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/history.h"
#include "transport/importer.h"
#include "transport/steady.h"

#define MESSAGES_A_TURN 32
#define RENAMES 64 /* at once, and one a second: every name is kept for ever (names.c) */

int tp_link_begin(struct tp_link *link, int fd, const uint8_t instance[static 16],
                  const struct tp_link_self *self, uint64_t now_ms) {
    uint32_t slot = tp_peer_slot(link->peer);
    *link = (struct tp_link){.state = TP_LINK_HELLO,
                             .fd = fd,
                             .deadline_ms = now_ms + TP_WIRE_HELLO_MS,
                             .peer = tp_peer_at(slot)};
    memcpy(link->instance, instance, sizeof(link->instance));
    struct tp_msg message = {.type = TP_MSG_HELLO};
    struct tp_msg_hello *hello = &message.body.hello;
    hello->purpose = TP_PURPOSE_ATTACH;
    hello->netns = self->netns;
    memcpy(hello->instance, self->instance, sizeof(hello->instance));
    memcpy(hello->identity, self->identity, sizeof(hello->identity));
    memcpy(hello->program, tp_stats_page()->program, sizeof(hello->program));
    hello->program[sizeof(hello->program) - 1] = 0;
    int error = tp_wire_send(fd, &message, NULL, 0);
    if (error) {
        close(fd);
        link->state = TP_LINK_FREE;
        link->fd = -1;
        return error;
    }
    (void)tp_fork_close_add(fd);
    return 0;
}

/* ---- what others see of it
 * ----------------------------------------------------------------------------------------- */

static struct tp_stats_peer *link_stats(const struct tp_link *link) {
    return &tp_stats_page()->peers[tp_peer_slot(link->peer)];
}

static struct tp_peer_segment *first_segment(const struct tp_link *link) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (atomic_load(&link->peer->segments[i].state) == TP_SEGMENT_LIVE)
            return &link->peer->segments[i];
    }
    return NULL;
}

static void stats_rename(const struct tp_link *link) {
    struct tp_stats_peer *stats = link_stats(link);
    snprintf(stats->name, sizeof(stats->name), "%.127s", link->name->text);
}

static void stats_attach(const struct tp_link *link) {
    struct tp_stats_peer *stats = link_stats(link);
    atomic_store(&stats->state, TP_SLOT_EMPTY);
    memcpy(stats->instance, link->instance, sizeof(stats->instance));
    stats_rename(link);
    snprintf(stats->path, sizeof(stats->path), "shared memory");
    atomic_store(&stats->read_bytes, 0);
    atomic_store(&stats->write_bytes, 0);
    stats->since_s = (uint64_t)time(NULL);
    atomic_store(&stats->state, TP_SLOT_STARTING);
}

static void stats_refresh(const struct tp_link *link) {
    if (!link->name || link->state != TP_LINK_OPEN)
        return;
    struct tp_stats_peer *stats = link_stats(link);
    uint32_t pieces = 0, mapped = 0, segments = 0;
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        const struct tp_peer_segment *segment = &link->peer->segments[i];
        if (atomic_load(&segment->state) != TP_SEGMENT_LIVE)
            continue;
        segments++;
        pieces += segment->message.piece_count;
        mapped += atomic_load(&segment->mapped_count);
    }
    stats->pieces = pieces;
    stats->pieces_mapped = mapped;
    stats->segments = segments;
    atomic_store(&stats->state, pieces && pieces == mapped ? TP_SLOT_LIVE : TP_SLOT_STARTING);
}

static void announce(struct tp_link *link) {
    const struct tp_peer_segment *segment = first_segment(link);
    if (link->announced || !link->name || !segment)
        return;
    link->announced = true;
    const uint8_t *id = link->instance;
    tp_log(TP_LOG_INFO,
           "attached to store %s (instance %02x%02x%02x%02x, %.2f GiB in %u pieces) through shared "
           "memory",
           link->name->text, id[0], id[1], id[2], id[3],
           (double)segment->message.bytes / (double)(UINT64_C(1) << 30),
           segment->message.piece_count);
}

/* ---- messages
 * -------------------------------------------------------------------------------------------------------
 */

static enum tp_link_end refused(const struct tp_link *link, const struct tp_msg_refused *message) {
    static atomic_flag said_identity = ATOMIC_FLAG_INIT;
    static atomic_flag said_other = ATOMIC_FLAG_INIT;
    static atomic_flag said_full = ATOMIC_FLAG_INIT;
    tp_count(TP_PEERS_REFUSED, 1);
    if (message->reason == TP_REFUSED_FULL) {
        tp_log_once(&said_full, TP_LOG_WARN,
                    "store %02x%02x%02x%02x serves as many engines as it takes: this one uses "
                    "Mooncake's transport until a place is free",
                    link->instance[0], link->instance[1], link->instance[2], link->instance[3]);
        return TP_LINK_SILENT;
    }
    if (message->reason == TP_REFUSED_IDENTITY) {
        tp_log_once(
            &said_identity, TP_LOG_WARN,
            "a store refuses this process as one of another host; if both are on one host, set "
            "MC_TENT_MACHINE_ID=boot_id for both");
        return TP_LINK_REFUSED;
    }
    char text[sizeof(message->text)];
    for (size_t i = 0; i < sizeof(text); i++) /* other people's words: no control characters */
        text[i] = (char)(message->text[i] && (message->text[i] < ' ' || message->text[i] == 127)
                             ? '?'
                             : message->text[i]);
    text[sizeof(text) - 1] = 0;
    tp_log_once(&said_other, TP_LOG_WARN, "store %02x%02x%02x%02x refuses this process: %s",
                link->instance[0], link->instance[1], link->instance[2], link->instance[3], text);
    return TP_LINK_REFUSED;
}

/* The store is not to blame, and is connected to again. */
static enum tp_link_end out_of_memory(void) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    tp_log_once(&said, TP_LOG_WARN,
                "no memory to attach to a store: its transfers are left to Mooncake, and it is "
                "tried again");
    return TP_LINK_SILENT;
}

/* Map the store's lease page. 0; -EPROTO when it is not what a store sends; or -errno. */
static int take_lease(struct tp_link *link, int fd) {
    int error = tp_steady_check(fd, TP_LEASE_BYTES);
    if (error)
        return error;
    void *page = mmap(NULL, TP_LEASE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return -errno;
    (void)madvise(page, TP_LEASE_BYTES, MADV_DONTFORK);
    link->peer->lease = page;
    return 0;
}

static enum tp_link_end welcomed(struct tp_link *link, const struct tp_msg_welcome *message,
                                 const int *fds, unsigned fd_count,
                                 const struct tp_link_self *self) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (memcmp(message->instance, link->instance, sizeof(link->instance)) != 0)
        return TP_LINK_BROKEN;
    if (strncmp(message->identity, self->identity, sizeof(self->identity)) != 0) {
        tp_count(TP_PEERS_REFUSED, 1);
        tp_log_once(
            &said, TP_LOG_WARN,
            "a store in the socket directory is on another host by its identity (%.95s, ours is "
            "%s); if both are on one host, set MC_TENT_MACHINE_ID=boot_id for both",
            message->identity, self->identity);
        return TP_LINK_REFUSED;
    }
    int error = fd_count == 1 ? take_lease(link, fds[0]) : -EPROTO;
    if (error)
        return error == -EPROTO ? TP_LINK_BROKEN : out_of_memory();
    link->netns = message->netns;
    link->state = TP_LINK_OPEN;
    return TP_LINK_LIVES;
}

/* Names that mean "this network namespace" and so name different stores in different ones. */
static bool is_loopback(const char *name) {
    return strncmp(name, "127.", 4) == 0 || strncmp(name, "localhost", 9) == 0 ||
           strncmp(name, "[::1]", 5) == 0 || strncmp(name, "::1", 3) == 0;
}

static void warn_ambiguous(const struct tp_link *link) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    for (uint32_t i = 0; i < TP_PEERS; i++) {
        const struct tp_peer *other = tp_peer_at(i);
        if (other != link->peer && atomic_load(&other->generation) != 0 &&
            atomic_load(&other->name) == link->name)
            tp_log_once(
                &said, TP_LOG_WARN,
                "two live stores of this host are named %s: its transfers are left to Mooncake "
                "until one of them ends",
                link->name->text);
    }
}

/* A store that is set up again in one process gets a new name each time; one that floods us with
 * names does not mean well. */
static bool rename_allowed(struct tp_link *link) {
    uint64_t second = tp_now_ms() / 1000;
    uint64_t passed = second - link->renamed_s;
    link->renames -= passed < link->renames ? (unsigned)passed : link->renames;
    link->renamed_s = second;
    return ++link->renames <= RENAMES;
}

/*
 * May this segment be used under this name? Returns 0; -EADDRINUSE, with one line a name, if its
 * addresses are those of an earlier instance, of whose memory the master may still speak; or
 * -ENOMEM.
 */
static int check_history(const struct tp_link *link, struct tp_name *name,
                         const struct tp_msg_segment *message) {
    const uint8_t *id = link->instance;
    int error = tp_history_add(name, id, message->base, message->bytes);
    if (error == -EADDRINUSE && tp_history_warn(name))
        tp_log(TP_LOG_WARN,
               "store %s (instance %02x%02x%02x%02x) has a segment at 0x%llx, %llu MiB, where an "
               "earlier instance of this name had one: a request for the old memory would get the "
               "bytes of the new, so requests to this segment fall back to Mooncake's transport; "
               "start the store once more to get other addresses, or restart this process",
               name->text, id[0], id[1], id[2], id[3], (unsigned long long)message->base,
               (unsigned long long)message->bytes >> 20);
    return error;
}

static void segment_withdrawn(struct tp_link *link, struct tp_peer_segment *segment) {
    atomic_store(&segment->state, TP_SEGMENT_GONE);
    for (unsigned i = 0; i < TP_LINK_WANTS; i++) {
        if (link->wants[i].segment_id == segment->message.segment_id)
            link->wants[i].gone = true; /* its answer may be on the way */
    }
}

/* The segments that came before this name. Those that may not be used under it are withdrawn. */
static int check_histories(struct tp_link *link, struct tp_name *name) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        struct tp_peer_segment *segment = &link->peer->segments[i];
        if (atomic_load(&segment->state) != TP_SEGMENT_LIVE)
            continue;
        int error = check_history(link, name, &segment->message);
        if (error == -ENOMEM)
            return error;
        if (error)
            segment_withdrawn(link, segment);
    }
    return 0;
}

static enum tp_link_end named(struct tp_link *link, const char *text,
                              const struct tp_link_self *self) {
    if (text[0] == 0 || (link->name && strcmp(text, link->name->text) == 0))
        return TP_LINK_LIVES; /* not known yet, or nothing new */
    if (!rename_allowed(link))
        return TP_LINK_BROKEN;
    struct tp_name *name = tp_name_intern(text, strnlen(text, TP_NAME_BYTES + 1));
    if (!name) /* slashes alone are no name */
        return text[strspn(text, "/")] ? out_of_memory() : TP_LINK_BROKEN;
    if (name == link->name)
        return TP_LINK_LIVES;
    if (is_loopback(name->text) && (self->netns == 0 || link->netns != self->netns)) {
        tp_log(TP_LOG_INFO,
               "store %s listens on the loopback of another network namespace: not used",
               name->text);
        return link->name ? TP_LINK_BROKEN : TP_LINK_LIVES;
    }
    if (check_histories(link, name) != 0)
        return out_of_memory();
    bool first = !link->name;
    link->name = name;
    if (first) {
        stats_attach(link);
        tp_count(TP_PEERS_ATTACHED, 1);
    } else {
        stats_rename(link);
    }
    tp_peer_publish(link->peer, name,
                    memcmp(link->instance, self->instance, sizeof(link->instance)) == 0);
    warn_ambiguous(link);
    announce(link);
    stats_refresh(link);
    return TP_LINK_LIVES;
}

static struct tp_peer_segment *segment_by_id(const struct tp_link *link, uint64_t id) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        struct tp_peer_segment *segment = &link->peer->segments[i];
        if (atomic_load(&segment->state) == TP_SEGMENT_LIVE && segment->message.segment_id == id)
            return segment;
    }
    return NULL;
}

/* Would this segment's published range lie over another one's? Then an address had two meanings. */
static bool overlaps(const struct tp_link *link, const struct tp_msg_segment *message) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        const struct tp_peer_segment *segment = &link->peer->segments[i];
        if (atomic_load(&segment->state) == TP_SEGMENT_LIVE &&
            message->base < segment->message.base + segment->message.bytes &&
            segment->message.base < message->base + message->bytes)
            return true;
    }
    return false;
}

static enum tp_link_end segment_added(struct tp_link *link, const struct tp_msg_segment *message) {
    if (tp_wire_check_segment(message) != 0 || segment_by_id(link, message->segment_id) ||
        overlaps(link, message))
        return TP_LINK_BROKEN;
    uint32_t i = 0;
    while (i < TP_WIRE_MAX_SEGMENTS &&
           atomic_load(&link->peer->segments[i].state) != TP_SEGMENT_EMPTY)
        i++;
    if (i == TP_WIRE_MAX_SEGMENTS)
        return TP_LINK_BROKEN;
    int error = link->name ? check_history(link, link->name, message) : 0;
    if (error)
        return error == -ENOMEM ? out_of_memory() : TP_LINK_LIVES;
    struct tp_peer_segment *segment = &link->peer->segments[i];
    if (tp_import_begin(segment, message) != 0)
        return out_of_memory();
    atomic_store(&segment->state, TP_SEGMENT_LIVE);
    if (atomic_load(&link->peer->segment_high) <= i)
        atomic_store(&link->peer->segment_high, i + 1);
    announce(link);
    stats_refresh(link);
    return TP_LINK_LIVES;
}

static enum tp_link_end segment_gone(struct tp_link *link, uint64_t id) {
    struct tp_peer_segment *segment = segment_by_id(link, id);
    if (!segment)
        return TP_LINK_LIVES; /* one that was not imported */
    segment_withdrawn(link, segment);
    stats_refresh(link);
    return TP_LINK_LIVES;
}

static enum tp_link_end pieces_came(struct tp_link *link, const struct tp_msg_pieces *message,
                                    const int *fds, unsigned fd_count) {
    struct tp_want *want = NULL;
    for (unsigned i = 0; i < TP_LINK_WANTS && !want; i++) {
        struct tp_want *w = &link->wants[i];
        if (w->segment_id && w->segment_id == message->segment_id && w->first == message->first &&
            message->count <= w->count)
            want = w;
    }
    if (!want || fd_count != message->count || message->count == 0)
        return TP_LINK_BROKEN;
    struct tp_peer_segment *segment = segment_by_id(link, message->segment_id);
    for (unsigned i = 0; i < fd_count && segment; i++) {
        static atomic_flag said = ATOMIC_FLAG_INIT;
        int error = tp_import_piece(link->peer, segment, message->first + i, fds[i]);
        if (error == -EPROTO)
            return TP_LINK_BROKEN;
        if (error)
            tp_log_once(&said, TP_LOG_WARN,
                        "cannot map piece %u of store %s: %s; requests to it are left to Mooncake, "
                        "and it is tried again",
                        message->first + i, link->name ? link->name->text : "", strerror(-error));
    }
    want->first += message->count;
    want->count -= message->count;
    if (want->count == 0)
        *want = (struct tp_want){0};
    stats_refresh(link);
    return TP_LINK_LIVES;
}

static enum tp_link_end handle(struct tp_link *link, const struct tp_msg *message, const int *fds,
                               unsigned fd_count, const struct tp_link_self *self) {
    if (link->state == TP_LINK_HELLO) {
        if (message->type == TP_MSG_WELCOME)
            return welcomed(link, &message->body.welcome, fds, fd_count, self);
        if (message->type == TP_MSG_REFUSED)
            return refused(link, &message->body.refused);
        return TP_LINK_BROKEN;
    }
    switch (message->type) {
    case TP_MSG_NAME:
        return named(link, message->body.name.name, self);
    case TP_MSG_SEGMENT:
        return segment_added(link, &message->body.segment);
    case TP_MSG_PIECES:
        return pieces_came(link, &message->body.pieces, fds, fd_count);
    case TP_MSG_GONE:
        return segment_gone(link, message->body.gone.segment_id);
    default:
        return TP_LINK_BROKEN;
    }
}

enum tp_link_end tp_link_read(struct tp_link *link, const struct tp_link_self *self) {
    for (unsigned n = 0; n < MESSAGES_A_TURN; n++) {
        struct tp_msg message;
        int fds[TP_WIRE_MAX_FDS];
        unsigned fd_count = 0;
        int error = tp_wire_receive(link->fd, &message, fds, TP_WIRE_MAX_FDS, &fd_count);
        if (error == -EAGAIN)
            return TP_LINK_LIVES;
        if (error == -EPROTO)
            return TP_LINK_BROKEN;
        if (error == -EPROTONOSUPPORT) {
            static atomic_flag said = ATOMIC_FLAG_INIT;
            tp_count(TP_PEERS_REFUSED, 1);
            tp_log_once(
                &said, TP_LOG_WARN,
                "a store in the socket directory runs another version of Tidepool: use one version "
                "on the whole host");
            return TP_LINK_REFUSED;
        }
        if (error == -EMFILE) {
            static atomic_flag said = ATOMIC_FLAG_INIT;
            tp_log_once(&said, TP_LOG_WARN,
                        "out of file descriptors (ulimit -n): the memory of store %s cannot be "
                        "mapped; its transfers are left to Mooncake until it can",
                        link->name ? link->name->text : "");
            return TP_LINK_SILENT;
        }
        if (error)
            return TP_LINK_EOF;
        /* A child must not keep a store's memory. */
        for (unsigned i = 0; i < fd_count; i++)
            (void)tp_fork_close_add(fds[i]);
        enum tp_link_end end = handle(link, &message, fds, fd_count, self);
        for (unsigned i = 0; i < fd_count; i++) {
            tp_fork_close_remove(fds[i]);
            close(fds[i]);
        }
        if (end != TP_LINK_LIVES)
            return end;
    }
    return TP_LINK_LIVES;
}

/* ---- work
 * ------------------------------------------------------------------------------------------------------------
 */

/* How much may be under way. The driver takes tens of milliseconds for a piece: what is asked for
 * ahead of the import threads would only stand before what a request misses next. */
static bool may_ask(const struct tp_link *link, const struct tp_peer_segment *segment,
                    unsigned in_flight) {
    return segment->message.kind == TP_WIRE_CUMEM ? in_flight + link->peer->jobs < TP_IMPORT_THREADS
                                                  : in_flight < TP_LINK_IN_FLIGHT;
}

static enum tp_link_end ask(struct tp_link *link, struct tp_peer_segment *segment, bool missed_only,
                            unsigned *in_flight) {
    uint32_t most = segment->message.kind == TP_WIRE_CUMEM ? 1 : TP_WIRE_MAX_FDS;
    while (may_ask(link, segment, *in_flight)) {
        struct tp_want *free_want = NULL;
        for (unsigned i = 0; i < TP_LINK_WANTS && !free_want; i++) {
            if (link->wants[i].segment_id == 0)
                free_want = &link->wants[i];
        }
        if (!free_want)
            return TP_LINK_LIVES;
        if (tp_import_open(link->peer, segment, missed_only))
            continue;
        struct tp_msg message = {.type = TP_MSG_WANT};
        struct tp_msg_pieces *next = &message.body.pieces;
        next->segment_id = segment->message.segment_id;
        tp_import_next(link->peer, segment, missed_only, most, &next->first, &next->count);
        if (next->count == 0)
            return TP_LINK_LIVES;
        int error = tp_wire_send(link->fd, &message, NULL, 0);
        if (error == -EAGAIN) {
            memset(segment->stages + next->first, TP_PIECE_ABSENT, next->count);
            return TP_LINK_LIVES;
        }
        if (error)
            return TP_LINK_EOF;
        *free_want = (struct tp_want){next->segment_id, next->first, next->count, false};
        (*in_flight)++;
    }
    return TP_LINK_LIVES;
}

static unsigned wants_in_flight(const struct tp_link *link) {
    unsigned count = 0;
    for (unsigned i = 0; i < TP_LINK_WANTS; i++)
        count += link->wants[i].segment_id != 0 && !link->wants[i].gone;
    return count;
}

/*
 * May a withdrawn segment be dropped? Who took a reference before it was withdrawn may look at it,
 * and who takes one later too, for a moment, as at all segments. As in peer.c either such a one is
 * seen here, or it sees what is written here.
 */
static bool may_drop(struct tp_peer *peer, struct tp_peer_segment *segment) {
    if (atomic_load(&segment->state) == TP_SEGMENT_DROPPED)
        return true;
    if (atomic_load(&segment->state) != TP_SEGMENT_GONE || peer->jobs != 0 ||
        atomic_load(&peer->refs) != 0)
        return false;
    atomic_store(&segment->state, TP_SEGMENT_DROPPED);
    if (atomic_load(&peer->refs) == 0)
        return true;
    atomic_store(&segment->state, TP_SEGMENT_GONE);
    return false;
}

/* Let go of withdrawn segments, and count those whose pieces can be asked for. */
static unsigned look_at_segments(struct tp_link *link, bool *ready, bool *ret_busy) {
    struct tp_peer *peer = link->peer;
    uint32_t high = atomic_load(&peer->segment_high);
    unsigned count = 0;
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        if (may_drop(peer, segment))
            tp_import_drop(segment, ret_busy);
        ready[i] =
            atomic_load(&segment->state) == TP_SEGMENT_LIVE && tp_import_ready(peer, segment);
        count += ready[i];
    }
    return count;
}

enum tp_link_end tp_link_work(struct tp_link *link, uint64_t now_ms, bool *ret_busy) {
    bool ready[TP_WIRE_MAX_SEGMENTS] = {false};
    if (link->state == TP_LINK_HELLO) /* a late answer is read: it may be us who stood still */
        return now_ms >= link->deadline_ms && !tp_wire_unread(link->fd) ? TP_LINK_SILENT
                                                                        : TP_LINK_LIVES;
    tp_import_retry(link->peer, now_ms);
    if (look_at_segments(link, ready, ret_busy) == 0)
        return TP_LINK_LIVES;
    unsigned in_flight = wants_in_flight(link);
    bool prefaulted = false;
    /* What requests have missed in any segment comes before all else. */
    for (int missed_only = 1; missed_only >= 0; missed_only--) {
        for (uint32_t i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
            struct tp_peer_segment *segment = &link->peer->segments[i];
            enum tp_link_end end =
                ready[i] ? ask(link, segment, missed_only, &in_flight) : TP_LINK_LIVES;
            if (end != TP_LINK_LIVES)
                return end;
            if (ready[i] && !missed_only && !prefaulted)
                prefaulted = tp_import_prefault(segment);
        }
    }
    *ret_busy |= prefaulted;
    return TP_LINK_LIVES;
}

void tp_link_imported(struct tp_link *link, const struct tp_import_job *job) {
    tp_import_ended(job);
    stats_refresh(link);
}

/* ---- the end
 * ---------------------------------------------------------------------------------------------------------
 */

void tp_link_end(struct tp_link *link) {
    if (link->name) {
        tp_peer_kill(link->peer);
        tp_count(TP_PEERS_LOST, 1);
        atomic_store(&link_stats(link)->state, TP_SLOT_GONE);
        tp_log(TP_LOG_INFO, "store %s is gone: its transfers are left to Mooncake",
               link->name->text);
    }
    tp_fork_close_remove(link->fd);
    close(link->fd); /* takes it out of epoll as well */
    link->fd = -1;
    link->state = TP_LINK_DRAIN;
}

bool tp_link_drain(struct tp_link *link, bool *ret_busy) {
    if (atomic_load(&link->peer->refs) != 0 || link->peer->jobs != 0)
        return false;
    bool empty = true;
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (atomic_load(&link->peer->segments[i].state) != TP_SEGMENT_EMPTY)
            tp_import_drop(&link->peer->segments[i], ret_busy);
        empty = empty && atomic_load(&link->peer->segments[i].state) == TP_SEGMENT_EMPTY;
    }
    if (!empty)
        return false;
    atomic_store(&link->peer->segment_high, 0);
    atomic_store(&link->peer->devices_wanted, 0);
    link->peer->opening = 0;
    link->peer->shut = 0;
    link->peer->retry = false;
    link->peer->retry_wait_s = 0;
    atomic_store(&link->peer->name, NULL);
    if (link->peer->lease)
        munmap((void *)link->peer->lease, TP_LEASE_BYTES);
    link->peer->lease = NULL;
    link->name = NULL;
    link->state = TP_LINK_FREE;
    return true;
}

bool tp_link_held(const struct tp_link *link) {
    if (link->state == TP_LINK_DRAIN)
        return true;
    if (link->state != TP_LINK_OPEN)
        return false;
    uint32_t high = atomic_load(&link->peer->segment_high);
    for (uint32_t i = 0; i < high; i++) {
        uint32_t state = atomic_load(&link->peer->segments[i].state);
        if (state == TP_SEGMENT_GONE || state == TP_SEGMENT_DROPPED)
            return true;
    }
    return false;
}
