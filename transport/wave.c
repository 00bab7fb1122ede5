/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waves: making them, sending them, knowing when they have ended, and not letting them gather for
 * ever. See wave.h, also for what it must not know.
 */
#include "transport/wave.h"

#include <stdlib.h>
#include <time.h>
#include <x86intrin.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/copy_device.h"
#include "transport/stall.h"

/*
 * A wave is sent when it holds this much: soon when the link is idle, later when it has work, since
 * larger waves are faster. On an H200, 1 GiB in waves of 4, 8, 16 and 32 MiB, GB/s: copy engines
 * 53, 54, 55 and 55 (64 KiB copies and larger), kernel 49, 50, 51 and 51.
 */
#define FIRST_WAVE_BYTES ((uint64_t)4 << 20)
#define WAVE_BYTES ((uint64_t)16 << 20)
#define READY_WAVES 3    /* a direction and method, made before the first copy */
#define POLL_TICKS 6000u /* about 2 us between queries of one wave */
/* How long a poll stays with a wave whose end is near: at 3 ticks a ns and 50 GB/s, 100 us, and 30
 * us more than it should take. */
#define STAY_TICKS_PER_KIB 61u
#define STAY_TICKS 300000u
#define STAY_GRACE_TICKS 90000u

static struct tp_wave_queue queues[TP_DEVICES][2][TP_GPU_METHODS];
static pthread_once_t queues_once = PTHREAD_ONCE_INIT;
static _Atomic int highest_device = -1;

#define QUEUES_A_GPU (2 * TP_GPU_METHODS)

/* The queues of all GPUs that were used, one after the other. */
static int queue_count(void) {
    return (atomic_load(&highest_device) + 1) * QUEUES_A_GPU;
}

static struct tp_wave_queue *queue_at(int i) {
    return &queues[i / QUEUES_A_GPU][i / TP_GPU_METHODS % 2][i % TP_GPU_METHODS];
}
static _Thread_local unsigned deferring;

static void init_queues(void) {
    for (int device = 0; device < TP_DEVICES; device++) {
        for (int i = 0; i < 2 * TP_GPU_METHODS; i++) {
            struct tp_wave_queue *queue = &queues[device][i / TP_GPU_METHODS][i % TP_GPU_METHODS];
            pthread_mutex_init(&queue->lock, NULL);
            queue->to_device = i / TP_GPU_METHODS;
            queue->method = (enum tp_gpu_method)(i % TP_GPU_METHODS);
        }
    }
}

struct tp_wave_queue *tp_wave_queues(int device, bool to_device) {
    pthread_once(&queues_once, init_queues);
    int highest = atomic_load_explicit(&highest_device, memory_order_relaxed);
    while (highest < device && !atomic_compare_exchange_weak(&highest_device, &highest, device))
        continue;
    return queues[device][to_device];
}

bool tp_wave_gathering(void) {
    return deferring > 0;
}

/* ---- waves ---- */

static void free_ops(struct tp_wave *wave) {
    if (wave->queue->method == TP_GPU_KERNEL)
        tp_gpu_pinned_free(wave->gpu, wave->ops);
    else
        free(wave->ops);
}

static struct tp_wave *new_wave(struct tp_wave_queue *queue, struct tp_gpu *gpu) {
    struct tp_wave *wave = calloc(1, sizeof(*wave));
    if (!wave)
        return NULL;
    size_t bytes = (size_t)TP_WAVE_OPS * sizeof(*wave->ops);
    wave->queue = queue;
    wave->gpu = gpu;
    wave->scratch = malloc((size_t)TP_WAVE_OPS * 3 * sizeof(*wave->scratch));
    wave->event = tp_gpu_event(gpu);
    if (wave->scratch && wave->event)
        wave->ops =
            queue->method == TP_GPU_KERNEL ? tp_gpu_pinned_alloc(gpu, bytes) : malloc(bytes);
    if (tp_registrar_on())
        wave->held = malloc(TP_WAVE_OPS * sizeof(*wave->held));
    if (wave->ops && (wave->held || !tp_registrar_on())) {
        wave->also = atomic_load(&queue->all);
        while (!atomic_compare_exchange_weak(&queue->all, &wave->also, wave))
            continue;
        return wave;
    }
    free_ops(wave);
    tp_gpu_event_free(gpu, wave->event);
    free(wave->held);
    free(wave->scratch);
    free(wave);
    return NULL;
}

/* An unused wave, or a new one; without the lock, since a new one calls the driver. */
static struct tp_wave *take_wave(struct tp_wave_queue *queue, struct tp_gpu *gpu) {
    pthread_mutex_lock(&queue->lock);
    struct tp_wave *wave = queue->unused;
    if (wave)
        queue->unused = wave->next;
    pthread_mutex_unlock(&queue->lock);
    if (!wave)
        wave = new_wave(queue, gpu);
    if (!wave)
        return NULL;
    wave->next = NULL;
    wave->count = 0;
    wave->held_count = 0;
    wave->bytes = 0;
    wave->submitted_ms = 0;
    atomic_store(&wave->refs, 0);
    atomic_store(&wave->polled, 0);
    atomic_store(&wave->state, TP_WAVE_OPEN);
    return wave;
}

void tp_wave_let_go(struct tp_wave *wave) {
    if (atomic_fetch_sub_explicit(&wave->refs, 1, memory_order_acq_rel) != 1)
        return;
    struct tp_wave_queue *queue = wave->queue;
    pthread_mutex_lock(&queue->lock);
    wave->next = queue->unused;
    queue->unused = wave;
    pthread_mutex_unlock(&queue->lock);
}

/* Before the end is told: then the chunks may go with their peer. */
static void release_chunks(struct tp_wave *wave) {
    for (uint32_t i = 0; i < wave->held_count; i++)
        tp_chunk_release(wave->held[i]);
    wave->held_count = 0;
}

/* Instead of sending it. Once the state is stored, the wave is others'. */
static void refuse(struct tp_wave *wave) {
    tp_count(TP_LATE_WRITES, wave->count);
    release_chunks(wave);
    atomic_store_explicit(&wave->state, TP_WAVE_FAILED, memory_order_release);
}

/* Once the state is stored, the wave is others'. */
void tp_wave_send(struct tp_wave *wave) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    struct tp_wave_queue *queue = wave->queue;
    bool to_device = queue->to_device;
    enum tp_gpu_method method = queue->method;
    if (tp_stall_late(wave->submitted_ms)) {
        refuse(wave);
        return;
    }
    atomic_fetch_add_explicit(&queue->under_way, 1, memory_order_relaxed);
    tp_cu_result result = tp_gpu_send(wave->gpu, &method, to_device, wave->ops, wave->count,
                                      wave->scratch, wave->event);
    if (result == TP_CUDA_SUCCESS)
        tp_count(method == TP_GPU_KERNEL ? TP_KERNEL_BYTES : TP_DMA_BYTES, wave->bytes);
    else
        tp_log_once(&said, TP_LOG_ERROR, "copies %s GPU %d failed: %s; their transfers fail",
                    to_device ? "to" : "from", tp_gpu_device(wave->gpu), tp_cuda_error(result));
    if (result != TP_CUDA_SUCCESS) {
        atomic_fetch_sub_explicit(&queue->under_way, 1, memory_order_relaxed);
        release_chunks(wave);
    }
    wave->sent = __rdtsc();
    atomic_store_explicit(&wave->state, result == TP_CUDA_SUCCESS ? TP_WAVE_SENT : TP_WAVE_FAILED,
                          memory_order_release);
}

/* Take this wave out of the queue to send it; false when somebody else has. */
bool tp_wave_close(struct tp_wave *wave) {
    struct tp_wave_queue *queue = wave->queue;
    pthread_mutex_lock(&queue->lock);
    bool ours = queue->open == wave;
    if (ours)
        queue->open = NULL;
    pthread_mutex_unlock(&queue->lock);
    return ours;
}

void tp_wave_query(struct tp_wave *wave) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t now = __rdtsc();
    uint64_t last = atomic_load_explicit(&wave->polled, memory_order_relaxed);
    if (now - last < POLL_TICKS ||
        !atomic_compare_exchange_strong_explicit(&wave->polled, &last, now, memory_order_relaxed,
                                                 memory_order_relaxed))
        return;
    tp_cu_result result = tp_gpu_query(wave->gpu, wave->event);
    if (result == TP_CUDA_ERROR_NOT_READY)
        return;
    if (result != TP_CUDA_SUCCESS)
        tp_log_once(&said, TP_LOG_ERROR,
                    "copies of GPU %d failed: %s; their transfers fail, and further ones are left "
                    "to Mooncake",
                    tp_gpu_device(wave->gpu), tp_cuda_error(result));
    /* Another thread may have seen the end as well: it is counted once. */
    uint32_t sent = TP_WAVE_SENT;
    struct tp_wave_queue *queue = wave->queue;
    if (!atomic_compare_exchange_strong_explicit(&wave->state, &sent, TP_WAVE_ENDING,
                                                 memory_order_acquire, memory_order_relaxed))
        return;
    atomic_fetch_sub_explicit(&queue->under_way, 1, memory_order_relaxed);
    release_chunks(wave);
    atomic_store_explicit(&wave->state, result == TP_CUDA_SUCCESS ? TP_WAVE_DONE : TP_WAVE_FAILED,
                          memory_order_release);
}

bool tp_wave_full(const struct tp_wave *wave) {
    uint32_t under_way = atomic_load_explicit(&wave->queue->under_way, memory_order_relaxed);
    return wave->bytes >= (under_way ? WAVE_BYTES : FIRST_WAVE_BYTES) || wave->count == TP_WAVE_OPS;
}

/* The queue's open wave with the lock held, opening one first if there is none. NULL: no memory,
 * and no lock is held. */
struct tp_wave *tp_wave_lock_open(struct tp_wave_queue *queue, struct tp_gpu *gpu) {
    struct tp_wave *spare = NULL;
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        if (queue->open || spare) {
            if (!queue->open) {
                queue->open = spare;
                queue->opened++;
            } else if (spare) { /* somebody was faster */
                spare->next = queue->unused;
                queue->unused = spare;
            }
            return queue->open;
        }
        pthread_mutex_unlock(&queue->lock);
        spare = take_wave(queue, gpu);
        if (!spare)
            return NULL;
    }
}

void tp_wave_hold_chunk(struct tp_wave *wave, struct tp_chunk *chunk) {
    if (!chunk || (wave->held_count && wave->held[wave->held_count - 1] == chunk))
        return;
    tp_chunk_hold_again(chunk);
    wave->held[wave->held_count++] = chunk; /* at most one an op */
}

/*
 * Stay with the only wave under way until it ends, for a bounded time: callers that sleep between
 * polls (range reads: 10 us, with the kernel's slack 60) would see its end late. A wave of 4 MiB
 * takes 80 us.
 */
void tp_wave_stay(struct tp_wave *wave) {
    uint64_t start = __rdtsc();
    uint64_t end = wave->sent + wave->bytes * STAY_TICKS_PER_KIB / 1024;
    if (end > start + STAY_TICKS || start > end + STAY_GRACE_TICKS)
        return;
    end += STAY_GRACE_TICKS;
    while (atomic_load_explicit(&wave->state, memory_order_acquire) == TP_WAVE_SENT &&
           atomic_load_explicit(&wave->queue->under_way, memory_order_relaxed) == 1 &&
           __rdtsc() < end) {
        for (int i = 0; i < 16; i++)
            _mm_pause();
        tp_wave_query(wave);
    }
}

/* ---- gathering ---- */

/*
 * A wave that gathers goes out within 2 ms also when its thread neither polls nor ends its bracket.
 * A thread looks each millisecond, while brackets are opened at all; it sleeps when none was for a
 * while, so that only the first bracket after a pause costs a system call.
 */
#define FLUSH_TICK_NS 1000000
#define FLUSH_IDLE_TICKS 100u
#define START_AGAIN_MS 1000 /* threads run out and come back */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t news;
    _Atomic uint64_t brackets; /* opened so far */
    _Atomic bool asleep;
    bool started;
    _Atomic uint64_t next_start_ms; /* 0: none could not be started */
} flusher = {.lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};

/* Take the queue's open wave; `old_only`: when it was open at the last look as well. */
static struct tp_wave *take_open(struct tp_wave_queue *queue, bool old_only) {
    pthread_mutex_lock(&queue->lock);
    struct tp_wave *wave = queue->open;
    if (wave && old_only && queue->seen != queue->opened) {
        queue->seen = queue->opened;
        wave = NULL;
    }
    if (wave)
        queue->open = NULL;
    pthread_mutex_unlock(&queue->lock);
    return wave;
}

/* All that still gathers; `old_only`: of what was open at the last look as well. */
static void send_gathering(bool old_only) {
    for (int i = 0, count = queue_count(); i < count; i++) {
        struct tp_wave *wave = take_open(queue_at(i), old_only);
        if (wave)
            tp_wave_send(wave);
    }
}

static bool any_open(void) {
    bool open = false;
    for (int i = 0, count = queue_count(); i < count && !open; i++) {
        struct tp_wave_queue *queue = queue_at(i);
        pthread_mutex_lock(&queue->lock);
        open = queue->open != NULL;
        pthread_mutex_unlock(&queue->lock);
    }
    return open;
}

static void sleep_until_bracket(uint64_t seen) {
    pthread_mutex_lock(&flusher.lock);
    /* seq_cst on both sides: either the bracket sees the sleeper, or this sees the bracket. The
     * same of a wave that a long bracket opens late, by the queue's lock. */
    atomic_store(&flusher.asleep, true);
    while (atomic_load(&flusher.brackets) == seen && !any_open())
        pthread_cond_wait(&flusher.news, &flusher.lock);
    atomic_store(&flusher.asleep, false);
    pthread_mutex_unlock(&flusher.lock);
}

/* Detached, for the life of the process: it holds nothing between two looks. */
static void *run_flusher(void *arg) {
    const struct timespec tick = {0, FLUSH_TICK_NS};
    uint64_t seen = 0;
    unsigned idle = 0;
    for (;;) {
        uint64_t brackets = atomic_load(&flusher.brackets);
        idle = brackets == seen ? idle + 1 : 0;
        seen = brackets;
        if (idle > FLUSH_IDLE_TICKS)
            sleep_until_bracket(seen);
        nanosleep(&tick, NULL);
        send_gathering(true);
    }
    return arg;
}

static void start_flusher(void) {
    pthread_t thread;
    pthread_mutex_lock(&flusher.lock);
    if (!flusher.started) {
        flusher.started = tp_thread_start("tidepool-waves", run_flusher, NULL, &thread) == 0;
        if (flusher.started)
            pthread_detach(thread);
        atomic_store(&flusher.next_start_ms, flusher.started ? 0 : tp_now_ms() + START_AGAIN_MS);
    }
    pthread_mutex_unlock(&flusher.lock);
}

void tp_device_prepare(struct tp_gpu *gpu) {
    pthread_once(&queues_once, init_queues);
    start_flusher();
    for (int i = 0; i < QUEUES_A_GPU * READY_WAVES; i++) {
        struct tp_wave_queue *queue = queue_at(tp_gpu_device(gpu) * QUEUES_A_GPU + i / READY_WAVES);
        if (queue->method == TP_GPU_KERNEL && !tp_gpu_kernel_max(gpu, queue->to_device))
            continue;
        struct tp_wave *wave = new_wave(queue, gpu);
        if (!wave)
            continue;
        pthread_mutex_lock(&queue->lock);
        wave->next = queue->unused;
        queue->unused = wave;
        pthread_mutex_unlock(&queue->lock);
    }
}

void tp_wave_wake_flusher(void) {
    if (!atomic_load(&flusher.asleep) || tp_inert())
        return;
    pthread_mutex_lock(&flusher.lock);
    pthread_cond_signal(&flusher.news);
    pthread_mutex_unlock(&flusher.lock);
}

void tp_device_defer_begin(void) {
    uint64_t next_start_ms = atomic_load_explicit(&flusher.next_start_ms, memory_order_relaxed);
    deferring++;
    atomic_fetch_add(&flusher.brackets, 1);
    if (next_start_ms && tp_now_ms() >= next_start_ms && !tp_inert())
        start_flusher();
    tp_wave_wake_flusher();
}

void tp_device_defer_end(void) {
    if (deferring == 0 || --deferring > 0)
        return;
    send_gathering(false);
}

/* Look at a wave that nothing of ours refers to: a reference of our own keeps it from being used
 * again meanwhile. True: it was under way, and has ended. */
static bool sweep_wave(struct tp_wave *wave) {
    uint32_t refs = atomic_load_explicit(&wave->refs, memory_order_relaxed);
    do {
        if (refs == 0 || atomic_load_explicit(&wave->state, memory_order_relaxed) != TP_WAVE_SENT)
            return false;
    } while (!atomic_compare_exchange_weak(&wave->refs, &refs, refs + 1));
    bool under_way = atomic_load_explicit(&wave->state, memory_order_acquire) == TP_WAVE_SENT;
    if (under_way)
        tp_wave_query(wave);
    bool ended =
        under_way && atomic_load_explicit(&wave->state, memory_order_acquire) != TP_WAVE_SENT;
    tp_wave_let_go(wave);
    return ended;
}

unsigned tp_device_sweep(void) {
    unsigned ended = 0;
    for (int i = 0, count = queue_count(); i < count; i++) {
        for (struct tp_wave *wave = atomic_load(&queue_at(i)->all); wave; wave = wave->also)
            ended += sweep_wave(wave);
    }
    return ended;
}
