/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registering chunks and unregistering them, within the limit; a queue of what is wanted, and the
 * threads that work it off.
 *
 * The driver is called without the lock. A chunk that a thread is in the driver for has a state
 * that says so, and only that thread ends it. Bytes count against the limit from before a
 * registration until after its end.
 *
 * It must not know: segments, what is worth registering (chunks.c).
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <x86intrin.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "transport/chunk.h"
#include "transport/chunk_order.h"
#include "transport/copy_device.h"
#include "transport/gpu.h"

#define THREADS 4 /* the driver does one at a time, mostly */
#define CPUS_A_THREAD 4
#define SLICE_NS UINT64_C(20000000)   /* of a drop; as long as the peer thread maps a piece */
#define CHUNKS_A_LOOK 16              /* at the clock */
#define PAUSE_NS 30000                /* between looks at copies under way */
#define BACKOFF_NS UINT64_C(10000000) /* after a failure; doubled by each further one */
#define BACKOFF_DOUBLINGS 10
#define START_AGAIN_NS UINT64_C(1000000000) /* threads run out and come back */
#define LET_GO_TRIES 10   /* of a dropped segment, one a slice: what fails once need not again */
#define NO_ONE UINT64_MAX /* has been idle for as long: none may give way */

enum outcome {
    READY,
    REFUSED, /* by the driver, or it cannot be */
    FULL,    /* none may give way */
    TAKEN,   /* another thread is at it */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;    /* something is wanted */
    pthread_cond_t changed; /* a thread has come back from the driver */
    /* Written under the lock: registered, about to be, or about to be no more; pinned; what is kept
     * for that at least. */
    _Atomic uint64_t bytes, pinned, kept;
    uint32_t under_way; /* chunks that threads are going to bring into the order of use, or back */
    struct tp_chunk *first, *last; /* wanted */
    pthread_t threads[THREADS];
    unsigned thread_count;
    bool started, stop;     /* started: all that there are to be */
    uint64_t next_start_ns; /* after one that could not be started */
    unsigned failures;      /* since the last success */
    uint64_t pause_end_ns;
    _Atomic uint64_t none_until; /* time stamp counter: no chunk may give way before */
} registrar = {.lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP,
               .work = PTHREAD_COND_INITIALIZER,
               .changed = PTHREAD_COND_INITIALIZER};

/* With the lock held, wait for a thread to come back from the driver, this long at most. */
static void wait_changed(uint64_t ns) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    uint64_t nanoseconds = (uint64_t)end.tv_nsec + ns;
    end.tv_sec += (time_t)(nanoseconds / 1000000000u);
    end.tv_nsec = (long)(nanoseconds % 1000000000u);
    pthread_cond_clockwait(&registrar.changed, &registrar.lock, CLOCK_MONOTONIC, &end);
}

/* ---- states ---- */

/* From a state that only this thread may end, holds or not. */
static void set_state(struct tp_chunk *chunk, enum tp_chunk_state from, enum tp_chunk_state to) {
    atomic_fetch_add(&chunk->word, ((uint32_t)to - (uint32_t)from) << TP_CHUNK_STATE_BIT);
}

/* ---- the driver ---- */

/* With the lock held: no attempts for a while, so that a driver that refuses costs little. */
static void failed(const char *call, uint64_t bytes, tp_cu_result result) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    registrar.pause_end_ns =
        tp_now_ns() + tp_backoff(BACKOFF_NS, registrar.failures++, BACKOFF_DOUBLINGS);
    tp_count(TP_REGISTER_FAILURES, 1);
    tp_log_once(&said, TP_LOG_WARN,
                "%s of %llu MiB of a store's memory: %s (ulimit -l unlimited may help); its GPU "
                "copies go on without, at the cost of CPU time",
                call, (unsigned long long)bytes >> 20, tp_cuda_error(result));
}

/* With the lock held, which is let go meanwhile; the chunk is REGISTERING, and its bytes counted.
 */
static bool driver_register(struct tp_chunk *chunk, struct tp_gpu *gpu) {
    uint64_t bytes;
    void *address = tp_chunk_range(chunk, &bytes);
    tp_chunk_owner(chunk)->busy++;
    pthread_mutex_unlock(&registrar.lock);
    tp_cu_result result = tp_gpu_host_register(gpu, address, bytes);
    pthread_mutex_lock(&registrar.lock);
    tp_chunk_owner(chunk)->busy--;
    if (result != TP_CUDA_SUCCESS) {
        failed("cuMemHostRegister", bytes, result);
        return false;
    }
    registrar.failures = 0;
    chunk->gpu = gpu;
    tp_order_add(chunk);
    tp_count(TP_REGISTRATIONS, 1);
    tp_count(TP_REGISTERED_BYTES, bytes);
    return true;
}

/* The same; the chunk is UNREGISTERING and not in the heap, and PLAIN afterwards. False: the driver
 * keeps it, and it is what it was. */
static bool driver_unregister(struct tp_chunk *chunk) {
    uint64_t bytes;
    void *address = tp_chunk_range(chunk, &bytes);
    registrar.under_way++;
    tp_chunk_owner(chunk)->busy++;
    pthread_mutex_unlock(&registrar.lock);
    tp_cu_result result = tp_gpu_host_unregister(chunk->gpu, address);
    pthread_mutex_lock(&registrar.lock);
    tp_chunk_owner(chunk)->busy--;
    registrar.under_way--;
    if (result == TP_CUDA_SUCCESS) {
        registrar.bytes -= bytes;
        tp_count(TP_REGISTERED_BYTES, -bytes); /* wraps: a subtraction */
        set_state(chunk, TP_CHUNK_UNREGISTERING, TP_CHUNK_PLAIN);
    } else {
        failed("cuMemHostUnregister", bytes, result);
        tp_order_add(chunk);
        set_state(chunk, TP_CHUNK_UNREGISTERING, TP_CHUNK_REGISTERED);
    }
    pthread_cond_broadcast(&registrar.changed);
    return result == TP_CUDA_SUCCESS;
}

/* ---- the limit ---- */

/* A quarter of the limit, or all of it where the rest has no room for a chunk. */
uint64_t tp_registrar_pinned_share(void) {
    uint64_t limit = tp_config()->engine.register_max_bytes;
    return limit == 0 ? UINT64_MAX : limit - limit / 4 < TP_CHUNK_BYTES ? limit : limit / 4;
}

/* What chunks have to leave to pinned memory, whether it is there or not: it is needed just when
 * they are all in use. */
static uint64_t left_to_pinned(void) {
    uint64_t share = tp_registrar_pinned_share();
    uint64_t pinned = atomic_load_explicit(&registrar.pinned, memory_order_relaxed);
    uint64_t kept = atomic_load_explicit(&registrar.kept, memory_order_relaxed);
    kept = kept < share ? kept : share;
    return pinned > kept ? pinned : kept;
}

static bool within_limit(uint64_t more) {
    uint64_t limit = tp_config()->engine.register_max_bytes;
    return limit == 0 || atomic_load_explicit(&registrar.bytes, memory_order_relaxed) + more <=
                             limit - left_to_pinned();
}

bool tp_registrar_has_room(uint64_t bytes) {
    return within_limit(bytes);
}

bool tp_registrar_may_replace(void) {
    return __rdtsc() >= atomic_load_explicit(&registrar.none_until, memory_order_relaxed);
}

/* With the lock held, which is let go meanwhile: a chunk that was idle for so long makes way. */
static enum outcome evict(uint64_t idle_ticks) {
    struct tp_chunk *victim = idle_ticks == NO_ONE ? NULL : tp_order_take_least(idle_ticks);
    if (!victim)
        return FULL;
    if (!driver_unregister(victim))
        return REFUSED;
    tp_count(TP_REGISTER_EVICTIONS, 1);
    return READY;
}

static enum outcome make_room(uint64_t idle_ticks) {
    enum outcome outcome = READY;
    while (outcome == READY && !within_limit(0))
        outcome = evict(idle_ticks);
    return outcome;
}

static bool may_try(const struct tp_chunk *chunk, const struct tp_gpu *gpu, uint64_t bytes) {
    uint64_t limit = tp_config()->engine.register_max_bytes;
    return !tp_chunk_owner(chunk)->dropped && (limit == 0 || bytes <= limit) && !tp_gpu_lost(gpu) &&
           tp_now_ns() >= registrar.pause_end_ns;
}

/* With the lock held, which is let go meanwhile; in place of chunks that were idle for so long. The
 * chunk cannot go away: it is held, or its segment's `busy` is. */
static enum outcome register_chunk(struct tp_chunk *chunk, struct tp_gpu *gpu,
                                   uint64_t idle_ticks) {
    uint64_t bytes;
    (void)tp_chunk_range(chunk, &bytes);
    enum tp_chunk_state state = tp_chunk_state(chunk);
    if (state != TP_CHUNK_PLAIN)
        return state == TP_CHUNK_REGISTERED ? READY : TAKEN;
    if (!may_try(chunk, gpu, bytes))
        return REFUSED;
    set_state(chunk, TP_CHUNK_PLAIN, TP_CHUNK_REGISTERING);
    registrar.under_way++;
    registrar.bytes += bytes;
    enum outcome outcome = tp_order_reserve(registrar.under_way) ? make_room(idle_ticks) : REFUSED;
    if (outcome == READY && !driver_register(chunk, gpu))
        outcome = REFUSED;
    if (outcome != READY)
        registrar.bytes -= bytes;
    registrar.under_way--;
    set_state(chunk, TP_CHUNK_REGISTERING, outcome == READY ? TP_CHUNK_REGISTERED : TP_CHUNK_PLAIN);
    pthread_cond_broadcast(&registrar.changed);
    return outcome;
}

bool tp_registrar_settle(struct tp_chunk *chunk, struct tp_gpu *gpu, bool now,
                         uint64_t patience_ns) {
    uint64_t end = 0;
    enum outcome outcome = TAKEN;
    pthread_mutex_lock(&registrar.lock);
    while (outcome == TAKEN) {
        enum tp_chunk_state state = tp_chunk_state(chunk);
        bool patient = now && (end == 0 || tp_now_ns() < end);
        end = end ? end : tp_now_ns() + patience_ns;
        /* Nothing may be sent while the driver takes the registration away. */
        if (state == TP_CHUNK_UNREGISTERING || (state == TP_CHUNK_REGISTERING && patient))
            wait_changed(patience_ns + PAUSE_NS);
        else if (state == TP_CHUNK_PLAIN && patient)
            outcome = register_chunk(chunk, gpu, NO_ONE);
        else
            break;
    }
    bool registered = tp_chunk_state(chunk) == TP_CHUNK_REGISTERED;
    pthread_mutex_unlock(&registrar.lock);
    return registered;
}

/* ---- pinned memory ---- */

/* With the lock held, which is let go meanwhile: copies that have ended let go of their chunks
 * though nobody polls. False: none has. */
static bool let_ended_go(void) {
    pthread_mutex_unlock(&registrar.lock);
    unsigned ended = tp_device_sweep();
    pthread_mutex_lock(&registrar.lock);
    return ended > 0;
}

static bool pinned_fits(uint64_t more) {
    uint64_t limit = tp_config()->engine.register_max_bytes;
    return limit == 0 || registrar.bytes + registrar.pinned + more <= limit;
}

/* Chunks are in the way only where more GPUs than at first share the limit. Counted once there is
 * room: others subtract what is pinned from the limit. */
bool tp_registrar_take_pinned(uint64_t bytes) {
    enum outcome outcome = READY;
    pthread_mutex_lock(&registrar.lock);
    while (outcome == READY && !pinned_fits(bytes)) {
        outcome = evict(0);
        if (outcome == FULL && let_ended_go())
            outcome = READY;
    }
    if (outcome == READY)
        registrar.pinned += bytes;
    pthread_mutex_unlock(&registrar.lock);
    return outcome == READY;
}

void tp_registrar_give_pinned(uint64_t bytes) {
    pthread_mutex_lock(&registrar.lock);
    registrar.pinned -= bytes;
    pthread_mutex_unlock(&registrar.lock);
}

void tp_registrar_keep_pinned(uint64_t bytes) {
    pthread_mutex_lock(&registrar.lock);
    registrar.kept += bytes;
    pthread_mutex_unlock(&registrar.lock);
}

/* ---- in the background ---- */

/* With the lock held. */
static struct tp_chunk *next_wanted(void) {
    struct tp_chunk *chunk = registrar.first;
    if (!chunk)
        return NULL;
    registrar.first = chunk->next;
    if (!registrar.first)
        registrar.last = NULL;
    chunk->next = NULL;
    return chunk;
}

/* With the lock held, which is let go meanwhile. */
static void replace(struct tp_chunk *chunk) {
    uint64_t idle_ticks = tp_chunk_outlasts(chunk);
    enum outcome outcome = register_chunk(chunk, chunk->gpu, idle_ticks);
    if (outcome == FULL && let_ended_go())
        outcome = register_chunk(chunk, chunk->gpu, idle_ticks);
    if (outcome != FULL)
        return;
    /* Not by this chunk's own measure, which may be hours: it holds for all. */
    atomic_store_explicit(&registrar.none_until, __rdtsc() + tp_chunk_least_idle() / 8,
                          memory_order_relaxed);
    tp_count(TP_REGISTER_FULL, 1);
}

static void serve(struct tp_chunk *chunk) {
    struct tp_chunks *chunks = tp_chunk_owner(chunk);
    uint64_t bytes;
    (void)tp_chunk_range(chunk, &bytes);
    chunks->busy++;
    if (within_limit(bytes))
        (void)register_chunk(chunk, chunk->gpu, NO_ONE);
    else if (atomic_load(&chunk->wanted) == TP_CHUNK_IN_PLACE_OF_OTHERS)
        replace(chunk);
    atomic_store(&chunk->wanted, TP_CHUNK_UNWANTED);
    chunks->busy--;
}

static void *run(void *arg) {
    (void)arg;
    pthread_mutex_lock(&registrar.lock);
    while (!registrar.stop) {
        struct tp_chunk *chunk = next_wanted();
        if (chunk)
            serve(chunk);
        else
            pthread_cond_wait(&registrar.work, &registrar.lock);
    }
    pthread_mutex_unlock(&registrar.lock);
    return NULL;
}

/* With the lock held. Without any thread, only what pays at once is registered. */
static void start_threads(uint64_t now_ns) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    unsigned wanted = tp_host_cpus() / CPUS_A_THREAD;
    int error = 0;
    wanted = wanted < 1 ? 1 : wanted > THREADS ? THREADS : wanted;
    while (registrar.thread_count < wanted && !error) {
        error =
            tp_thread_start("tidepool-reg", run, NULL, &registrar.threads[registrar.thread_count]);
        registrar.thread_count += !error;
    }
    registrar.started = !error;
    if (!error)
        return;
    registrar.next_start_ns = now_ns + START_AGAIN_NS;
    tp_log_once(&said, TP_LOG_WARN,
                "%u of %u threads that register stores' memory could be started: %s (ulimit -u, "
                "the cgroup's pids.max); less of it is registered, and it is tried again",
                registrar.thread_count, wanted, strerror(-error));
}

static bool wantable(const struct tp_chunks *chunks, const struct tp_chunk *chunk) {
    uint32_t piece = (uint32_t)(chunk - chunks->chunk) / chunks->per_piece;
    return tp_chunk_state(chunk) == TP_CHUNK_PLAIN &&
           atomic_load_explicit(&chunk->wanted, memory_order_relaxed) == TP_CHUNK_UNWANTED &&
           atomic_load_explicit(&chunks->mapped[piece], memory_order_acquire);
}

static void want(struct tp_chunks *chunks, struct tp_chunk *chunk, struct tp_gpu *gpu,
                 enum tp_chunk_want how) {
    if (!wantable(chunks, chunk))
        return;
    atomic_store_explicit(&chunk->chunks, chunks, memory_order_relaxed);
    atomic_store(&chunk->wanted, how);
    chunk->gpu = gpu;
    *(registrar.last ? &registrar.last->next : &registrar.first) = chunk;
    registrar.last = chunk;
}

void tp_registrar_want(struct tp_chunks *chunks, uint32_t index, struct tp_gpu *gpu, int step,
                       uint32_t count, enum tp_chunk_want how) {
    struct tp_chunk *chunk = &chunks->chunk[index];
    uint64_t limit = tp_config()->engine.register_max_bytes;
    uint32_t i = 0;
    /* The lock only when there is something to do. */
    while (i < count && !wantable(chunks, chunk + (long)i * step))
        i++;
    if (i == count)
        return;
    uint64_t now_ns = tp_now_ns();
    pthread_mutex_lock(&registrar.lock);
    bool room = how == TP_CHUNK_IN_PLACE_OF_OTHERS || within_limit(chunks->chunk_bytes);
    if (room && (limit == 0 || limit >= chunks->chunk_bytes) && now_ns >= registrar.pause_end_ns) {
        /* Not while tp_registrar_stop waits for those that it has counted. */
        if (!registrar.started && !registrar.stop && now_ns >= registrar.next_start_ns)
            start_threads(now_ns);
        for (; i < count && registrar.thread_count; i++)
            want(chunks, chunk + (long)i * step, gpu, how);
        pthread_cond_broadcast(&registrar.work);
    }
    pthread_mutex_unlock(&registrar.lock);
}

void tp_registrar_stop(void) {
    pthread_mutex_lock(&registrar.lock);
    unsigned count = registrar.thread_count;
    registrar.stop = true;
    pthread_cond_broadcast(&registrar.work);
    pthread_mutex_unlock(&registrar.lock);
    for (unsigned i = 0; i < count; i++)
        pthread_join(registrar.threads[i], NULL);
    pthread_mutex_lock(&registrar.lock);
    registrar.thread_count = 0;
    registrar.started = false;
    registrar.stop = false;
    pthread_mutex_unlock(&registrar.lock);
}

/* ---- the end of a segment ---- */

/* With the lock held: what is wanted of this segment is not any more. */
static void forget_wanted(const struct tp_chunks *chunks) {
    struct tp_chunk **link = &registrar.first;
    registrar.last = NULL;
    while (*link) {
        struct tp_chunk *chunk = *link;
        if (tp_chunk_owner(chunk) == chunks) {
            *link = chunk->next;
        } else {
            registrar.last = chunk;
            link = &chunk->next;
        }
    }
}

/* With the lock held, which is let go meanwhile. False: a thread is at it, or it is tried again. */
static bool let_go(struct tp_chunks *chunks, struct tp_chunk *chunk) {
    enum tp_chunk_state state = tp_chunk_state(chunk);
    uint64_t bytes;
    if (state == TP_CHUNK_PLAIN)
        return true;
    if (state != TP_CHUNK_REGISTERED || !tp_order_begin_end(chunk))
        return false;
    tp_order_remove(chunk);
    if (driver_unregister(chunk))
        return true;
    if (++chunks->refusals < LET_GO_TRIES && !tp_gpu_lost(chunk->gpu))
        return false;
    /* It is the driver's for good, and no part of what can make way. */
    chunks->stuck = true;
    (void)tp_chunk_range(chunk, &bytes);
    tp_order_remove(chunk);
    set_state(chunk, TP_CHUNK_REGISTERED, TP_CHUNK_PLAIN);
    registrar.bytes -= bytes;
    tp_count(TP_REGISTERED_BYTES, -bytes);
    return true;
}

bool tp_chunks_drop(struct tp_chunks *chunks, bool *ret_stuck) {
    uint64_t end = tp_now_ns() + SLICE_NS;
    pthread_mutex_lock(&registrar.lock);
    chunks->dropped = true;
    chunks->out_of_time = false;
    forget_wanted(chunks);
    while (chunks->let_go < chunks->count && let_go(chunks, &chunks->chunk[chunks->let_go])) {
        chunks->let_go++;
        chunks->out_of_time = chunks->let_go % CHUNKS_A_LOOK == 0 && tp_now_ns() > end;
        if (chunks->out_of_time)
            break;
    }
    bool done = chunks->let_go == chunks->count && chunks->busy == 0;
    pthread_mutex_unlock(&registrar.lock);
    if (!done)
        return false;
    *ret_stuck = chunks->stuck;
    free(chunks);
    return true;
}

bool tp_chunks_drop_goes_on(const struct tp_chunks *chunks) {
    return chunks->out_of_time;
}
