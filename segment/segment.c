/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of overlays: which ranges are shareable memory, and which of them are published.
 *
 * It must not know: what pieces are made of (backing.h), how they are built (pieces.c), or who is
 * connected (server.c).
 *
 * fork. A child must not keep the store's memory alive after the store has died, and must not crash
 * when it merely exits and runs destructors on the way. So overlays are MADV_DONTFORK, and the
 * child's handler lays private anonymous memory over the holes and closes the pieces' fds: a child
 * that touches the range reads zeros, its writes reach nobody, and free() of the range (malloc's
 * header lies in the page before, which the child has) unmaps it as usual. The handler does nothing
 * but mmap and close. A fork between the overlay and its MADV_DONTFORK leaves the child the shared
 * mapping: harmless but for the memory.
 */
#include "segment/segment.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "segment/addresses.h"
#include "segment/cumem.h"
#include "segment/lease.h"
#include "segment/pieces.h"
#include "segment/server.h"
#include "segment/table.h"

#define SMALL_PAGE 4096U
#define SETTLE_MS 5000

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

enum overlay_state { FREE, BUILDING, READY, LEAVING };

/*
 * | field        | written by                 | read by                                  |
 * |--------------|----------------------------|------------------------------------------|
 * | base, bytes  | under the lock, base last  | anyone, without the lock; base 0: nothing |
 * | the rest     | under the lock             | under the lock; a forked child            |
 */
struct overlay {
    _Atomic uintptr_t base;
    _Atomic uintptr_t bytes;
    uintptr_t claimed, claimed_bytes; /* the range while it is not FREE: overlaps are refused */
    uint64_t id;
    struct tp_pieces pieces;
    enum overlay_state state;
    bool published;
    unsigned opening; /* threads that let GPUs reach it, without the lock: it stays READY */
    uint64_t opened;  /* GPUs that do, a bit each */
};

static struct overlay table[TP_WIRE_MAX_SEGMENTS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
/* An overlay is LEAVING no more, or nobody opens it any more. */
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;
static uint64_t last_id; /* under the lock; ids are never reused */

/* Bounds of all overlays there ever were: most addresses fail two compares. */
static _Atomic uintptr_t lowest = UINTPTR_MAX;
static _Atomic uintptr_t highest;

/*
 * What `free` looks at: where memory of our own and overlays begin. Apart from the table, since a
 * forked child must go on to know the former: the range is no memory of malloc's there either.
 */
static struct {
    _Atomic uintptr_t base; /* 0: none; written last */
    atomic_bool ours;       /* else an overlay */
} freed[TP_WIRE_MAX_SEGMENTS];
static _Atomic uintptr_t freed_lowest = UINTPTR_MAX;
static _Atomic uintptr_t freed_highest;

static void forked_child(void) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        struct overlay *overlay = &table[i];
        uintptr_t base = atomic_load(&overlay->base);
        if (base == 0)
            continue;
        (void)mmap((void *)base, atomic_load(&overlay->bytes), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        for (uint32_t k = 0; k < overlay->pieces.count; k++)
            close(overlay->pieces.fds[k]);
        atomic_store(&overlay->base, 0);
    }
}

static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static void prepare(void) {
    int page;
    (void)tp_stats_open(&page); /* before the first slot of it is written */
    tp_fork_guard();
    (void)pthread_atfork(NULL, NULL, forked_child);
}

bool tp_segment_contains(const void *address) {
    uintptr_t wanted = (uintptr_t)address;
    if (wanted < atomic_load_explicit(&lowest, memory_order_relaxed) ||
        wanted >= atomic_load_explicit(&highest, memory_order_relaxed))
        return false;
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        uintptr_t base = atomic_load_explicit(&table[i].base, memory_order_acquire);
        uintptr_t bytes = atomic_load_explicit(&table[i].bytes, memory_order_acquire);
        /* The slot may be reused between the two loads: the base must still be the same. */
        if (base != 0 && wanted - base < bytes &&
            atomic_load_explicit(&table[i].base, memory_order_relaxed) == base)
            return true;
    }
    return false;
}

/* Under the lock. */
static void widen_bounds(uintptr_t base, uintptr_t bytes) {
    if (base < atomic_load(&lowest))
        atomic_store(&lowest, base);
    if (base + bytes > atomic_load(&highest))
        atomic_store(&highest, base + bytes);
}

/* Under the lock: the finished overlay that starts at `address`. */
static struct overlay *find_ready(const void *address) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (table[i].state == READY && table[i].claimed == (uintptr_t)address)
            return &table[i];
    }
    return NULL;
}

/* Under the lock. */
static struct overlay *find_published(uint64_t segment_id) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (table[i].published && table[i].id == segment_id)
            return &table[i];
    }
    return NULL;
}

/* Take a slot for a range that overlaps no other. */
static int claim(uintptr_t address, size_t bytes, struct overlay **ret_overlay,
                 struct tp_held *ret_held) {
    struct overlay *found = NULL;
    struct tp_held held = {0};
    int result = 0;
    pthread_mutex_lock(&table_lock);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        struct overlay *overlay = &table[i];
        if (overlay->state == FREE) {
            if (found == NULL)
                found = overlay;
            continue;
        }
        held.fds += overlay->pieces.count;
        held.bytes += overlay->pieces.bytes;
        if (address < overlay->claimed + overlay->claimed_bytes &&
            overlay->claimed < address + bytes)
            result = -EEXIST;
    }
    if (result == 0 && found == NULL)
        result = -ENOSPC;
    if (result == 0) {
        found->state = BUILDING;
        found->claimed = address;
        found->claimed_bytes = bytes;
        *ret_overlay = found;
        *ret_held = held;
    }
    pthread_mutex_unlock(&table_lock);
    return result;
}

static void say_unclaimed(int error, const void *address) {
    if (error == -EEXIST)
        tp_log(TP_LOG_ERROR, "segment at %p overlaps one that is shared already", address);
    else
        tp_log(TP_LOG_ERROR, "segment at %p: a process can share %d segments, all in use", address,
               TP_WIRE_MAX_SEGMENTS);
}

static enum tp_segment_kind kind_of(const struct tp_pieces *pieces) {
    enum tp_segment_kind kind = tp_config()->store.kind;
    bool beside = kind == TP_SEGMENT_CUMEM && pieces->wire_kind != TP_WIRE_CUMEM;
    return beside ? TP_SEGMENT_MEMFD : kind;
}

/* Under the lock. `state` is written last: readers of the page look at it first. */
static void show(const struct overlay *overlay, enum tp_slot_state state) {
    struct tp_stats_segment *slot = &tp_stats_page()->segments[overlay - table];
    const struct tp_pieces *pieces = &overlay->pieces;
    if (state == TP_SLOT_STARTING) {
        slot->kind = kind_of(pieces);
        slot->base = (uintptr_t)pieces->base;
        slot->bytes = pieces->bytes;
        slot->page_bytes = pieces->page_bytes;
        slot->piece_bytes = pieces->piece_bytes;
        slot->pieces = pieces->count;
        slot->nodes = pieces->node_count;
        memcpy(slot->detail, pieces->detail, sizeof slot->detail);
    }
    atomic_store_explicit(&slot->state, state, memory_order_release);
}

/* Under the lock: from now on `free` of its start is looked at. */
static void watch_free(const struct overlay *overlay, bool ours) {
    uintptr_t base = overlay->claimed;
    if (base < atomic_load(&freed_lowest))
        atomic_store(&freed_lowest, base);
    if (base > atomic_load(&freed_highest))
        atomic_store(&freed_highest, base);
    atomic_store(&freed[overlay - table].ours, ours);
    atomic_store(&freed[overlay - table].base, base);
}

static void enter(struct overlay *overlay, const struct tp_pieces *pieces) {
    pthread_mutex_lock(&table_lock);
    if (pieces->ours) {
        overlay->claimed = (uintptr_t)pieces->base;
        overlay->claimed_bytes = pieces->bytes;
    }
    watch_free(overlay, pieces->ours);
    overlay->pieces = *pieces;
    overlay->id = ++last_id;
    overlay->state = READY;
    widen_bounds((uintptr_t)pieces->base, pieces->bytes);
    atomic_store_explicit(&overlay->bytes, pieces->bytes, memory_order_release);
    atomic_store_explicit(&overlay->base, (uintptr_t)pieces->base, memory_order_release);
    show(overlay, TP_SLOT_STARTING);
    pthread_mutex_unlock(&table_lock);
    (void)madvise(pieces->base, pieces->bytes, MADV_DONTFORK);
}

static void unclaim(struct overlay *overlay) {
    pthread_mutex_lock(&table_lock);
    atomic_store(&freed[overlay - table].base, 0);
    overlay->pieces = (struct tp_pieces){0};
    overlay->opened = 0;
    overlay->state = FREE;
    pthread_cond_broadcast(&left);
    pthread_mutex_unlock(&table_lock);
}

static void say_made(const struct tp_pieces *pieces) {
    tp_log(TP_LOG_INFO, "segment of %" PRIu64 " MiB at %p: %" PRIu32 " pieces of %s on %u nodes",
           pieces->bytes >> 20, pieces->base, pieces->count, pieces->detail, pieces->node_count);
}

/* The end of a build: into the table, or counted as failed and the claim (NULL: there was none)
 * given up. */
static int settle(struct overlay *overlay, const struct tp_pieces *pieces, int result) {
    if (result < 0) {
        tp_count(TP_SEGMENT_FAILURES, 1);
        if (overlay != NULL)
            unclaim(overlay);
        return result;
    }
    enter(overlay, pieces);
    say_made(pieces);
    return 0;
}

int tp_segment_overlay(void *address, size_t bytes, bool keep_contents,
                       const struct tp_config *config) {
    struct overlay *overlay = NULL;
    struct tp_pieces pieces = {0};
    struct tp_held held = {0};
    if (tp_inert())
        return -ECHILD;
    pthread_once(&prepared, prepare);
    int result = bytes > UINTPTR_MAX - (uintptr_t)address ? -EINVAL : 0;
    if (result < 0) {
        tp_log(TP_LOG_ERROR, "segment at %p: %zu bytes are no range", address, bytes);
    } else if (bytes > 0 && !tp_addresses_take(config, address, bytes, false)) {
        return -EADDRINUSE;
    } else {
        result = claim((uintptr_t)address, bytes, &overlay, &held);
        if (result < 0)
            say_unclaimed(result, address);
    }
    if (result == 0)
        result = tp_pieces_build(address, bytes, keep_contents, held, config, &pieces);
    return settle(overlay, &pieces, result);
}

int tp_segment_allocate(size_t bytes, size_t alignment, bool cumem, const struct tp_config *config,
                        void **ret_address) {
    struct overlay *overlay = NULL;
    struct tp_pieces pieces = {0};
    struct tp_held held = {0};
    if (tp_inert())
        return -ECHILD;
    pthread_once(&prepared, prepare);
    int result = claim(0, 0, &overlay, &held); /* where it will lie is not known yet */
    if (result < 0)
        say_unclaimed(result, NULL);
    else if (cumem)
        result = tp_cumem_build(bytes, alignment, held.fds, config, &pieces);
    else
        result = tp_pieces_allocate(bytes, alignment, held, config, &pieces);
    if (result == -EADDRNOTAVAIL) {
        unclaim(overlay);
        return result;
    }
    result = settle(overlay, &pieces, result);
    if (result == 0)
        *ret_address = pieces.base;
    return result;
}

/* ---- GPUs of this process ---- */

/* Those of `devices` that do not reach it yet; none when it is no CUDA memory. *ret_pieces stays
 * until end_opening. */
static uint64_t begin_opening(struct overlay *overlay, uint64_t devices,
                              struct tp_pieces *ret_pieces) {
    uint64_t missing = 0;
    pthread_mutex_lock(&table_lock);
    if (overlay->state == READY && overlay->pieces.wire_kind == TP_WIRE_CUMEM)
        missing = devices & ~overlay->opened;
    if (missing != 0) {
        overlay->opening++;
        *ret_pieces = overlay->pieces;
    }
    pthread_mutex_unlock(&table_lock);
    return missing;
}

static void end_opening(struct overlay *overlay, uint64_t opened) {
    pthread_mutex_lock(&table_lock);
    overlay->opened |= opened;
    overlay->opening--;
    pthread_cond_broadcast(&left);
    pthread_mutex_unlock(&table_lock);
}

/* Without any, nobody may have initialised the driver. */
static bool any_cumem(void) {
    bool found = false;
    pthread_mutex_lock(&table_lock);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++)
        found |= table[i].state == READY && table[i].pieces.wire_kind == TP_WIRE_CUMEM;
    pthread_mutex_unlock(&table_lock);
    return found;
}

void tp_segment_open_to_gpus(void) {
    struct tp_pieces pieces;
    uint64_t devices = !tp_inert() && any_cumem() ? tp_cuda_active_devices() : 0;
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS && devices != 0; i++) {
        uint64_t missing = begin_opening(&table[i], devices, &pieces);
        if (missing != 0)
            end_opening(&table[i], tp_cumem_open(&pieces, missing));
    }
}

/*
 * Addresses that engines know as those of segments that they may not have let go of yet: a transfer
 * to something new there would be copied into the old pages. Under the lock.
 */
static struct stale {
    uintptr_t first, end; /* end 0: none */
    uint64_t number;      /* of the withdrawal */
} stale[TP_WIRE_MAX_SEGMENTS];
static uint64_t withdrawals;

static void remember_stale(uintptr_t first, uintptr_t end) {
    unsigned i = 0;
    while (i < TP_WIRE_MAX_SEGMENTS - 1 && stale[i].end != 0)
        i++;
    /* The last one takes in all that find no room. */
    if (stale[i].end == 0 || first < stale[i].first)
        stale[i].first = first;
    if (stale[i].end < end)
        stale[i].end = end;
    stale[i].number = ++withdrawals;
}

/* Are there such addresses in the range? *ret_number: the last withdrawal so far. */
static bool find_stale(uintptr_t first, uintptr_t end, uint64_t *ret_number) {
    bool found = false;
    pthread_mutex_lock(&table_lock);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++)
        found |= first < stale[i].end && stale[i].first < end;
    *ret_number = withdrawals;
    pthread_mutex_unlock(&table_lock);
    return found;
}

/* All engines know of the withdrawals up to this one. */
static void forget_stale(uint64_t number) {
    pthread_mutex_lock(&table_lock);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (stale[i].number <= number)
            stale[i] = (struct stale){0};
    }
    pthread_mutex_unlock(&table_lock);
}

bool tp_segment_settle(const void *address, size_t bytes) {
    uint64_t number;
    if (tp_inert() || !find_stale((uintptr_t)address, (uintptr_t)address + bytes, &number))
        return true;
    if (tp_server_settle(SETTLE_MS)) {
        forget_stale(number);
        return true;
    }
    tp_log(TP_LOG_ERROR,
           "%zu MiB at %p are not made known to engines: a segment was there before, and an engine "
           "has not let go of it for %d s; is it stopped, or starved of CPU? Let it go on or end "
           "it, and mount the memory again",
           bytes >> 20, address, SETTLE_MS / 1000);
    return false;
}

/* Under the lock. */
static void withdraw(struct overlay *overlay) {
    if (!overlay->published)
        return;
    tp_lease_set((unsigned)(overlay - table), 0);
    remember_stale((uintptr_t)overlay->pieces.base,
                   (uintptr_t)overlay->pieces.base + overlay->pieces.bytes);
    overlay->published = false;
    show(overlay, TP_SLOT_STARTING);
    tp_count(TP_SEGMENT_BYTES, -overlay->pieces.bytes); /* wraps: a subtraction */
}

/* Under the lock. */
static bool is_leaving(const void *address) {
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (table[i].state == LEAVING && table[i].claimed == (uintptr_t)address)
            return true;
    }
    return false;
}

/* Under the lock. */
static bool is_opening(const void *address) {
    const struct overlay *overlay = find_ready(address);
    return overlay != NULL && overlay->opening > 0;
}

/*
 * Take the segment that starts at `address` out of the table, if it is of memory of our own, or an
 * overlay (`ours`). The range stays
 * claimed: unmapping a large segment takes time, and that is not done under the lock. Whoever comes
 * meanwhile, to free the memory, waits: other memory may be at these addresses right after, and
 * would be mapped over.
 */
static struct overlay *take_out(const void *address, bool ours, struct tp_pieces *ret_pieces) {
    pthread_mutex_lock(&table_lock);
    while ((!ours && is_leaving(address)) || is_opening(address))
        pthread_cond_wait(&left, &table_lock);
    struct overlay *overlay = find_ready(address);
    if (overlay != NULL && overlay->pieces.ours != ours)
        overlay = NULL;
    if (overlay != NULL) {
        withdraw(overlay);
        show(overlay, TP_SLOT_EMPTY);
        atomic_store_explicit(&overlay->base, 0, memory_order_release);
        overlay->state = LEAVING;
        *ret_pieces = overlay->pieces;
        overlay->pieces = (struct tp_pieces){0};
        /* Before it is unmapped: the call of munmap for it is not the host's. `free` of an overlay
         * is looked at until the end. */
        if (ours)
            atomic_store(&freed[overlay - table].base, 0);
    }
    pthread_mutex_unlock(&table_lock);
    if (overlay != NULL)
        tp_server_wake();
    return overlay;
}

int tp_segment_restore(void *address) {
    struct tp_pieces pieces;
    if (tp_inert())
        return -ENOENT;
    struct overlay *overlay = take_out(address, false, &pieces);
    if (overlay == NULL)
        return tp_segment_withdraw(address);
    (void)tp_pieces_remove(&pieces);
    unclaim(overlay);
    return 0;
}

/* The start of an overlay, not of memory of our own, that reaches into the range; NULL when there
 * is none. */
static void *find_overlapping(const void *address, size_t bytes) {
    uintptr_t first = (uintptr_t)address;
    void *found = NULL;
    pthread_mutex_lock(&table_lock);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS && found == NULL; i++) {
        const struct overlay *overlay = &table[i];
        if (overlay->state == READY && !overlay->pieces.ours &&
            first < overlay->claimed + overlay->claimed_bytes && overlay->claimed < first + bytes)
            found = (void *)overlay->claimed;
    }
    pthread_mutex_unlock(&table_lock);
    return found;
}

void tp_segment_forget(const void *address, size_t bytes) {
    struct tp_pieces pieces;
    if (tp_inert())
        return;
    for (void *old = find_overlapping(address, bytes); old;
         old = find_overlapping(address, bytes)) {
        struct overlay *overlay = take_out(old, false, &pieces);
        if (overlay == NULL)
            return;
        tp_pieces_forget(&pieces);
        unclaim(overlay);
    }
}

/* Is `free` of this address looked at? *ret_ours: is the memory ours? */
static bool is_watched(const void *address, bool *ret_ours) {
    uintptr_t wanted = (uintptr_t)address;
    if (wanted % SMALL_PAGE != 0 ||
        wanted < atomic_load_explicit(&freed_lowest, memory_order_relaxed) ||
        wanted > atomic_load_explicit(&freed_highest, memory_order_relaxed))
        return false;
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++) {
        if (atomic_load_explicit(&freed[i].base, memory_order_acquire) == wanted) {
            *ret_ours = atomic_load_explicit(&freed[i].ours, memory_order_relaxed);
            return true;
        }
    }
    return false;
}

bool tp_segment_free(void *address) {
    struct tp_pieces pieces;
    bool ours;
    if (!is_watched(address, &ours))
        return false;
    if (tp_inert())
        return ours;
    int error = errno;
    struct overlay *overlay = take_out(address, ours, &pieces);
    if (overlay != NULL) {
        if (pieces.wire_kind == TP_WIRE_CUMEM)
            tp_cumem_remove(&pieces);
        else
            (void)tp_pieces_remove(&pieces);
        unclaim(overlay);
    }
    errno = error;
    return ours;
}

int tp_segment_publish(void *address, const struct tp_config *config) {
    if (tp_inert())
        return -ECHILD;
    pthread_mutex_lock(&table_lock);
    const struct overlay *ready = find_ready(address);
    size_t bytes = ready != NULL ? ready->pieces.bytes : 0;
    pthread_mutex_unlock(&table_lock);
    if (bytes == 0)
        return -ENOENT;
    if (!tp_segment_settle(address, bytes))
        return -EBUSY;
    int result = tp_server_start(true, config);
    if (result < 0)
        return result;
    pthread_mutex_lock(&table_lock);
    struct overlay *overlay = find_ready(address);
    if (overlay == NULL) {
        result = -ENOENT;
    } else if (!overlay->published) {
        overlay->published = true;
        tp_lease_set((unsigned)(overlay - table), overlay->id);
        show(overlay, TP_SLOT_LIVE);
        tp_count(TP_SEGMENT_BYTES, overlay->pieces.bytes);
    }
    pthread_mutex_unlock(&table_lock);
    tp_server_wake();
    return result;
}

int tp_segment_withdraw(void *address) {
    if (tp_inert())
        return -ENOENT;
    pthread_mutex_lock(&table_lock);
    struct overlay *overlay = find_ready(address);
    if (overlay != NULL) {
        withdraw(overlay);
        overlay->id = ++last_id; /* published again, it is a new segment to the engines */
    }
    pthread_mutex_unlock(&table_lock);
    if (overlay == NULL)
        return -ENOENT;
    tp_server_wake();
    return 0;
}

void tp_table_published(uint64_t ret_ids[static TP_WIRE_MAX_SEGMENTS]) {
    pthread_mutex_lock(&table_lock);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++)
        ret_ids[i] = table[i].published ? table[i].id : 0;
    pthread_mutex_unlock(&table_lock);
}

int tp_table_describe(uint64_t segment_id, struct tp_msg_segment *ret_segment) {
    int result = -ENOENT;
    pthread_mutex_lock(&table_lock);
    const struct overlay *overlay = find_published(segment_id);
    if (overlay != NULL) {
        const struct tp_pieces *pieces = &overlay->pieces;
        *ret_segment = (struct tp_msg_segment){.segment_id = segment_id,
                                               .base = (uintptr_t)pieces->base,
                                               .bytes = pieces->bytes,
                                               .page_bytes = pieces->page_bytes,
                                               .piece_bytes = pieces->piece_bytes,
                                               .piece_count = pieces->count,
                                               .kind = pieces->wire_kind,
                                               .map_bytes = pieces->bytes,
                                               .slot = (uint32_t)(overlay - table)};
        result = 0;
    }
    pthread_mutex_unlock(&table_lock);
    return result;
}

int tp_table_send_pieces(int socket_fd, const struct tp_msg_pieces *want) {
    struct tp_msg message = {.type = TP_MSG_PIECES};
    int result;
    message.body.pieces = *want;
    pthread_mutex_lock(&table_lock);
    const struct overlay *overlay = find_published(want->segment_id);
    if (overlay == NULL)
        result = want->segment_id == 0 || want->segment_id > last_id ? -EPROTO : -ENOENT;
    else if (want->count == 0 || want->count > TP_WIRE_MAX_FDS ||
             want->first >= overlay->pieces.count ||
             want->count > overlay->pieces.count - want->first)
        result = -EPROTO;
    else
        result = tp_wire_send(socket_fd, &message, overlay->pieces.fds + want->first, want->count);
    pthread_mutex_unlock(&table_lock);
    return result;
}
