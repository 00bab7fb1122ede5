/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where is this byte here: from a segment name to the peer that bears it, and from an address in
 * the store to one in this process. No locks, no system calls, except to wake the peer thread after
 * a miss, and to wait for a store that is being attached when a name is new.
 *
 * It must not know: batches, sockets.
 */
#include <time.h>

#include "env/env.h"
#include "transport/peer.h"
#include "transport/slot.h"

#define SAY_AFTER_MS                                                                               \
    3000 /* time for a store that is being attached, before its name is called foreign */

#define ATTACH_MS 50 /* from when a name was first opened: its requests may wait so long in all */
#define PAUSE_NS 200000

#define SLOT_BITS 6
_Static_assert(TP_PEERS == 1 << SLOT_BITS, "a slot's number fits the low bits of a name's memory");

/* The chosen path, once a name: nobody should have to guess that transfers went the long way. */
static void say_foreign(struct tp_name *name) {
    struct timespec now;
    if (!tp_log_on(TP_LOG_INFO) || clock_gettime(CLOCK_MONOTONIC, &now) != 0)
        return;
    uint64_t now_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    uint64_t opened_ms = atomic_load_explicit(&name->opened_ms, memory_order_relaxed);
    if (opened_ms == 0 || now_ms < opened_ms + SAY_AFTER_MS)
        return;
    tp_log_once(
        &name->said, TP_LOG_INFO,
        "segment %s is not a Tidepool store of this host: its transfers are left to Mooncake",
        name->text);
}

static bool is_new(const struct tp_name *name) {
    uint64_t opened_ms = atomic_load_explicit(&name->opened_ms, memory_order_relaxed);
    return opened_ms != 0 && tp_now_ms() < opened_ms + ATTACH_MS;
}

static void pause_a_moment(void) {
    nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

static struct tp_peer *look_up(struct tp_name *name) {
    uint64_t known = atomic_load_explicit(&name->peer, memory_order_relaxed);
    uint32_t slot = known & (TP_PEERS - 1);
    uint64_t generation = known >> SLOT_BITS;
    struct tp_peer *peer = tp_peer_acquire(slot, generation);
    if (peer)
        return peer;
    uint64_t epoch = tp_peer_epoch();
    if (atomic_load_explicit(&name->miss_epoch, memory_order_relaxed) != epoch + 1) {
        peer = tp_peer_find(name, &slot, &generation);
        if (peer) {
            atomic_store_explicit(&name->peer, generation << SLOT_BITS | slot,
                                  memory_order_relaxed);
            return peer;
        }
        atomic_store_explicit(&name->miss_epoch, epoch + 1, memory_order_relaxed);
    }
    return NULL;
}

struct tp_peer *tp_route_peer(struct tp_name *name, bool *ret_gone) {
    for (;;) {
        /* Asked before the look-up: a store that has got its name meanwhile is found. */
        uint64_t until = tp_peer_attaching_until();
        struct tp_peer *peer = look_up(name);
        if (peer)
            return peer;
        if (until == 0 || tp_now_ms() >= until || !is_new(name))
            break;
        pause_a_moment();
    }
    uint64_t known = atomic_load_explicit(&name->peer, memory_order_relaxed);
    if (known == 0)
        say_foreign(name);
    *ret_gone = known != 0;
    return NULL;
}

/* A request needs this piece: it takes a ticket, if it is the first. */
static void miss(struct tp_peer_segment *segment, uint64_t piece) {
    uint32_t none = 0;
    if (atomic_load_explicit(&segment->missed[piece], memory_order_relaxed) != 0)
        return;
    uint32_t ticket = atomic_fetch_add_explicit(&segment->tickets, 1, memory_order_relaxed) + 1;
    if (atomic_compare_exchange_strong(&segment->missed[piece], &none, ticket))
        tp_peer_wake();
}

/* Is every piece of [inside, inside + bytes) mapped? Those that are not go to the front of the
 * queue. */
static bool pieces_mapped(struct tp_peer_segment *segment, uint64_t inside, uint64_t bytes) {
    const struct tp_msg_segment *message = &segment->message;
    bool mapped = true;
    if (atomic_load_explicit(&segment->mapped_count, memory_order_acquire) == message->piece_count)
        return true;
    uint64_t last = (inside + bytes - 1) / message->piece_bytes;
    for (uint64_t i = inside / message->piece_bytes; i <= last; i++) {
        if (atomic_load_explicit(&segment->mapped[i], memory_order_acquire))
            continue;
        miss(segment, i);
        mapped = false;
    }
    return mapped;
}

static enum tp_route route_now(struct tp_peer *peer, uint64_t offset, uint64_t bytes,
                               void **ret_address, uint8_t *ret_segment) {
    uint32_t high = atomic_load_explicit(&peer->segment_high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        if (atomic_load(&segment->state) != TP_SEGMENT_LIVE)
            continue;
        const struct tp_msg_segment *message = &segment->message;
        if (offset < message->base || bytes > message->bytes ||
            offset - message->base > message->bytes - bytes)
            continue;
        if (!tp_peer_publishes(peer, (uint8_t)i)) /* the message that says so is on its way */
            continue;
        uint64_t inside = offset - message->base;
        if (!pieces_mapped(segment, inside, bytes))
            return TP_ROUTE_NOT_IMPORTED;
        *ret_address = segment->address + inside;
        if (ret_segment)
            *ret_segment = (uint8_t)i;
        return TP_ROUTE_OK;
    }
    return TP_ROUTE_OUT_OF_RANGE;
}

/* May a request wait for what this store is about to tell or to give? */
static bool waits_for(const struct tp_peer *peer) {
    const struct tp_name *name = atomic_load_explicit(&peer->name, memory_order_acquire);
    return name && is_new(name) && tp_peer_alive(peer);
}

enum tp_route tp_peer_route(struct tp_peer *peer, uint64_t offset, uint64_t bytes,
                            void **ret_address, uint8_t *ret_segment) {
    for (;;) {
        /* Asked before the route: the first segment may come meanwhile. */
        bool none = atomic_load_explicit(&peer->segment_high, memory_order_acquire) == 0;
        enum tp_route route = route_now(peer, offset, bytes, ret_address, ret_segment);
        if (route == TP_ROUTE_OK || (route == TP_ROUTE_OUT_OF_RANGE && !none) || !waits_for(peer))
            return route;
        pause_a_moment();
    }
}

/* Withdrawn or not: what was routed before stays until its reference is gone. */
static bool is_there(struct tp_peer_segment *segment) {
    uint32_t state = atomic_load(&segment->state);
    return state == TP_SEGMENT_LIVE || state == TP_SEGMENT_GONE;
}

/* The CUDA memory that this routed address lies in, NULL: none. */
static struct tp_peer_segment *cumem_at(struct tp_peer *peer, const void *address) {
    uint32_t high = atomic_load_explicit(&peer->segment_high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        if (!is_there(segment) || segment->message.kind != TP_WIRE_CUMEM)
            continue;
        uintptr_t start = (uintptr_t)atomic_load_explicit(&segment->address, memory_order_relaxed);
        if (start && (uintptr_t)address - start < segment->message.map_bytes)
            return segment;
    }
    return NULL;
}

static bool device_access_now(struct tp_peer *peer, int device, const void *address,
                              uint64_t bytes) {
    struct tp_peer_segment *segment = cumem_at(peer, address);
    uint64_t bit = UINT64_C(1) << device;
    bool open = true;
    if (!segment || atomic_load_explicit(&segment->open_to_all, memory_order_acquire) & bit)
        return true;
    uint64_t piece_bytes = segment->message.piece_bytes;
    uint64_t inside = (uintptr_t)address - (uintptr_t)segment->address;
    for (uint64_t i = inside / piece_bytes; i <= (inside + bytes - 1) / piece_bytes; i++) {
        if (atomic_load_explicit(&segment->opened[i], memory_order_acquire) & bit)
            continue;
        atomic_fetch_or(&peer->devices_wanted, bit);
        miss(segment, i);
        open = false;
    }
    return open;
}

bool tp_peer_device_access(struct tp_peer *peer, int device, const void *address, uint64_t bytes) {
    if (device < 0 || device >= 64)
        return false;
    while (!device_access_now(peer, device, address, bytes)) {
        if (!waits_for(peer))
            return false;
        pause_a_moment();
    }
    return true;
}

bool tp_peer_address_is_cumem(struct tp_peer *peer, const void *address) {
    return cumem_at(peer, address) != NULL;
}

struct tp_chunks *tp_peer_chunks(struct tp_peer *peer, const void *address) {
    uint32_t high = atomic_load_explicit(&peer->segment_high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        if (!is_there(segment))
            continue;
        struct tp_chunks *chunks = atomic_load_explicit(&segment->chunks, memory_order_relaxed);
        if (!chunks)
            continue;
        uintptr_t start = (uintptr_t)atomic_load_explicit(&segment->address, memory_order_relaxed);
        if ((uintptr_t)address - start < segment->message.map_bytes)
            return chunks;
    }
    return NULL;
}
