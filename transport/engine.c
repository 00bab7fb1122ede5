/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engines of this process and the segment handles that they opened; starting and ending the
 * engine half.
 *
 * Lookups take no lock: keys lie in a fixed table of atomics, handles in hash chains that only
 * grow. Both are written under one mutex, on events that are rare (an engine starts, a segment is
 * opened for the first time).
 *
 * It must not know: batches, connections, how a name becomes an address.
 */
#include "transport/engine.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "env/env.h"
#include "transport/batch.h"
#include "transport/copy_host.h"
#include "transport/names.h"
#include "transport/peer.h"
#include "transport/registrar.h"
#include "transport/staging.h"
#include "transport/transport.h"

#define ENGINES 64
#define KEYS 256 /* an engine has one key and usually one alias */
#define HANDLE_BUCKETS 256
#define HANDLE_LIMIT 65536

struct handle {
    struct handle *next;
    uint64_t number;
    struct tp_name *_Atomic name; /* NULL: closed */
};

struct tp_engine {
    struct handle *_Atomic buckets[HANDLE_BUCKETS];
    uint32_t handle_count;
    bool used;
};

struct key {
    const void *_Atomic address;
    struct tp_engine *_Atomic engine;
};

static struct tp_engine engines[ENGINES];
static struct key keys[KEYS];
static _Atomic uint32_t key_high; /* keys beyond it were never used */
static _Atomic uint32_t engine_count;
static pthread_mutex_t engine_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool transport_on;

static struct tp_engine *key_lookup(const void *address) {
    if (!address)
        return NULL;
    uint32_t high = atomic_load_explicit(&key_high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++) {
        if (atomic_load_explicit(&keys[i].address, memory_order_acquire) == address)
            return atomic_load_explicit(&keys[i].engine, memory_order_acquire);
    }
    return NULL;
}

/* Under engine_lock. */
static bool key_add(const void *address, struct tp_engine *engine) {
    uint32_t high = atomic_load_explicit(&key_high, memory_order_relaxed);
    uint32_t i = 0;
    while (i < high && atomic_load_explicit(&keys[i].address, memory_order_relaxed))
        i++;
    if (i == KEYS)
        return false;
    atomic_store_explicit(&keys[i].engine, engine, memory_order_release);
    atomic_store_explicit(&keys[i].address, address, memory_order_release);
    if (i == high)
        atomic_store_explicit(&key_high, high + 1, memory_order_release);
    return true;
}

/* Under engine_lock. */
static struct tp_engine *engine_make(const void *key) {
    for (unsigned i = 0; i < ENGINES; i++) {
        struct tp_engine *engine = &engines[i];
        if (engine->used)
            continue;
        if (!key_add(key, engine))
            return NULL;
        engine->used = true;
        atomic_fetch_add_explicit(&engine_count, 1, memory_order_relaxed);
        return engine;
    }
    return NULL;
}

struct tp_engine *tp_engine_find(const void *key, bool create) {
    struct tp_engine *engine = key_lookup(key);
    if (engine || !create || !key || tp_inert())
        return engine;
    pthread_mutex_lock(&engine_lock);
    engine = key_lookup(key);
    if (!engine)
        engine = engine_make(key);
    pthread_mutex_unlock(&engine_lock);
    return engine;
}

void tp_engine_alias(struct tp_engine *engine, const void *alias) {
    if (!engine || !alias || key_lookup(alias) == engine || tp_inert())
        return;
    pthread_mutex_lock(&engine_lock);
    uint32_t high = atomic_load_explicit(&key_high, memory_order_relaxed);
    uint32_t i = 0;
    while (i < high && atomic_load_explicit(&keys[i].address, memory_order_relaxed) != alias)
        i++;
    if (i < high) /* an address that belonged to an engine that is gone */
        atomic_store_explicit(&keys[i].engine, engine, memory_order_release);
    else
        key_add(alias, engine);
    pthread_mutex_unlock(&engine_lock);
}

/* Under engine_lock. The chains stay: a handle with the same number reuses its entry. */
static void engine_clear(struct tp_engine *engine) {
    for (unsigned i = 0; i < HANDLE_BUCKETS; i++) {
        struct handle *entry = atomic_load_explicit(&engine->buckets[i], memory_order_relaxed);
        for (; entry; entry = entry->next)
            atomic_store_explicit(&entry->name, NULL, memory_order_release);
    }
    engine->used = false;
    atomic_fetch_sub_explicit(&engine_count, 1, memory_order_relaxed);
}

/* Under engine_lock: forget one key. An engine that was moved has another, and ends with its last.
 */
static void key_remove(const void *address) {
    uint32_t high = atomic_load_explicit(&key_high, memory_order_relaxed);
    struct tp_engine *engine = key_lookup(address);
    bool more = false;
    for (uint32_t i = 0; i < high; i++) {
        const void *known = atomic_load_explicit(&keys[i].address, memory_order_relaxed);
        if (known == address)
            atomic_store_explicit(&keys[i].address, NULL, memory_order_release);
        else if (known && atomic_load_explicit(&keys[i].engine, memory_order_relaxed) == engine)
            more = true;
    }
    if (engine && !more)
        engine_clear(engine);
}

void tp_engine_forget(const void *key) {
    if (tp_inert() || !key_lookup(key))
        return;
    pthread_mutex_lock(&engine_lock);
    key_remove(key);
    pthread_mutex_unlock(&engine_lock);
}

struct tp_engine *tp_engine_only(void) {
    if (atomic_load_explicit(&engine_count, memory_order_relaxed) != 1 || tp_inert())
        return NULL;
    struct tp_engine *only = NULL;
    pthread_mutex_lock(&engine_lock);
    for (unsigned i = 0; i < ENGINES && !only; i++) {
        if (engines[i].used)
            only = &engines[i];
    }
    pthread_mutex_unlock(&engine_lock);
    return only;
}

static struct handle *handle_find(const struct tp_engine *engine, uint64_t number) {
    struct handle *entry =
        atomic_load_explicit(&engine->buckets[number % HANDLE_BUCKETS], memory_order_acquire);
    while (entry && entry->number != number)
        entry = entry->next;
    return entry;
}

/* Under engine_lock. */
static struct handle *handle_make(struct tp_engine *engine, uint64_t number) {
    struct handle *entry = handle_find(engine, number);
    if (entry)
        return entry;
    if (engine->handle_count >= HANDLE_LIMIT)
        return NULL;
    entry = calloc(1, sizeof(*entry));
    if (!entry)
        return NULL;
    entry->number = number;
    struct handle *_Atomic *bucket = &engine->buckets[number % HANDLE_BUCKETS];
    entry->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, entry, memory_order_release);
    engine->handle_count++;
    return entry;
}

struct tp_name *tp_engine_name(const struct tp_engine *engine, uint64_t handle) {
    struct handle *entry = handle_find(engine, handle);
    return entry ? atomic_load_explicit(&entry->name, memory_order_acquire) : NULL;
}

static bool same_name(const struct tp_name *name, const char *text, size_t bytes) {
    while (bytes > 0 && *text == '/') {
        text++;
        bytes--;
    }
    return name->bytes == bytes && memcmp(name->text, text, bytes) == 0;
}

static void name_opened(struct tp_name *name) {
    struct timespec now;
    uint64_t never = 0;
    if (clock_gettime(CLOCK_MONOTONIC, &now) == 0)
        atomic_compare_exchange_strong(&name->opened_ms, &never,
                                       (uint64_t)now.tv_sec * 1000 +
                                           (uint64_t)now.tv_nsec / 1000000 + 1);
}

void tp_engine_open(struct tp_engine *engine, uint64_t handle, const char *name,
                    size_t name_bytes) {
    if (!engine || !name)
        return;
    struct tp_name *known = tp_engine_name(engine, handle);
    if ((known && same_name(known, name, name_bytes)) || tp_inert())
        return;
    struct tp_name *wanted = tp_name_intern(name, name_bytes);
    if (!wanted && !known)
        return;
    pthread_mutex_lock(&engine_lock);
    struct handle *entry = handle_make(engine, handle);
    if (entry)
        atomic_store_explicit(&entry->name, wanted, memory_order_release);
    pthread_mutex_unlock(&engine_lock);
    if (!wanted)
        return;
    name_opened(wanted);
    if (tp_transport_on())
        tp_peer_kick();
}

void tp_engine_close(struct tp_engine *engine, uint64_t handle) {
    if (!engine || tp_inert())
        return;
    struct handle *entry = handle_find(engine, handle);
    if (entry)
        atomic_store_explicit(&entry->name, NULL, memory_order_release);
}

void tp_transport_set_look(void (*look)(void)) {
    tp_peer_set_look(look);
}

int tp_transport_start(const struct tp_config *config) {
    if (tp_inert())
        return -ECANCELED;
    if (atomic_load_explicit(&transport_on, memory_order_acquire))
        return 0;
    if (config->engine.half != TP_HALF_ON)
        return -EINVAL;
    pthread_mutex_lock(&start_lock);
    int error = 0;
    if (!atomic_load_explicit(&transport_on, memory_order_relaxed)) {
        tp_fork_guard();
        tp_copy_pool_size(config->engine.copy_threads);
        tp_peer_set_reaper(tp_batch_reap);
        error = tp_peer_start(config);
        atomic_store_explicit(&transport_on, error == 0, memory_order_release);
    }
    pthread_mutex_unlock(&start_lock);
    return error;
}

void tp_transport_stop(void) {
    if (tp_inert() || !atomic_load_explicit(&transport_on, memory_order_acquire))
        return;
    pthread_mutex_lock(&start_lock);
    if (atomic_exchange(&transport_on, false)) {
        tp_registrar_stop();
        tp_stage_stop();
    }
    tp_peer_stop();
    pthread_mutex_unlock(&start_lock);
}

bool tp_transport_on(void) {
    return atomic_load_explicit(&transport_on, memory_order_acquire) && !tp_inert();
}
