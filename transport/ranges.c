/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered ranges. Asking the driver whose memory a pointer is costs more than planning the whole
 * request, so the answer is kept with the range that Mooncake was told of.
 *
 * A sorted table of atomics under a sequence count: readers take no lock, and when a registration
 * is under way they ask the driver instead of waiting.
 * (Fields are stored with release and loaded with acquire, so whoever reads a new one sees the
 * changed count: no fences, which ThreadSanitizer cannot follow.)
 *
 * It must not know: batches, peers.
 */
#include "transport/ranges.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "env/cuda.h"
#include "env/env.h"
#include "transport/gpu.h"
#include "transport/peer.h"
#include "transport/transport.h"

#define RANGES 4096 /* further ones cost a driver call a request */

struct range {
    _Atomic uintptr_t first, end;
    /* An enum tp_memory, UNKNOWN until the first use, and above it the GPU's ordinal. While
     * UNKNOWN, the ordinal's place says whether the registration called it a GPU's. */
    _Atomic int owner;
};

#define MEMORY_BITS 2
#define MEMORY_MASK 3

static int pack(enum tp_memory memory, int device) {
    return (int)memory | device << MEMORY_BITS;
}

static struct range ranges[RANGES];
static _Atomic uint32_t range_count;
static _Atomic uint32_t range_sequence; /* odd while the table is being changed */
static pthread_mutex_t range_lock = PTHREAD_MUTEX_INITIALIZER;

/* The last range that starts at or below `address`, -1 for none. */
static long range_search(uintptr_t address) {
    uint32_t low = 0;
    uint32_t high = atomic_load_explicit(&range_count, memory_order_acquire);
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (atomic_load_explicit(&ranges[middle].first, memory_order_acquire) <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return (long)low - 1;
}

static void range_copy(struct range *to, const struct range *from) {
    atomic_store_explicit(&to->first, atomic_load_explicit(&from->first, memory_order_acquire),
                          memory_order_release);
    atomic_store_explicit(&to->end, atomic_load_explicit(&from->end, memory_order_acquire),
                          memory_order_release);
    atomic_store_explicit(&to->owner, atomic_load_explicit(&from->owner, memory_order_acquire),
                          memory_order_release);
}

static void write_begin(void) {
    pthread_mutex_lock(&range_lock);
    atomic_fetch_add_explicit(&range_sequence, 1, memory_order_seq_cst);
}

static void write_end(void) {
    atomic_fetch_add_explicit(&range_sequence, 1, memory_order_seq_cst);
    pthread_mutex_unlock(&range_lock);
}

/* Between write_begin and write_end. */
static void range_remove(long index) {
    uint32_t count = atomic_load_explicit(&range_count, memory_order_acquire);
    for (uint32_t i = (uint32_t)index; i + 1 < count; i++)
        range_copy(&ranges[i], &ranges[i + 1]);
    atomic_store_explicit(&range_count, count - 1, memory_order_release);
}

/* Memory of a GPU is registered long before its first transfer: the time to make that GPU ready,
 * and to map a store's memory for it. */
static void prepare_gpu(const void *address) {
    const struct tp_engine_config *engine = &tp_config()->engine;
    int device = 0;
    if (engine->half == TP_HALF_ON && engine->device_copy && tp_cuda_initialised() &&
        tp_cuda_classify(address, &device) == TP_MEMORY_DEVICE) {
        tp_gpu_prepare(device);
        tp_peer_wake();
    }
}

void tp_register_range(const void *address, size_t bytes, const char *location) {
    uintptr_t first = (uintptr_t)address;
    if (!first || !bytes || first + bytes < first || tp_inert())
        return;
    /* A name is no proof; but memory that is called a GPU's is never copied as if it were the
     * host's. */
    bool device = location && strncmp(location, "cuda", 4) == 0;
    prepare_gpu(address);
    write_begin();
    long before = range_search(first);
    if (before >= 0 && atomic_load_explicit(&ranges[before].first, memory_order_acquire) == first) {
        range_remove(before);
        before--;
    }
    uint32_t count = atomic_load_explicit(&range_count, memory_order_acquire);
    if (count < RANGES) {
        for (long i = (long)count; i > before + 1; i--)
            range_copy(&ranges[i], &ranges[i - 1]);
        struct range *range = &ranges[before + 1];
        atomic_store_explicit(&range->first, first, memory_order_release);
        atomic_store_explicit(&range->end, first + bytes, memory_order_release);
        atomic_store_explicit(&range->owner, pack(TP_MEMORY_UNKNOWN, device), memory_order_release);
        atomic_store_explicit(&range_count, count + 1, memory_order_release);
    }
    write_end();
}

void tp_unregister_range(const void *address) {
    if (!address || tp_inert())
        return;
    write_begin();
    long index = range_search((uintptr_t)address);
    if (index >= 0 &&
        atomic_load_explicit(&ranges[index].first, memory_order_acquire) == (uintptr_t)address)
        range_remove(index);
    write_end();
}

/* What the table says of the range around `address`; false when there is none or it was being
 * changed. */
static bool range_read(uintptr_t address, struct tp_range_hint *ret_hint) {
    uint32_t before = atomic_load_explicit(&range_sequence, memory_order_acquire);
    if (before & 1)
        return false;
    struct tp_range_hint found = {0};
    long index = range_search(address);
    if (index >= 0) {
        found.first = atomic_load_explicit(&ranges[index].first, memory_order_acquire);
        found.end = atomic_load_explicit(&ranges[index].end, memory_order_acquire);
        int owner = atomic_load_explicit(&ranges[index].owner, memory_order_acquire);
        found.memory = (enum tp_memory)(owner & MEMORY_MASK);
        found.device = owner >> MEMORY_BITS;
    }
    if (atomic_load_explicit(&range_sequence, memory_order_acquire) != before)
        return false;
    if (address < found.first || address >= found.end)
        return false;
    *ret_hint = found;
    return true;
}

/* Keep the driver's answer with the range, if it is still the same one. */
static void range_learn(const struct tp_range_hint *hint) {
    pthread_mutex_lock(&range_lock);
    long index = range_search(hint->first);
    if (index >= 0 &&
        atomic_load_explicit(&ranges[index].first, memory_order_acquire) == hint->first &&
        atomic_load_explicit(&ranges[index].end, memory_order_acquire) == hint->end)
        atomic_store_explicit(&ranges[index].owner, pack(hint->memory, hint->device),
                              memory_order_release);
    pthread_mutex_unlock(&range_lock);
}

enum tp_memory tp_range_memory(const void *address, uint64_t bytes, struct tp_range_hint *hint,
                               int *ret_device) {
    uintptr_t first = (uintptr_t)address;
    if (!(first >= hint->first && first < hint->end && bytes <= hint->end - first)) {
        struct tp_range_hint found;
        if (!range_read(first, &found) || bytes > found.end - first)
            return tp_cuda_classify(address, ret_device);
        if (found.memory == TP_MEMORY_UNKNOWN) {
            bool called_device = found.device != 0;
            found.memory = tp_cuda_classify(address, &found.device);
            if (called_device && found.memory == TP_MEMORY_HOST)
                return TP_MEMORY_UNKNOWN;
            if (found.memory != TP_MEMORY_UNKNOWN)
                range_learn(&found);
        }
        *hint = found;
    }
    if (hint->memory == TP_MEMORY_DEVICE)
        *ret_device = hint->device;
    return hint->memory;
}

uintptr_t tp_range_start(const struct tp_range_hint *hint, const void *address) {
    uintptr_t at = (uintptr_t)address;
    return at >= hint->first && at < hint->end ? hint->first : at;
}
