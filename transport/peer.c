/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The slots of attached stores as the rest of transport/ sees them: find, hold, let go, alive.
 *
 * A reference and a slot's end exclude each other as in Dekker's algorithm: a taker raises refs,
 * then looks at the generation; the peer thread clears the generation, then looks at refs. Both are
 * sequentially consistent, so one of them sees the other.
 *
 * It must not know: sockets, messages, mmap.
 */
#include "transport/peer.h"

#include "env/stats.h"
#include "transport/slot.h"

struct tp_peer tp_peers[TP_PEERS];

static _Atomic uint64_t peer_epoch;
static uint64_t last_generation; /* the peer thread only */

uint32_t tp_peer_slot(const struct tp_peer *peer) {
    return (uint32_t)(peer - tp_peers);
}

struct tp_peer *tp_peer_at(uint32_t slot) {
    return &tp_peers[slot];
}

bool tp_peer_self(const struct tp_peer *peer) {
    return peer->self;
}

bool tp_peer_alive(const struct tp_peer *peer) {
    if (!atomic_load_explicit(&peer->alive, memory_order_acquire))
        return false;
    uint32_t owner = atomic_load_explicit(&peer->lease->owner, memory_order_acquire);
    return owner != 0 && !(owner & TP_LEASE_OWNER_DIED);
}

bool tp_peer_publishes(const struct tp_peer *peer, uint8_t segment) {
    const struct tp_msg_segment *message = &peer->segments[segment].message;
    return tp_peer_alive(peer) && atomic_load_explicit(&peer->lease->segments[message->slot],
                                                       memory_order_acquire) == message->segment_id;
}

uint64_t tp_peer_epoch(void) {
    return atomic_load_explicit(&peer_epoch, memory_order_acquire);
}

struct tp_peer *tp_peer_acquire(uint32_t slot, uint64_t generation) {
    if (slot >= TP_PEERS || generation == 0)
        return NULL;
    struct tp_peer *peer = &tp_peers[slot];
    /* A look before the write: a name that is out of date must not touch the line that busy threads
     * share. */
    if (atomic_load_explicit(&peer->generation, memory_order_relaxed) != generation)
        return NULL;
    atomic_fetch_add(&peer->refs, 1);
    if (atomic_load(&peer->generation) == generation && tp_peer_alive(peer))
        return peer;
    tp_peer_release(peer);
    return NULL;
}

void tp_peer_release(struct tp_peer *peer) {
    atomic_fetch_sub(&peer->refs, 1);
}

struct tp_peer *tp_peer_find(const struct tp_name *name, uint32_t *ret_slot,
                             uint64_t *ret_generation) {
    uint32_t found = TP_PEERS;
    uint64_t found_generation = 0;
    for (uint32_t i = 0; i < TP_PEERS; i++) {
        uint64_t generation = atomic_load_explicit(&tp_peers[i].generation, memory_order_acquire);
        if (generation == 0 ||
            atomic_load_explicit(&tp_peers[i].name, memory_order_acquire) != name)
            continue;
        if (found < TP_PEERS)
            return NULL; /* two live stores of one name: which one Mooncake means cannot be known */
        found = i;
        found_generation = generation;
    }
    struct tp_peer *peer = found < TP_PEERS ? tp_peer_acquire(found, found_generation) : NULL;
    if (peer) {
        *ret_slot = found;
        *ret_generation = found_generation;
    }
    return peer;
}

void tp_peer_count(struct tp_peer *peer, bool write, uint64_t bytes) {
    struct tp_stats_peer *stats = &tp_stats_page()->peers[tp_peer_slot(peer)];
    atomic_fetch_add_explicit(write ? &stats->write_bytes : &stats->read_bytes, bytes,
                              memory_order_relaxed);
}

void tp_peer_names_changed(void) {
    for (uint32_t i = 0; i < TP_PEERS; i++) {
        if (atomic_load_explicit(&tp_peers[i].generation, memory_order_relaxed) != 0)
            atomic_store(&tp_peers[i].generation, ++last_generation);
    }
    atomic_fetch_add(&peer_epoch, 1);
}

void tp_peer_publish(struct tp_peer *peer, struct tp_name *name, bool self) {
    if (atomic_load(&peer->generation) == 0) /* readers look at it only after the generation */
        peer->self = self;
    atomic_store(&peer->name, name);
    atomic_store(&peer->alive, true);
    atomic_store(&peer->generation, ++last_generation);
    tp_peer_names_changed();
}

void tp_peer_kill(struct tp_peer *peer) {
    atomic_store(&peer->alive, false);
    atomic_store(&peer->generation, 0);
    tp_peer_names_changed();
}
