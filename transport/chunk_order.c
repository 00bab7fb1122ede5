/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A heap of registered chunks. A use is only noted in the chunk, without the lock; its key, the
 * registration at first, follows when the chunk comes to the top.
 *
 * It must not know: the driver, the limit.
 */
#include "transport/chunk_order.h"

#include <stdlib.h>
#include <x86intrin.h>

static struct {
    struct tp_chunk **heap; /* least key first */
    uint32_t count, room;
} order;

bool tp_order_begin_end(struct tp_chunk *chunk) {
    uint32_t idle = (uint32_t)TP_CHUNK_REGISTERED << TP_CHUNK_STATE_BIT;
    return atomic_compare_exchange_strong(&chunk->word, &idle,
                                          (uint32_t)TP_CHUNK_UNREGISTERING << TP_CHUNK_STATE_BIT);
}

static void put(uint32_t place, struct tp_chunk *chunk) {
    order.heap[place - 1] = chunk;
    chunk->place = place;
}

static void sift_up(uint32_t place, struct tp_chunk *chunk) {
    for (; place > 1 && order.heap[place / 2 - 1]->key > chunk->key; place /= 2)
        put(place, order.heap[place / 2 - 1]);
    put(place, chunk);
}

static void sift_down(uint32_t place, struct tp_chunk *chunk) {
    for (uint32_t child; (child = place * 2) <= order.count; place = child) {
        if (child < order.count && order.heap[child]->key < order.heap[child - 1]->key)
            child++;
        if (order.heap[child - 1]->key >= chunk->key)
            break;
        put(place, order.heap[child - 1]);
    }
    put(place, chunk);
}

bool tp_order_reserve(uint32_t more) {
    uint32_t need = order.count + more;
    if (need <= order.room)
        return true;
    uint32_t room = need < 64 ? 64 : need + need / 2;
    struct tp_chunk **grown = reallocarray(order.heap, room, sizeof(struct tp_chunk *));
    if (!grown)
        return false;
    order.heap = grown;
    order.room = room;
    return true;
}

void tp_order_add(struct tp_chunk *chunk) {
    chunk->key = __rdtsc();
    sift_up(++order.count, chunk);
}

void tp_order_remove(struct tp_chunk *chunk) {
    uint32_t place = chunk->place;
    struct tp_chunk *moved = order.heap[order.count - 1];
    chunk->place = 0;
    order.count--;
    if (moved == chunk)
        return;
    if (moved->key < chunk->key)
        sift_up(place, moved);
    else
        sift_down(place, moved);
}

/*
 * Those that are in use are set aside and put back in their places. From the first one on that was
 * used too lately, all are. (Time stamp counters of other processors may be a little ahead.)
 */
struct tp_chunk *tp_order_take_least(uint64_t idle_ticks) {
    uint64_t now = __rdtsc();
    struct tp_chunk *aside = NULL;
    struct tp_chunk *found = NULL;
    while (!found && order.count) {
        struct tp_chunk *chunk = order.heap[0];
        uint64_t used = atomic_load_explicit(&chunk->used, memory_order_relaxed);
        if (used > chunk->key) {
            chunk->key = used;
            sift_down(1, chunk);
            continue;
        }
        if (chunk->key > now || now - chunk->key < idle_ticks)
            break;
        tp_order_remove(chunk);
        if (tp_order_begin_end(chunk)) {
            found = chunk;
        } else {
            chunk->aside = aside;
            aside = chunk;
        }
    }
    for (; aside; aside = aside->aside)
        sift_up(++order.count, aside);
    return found;
}
