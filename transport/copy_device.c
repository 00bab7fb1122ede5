/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waves: gathering copies of many submits into few driver calls, and knowing when they have ended.
 *
 * A wave belongs to one device, direction and method. While it gathers it is the queue's `open`
 * wave and changes under the queue's lock; whoever takes it out of there sends it, without the
 * lock. From then on only `state` changes.
 *
 * It must not know: batches, peers, contexts and streams (gpu.c).
 */
#include "transport/copy_device.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <x86intrin.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "transport/gpu.h"
#include "transport/registrar.h"

/*
 * A wave is sent when it holds this much: soon when the link is idle, later when it has work, since
 * larger waves are faster. On an H200, 1 GiB in waves of 4, 8, 16 and 32 MiB, GB/s: copy engines
 * 53, 54, 55 and 55 (64 KiB copies and larger), kernel 49, 50, 51 and 51.
 */
#define FIRST_WAVE_BYTES ((uint64_t)4 << 20)
#define WAVE_BYTES ((uint64_t)16 << 20)
#define WAVE_OPS 4096u
#define CHUNK_BYTES                                                                                \
    ((size_t)16 << 10)   /* a warp's share: larger copies are cut so that all warps have work */
#define READY_WAVES 3    /* a direction and method, made before the first copy */
#define POLL_TICKS 6000u /* about 2 us between queries of one wave */
/* How long a poll stays with a wave whose end is near: at 3 ticks a ns and 50 GB/s, 100 us, and 30
 * us more than it should take. */
#define STAY_TICKS_PER_KIB 61u
#define STAY_TICKS 300000u
#define STAY_GRACE_TICKS 90000u

enum wave_state { WAVE_OPEN, WAVE_SENT, WAVE_ENDING, WAVE_DONE, WAVE_FAILED };

struct tp_wave {
    struct tp_wave *next; /* in the queue's list of unused ones */
    struct tp_wave *also; /* in the list of all of them */
    struct queue *queue;
    struct tp_gpu *gpu;
    _Atomic uint32_t state;
    _Atomic uint32_t refs;   /* groups that have copies in it */
    _Atomic uint64_t polled; /* time stamp counter */
    uint64_t sent;           /* the same, before its state says so */
    struct tp_copy_op *ops;  /* WAVE_OPS; the kernel's are pinned */
    uint64_t *scratch;       /* for the copy engines' lists */
    struct tp_chunk **held;  /* chunks of its copies, until it has ended; NULL: no registrar */
    uint32_t held_count;
    tp_cu_event event;
    uint32_t count;
    uint64_t bytes;
};

struct queue {
    pthread_mutex_t lock;
    bool to_device;
    enum tp_gpu_method method;
    struct tp_wave *open;
    struct tp_wave *unused;
    uint64_t opened;             /* counts waves that were opened */
    uint64_t seen;               /* the flusher's: `opened` when it last found one open */
    struct tp_wave *_Atomic all; /* ever made: they are never freed */
    _Atomic uint32_t under_way;  /* waves sent whose end nobody has seen */
};

static struct queue queues[TP_DEVICES][2][TP_GPU_METHODS];
static pthread_once_t queues_once = PTHREAD_ONCE_INIT;
static _Atomic int highest_device = -1;
static _Thread_local unsigned deferring;

static void init_queues(void) {
    for (int device = 0; device < TP_DEVICES; device++) {
        for (int i = 0; i < 2 * TP_GPU_METHODS; i++) {
            struct queue *queue = &queues[device][i / TP_GPU_METHODS][i % TP_GPU_METHODS];
            pthread_mutex_init(&queue->lock, NULL);
            queue->to_device = i / TP_GPU_METHODS;
            queue->method = (enum tp_gpu_method)(i % TP_GPU_METHODS);
        }
    }
}

/* ---- waves ---- */

static void free_ops(struct tp_wave *wave) {
    if (wave->queue->method == TP_GPU_KERNEL)
        tp_gpu_pinned_free(wave->gpu, wave->ops);
    else
        free(wave->ops);
}

static struct tp_wave *new_wave(struct queue *queue, struct tp_gpu *gpu) {
    struct tp_wave *wave = calloc(1, sizeof(*wave));
    if (!wave)
        return NULL;
    size_t bytes = (size_t)WAVE_OPS * sizeof(*wave->ops);
    wave->queue = queue;
    wave->gpu = gpu;
    wave->scratch = malloc((size_t)WAVE_OPS * 3 * sizeof(*wave->scratch));
    wave->event = tp_gpu_event(gpu);
    if (wave->scratch && wave->event)
        wave->ops =
            queue->method == TP_GPU_KERNEL ? tp_gpu_pinned_alloc(gpu, bytes) : malloc(bytes);
    if (tp_registrar_on())
        wave->held = malloc(WAVE_OPS * sizeof(*wave->held));
    if (wave->ops && (wave->held || !tp_registrar_on())) {
        wave->also = atomic_load(&queue->all);
        while (!atomic_compare_exchange_weak(&queue->all, &wave->also, wave))
            continue;
        return wave;
    }
    if (!wave->event)
        tp_gpu_give_up(gpu, "no event can be made");
    free_ops(wave);
    tp_gpu_event_free(gpu, wave->event);
    free(wave->held);
    free(wave->scratch);
    free(wave);
    return NULL;
}

/* An unused wave, or a new one; without the lock, since a new one calls the driver. */
static struct tp_wave *take_wave(struct queue *queue, struct tp_gpu *gpu) {
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
    atomic_store(&wave->refs, 0);
    atomic_store(&wave->polled, 0);
    atomic_store(&wave->state, WAVE_OPEN);
    return wave;
}

static void let_go(struct tp_wave *wave) {
    if (atomic_fetch_sub_explicit(&wave->refs, 1, memory_order_acq_rel) != 1)
        return;
    struct queue *queue = wave->queue;
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

/* Once the state is stored, the wave is others'. */
static void send_wave(struct tp_wave *wave) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    struct queue *queue = wave->queue;
    bool to_device = queue->to_device;
    enum tp_gpu_method method = queue->method;
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
    atomic_store_explicit(&wave->state, result == TP_CUDA_SUCCESS ? WAVE_SENT : WAVE_FAILED,
                          memory_order_release);
}

/* Take this wave out of the queue to send it; false when somebody else has. */
static bool close_wave(struct tp_wave *wave) {
    struct queue *queue = wave->queue;
    pthread_mutex_lock(&queue->lock);
    bool ours = queue->open == wave;
    if (ours)
        queue->open = NULL;
    pthread_mutex_unlock(&queue->lock);
    return ours;
}

static void query_wave(struct tp_wave *wave) {
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
    uint32_t sent = WAVE_SENT;
    struct queue *queue = wave->queue;
    if (!atomic_compare_exchange_strong_explicit(&wave->state, &sent, WAVE_ENDING,
                                                 memory_order_acquire, memory_order_relaxed))
        return;
    atomic_fetch_sub_explicit(&queue->under_way, 1, memory_order_relaxed);
    release_chunks(wave);
    atomic_store_explicit(&wave->state, result == TP_CUDA_SUCCESS ? WAVE_DONE : WAVE_FAILED,
                          memory_order_release);
}

/* ---- building a job ---- */

/* The group that goes this way; where there is none yet, the next free one, empty but not counted.
 * NULL: none is left. */
static struct tp_device_group *find_group(struct tp_device_job *job, int device, bool to_device,
                                          bool host_mapped) {
    for (uint32_t i = 0; i < job->group_count; i++) {
        struct tp_device_group *group = &job->groups[i];
        if (group->device == device && group->to_device == to_device &&
            group->host_mapped == host_mapped)
            return group;
    }
    if (job->group_count == TP_DEVICE_GROUPS)
        return NULL;
    struct tp_device_group *group = &job->groups[job->group_count];
    group->device = device;
    group->to_device = to_device;
    group->host_mapped = host_mapped;
    group->op_count = 0;
    group->wave_count = 0;
    group->failed = false;
    return group;
}

static bool continues(const struct tp_copy_op *op, const void *to, const void *from) {
    return (char *)op->to + op->bytes == to && (const char *)op->from + op->bytes == from;
}

static bool reserve_ops(struct tp_device_group *group, uint32_t count) {
    if (group->ops && group->chunks && count <= group->op_room - group->op_count)
        return true;
    if (count > UINT32_MAX / 2 - group->op_count)
        return false;
    uint32_t room = group->op_room ? group->op_room * 2 : 64;
    if (room < group->op_count + count)
        room = group->op_count + count;
    struct tp_copy_op *ops = reallocarray(group->ops, room, sizeof(*ops));
    if (ops)
        group->ops = ops;
    struct tp_chunk **chunks =
        ops ? reallocarray(group->chunks, room, sizeof(struct tp_chunk *)) : NULL;
    if (!chunks)
        return false;
    group->chunks = chunks;
    group->op_room = room;
    return true;
}

static struct tp_chunk *last_chunk(const struct tp_device_group *group) {
    return group->op_count ? group->chunks[group->op_count - 1] : NULL;
}

/* There is room. Nothing is merged beyond a chunk: its end may be that of a registration. */
static void append(struct tp_device_group *group, struct tp_chunk *chunk, void *to,
                   const void *from, size_t bytes) {
    struct tp_copy_op *last = group->op_count ? &group->ops[group->op_count - 1] : NULL;
    bool same = last && last_chunk(group) == chunk;
    if (same && continues(last, to, from)) {
        last->bytes += bytes;
        return;
    }
    if (chunk && !same)
        tp_chunk_hold_again(chunk);
    group->chunks[group->op_count] = chunk;
    group->ops[group->op_count++] = (struct tp_copy_op){to, from, bytes};
}

static void release_ops(struct tp_device_group *group) {
    for (uint32_t i = 0; i < group->op_count; i++) {
        struct tp_chunk *chunk = group->chunks[i];
        if (chunk && (i + 1 == group->op_count || group->chunks[i + 1] != chunk))
            tp_chunk_release(chunk);
    }
    group->op_count = 0;
}

/* The group that goes this way, with room for `count` copies more. */
static int reserve(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                   uint32_t count, struct tp_device_group **ret_group) {
    if (!tp_gpu_get(device))
        return -ENODEV;
    struct tp_device_group *group = find_group(job, device, to_device, host_mapped);
    if (!group)
        return -ENOSPC;
    if (!reserve_ops(group, count))
        return -ENOMEM;
    *ret_group = group;
    return 0;
}

int tp_device_reserve(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                      uint32_t count) {
    struct tp_device_group *group = NULL;
    return reserve(job, device, to_device, host_mapped, count, &group);
}

int tp_device_add_chunk(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                        struct tp_chunk *chunk, void *to, const void *from, size_t bytes,
                        uint8_t *ret_group) {
    struct tp_device_group *group = NULL;
    int error = reserve(job, device, to_device, host_mapped, 1, &group);
    if (error)
        return error;
    uint32_t index = (uint32_t)(group - job->groups);
    append(group, chunk, to, from, bytes);
    if (index == job->group_count)
        job->group_count++;
    *ret_group = (uint8_t)index;
    return 0;
}

int tp_device_add(struct tp_device_job *job, int device, bool to_device, bool host_mapped, void *to,
                  const void *from, size_t bytes, uint8_t *ret_group) {
    return tp_device_add_chunk(job, device, to_device, host_mapped, NULL, to, from, bytes,
                               ret_group);
}

bool tp_device_holds(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                     const struct tp_chunk *chunk) {
    const struct tp_device_group *group = find_group(job, device, to_device, host_mapped);
    return group && last_chunk(group) == chunk;
}

/* ---- handing it to waves ---- */

static bool reserve_wave(struct tp_device_group *group) {
    if (group->wave_count < group->wave_room)
        return true;
    uint32_t room = group->wave_room ? group->wave_room * 2 : 16;
    struct tp_wave **grown = reallocarray(group->waves, room, sizeof(struct tp_wave *));
    if (!grown)
        return false;
    group->waves = grown;
    group->wave_room = room;
    return true;
}

/* Remember that the group has copies in this open wave, under the queue's lock. Room was reserved
 * before. */
static void join(struct tp_device_group *group, struct tp_wave *wave) {
    group->waves[group->wave_count++] = wave;
    atomic_fetch_add_explicit(&wave->refs, 1, memory_order_relaxed);
}

static bool full(const struct tp_wave *wave) {
    uint32_t under_way = atomic_load_explicit(&wave->queue->under_way, memory_order_relaxed);
    return wave->bytes >= (under_way ? WAVE_BYTES : FIRST_WAVE_BYTES) || wave->count == WAVE_OPS;
}

/* Where a group has got to, in handing over its copies of one method. */
struct cursor {
    const struct tp_device_group *group;
    enum tp_gpu_method method;
    uint64_t kernel_max;
    uint32_t op;
    size_t done; /* of that copy */
};

/* The copy to hand over next; NULL at the end. */
static const struct tp_copy_op *next_op(struct cursor *cursor) {
    const struct tp_device_group *group = cursor->group;
    for (; cursor->op < group->op_count; cursor->op++, cursor->done = 0) {
        const struct tp_copy_op *op = &group->ops[cursor->op];
        enum tp_gpu_method method = op->bytes <= cursor->kernel_max ? TP_GPU_KERNEL : TP_GPU_ENGINE;
        if (method == cursor->method && cursor->done < op->bytes)
            return op;
    }
    return NULL;
}

static void hold_chunk(struct tp_wave *wave, struct tp_chunk *chunk) {
    if (!chunk || (wave->held_count && wave->held[wave->held_count - 1] == chunk))
        return;
    tp_chunk_hold_again(chunk);
    wave->held[wave->held_count++] = chunk; /* at most one an op */
}

/* Put as much as one wave takes into it. Under the queue's lock. */
static void fill(struct tp_wave *wave, struct cursor *cursor) {
    bool cut = wave->queue->method == TP_GPU_KERNEL;
    for (const struct tp_copy_op *op = next_op(cursor); op && !full(wave); op = next_op(cursor)) {
        size_t left = op->bytes - cursor->done;
        size_t part = cut && left > CHUNK_BYTES ? CHUNK_BYTES : left;
        wave->ops[wave->count++] = (struct tp_copy_op){(char *)op->to + cursor->done,
                                                       (const char *)op->from + cursor->done, part};
        hold_chunk(wave, cursor->group->chunks[cursor->op]);
        wave->bytes += part;
        cursor->done += part;
    }
}

/* The queue's open wave with the lock held, opening one first if there is none. NULL: no memory,
 * and no lock is held. */
static struct tp_wave *lock_open_wave(struct queue *queue, struct tp_gpu *gpu) {
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

/* Hand over the copies of one method. Without pinned memory for the kernel's waves the copy engines
 * take them. */
static bool start_method(struct tp_device_group *group, struct tp_gpu *gpu,
                         enum tp_gpu_method method, uint64_t kernel_max) {
    struct queue *pair = queues[group->device][group->to_device];
    struct queue *queue = &pair[method];
    struct cursor cursor = {.group = group, .method = method, .kernel_max = kernel_max};
    while (next_op(&cursor)) {
        struct tp_wave *wave = reserve_wave(group) ? lock_open_wave(queue, gpu) : NULL;
        if (!wave && queue == &pair[TP_GPU_KERNEL]) {
            queue = &pair[TP_GPU_ENGINE];
            continue;
        }
        if (!wave)
            return false;
        join(group, wave);
        fill(wave, &cursor);
        bool send = full(wave);
        if (send)
            queue->open = NULL;
        pthread_mutex_unlock(&queue->lock);
        if (send)
            send_wave(wave);
    }
    return true;
}

static void start_group(struct tp_device_group *group) {
    struct tp_gpu *gpu = tp_gpu_get(group->device);
    /* Read once: a calibration that ends meanwhile must not move copies from one method to the
     * other. */
    uint64_t kernel_max = gpu && group->host_mapped ? tp_gpu_kernel_max(gpu, group->to_device) : 0;
    for (int method = 0; method < TP_GPU_METHODS && !group->failed; method++)
        group->failed = !gpu || !start_method(group, gpu, (enum tp_gpu_method)method, kernel_max);
    release_ops(group); /* the waves hold what they need */
    for (uint32_t i = 0; i < group->wave_count && !deferring; i++) {
        if (close_wave(group->waves[i]))
            send_wave(group->waves[i]);
    }
}

void tp_device_start(struct tp_device_job *job) {
    pthread_once(&queues_once, init_queues);
    for (uint32_t i = 0; i < job->group_count; i++) {
        struct tp_device_group *group = &job->groups[i];
        int highest = atomic_load(&highest_device);
        while (highest < group->device &&
               !atomic_compare_exchange_weak(&highest_device, &highest, group->device))
            continue;
        start_group(group);
    }
    if (job->hits)
        tp_count(TP_REGISTER_HITS, job->hits);
    if (job->misses)
        tp_count(TP_REGISTER_MISSES, job->misses);
    job->hits = 0;
    job->misses = 0;
}

/* ---- the end ---- */

static enum tp_device_state look_group(const struct tp_device_group *group) {
    enum tp_device_state state = group->failed ? TP_DEVICE_FAILED : TP_DEVICE_DONE;
    for (uint32_t i = 0; i < group->wave_count; i++) {
        uint32_t wave = atomic_load_explicit(&group->waves[i]->state, memory_order_acquire);
        if (wave == WAVE_OPEN || wave == WAVE_SENT || wave == WAVE_ENDING)
            return TP_DEVICE_RUNNING;
        if (wave == WAVE_FAILED)
            state = TP_DEVICE_FAILED;
    }
    return state;
}

enum tp_device_state tp_device_look(const struct tp_device_job *job, unsigned group) {
    enum tp_device_state state = TP_DEVICE_DONE;
    if (group < job->group_count)
        return look_group(&job->groups[group]);
    for (uint32_t i = 0; i < job->group_count; i++) {
        enum tp_device_state one = look_group(&job->groups[i]);
        if (one == TP_DEVICE_RUNNING)
            return one;
        if (one == TP_DEVICE_FAILED)
            state = one;
    }
    return state;
}

/*
 * Stay with the only wave under way until it ends, for a bounded time: callers that sleep between
 * polls (range reads: 10 us, with the kernel's slack 60) would see its end late. A wave of 4 MiB
 * takes 80 us.
 */
static void stay_with(struct tp_wave *wave) {
    uint64_t start = __rdtsc();
    uint64_t end = wave->sent + wave->bytes * STAY_TICKS_PER_KIB / 1024;
    if (end > start + STAY_TICKS || start > end + STAY_GRACE_TICKS)
        return;
    end += STAY_GRACE_TICKS;
    while (atomic_load_explicit(&wave->state, memory_order_acquire) == WAVE_SENT &&
           atomic_load_explicit(&wave->queue->under_way, memory_order_relaxed) == 1 &&
           __rdtsc() < end) {
        for (int i = 0; i < 16; i++)
            _mm_pause();
        query_wave(wave);
    }
}

void tp_device_poll(struct tp_device_job *job) {
    for (uint32_t i = 0; i < job->group_count; i++) {
        struct tp_device_group *group = &job->groups[i];
        for (uint32_t k = 0; k < group->wave_count; k++) {
            struct tp_wave *wave = group->waves[k];
            uint32_t state = atomic_load_explicit(&wave->state, memory_order_acquire);
            if (state == WAVE_OPEN && close_wave(wave))
                send_wave(wave);
            else if (state == WAVE_SENT)
                query_wave(wave);
        }
        struct tp_wave *last = group->wave_count ? group->waves[group->wave_count - 1] : NULL;
        if (last && atomic_load_explicit(&last->state, memory_order_acquire) == WAVE_SENT)
            stay_with(last);
    }
}

void tp_device_reset(struct tp_device_job *job) {
    for (uint32_t i = 0; i < job->group_count; i++) {
        struct tp_device_group *group = &job->groups[i];
        for (uint32_t k = 0; k < group->wave_count; k++)
            let_go(group->waves[k]);
        group->wave_count = 0;
        release_ops(group);
    }
    job->group_count = 0;
    job->hits = 0;
    job->misses = 0;
}

void tp_device_release(struct tp_device_job *job) {
    for (unsigned i = 0; i < TP_DEVICE_GROUPS; i++) {
        free(job->groups[i].ops);
        free(job->groups[i].chunks);
        free(job->groups[i].waves);
    }
    memset(job, 0, sizeof(*job));
}

/* ---- gathering ---- */

/*
 * A wave that gathers goes out within 2 ms also when its thread neither polls nor ends its bracket.
 * A thread looks each millisecond, while brackets are opened at all; it sleeps when none was for a
 * while, so that only the first bracket after a pause costs a system call.
 */
#define FLUSH_TICK_NS 1000000
#define FLUSH_IDLE_TICKS 100u

static struct {
    pthread_mutex_t lock;
    pthread_cond_t news;
    _Atomic uint64_t brackets; /* opened so far */
    _Atomic bool asleep;
    bool started;
} flusher = {.lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};

/* Take the queue's open wave; `old_only`: when it was open at the last look as well. */
static struct tp_wave *take_open(struct queue *queue, bool old_only) {
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
    int highest = atomic_load(&highest_device);
    for (int device = 0; device <= highest; device++) {
        for (int i = 0; i < 2 * TP_GPU_METHODS; i++) {
            struct tp_wave *wave =
                take_open(&queues[device][i / TP_GPU_METHODS][i % TP_GPU_METHODS], old_only);
            if (wave)
                send_wave(wave);
        }
    }
}

static void sleep_until_bracket(uint64_t seen) {
    pthread_mutex_lock(&flusher.lock);
    /* seq_cst on both sides: either the bracket sees the sleeper, or this sees the bracket. */
    atomic_store(&flusher.asleep, true);
    while (atomic_load(&flusher.brackets) == seen)
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
    if (!flusher.started && tp_thread_start("tidepool-waves", run_flusher, NULL, &thread) == 0) {
        flusher.started = true;
        pthread_detach(thread);
    }
    pthread_mutex_unlock(&flusher.lock);
}

void tp_device_prepare(struct tp_gpu *gpu) {
    pthread_once(&queues_once, init_queues);
    start_flusher();
    for (int i = 0; i < 2 * TP_GPU_METHODS * READY_WAVES; i++) {
        int way = i / READY_WAVES;
        struct queue *queue =
            &queues[tp_gpu_device(gpu)][way / TP_GPU_METHODS][way % TP_GPU_METHODS];
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

void tp_device_defer_begin(void) {
    deferring++;
    atomic_fetch_add(&flusher.brackets, 1);
    if (!atomic_load(&flusher.asleep) || tp_inert())
        return;
    pthread_mutex_lock(&flusher.lock);
    pthread_cond_signal(&flusher.news);
    pthread_mutex_unlock(&flusher.lock);
}

void tp_device_defer_end(void) {
    if (deferring == 0 || --deferring > 0)
        return;
    send_gathering(false);
}

/* Look at a wave that nothing of ours refers to: a reference of our own keeps it from being used
 * again meanwhile. False: it was not under way. */
static bool sweep_wave(struct tp_wave *wave, unsigned *ended) {
    uint32_t refs = atomic_load_explicit(&wave->refs, memory_order_relaxed);
    do {
        if (refs == 0 || atomic_load_explicit(&wave->state, memory_order_relaxed) != WAVE_SENT)
            return false;
    } while (!atomic_compare_exchange_weak(&wave->refs, &refs, refs + 1));
    bool under_way = atomic_load_explicit(&wave->state, memory_order_acquire) == WAVE_SENT;
    if (under_way)
        query_wave(wave);
    *ended += under_way && atomic_load_explicit(&wave->state, memory_order_acquire) != WAVE_SENT;
    let_go(wave);
    return under_way;
}

unsigned tp_device_sweep(bool send, unsigned *ret_ended) {
    unsigned found = 0;
    unsigned ended = 0;
    int highest = atomic_load(&highest_device);
    if (send)
        send_gathering(false);
    for (int device = 0; device <= highest; device++) {
        for (int i = 0; i < 2 * TP_GPU_METHODS; i++) {
            struct queue *queue = &queues[device][i / TP_GPU_METHODS][i % TP_GPU_METHODS];
            for (struct tp_wave *wave = atomic_load(&queue->all); wave; wave = wave->also)
                found += sweep_wave(wave, &ended);
        }
    }
    *ret_ended = ended;
    return found;
}
