/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: stores that this process is attached to, and addresses in them. peer.c owns
 * the connections (one thread); route.c answers "where is this byte here" for batch.c without a
 * lock.
 *
 * A peer sits in one of TP_PEERS static slots. A batch that uses a slot holds a reference
 * (tp_peer_acquire ... release); mappings are dropped by the peer thread only when the peer is dead
 * and no reference is left.
 */
#ifndef TIDEPOOL_PEER_H
#define TIDEPOOL_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TP_PEERS 64

struct tp_peer; /* a slot */
struct tp_name;
struct tp_chunks;
struct tp_config;

/*
 * The live peer named `name`, with a reference held, or NULL: none, dead, or ambiguous (two live
 * stores of one name; loopback names count only within one network namespace). Lock-free.
 * *ret_slot and *ret_generation let a later tp_peer_acquire skip the search.
 */
struct tp_peer *tp_peer_find(const struct tp_name *name, uint32_t *ret_slot,
                             uint64_t *ret_generation);

/*
 * The peer in `slot` if it is still live and of this generation, with a reference held; else NULL.
 * Lock-free. A generation is given once in the process, and all live peers get new ones whenever
 * the answer of tp_peer_find may change for any name.
 */
struct tp_peer *tp_peer_acquire(uint32_t slot, uint64_t generation);
void tp_peer_release(struct tp_peer *peer);

/* The slot's number, and back. */
uint32_t tp_peer_slot(const struct tp_peer *peer);
struct tp_peer *tp_peer_at(uint32_t slot);

/* Is this peer our own process: may `source` be the very memory at `target_offset`? */
bool tp_peer_self(const struct tp_peer *peer);

/* Is the store still there: its connection open, and its process alive by its lease page? Two
 * loads; `peer` must be held. */
bool tp_peer_alive(const struct tp_peer *peer);

/*
 * Is the store there, and does it still publish this segment (a number of tp_peer_route)? Looked at
 * before a copy is planned, and after it has ended, before it is reported as done: a store may take
 * memory back, and put something new at its addresses, while this process stands still or its
 * thread is late to read the store's messages. Three loads; `peer` must be held.
 */
bool tp_peer_publishes(const struct tp_peer *peer, uint8_t segment);

/* Raised whenever a peer attaches, is renamed or dies: cached negative answers are valid only while
 * it is unchanged. */
uint64_t tp_peer_epoch(void);

/*
 * Until when (CLOCK_MONOTONIC, ms) a request may wait for a store that has answered, and whose name
 * is not known yet. 0: there is none.
 */
uint64_t tp_peer_attaching_until(void);

/* Wake the peer thread to look at the directory now (an unknown name was opened). At most one wake
 * is pending. */
void tp_peer_kick(void);
/* Wake the peer thread to see to its stores' pieces; it does not look at the directory. */
void tp_peer_wake(void);

enum tp_route { TP_ROUTE_OK, TP_ROUTE_OUT_OF_RANGE, TP_ROUTE_NOT_IMPORTED };

/*
 * Address `offset` .. + `bytes` of the store here, when all of it lies in one published segment
 * (*ret_segment, below TP_WIRE_MAX_SEGMENTS; may be NULL) and its pieces are mapped. A miss for
 * want of pieces moves them to the front of the import queue, in the order of first use. A name
 * that was first opened a moment ago waits for its pieces, 50 ms at most from then on. No locks;
 * `peer` must be held.
 */
enum tp_route tp_peer_route(struct tp_peer *peer, uint64_t offset, uint64_t bytes,
                            void **ret_address, uint8_t *ret_segment);

/*
 * May GPU `device` reach these routed bytes now? False sees to it that it soon may; until then such
 * requests are Mooncake's. Lock-free; `peer` must be held.
 */
bool tp_peer_device_access(struct tp_peer *peer, int device, const void *address, uint64_t bytes);

/* Can GPUs read and write the host memory at this routed address by themselves (CUDA VMM memory)?
 * Lock-free. */
bool tp_peer_address_is_cumem(struct tp_peer *peer, const void *address);

/* The chunks that are registered with CUDA, or to be, of the memory at this routed address; NULL:
 * it is left as it is. Lock-free. */
struct tp_chunks *tp_peer_chunks(struct tp_peer *peer, const void *address);

/* Add to the peer's own counters (tidepool status shows them by peer). */
void tp_peer_count(struct tp_peer *peer, bool write, uint64_t bytes);

/*
 * The live peer that a segment name stands for, with a reference held, or NULL. Remembers the
 * answer in the name, so that a batch costs two loads. *ret_gone (set only on NULL) says that there
 * was one once. A name that was first opened a moment ago waits for stores that are being attached
 * and could bear it, 50 ms at most from then on. No locks.
 */
struct tp_peer *tp_route_peer(struct tp_name *name, bool *ret_gone);

/*
 * Start and end the thread that looks for stores in config->engine.socket_dir. A missing directory
 * is no error: the thread looks for it each second. `reap` is called from the thread while a dead
 * store's memory is still referred to: it lets go of the references of copies that have ended and
 * that nobody has asked about. `config` must live until tp_peer_stop.
 */
int tp_peer_start(const struct tp_config *config);
void tp_peer_stop(void);
void tp_peer_set_reaper(void (*reap)(void));
/* `look` is called from the thread once a second, more often when stores come and go. */
void tp_peer_set_look(void (*look)(void));

#endif
