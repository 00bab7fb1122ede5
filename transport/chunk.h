/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the registrar: what a chunk is. chunks.c cuts segments into chunks and decides what is to
 * be registered; registrar.c registers, and keeps to the limit.
 *
 * | field of tp_chunk  | written                                                               |
 * |--------------------|-----------------------------------------------------------------------|
 * | word               | holds by any thread; the state as TP_CHUNK_* says                     |
 * | used, visit, gap   | by any thread that holds it                                           |
 * | wanted             | under the registrar's lock; read by any thread                        |
 * | gpu                | under the lock while the chunk is not registered                      |
 * | the rest           | under the lock                                                        |
 */
#ifndef TIDEPOOL_CHUNK_H
#define TIDEPOOL_CHUNK_H

#include <stdatomic.h>

#include "segment/wire.h"
#include "transport/registrar.h"

/*
 * Registering costs 50 to 60 us a MiB for pages of 4 KiB and 22 to 32 for huge ones in chunks of 16
 * MiB and more; in chunks of 4 MiB 55 to 100 and 40 to 47; giving back another 20 to 40. The driver
 * does one at a time, and copies beside it run at half their speed. Copying takes 19, as much by
 * way of pinned slots (staging.h), and what is neither registered nor staged 130 to the GPU and 70
 * from it (H200, PCIe Gen5). So 4 MiB take 0.2 to 0.4 ms, a wait that a submit can bear; copy
 * engines are at their full speed (54 of 55 GB/s); and half a chunk, the least that pays at once,
 * is one vLLM block of a 32B model (2 MiB). Larger chunks would register more that nobody asked
 * for.
 */
#define TP_CHUNK_BYTES (UINT64_C(4) << 20)

/* PLAIN and REGISTERED last; the others mean that a thread is in the driver for this chunk, and
 * only that thread ends them. Under the registrar's lock, except that a hold may come at any time.
 */
enum tp_chunk_state {
    TP_CHUNK_PLAIN,
    TP_CHUNK_REGISTERING,
    TP_CHUNK_REGISTERED,
    TP_CHUNK_UNREGISTERING, /* not begun while it is held, but a hold may come meanwhile: it waits
                             */
};

#define TP_CHUNK_STATE_BIT 28
#define TP_CHUNK_HOLDS ((UINT32_C(1) << TP_CHUNK_STATE_BIT) - 1)

enum tp_chunk_want { TP_CHUNK_UNWANTED, TP_CHUNK_IF_ROOM, TP_CHUNK_IN_PLACE_OF_OTHERS };

struct tp_chunk {
    _Atomic uint32_t word;  /* state << TP_CHUNK_STATE_BIT | holds */
    uint32_t place;         /* in the heap of what is registered, from 1; 0: not there */
    _Atomic uint64_t used;  /* time stamp counter of the last hold */
    _Atomic uint64_t visit; /* the same of the hold that began the last visit */
    _Atomic uint64_t gap;   /* from the visit before to that one; 0: there was none */
    uint64_t key;           /* what the heap is sorted by: `used` or an earlier value of it */
    struct tp_chunks
        *_Atomic chunks;     /* NULL before the first use: of many TiB most is never used */
    struct tp_gpu *gpu;      /* in whose context it is registered, or shall be */
    struct tp_chunk *next;   /* wanted after this one */
    struct tp_chunk *aside;  /* the next of those that could not give way */
    _Atomic uint32_t wanted; /* enum tp_chunk_want */
};

struct tp_chunks {
    char *address;
    uint64_t piece_bytes, map_bytes; /* pieces lie behind each other, the last may be shorter */
    const atomic_uchar *mapped;      /* one a piece */
    uint64_t chunk_bytes; /* TP_CHUNK_BYTES, or the segment's page where that is larger */
    uint32_t per_piece, count;
    _Atomic uint32_t last; /* chunk that was held last */
    unsigned busy;         /* threads of the registrar that look at a chunk; under its lock */
    bool dropped, stuck;   /* under its lock */
    bool out_of_time;      /* the last slice of a drop ended by the clock; the peer thread's */
    uint32_t let_go;       /* chunks of a dropped segment that are not registered any more */
    unsigned refusals;     /* of the driver, to let them go */
    struct tp_chunk chunk[];
};

static inline enum tp_chunk_state tp_chunk_state(const struct tp_chunk *chunk) {
    return (enum tp_chunk_state)(atomic_load_explicit(&chunk->word, memory_order_acquire) >>
                                 TP_CHUNK_STATE_BIT);
}

/* Of a chunk that tp_chunk_at has given, or that is next to such a one and wanted. */
static inline struct tp_chunks *tp_chunk_owner(const struct tp_chunk *chunk) {
    return atomic_load_explicit(&chunk->chunks, memory_order_relaxed);
}

/* Where a chunk lies. */
void *tp_chunk_range(const struct tp_chunk *chunk, uint64_t *ret_bytes);

/* Let a thread of the registrar register these (at most `count` from chunk `index` on, each `step`
 * further), those of them that are plain and mapped. */
void tp_registrar_want(struct tp_chunks *chunks, uint32_t index, struct tp_gpu *gpu, int step,
                       uint32_t count, enum tp_chunk_want how);

/*
 * For a chunk that is held and was not registered: wait until the driver is not busy with it, for
 * as long as that pays, and register it if `now` says so and there is room. True: it is registered.
 */
bool tp_registrar_settle(struct tp_chunk *chunk, struct tp_gpu *gpu, bool now,
                         uint64_t patience_ns);

/* Is there room for so much more? One load; any thread, no lock. */
bool tp_registrar_has_room(uint64_t bytes);

/* May there be a chunk that could give way? False for a while after there was none. One load. */
bool tp_registrar_may_replace(void);

/* For how long a chunk must not have been used to give way to this one, in ticks of the time stamp
 * counter. */
uint64_t tp_chunk_outlasts(const struct tp_chunk *chunk);

/* The same at least, for any chunk. */
uint64_t tp_chunk_least_idle(void);

#endif
