/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segment names, each kept once. A store that restarts in peer-to-peer mode comes back under a new
 * port, so names come and go; they are few and small, and never freeing them is what lets every
 * reader go without a lock.
 *
 * It must not know: engines, peers, what a name is looked up for.
 */
#include "transport/names.h"

#include "env/stats.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define NAME_BUCKETS 1024
/* Names also come from other processes, which must not fill this one's memory: 65536 names are 20
 * MiB. */
#define NAME_LIMIT 65536

static struct tp_name *_Atomic name_buckets[NAME_BUCKETS];
static pthread_mutex_t name_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned name_count;

static uint64_t name_hash(const char *text, size_t bytes) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static struct tp_name *name_find(uint64_t hash, const char *text, size_t bytes) {
    struct tp_name *name =
        atomic_load_explicit(&name_buckets[hash % NAME_BUCKETS], memory_order_acquire);
    while (name &&
           (name->hash != hash || name->bytes != bytes || memcmp(name->text, text, bytes) != 0))
        name = name->next;
    return name;
}

static struct tp_name *name_make(uint64_t hash, const char *text, size_t bytes) {
    if (name_count >= NAME_LIMIT)
        return NULL;
    struct tp_name *name = calloc(1, sizeof(*name));
    if (!name)
        return NULL;
    name->hash = hash;
    name->bytes = (uint32_t)bytes;
    memcpy(name->text, text, bytes);
    atomic_flag_clear(&name->said);
    struct tp_name *_Atomic *bucket = &name_buckets[hash % NAME_BUCKETS];
    name->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, name, memory_order_release);
    name_count++;
    return name;
}

struct tp_name *tp_name_intern(const char *text, size_t bytes) {
    while (bytes > 0 && *text == '/') {
        text++;
        bytes--;
    }
    if (bytes == 0 || bytes > TP_NAME_BYTES)
        return NULL;
    uint64_t hash = name_hash(text, bytes);
    struct tp_name *name = name_find(hash, text, bytes);
    if (name)
        return name;
    pthread_mutex_lock(&name_lock);
    name = name_find(hash, text, bytes);
    if (!name)
        name = name_make(hash, text, bytes);
    pthread_mutex_unlock(&name_lock);
    return name;
}

/* ---- names whose requests fell back
 * ------------------------------------------------------------------------------- */

static struct tp_name *shown[TP_STATS_MISSES]; /* by row; one thread only */

/* The row for a name that has none: an empty one, or that of fewer requests; -1: all have more. */
static int row_for(uint64_t requests) {
    int least = -1;
    for (int i = 0; i < TP_STATS_MISSES; i++) {
        if (!shown[i])
            return i;
        uint64_t count = atomic_load_explicit(&shown[i]->missed_requests, memory_order_relaxed);
        if (count < requests) {
            requests = count;
            least = i;
        }
    }
    return least;
}

static void show_missed(struct tp_name *name, uint64_t requests) {
    struct tp_stats_miss *misses = tp_stats_page()->misses;
    int row = name->row ? (int)name->row - 1 : row_for(requests);
    if (row < 0)
        return;
    struct tp_stats_miss *miss = &misses[row];
    if (!name->row) {
        atomic_store_explicit(&miss->state, TP_SLOT_EMPTY, memory_order_release);
        if (shown[row])
            shown[row]->row = 0;
        shown[row] = name;
        name->row = (uint32_t)row + 1;
        memset(miss->name, 0, sizeof(miss->name));
        memcpy(miss->name, name->text,
               name->bytes < sizeof(miss->name) ? name->bytes : sizeof(miss->name) - 1);
    }
    atomic_store_explicit(&miss->requests, requests, memory_order_relaxed);
    atomic_store_explicit(&miss->bytes,
                          atomic_load_explicit(&name->missed_bytes, memory_order_relaxed),
                          memory_order_relaxed);
    atomic_store_explicit(&miss->state, TP_SLOT_LIVE, memory_order_release);
}

void tp_names_show_missed(void) {
    for (unsigned i = 0; i < NAME_BUCKETS; i++) {
        struct tp_name *name = atomic_load_explicit(&name_buckets[i], memory_order_acquire);
        for (; name; name = name->next) {
            uint64_t requests = atomic_load_explicit(&name->missed_requests, memory_order_relaxed);
            if (requests > 0)
                show_missed(name, requests);
        }
    }
}
