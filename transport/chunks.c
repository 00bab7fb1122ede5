/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments in chunks, and what is worth registering, when.
 *
 * While there is room for all: a chunk of which a submit moves at least half is registered at once,
 * in its thread, since that is faster from the first copy on; a chunk that is touched less, and
 * what lies ahead of the access, by a thread of the library.
 *
 * Once there is no more room, one is registered in place of another only if it is used more often.
 * To register 1 MiB and to give it back takes the driver as long as six copies of it by way of
 * pinned slots (chunk.h), so what is registered for one use is a loss, and a working set beyond the
 * limit that is read in turn must not push itself out, as it does by the order of use alone. So a
 * chunk gives way
 * - only after about two seconds without use: the link moves 100 GB meanwhile, and the engine's
 * work has gone elsewhere;
 * - for a chunk that comes back in less than half the time that it has been idle for. Of a set that
 * is read in turn, however large, none has been idle for longer than the others take to come back.
 *
 * It must not know: the driver, the limit.
 */
#include <stdlib.h>
#include <x86intrin.h>

#include "env/env.h"
#include "transport/chunk.h"
#include "transport/gpu.h"

#define PATIENCE_NS_A_MIB UINT64_C(200000) /* with what many small copies cost besides */
#define RECENT_TICKS (UINT64_C(1) << 28)   /* about 100 ms */
#define TICKS_A_MS UINT64_C(3000000)

/* About two seconds, and what belongs to one visit: uses closer to each other say nothing about
 * when a chunk comes back. */
static _Atomic uint64_t idle_ticks = 2000 * TICKS_A_MS;
#define VISITS_IN_IDLE 2

void tp_registrar_set_idle_ms(unsigned ms) {
    atomic_store(&idle_ticks, ms * TICKS_A_MS);
}

uint64_t tp_chunk_least_idle(void) {
    return atomic_load_explicit(&idle_ticks, memory_order_relaxed);
}

bool tp_registrar_on(void) {
    const struct tp_engine_config *engine = &tp_config()->engine;
    return engine->register_peer_memory && engine->device_copy && engine->half == TP_HALF_ON;
}

/* ---- the grid ---- */

static uint32_t chunks_in(uint64_t bytes, uint64_t chunk_bytes) {
    return (uint32_t)((bytes + chunk_bytes - 1) / chunk_bytes);
}

struct tp_chunks *tp_chunks_new(char *address, const struct tp_msg_segment *message,
                                const atomic_uchar *mapped) {
    if (!tp_registrar_on() || message->kind == TP_WIRE_CUMEM)
        return NULL;
    uint64_t chunk_bytes =
        message->page_bytes > TP_CHUNK_BYTES ? message->page_bytes : TP_CHUNK_BYTES;
    uint64_t first = message->piece_count > 1 ? message->piece_bytes : message->map_bytes;
    uint64_t last = message->map_bytes - (message->piece_count - 1) * first;
    uint32_t per_piece = chunks_in(first, chunk_bytes);
    uint32_t count = per_piece * (message->piece_count - 1) + chunks_in(last, chunk_bytes);
    struct tp_chunks *chunks =
        calloc(1, sizeof(*chunks) + (size_t)count * sizeof(chunks->chunk[0]));
    if (!chunks)
        return NULL;
    chunks->address = address;
    chunks->piece_bytes = first;
    chunks->map_bytes = message->map_bytes;
    chunks->mapped = mapped;
    chunks->chunk_bytes = chunk_bytes;
    chunks->per_piece = per_piece;
    chunks->count = count;
    return chunks;
}

void *tp_chunk_range(const struct tp_chunk *chunk, uint64_t *ret_bytes) {
    const struct tp_chunks *chunks = tp_chunk_owner(chunk);
    uint32_t index = (uint32_t)(chunk - chunks->chunk);
    uint32_t piece = index / chunks->per_piece;
    uint64_t offset = (uint64_t)(index % chunks->per_piece) * chunks->chunk_bytes;
    uint64_t start = piece * chunks->piece_bytes + offset;
    uint64_t piece_left = chunks->piece_bytes - offset;
    uint64_t map_left = chunks->map_bytes - start;
    uint64_t left = piece_left < map_left ? piece_left : map_left;
    *ret_bytes = left < chunks->chunk_bytes ? left : chunks->chunk_bytes;
    return chunks->address + start;
}

struct tp_chunk *tp_chunk_at(struct tp_chunks *chunks, const void *address, uint64_t *ret_bytes) {
    uint64_t offset = (uint64_t)((const char *)address - chunks->address);
    uint64_t piece = offset / chunks->piece_bytes;
    uint64_t inside = offset - piece * chunks->piece_bytes;
    struct tp_chunk *chunk =
        &chunks->chunk[piece * chunks->per_piece + inside / chunks->chunk_bytes];
    uint64_t bytes;
    atomic_store_explicit(&chunk->chunks, chunks, memory_order_relaxed);
    char *start = tp_chunk_range(chunk, &bytes);
    *ret_bytes = (uint64_t)(start + bytes - (const char *)address);
    return chunk;
}

/* ---- ahead of the access ---- */

static bool recent(const struct tp_chunk *chunk) {
    uint64_t used = atomic_load_explicit(&chunk->used, memory_order_relaxed);
    return used && __rdtsc() - used < RECENT_TICKS;
}

/* Which way does the access go from here: 1, -1, or 0 when it does not look like one in order. */
static int heading(struct tp_chunks *chunks, uint32_t index, uint32_t before) {
    bool up = index > 0 && recent(&chunks->chunk[index - 1]);
    bool down = index + 1 < chunks->count && recent(&chunks->chunk[index + 1]);
    if (before + 1 == index || (up && before != index + 1))
        return 1;
    return before == index + 1 || down ? -1 : 0;
}

static void look_ahead(struct tp_chunk *chunk, struct tp_gpu *gpu) {
    struct tp_chunks *chunks = tp_chunk_owner(chunk);
    uint32_t ahead = tp_config()->engine.register_ahead_chunks;
    uint32_t index = (uint32_t)(chunk - chunks->chunk);
    if (ahead == 0 || atomic_load_explicit(&chunks->last, memory_order_relaxed) == index + 1)
        return;
    uint32_t last = atomic_exchange_explicit(&chunks->last, index + 1, memory_order_relaxed);
    if (!tp_registrar_has_room(chunks->chunk_bytes))
        return;
    int step = heading(chunks, index, last - 1) < 0 ? -1 : 1;
    uint32_t left = step > 0 ? chunks->count - 1 - index : index;
    if (left)
        tp_registrar_want(chunks, index + (uint32_t)step, gpu, step, left < ahead ? left : ahead,
                          TP_CHUNK_IF_ROOM);
}

void tp_chunks_expect(struct tp_chunks *chunks, struct tp_gpu *gpu, const void *address,
                      uint64_t run_bytes) {
    uint64_t here;
    uint64_t there;
    uint64_t left = chunks->map_bytes - (uint64_t)((const char *)address - chunks->address);
    struct tp_chunk *first = tp_chunk_at(chunks, address, &here);
    /* The caller has not looked at what follows: it may be another segment's, or nobody's. */
    run_bytes = run_bytes < left ? run_bytes : left;
    if (here >= run_bytes || !tp_gpu_wants_registration(gpu) ||
        !tp_registrar_has_room(chunks->chunk_bytes))
        return;
    struct tp_chunk *last = tp_chunk_at(chunks, (const char *)address + run_bytes - 1, &there);
    tp_registrar_want(chunks, (uint32_t)(first - chunks->chunk) + 1, gpu, 1,
                      (uint32_t)(last - first), TP_CHUNK_IF_ROOM);
}

/* ---- holding ---- */

static void touch(struct tp_chunk *chunk) {
    uint64_t now = __rdtsc();
    uint64_t visit = atomic_load_explicit(&chunk->visit, memory_order_relaxed);
    atomic_store_explicit(&chunk->used, now, memory_order_relaxed);
    /* Another thread's visit may have begun after `now`. */
    if (visit && (now < visit || now - visit < tp_chunk_least_idle() / VISITS_IN_IDLE))
        return;
    atomic_store_explicit(&chunk->gap, visit ? now - visit : 0, memory_order_relaxed);
    atomic_store_explicit(&chunk->visit, now, memory_order_relaxed);
}

uint64_t tp_chunk_outlasts(const struct tp_chunk *chunk) {
    uint64_t twice = 2 * atomic_load_explicit(&chunk->gap, memory_order_relaxed);
    uint64_t least = tp_chunk_least_idle();
    return twice > least ? twice : least;
}

/* Have a chunk that is not registered at once registered later, if that is worth it. */
static void want_later(struct tp_chunk *chunk, struct tp_gpu *gpu, bool room) {
    struct tp_chunks *chunks = tp_chunk_owner(chunk);
    bool comes_back = atomic_load_explicit(&chunk->gap, memory_order_relaxed) > 0;
    if (room || (comes_back && tp_registrar_may_replace()))
        tp_registrar_want(chunks, (uint32_t)(chunk - chunks->chunk), gpu, 1, 1,
                          room ? TP_CHUNK_IF_ROOM : TP_CHUNK_IN_PLACE_OF_OTHERS);
}

static bool hold_unregistered(struct tp_chunk *chunk, struct tp_gpu *gpu, uint64_t run_bytes) {
    uint64_t bytes;
    (void)tp_chunk_range(chunk, &bytes);
    bool wanted = tp_gpu_wants_registration(gpu);
    bool room = wanted && tp_registrar_has_room(bytes);
    bool now = room && run_bytes >= bytes - bytes / 2;
    /* While it is held no registration of it can end, so plain stays plain or gets better. */
    if ((now || tp_chunk_state(chunk) == TP_CHUNK_UNREGISTERING) &&
        tp_registrar_settle(chunk, gpu, now, (run_bytes >> 10) * (PATIENCE_NS_A_MIB >> 10)))
        return true;
    if (wanted && !now)
        want_later(chunk, gpu, room);
    return false;
}

bool tp_chunk_hold(struct tp_chunk *chunk, struct tp_gpu *gpu, uint64_t run_bytes) {
    uint32_t word = atomic_fetch_add(&chunk->word, 1);
    touch(chunk);
    if (tp_gpu_wants_registration(gpu))
        look_ahead(chunk, gpu);
    if (word >> TP_CHUNK_STATE_BIT != TP_CHUNK_REGISTERED &&
        !hold_unregistered(chunk, gpu, run_bytes))
        return false;
    return !tp_gpu_lost(chunk->gpu); /* a context takes what was registered in it along */
}

bool tp_chunk_registered(const struct tp_chunk *chunk) {
    return tp_chunk_state(chunk) == TP_CHUNK_REGISTERED && !tp_gpu_lost(chunk->gpu);
}

void tp_chunk_hold_again(struct tp_chunk *chunk) {
    atomic_fetch_add_explicit(&chunk->word, 1, memory_order_relaxed);
}

void tp_chunk_release(struct tp_chunk *chunk) {
    atomic_fetch_sub(&chunk->word, 1);
}

bool tp_registrar_kernel_may(struct tp_gpu *gpu) {
    return tp_gpu_takes_host_pointers(gpu);
}
