/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pinned slots of each GPU. See stage_slot.h, also for what it must not know.
 */
#include "transport/stage_slot.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <x86intrin.h>

#include "env/stats.h"
#include "transport/copy_device.h"
#include "transport/gpu.h"
#include "transport/registrar.h"

/* Of a GPU: as many as eight threads fill or empty, and the calls that are under way. An H200 moved
 * to / from itself, GB/s of 53: with 24 slots 46 / 47, with 32 48 / 48, with 48 50 / 49. */
#define SLOTS 48u
#define SLOT_OPS 1024u
/* Where a copy lies in a slot differs from its place in the GPU's memory by a multiple of this: the
 * kernel moves 16 bytes at a time only then. */
#define ALIGN 64u
#define DATA_BYTES ((size_t)TP_SLOT_BYTES + (size_t)SLOT_OPS * ALIGN)
#define PINNED_BYTES (DATA_BYTES + TP_SEND_OPS * sizeof(struct tp_copy_op))
#define RETRY_TICKS (UINT64_C(1) << 25) /* about 10 ms, after a slot that could not be made */

/* | made, free, retry | under the lock, read without: hints |
 * | the rest          | under the lock                      | */
static struct pool {
    pthread_mutex_t lock;
    struct tp_slot *unused;
    uint32_t making;
    _Atomic uint64_t retry; /* time stamp counter */
    _Atomic uint32_t made, free;
} pools[TP_DEVICES];
static pthread_once_t pools_once = PTHREAD_ONCE_INIT;

_Static_assert(SLOT_OPS + TP_SLOT_CUTS <= TP_SEND_OPS, "a slot's list fits into a call");

static void init_pools(void) {
    for (int i = 0; i < TP_DEVICES; i++)
        pthread_mutex_init(&pools[i].lock, NULL);
}

static void hint(_Atomic uint32_t *count, int32_t more) {
    atomic_store(count, atomic_load_explicit(count, memory_order_relaxed) + (uint32_t)more);
}

/* ---- making them ---- */

static void free_slot(struct tp_gpu *gpu, struct tp_slot *slot) {
    tp_gpu_pinned_free(gpu, slot->data);
    tp_gpu_event_free(gpu, slot->event);
    free(slot->scratch);
    free(slot);
}

/* Calls the driver, with no lock held. */
static struct tp_slot *new_slot(struct tp_gpu *gpu) {
    if (!tp_registrar_take_pinned(PINNED_BYTES))
        return NULL;
    struct tp_slot *slot = calloc(1, sizeof(*slot));
    if (slot) {
        slot->scratch = malloc((size_t)3 * TP_SEND_OPS * sizeof(*slot->scratch));
        slot->event = tp_gpu_event(gpu);
        slot->data = tp_gpu_pinned_alloc(gpu, PINNED_BYTES);
        if (slot->scratch && slot->event && slot->data) {
            slot->ops = (struct tp_copy_op *)(void *)(slot->data + DATA_BYTES);
            tp_count(TP_STAGING_BYTES, PINNED_BYTES);
            return slot;
        }
        free_slot(gpu, slot);
    }
    tp_registrar_give_pinned(PINNED_BYTES);
    return NULL;
}

static uint32_t slots_allowed(void) {
    uint64_t count = tp_registrar_pinned_share() / PINNED_BYTES;
    return count < SLOTS ? (uint32_t)count : SLOTS;
}

/* How many more could be made now. */
static uint32_t makeable(const struct pool *pool) {
    uint32_t made = atomic_load(&pool->made);
    uint32_t allowed = slots_allowed();
    bool refused = __rdtsc() < atomic_load_explicit(&pool->retry, memory_order_relaxed);
    return made < allowed && !refused ? allowed - made : 0;
}

/* With the lock held, which is let go meanwhile. */
static struct tp_slot *make_slot(struct pool *pool, struct tp_gpu *gpu) {
    pool->making++;
    pthread_mutex_unlock(&pool->lock);
    struct tp_slot *slot = new_slot(gpu);
    pthread_mutex_lock(&pool->lock);
    pool->making--;
    if (slot)
        hint(&pool->made, 1);
    else
        atomic_store_explicit(&pool->retry, __rdtsc() + RETRY_TICKS, memory_order_relaxed);
    return slot;
}

void tp_slots_prepare(void) {
    pthread_once(&pools_once, init_pools);
    tp_registrar_keep_pinned(PINNED_BYTES * SLOTS);
}

struct tp_slot *tp_slot_take(struct tp_gpu *gpu) {
    struct pool *pool = &pools[tp_gpu_device(gpu)];
    pthread_mutex_lock(&pool->lock);
    struct tp_slot *slot = pool->unused;
    if (slot) {
        pool->unused = slot->next;
        hint(&pool->free, -1);
    } else if (makeable(pool) > pool->making) {
        slot = make_slot(pool, gpu);
    }
    pthread_mutex_unlock(&pool->lock);
    return slot;
}

void tp_slot_give(struct tp_gpu *gpu, struct tp_slot *slot) {
    struct pool *pool = &pools[tp_gpu_device(gpu)];
    pthread_mutex_lock(&pool->lock);
    slot->next = pool->unused;
    pool->unused = slot;
    hint(&pool->free, 1);
    pthread_mutex_unlock(&pool->lock);
}

bool tp_slots_made(const struct tp_gpu *gpu) {
    return atomic_load_explicit(&pools[tp_gpu_device(gpu)].made, memory_order_acquire) > 0;
}

uint32_t tp_slots_free(const struct tp_gpu *gpu) {
    const struct pool *pool = &pools[tp_gpu_device(gpu)];
    return atomic_load(&pool->free) + makeable(pool);
}

bool tp_slot_fits(const struct tp_slot *slot, const struct tp_stage_piece *piece, uint64_t most) {
    return slot->bytes + piece->bytes <= most &&
           slot->op_count + piece->end - piece->first <= SLOT_OPS;
}

/* ---- what lies in one ---- */

struct walk {
    const struct tp_stage_piece *piece;
    uint32_t op;
    size_t end; /* of the last one in the slot */
};

static struct walk walk(const struct tp_slot *slot) {
    return (struct walk){.piece = slot->pieces, .op = slot->pieces->first};
}

/* The next copy and its place in the slot. NULL: there is none. */
static const struct tp_stage_op *next_op(struct walk *walk, size_t *ret_at) {
    while (walk->piece && walk->op == walk->piece->end) {
        walk->piece = walk->piece->next;
        walk->op = walk->piece ? walk->piece->first : 0;
    }
    if (!walk->piece)
        return NULL;
    const struct tp_stage_op *op = &walk->piece->job->ops[walk->op++];
    size_t at = walk->end + (((uintptr_t)op->device - walk->end) & (ALIGN - 1));
    walk->end = at + op->bytes;
    *ret_at = at;
    return op;
}

static void copy_run(char *host, char *in_slot, size_t bytes, bool to_device) {
    if (bytes == 0)
        return;
    if (to_device)
        tp_copy_bytes_kept(in_slot, host, bytes); /* the GPU reads it from the cache */
    else
        tp_copy_bytes(host, in_slot, bytes);
}

/* Between the slot and the host's memory. Blocks of one object lie behind each other in both. */
void tp_slot_copy(const struct tp_slot *slot, bool to_device) {
    struct walk way = walk(slot);
    const struct tp_stage_op *op;
    char *host = NULL;
    size_t start = 0;
    size_t bytes = 0;
    size_t at = 0;
    while ((op = next_op(&way, &at))) {
        if (bytes && op->host == host + bytes && at == start + bytes) {
            bytes += op->bytes;
            continue;
        }
        copy_run(host, slot->data + start, bytes, to_device);
        host = op->host;
        start = at;
        bytes = op->bytes;
    }
    copy_run(host, slot->data + start, bytes, to_device);
    tp_copy_fence();
}

static bool goes_on(const struct tp_copy_op *op, const char *to, const char *from) {
    return (char *)op->to + op->bytes == to && (const char *)op->from + op->bytes == from;
}

/* Append to the list what lies at `to` and `from`: to the last one where it continues that and is
 * not apart, none larger than `most`. */
static uint32_t list_op(struct tp_copy_op *ops, uint32_t count, char *to, const char *from,
                        size_t bytes, bool apart, size_t most) {
    for (; bytes > 0; apart = false) {
        if (apart || ops[count - 1].bytes >= most || !goes_on(&ops[count - 1], to, from))
            ops[count++] = (struct tp_copy_op){to, from, 0};
        struct tp_copy_op *last = &ops[count - 1];
        size_t part = bytes < most - last->bytes ? bytes : most - last->bytes;
        last->bytes += part;
        to += part;
        from += part;
        bytes -= part;
    }
    return count;
}

uint32_t tp_slot_list_max(const struct tp_slot *slot) {
    return slot->op_count + (uint32_t)(slot->bytes / TP_SLOT_CUT_BYTES);
}

uint32_t tp_slot_list(const struct tp_slot *slot, bool to_device, size_t most,
                      struct tp_copy_op *ops, uint32_t count) {
    struct walk way = walk(slot);
    const struct tp_stage_op *op;
    size_t at = 0;
    while ((op = next_op(&way, &at))) {
        char *in_slot = slot->data + at;
        count = list_op(ops, count, to_device ? op->device : in_slot,
                        to_device ? in_slot : op->device, op->bytes, op->apart || count == 0, most);
    }
    return count;
}
