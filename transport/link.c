/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection to a store: its messages, and the slot that it fills (slot.h). Everything that arrives is hostile: what does not
 * fit ends the connection.
 *
 * It must not know: the directory, epoll, batches.
 */
#include "transport/link.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "segment/wire.h"
#include "transport/slot.h"

#define READ_AT_ONCE 64
#define WANTS_AT_ONCE 2

/* ---- for people ------------------------------------------------------------------------------------------------------ */

static struct tp_stats_peer *stats_of(const struct tp_link *link) {
    return &tp_stats_page()->peers[tp_peer_slot(link->peer)];
}

static void show_start(const struct tp_link *link) {
    struct tp_stats_peer *stats = stats_of(link);
    memset(stats->name, 0, sizeof stats->name);
    memcpy(stats->instance, link->instance, sizeof stats->instance);
    stats->pieces = stats->pieces_mapped = stats->segments = 0;
    atomic_store(&stats->read_bytes, 0);
    atomic_store(&stats->write_bytes, 0);
    stats->since_s = (uint64_t)time(NULL);
    snprintf(stats->path, sizeof stats->path, "attaching");
    atomic_store_explicit(&stats->state, TP_SLOT_STARTING, memory_order_release);
}

/* Totals of pieces, and the path in words. */
static void show_pieces(const struct tp_link *link) {
    struct tp_stats_peer *stats = stats_of(link);
    uint32_t pieces = 0;
    uint32_t mapped = 0;
    uint32_t segments = 0;
    uint64_t page_bytes = 0;
    uint32_t high = atomic_load(&link->peer->segment_high);
    for (uint32_t i = 0; i < high; i++) {
        const struct tp_peer_segment *segment = &link->peer->segments[i];
        if (atomic_load(&segment->state) != TP_SEGMENT_LIVE)
            continue;
        segments++;
        pieces += segment->message.piece_count;
        mapped += atomic_load(&segment->mapped_count);
        page_bytes = segment->message.page_bytes;
    }
    stats->segments = segments;
    stats->pieces = pieces;
    stats->pieces_mapped = mapped;
    snprintf(stats->path, sizeof stats->path, "shared memory, pages of %llu KiB", (unsigned long long)page_bytes / 1024);
}

static void show_name(const struct tp_link *link, const char *name) {
    struct tp_stats_peer *stats = stats_of(link);
    snprintf(stats->name, sizeof stats->name, "%.127s", name);
    atomic_store_explicit(&stats->state, TP_SLOT_LIVE, memory_order_release);
}

/* ---- names ----------------------------------------------------------------------------------------------------------- */

static bool is_loopback(const char *name) {
    return strncmp(name, "127.", 4) == 0 || strncmp(name, "localhost", 9) == 0 || strncmp(name, "[::1]", 5) == 0 ||
           strncmp(name, "::1", 3) == 0;
}

/* A loopback name means another process in every network namespace. */
static bool name_is_ours(const struct tp_link *link, const char *name) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t netns = tp_host_netns();
    if (!is_loopback(name) || (netns != 0 && netns == link->netns))
        return true;
    tp_log_once(&said, TP_LOG_WARN,
                "store %s is in another network namespace, where its loopback name means another process here: left to Mooncake; "
                "give the store a name that other containers can use",
                name);
    return false;
}

static enum tp_link_end take_name(struct tp_link *link, const char *text) {
    struct tp_peer *peer = link->peer;
    struct tp_name *name = text[0] ? tp_name_intern(text, strlen(text)) : NULL;
    if (!link->welcome)
        return TP_LINK_REFUSED;
    if (!name || !name_is_ours(link, name->text))
        return TP_LINK_LIVES;
    if (atomic_load(&peer->generation) != 0) {
        atomic_store(&peer->name, name);
        tp_peer_names_changed();
    } else {
        tp_peer_publish(peer, name);
        tp_count(TP_PEERS_ATTACHED, 1);
    }
    show_name(link, name->text);
    tp_log(TP_LOG_INFO, "attached to store %s: transfers go through shared memory", name->text);
    return TP_LINK_LIVES;
}

/* ---- segments and pieces --------------------------------------------------------------------------------------------- */

static struct tp_peer_segment *find_segment(struct tp_peer *peer, uint64_t id) {
    uint32_t high = atomic_load(&peer->segment_high);
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        if (atomic_load(&segment->state) != TP_SEGMENT_EMPTY && segment->message.segment_id == id)
            return segment;
    }
    return NULL;
}

/* Two ranges of one store that overlap would make an address ambiguous. */
static bool overlaps_other(struct tp_peer *peer, const struct tp_msg_segment *message) {
    uint32_t high = atomic_load(&peer->segment_high);
    for (uint32_t i = 0; i < high; i++) {
        const struct tp_peer_segment *segment = &peer->segments[i];
        const struct tp_msg_segment *other = &segment->message;
        if (atomic_load(&segment->state) == TP_SEGMENT_LIVE && message->base < other->base + other->bytes &&
            other->base < message->base + message->bytes)
            return true;
    }
    return false;
}

static enum tp_link_end take_segment(struct tp_link *link, const struct tp_msg_segment *message) {
    struct tp_peer *peer = link->peer;
    uint32_t index = 0;
    if (!link->welcome || tp_wire_check_segment(message) != 0 || find_segment(peer, message->segment_id) ||
        overlaps_other(peer, message))
        return TP_LINK_REFUSED;
    if (message->kind != TP_WIRE_MMAP) {
        tp_log(TP_LOG_INFO, "a segment of kind %u is left to Mooncake: this version maps files and memfds only", message->kind);
        return TP_LINK_LIVES;
    }
    while (index < TP_WIRE_MAX_SEGMENTS && atomic_load(&peer->segments[index].state) != TP_SEGMENT_EMPTY)
        index++;
    if (index == TP_WIRE_MAX_SEGMENTS)
        return TP_LINK_REFUSED;
    struct tp_peer_segment *segment = &peer->segments[index];
    int error = tp_import_reserve(segment, message);
    if (error) {
        tp_log(TP_LOG_WARN, "%llu bytes of addresses for a store's segment cannot be reserved: %s; left to Mooncake",
               (unsigned long long)message->map_bytes, strerror(-error));
        return TP_LINK_LIVES;
    }
    if (index >= atomic_load(&peer->segment_high))
        atomic_store(&peer->segment_high, index + 1);
    atomic_store(&segment->state, TP_SEGMENT_LIVE);
    show_pieces(link);
    return TP_LINK_LIVES;
}

static enum tp_link_end take_pieces(struct tp_link *link, const struct tp_msg_pieces *message, const int *fds, uint32_t count) {
    struct tp_peer_segment *segment = find_segment(link->peer, message->segment_id);
    if (link->wants == 0 || message->count != count || count == 0)
        return TP_LINK_REFUSED;
    link->wants--;
    if (!segment || atomic_load(&segment->state) == TP_SEGMENT_GONE)
        return TP_LINK_LIVES; /* withdrawn meanwhile */
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = message->first + i;
        if (index < message->first || index >= segment->message.piece_count || !segment->asked[index])
            return TP_LINK_REFUSED;
        int error = tp_import_piece(segment, index, fds[i]);
        if (error == -EPROTO)
            return TP_LINK_REFUSED;
        if (error) {
            tp_log(TP_LOG_WARN, "piece %u of a store's segment cannot be mapped: %s; requests to it are left to Mooncake", index,
                   strerror(-error));
        }
    }
    show_pieces(link);
    return TP_LINK_LIVES;
}

static enum tp_link_end take_gone(struct tp_link *link, uint64_t segment_id) {
    struct tp_peer_segment *segment = find_segment(link->peer, segment_id);
    if (segment)
        atomic_store(&segment->state, TP_SEGMENT_GONE);
    show_pieces(link);
    return TP_LINK_LIVES;
}

/* ---- the handshake --------------------------------------------------------------------------------------------------- */

static enum tp_link_end take_welcome(struct tp_link *link, const struct tp_msg_welcome *welcome, const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char identity[96];
    if (link->welcome || memcmp(welcome->instance, link->instance, sizeof link->instance) != 0)
        return TP_LINK_REFUSED;
    if (tp_host_identity(config->boot_id_only, identity) != 0 || strcmp(identity, welcome->identity) != 0) {
        tp_log_once(&said, TP_LOG_WARN,
                    "a store of this directory says that it runs on another host (%s, here %s): set MC_TENT_MACHINE_ID=boot_id in "
                    "both if these are containers of one host",
                    welcome->identity, identity);
        tp_count(TP_PEERS_REFUSED, 1);
        return TP_LINK_REFUSED;
    }
    link->welcome = true;
    link->netns = welcome->netns;
    return TP_LINK_LIVES;
}

static enum tp_link_end take_refused(const struct tp_msg_refused *refused) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    tp_count(TP_PEERS_REFUSED, 1);
    tp_log_once(&said, TP_LOG_WARN, "a store refused this process: %s", refused->text);
    return refused->reason == TP_REFUSED_FULL ? TP_LINK_LOST : TP_LINK_REFUSED;
}

static enum tp_link_end take(struct tp_link *link, const struct tp_msg *message, const int *fds, uint32_t fd_count,
                             const struct tp_config *config) {
    if (fd_count && message->type != TP_MSG_PIECES)
        return TP_LINK_REFUSED;
    switch (message->type) {
    case TP_MSG_WELCOME:
        return take_welcome(link, &message->body.welcome, config);
    case TP_MSG_REFUSED:
        return take_refused(&message->body.refused);
    case TP_MSG_NAME:
        return take_name(link, message->body.name.name);
    case TP_MSG_SEGMENT:
        return take_segment(link, &message->body.segment);
    case TP_MSG_PIECES:
        return take_pieces(link, &message->body.pieces, fds, fd_count);
    case TP_MSG_GONE:
        return take_gone(link, message->body.gone.segment_id);
    default:
        return TP_LINK_REFUSED;
    }
}

enum tp_link_end tp_link_read(struct tp_link *link, const struct tp_config *config) {
    for (int i = 0; i < READ_AT_ONCE; i++) {
        struct tp_msg message;
        int fds[TP_WIRE_MAX_FDS];
        unsigned fd_count = 0;
        int error = tp_wire_receive(link->fd, &message, fds, TP_WIRE_MAX_FDS, &fd_count);
        if (error == -EAGAIN)
            return TP_LINK_LIVES;
        if (error)
            return error == -EPROTO || error == -EPROTONOSUPPORT ? TP_LINK_REFUSED : TP_LINK_LOST;
        enum tp_link_end end = take(link, &message, fds, fd_count, config);
        for (unsigned k = 0; k < fd_count; k++)
            close(fds[k]); /* a mapping keeps what it needs */
        if (end != TP_LINK_LIVES)
            return end;
    }
    return TP_LINK_LIVES;
}

int tp_link_open(struct tp_link *link, int dir_fd, const char *socket_name, const uint8_t instance[16], uint64_t now_ms,
                 const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    struct tp_msg message = {.type = TP_MSG_HELLO};
    struct tp_msg_hello *hello = &message.body.hello;
    struct tp_stats_page *page = tp_stats_page();
    uint32_t uid = 0;
    int fd = tp_wire_connect(dir_fd, socket_name);
    if (fd < 0)
        return fd;
    int error = tp_wire_check_peer(fd, config, &uid, NULL);
    if (error == -EACCES) {
        tp_count(TP_PEERS_REFUSED, 1);
        tp_log_once(&said, TP_LOG_WARN, "store %s runs as uid %u, neither root nor uid %u: add it to TIDEPOOL_ALLOW_UIDS", socket_name,
                    uid, (unsigned)geteuid());
    }
    hello->purpose = TP_PURPOSE_ATTACH;
    hello->netns = tp_host_netns();
    memcpy(hello->instance, page->instance, sizeof hello->instance);
    snprintf(hello->program, sizeof hello->program, "%s", page->program);
    if (!error)
        error = tp_host_identity(config->boot_id_only, hello->identity);
    if (!error)
        error = tp_wire_send(fd, &message, NULL, 0);
    if (error) {
        close(fd);
        return error;
    }
    struct tp_peer *peer = link->peer;
    (void)tp_fork_close_add(fd);
    *link = (struct tp_link){.fd = fd, .since_ms = now_ms, .peer = peer};
    memcpy(link->instance, instance, sizeof link->instance);
    show_start(link);
    return 0;
}

/* ---- asking for pieces ----------------------------------------------------------------------------------------------- */

/* The next run of pieces of this segment that nobody asked for yet; count 0: none. */
static void next_run(struct tp_peer_segment *segment, uint32_t *ret_first, uint32_t *ret_count) {
    uint32_t pieces = segment->message.piece_count;
    uint32_t first = atomic_exchange(&segment->wanted, 0);
    *ret_count = 0;
    if (first == 0 || first > pieces || segment->asked[first - 1]) {
        while (segment->next_piece < pieces && segment->asked[segment->next_piece])
            segment->next_piece++;
        first = segment->next_piece;
    } else {
        first--;
    }
    *ret_first = first;
    while (*ret_count < TP_WIRE_MAX_FDS && first + *ret_count < pieces && !segment->asked[first + *ret_count])
        ++*ret_count;
}

static int ask_segment(struct tp_link *link, struct tp_peer_segment *segment) {
    struct tp_msg message = {.type = TP_MSG_WANT};
    struct tp_msg_pieces *want = &message.body.pieces;
    if (atomic_load(&segment->state) != TP_SEGMENT_LIVE)
        return 0;
    next_run(segment, &want->first, &want->count);
    if (want->count == 0)
        return 0;
    want->segment_id = segment->message.segment_id;
    int error = tp_wire_send(link->fd, &message, NULL, 0);
    if (error)
        return error == -EAGAIN ? 0 : error;
    memset(segment->asked + want->first, 1, want->count);
    link->wants++;
    return 1;
}

enum tp_link_end tp_link_ask(struct tp_link *link) {
    uint32_t high = atomic_load(&link->peer->segment_high);
    uint32_t idle = 0;
    while (link->wants < WANTS_AT_ONCE && high && idle < high) {
        int asked = ask_segment(link, &link->peer->segments[link->turn++ % high]);
        if (asked < 0)
            return TP_LINK_LOST;
        idle = asked ? 0 : idle + 1;
    }
    return TP_LINK_LIVES;
}

bool tp_link_prefault(struct tp_link *link) {
    uint32_t high = atomic_load(&link->peer->segment_high);
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &link->peer->segments[i];
        if (atomic_load(&segment->state) == TP_SEGMENT_LIVE && tp_import_prefault(segment))
            return true;
    }
    return false;
}

/* ---- the end --------------------------------------------------------------------------------------------------------- */

void tp_link_close(struct tp_link *link) {
    struct tp_peer *peer = link->peer;
    struct tp_name *name = atomic_load(&peer->name);
    if (atomic_load(&peer->generation) != 0) {
        tp_count(TP_PEERS_LOST, 1);
        tp_log(TP_LOG_INFO, "store %s is gone: its transfers are left to Mooncake until it is back", name ? name->text : "?");
    }
    tp_peer_kill(peer);
    shutdown(link->fd, SHUT_RDWR);
    tp_fork_close_remove(link->fd);
    close(link->fd);
    link->fd = -1;
    atomic_store_explicit(&stats_of(link)->state, TP_SLOT_GONE, memory_order_release);
}

bool tp_link_drop_memory(struct tp_peer *peer, bool dead) {
    uint32_t high = atomic_load(&peer->segment_high);
    bool clean = true;
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        uint32_t state = atomic_load(&segment->state);
        if (state == TP_SEGMENT_EMPTY || (state == TP_SEGMENT_LIVE && !dead))
            continue;
        atomic_store(&segment->state, TP_SEGMENT_GONE); /* before refs is looked at: see peer.c */
        if (atomic_load(&peer->refs) != 0)
            clean = false;
        else
            tp_import_drop(segment);
    }
    return clean && (!dead || atomic_load(&peer->refs) == 0);
}
