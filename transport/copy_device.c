/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs of copies between GPU and host memory: building them, handing them to waves, and their end.
 *
 * It must not know: batches, peers, contexts and streams (gpu.c), how a wave is sent (wave.c).
 */
#include "transport/copy_device.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/gpu.h"
#include "transport/registrar.h"
#include "transport/wave.h"

/* A warp's share of a kernel's wave: larger copies are cut so that all warps have work. */
#define CUT_BYTES ((size_t)16 << 10)
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
static void append(struct tp_device_group *group, uintptr_t gpu_start, struct tp_chunk *chunk,
                   void *to, const void *from, size_t bytes) {
    struct tp_copy_op *last = group->op_count ? &group->ops[group->op_count - 1] : NULL;
    bool same = last && last_chunk(group) == chunk;
    if (same && continues(last, to, from) &&
        (uintptr_t)(group->to_device ? last->to : last->from) >= gpu_start) {
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

/* The group's number, now that it has copies. */
static uint8_t count_group(struct tp_device_job *job, const struct tp_device_group *group) {
    uint32_t index = (uint32_t)(group - job->groups);
    if (index == job->group_count)
        job->group_count++;
    return (uint8_t)index;
}

int tp_device_add_chunk(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                        struct tp_chunk *chunk, void *to, const void *from, size_t bytes,
                        uint8_t *ret_group) {
    struct tp_device_group *group = NULL;
    int error = reserve(job, device, to_device, host_mapped, 1, &group);
    if (error)
        return error;
    append(group, job->gpu_start, chunk, to, from, bytes);
    *ret_group = count_group(job, group);
    return 0;
}

int tp_device_reserve_staged(struct tp_device_job *job, int device, bool to_device,
                             bool host_mapped, uint64_t bytes, uint32_t count) {
    struct tp_device_group *group = NULL;
    int error = reserve(job, device, to_device, host_mapped, 0, &group);
    if (error == 0 && !tp_stage_reserve(&group->staged, bytes, count))
        error = -ENOMEM;
    return error;
}

int tp_device_add_staged(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                         char *host, char *here, uint64_t bytes, uint8_t *ret_group) {
    struct tp_device_group *group = find_group(job, device, to_device, host_mapped);
    if (!group)
        return -ENOSPC;
    if (!tp_stage_reserve(&group->staged, bytes, 1))
        return -ENOMEM;
    tp_stage_add(&group->staged, host, here, bytes, job->gpu_start);
    *ret_group = count_group(job, group);
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
static void join(struct tp_device_group *group, struct tp_wave *wave, uint64_t submitted_ms) {
    if (submitted_ms != 0 && (wave->submitted_ms == 0 || submitted_ms < wave->submitted_ms))
        wave->submitted_ms = submitted_ms;
    group->waves[group->wave_count++] = wave;
    atomic_fetch_add_explicit(&wave->refs, 1, memory_order_relaxed);
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

/* Put as much as one wave takes into it. Under the queue's lock. */
static void fill(struct tp_wave *wave, struct cursor *cursor) {
    bool cut = wave->queue->method == TP_GPU_KERNEL;
    for (const struct tp_copy_op *op = next_op(cursor); op && !tp_wave_full(wave);
         op = next_op(cursor)) {
        size_t left = op->bytes - cursor->done;
        size_t part = cut && left > CUT_BYTES ? CUT_BYTES : left;
        wave->ops[wave->count++] = (struct tp_copy_op){(char *)op->to + cursor->done,
                                                       (const char *)op->from + cursor->done, part};
        tp_wave_hold_chunk(wave, cursor->group->chunks[cursor->op]);
        wave->bytes += part;
        cursor->done += part;
    }
}

/* Hand over the copies of one method. Without pinned memory for the kernel's waves the copy engines
 * take them. */
static bool start_method(struct tp_device_group *group, struct tp_gpu *gpu,
                         enum tp_gpu_method method, uint64_t kernel_max, uint64_t submitted_ms) {
    struct tp_wave_queue *pair = tp_wave_queues(group->device, group->to_device);
    struct tp_wave_queue *queue = &pair[method];
    struct cursor cursor = {.group = group, .method = method, .kernel_max = kernel_max};
    while (next_op(&cursor)) {
        struct tp_wave *wave = reserve_wave(group) ? tp_wave_lock_open(queue, gpu) : NULL;
        if (!wave && queue == &pair[TP_GPU_KERNEL]) {
            queue = &pair[TP_GPU_ENGINE];
            continue;
        }
        if (!wave)
            return false;
        join(group, wave, submitted_ms);
        fill(wave, &cursor);
        bool send = tp_wave_full(wave);
        if (send)
            queue->open = NULL;
        pthread_mutex_unlock(&queue->lock);
        if (send)
            tp_wave_send(wave);
    }
    return true;
}

static void start_group(struct tp_device_group *group, uint64_t submitted_ms) {
    struct tp_gpu *gpu = tp_gpu_get(group->device);
    /* Read once: a calibration that ends meanwhile must not move copies from one method to the
     * other. */
    uint64_t kernel_max = gpu && group->host_mapped ? tp_gpu_kernel_max(gpu, group->to_device) : 0;
    if (group->to_device) /* a read */
        submitted_ms = 0;
    group->staged.submitted_ms = submitted_ms;
    if (gpu) /* first of all, since it takes longer */
        tp_stage_start(&group->staged, gpu, group->to_device);
    for (int method = 0; method < TP_GPU_METHODS && !group->failed; method++)
        group->failed =
            !gpu || !start_method(group, gpu, (enum tp_gpu_method)method, kernel_max, submitted_ms);
    if (gpu && group->failed)
        tp_gpu_rest(gpu, "no memory or no event for more copies");
    release_ops(group); /* the waves hold what they need */
    if (tp_wave_gathering()) {
        tp_wave_wake_flusher();
        return;
    }
    for (uint32_t i = 0; i < group->wave_count; i++) {
        if (tp_wave_close(group->waves[i]))
            tp_wave_send(group->waves[i]);
    }
}

void tp_device_start(struct tp_device_job *job) {
    for (uint32_t i = 0; i < job->group_count; i++)
        start_group(&job->groups[i], job->submitted_ms);
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
    enum tp_stage_state staged = tp_stage_look(&group->staged);
    if (staged == TP_STAGE_RUNNING)
        return TP_DEVICE_RUNNING;
    if (staged == TP_STAGE_FAILED)
        state = TP_DEVICE_FAILED;
    for (uint32_t i = 0; i < group->wave_count; i++) {
        uint32_t wave = atomic_load_explicit(&group->waves[i]->state, memory_order_acquire);
        if (wave == TP_WAVE_OPEN || wave == TP_WAVE_SENT || wave == TP_WAVE_ENDING)
            return TP_DEVICE_RUNNING;
        if (wave == TP_WAVE_FAILED)
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

void tp_device_poll(struct tp_device_job *job) {
    for (uint32_t i = 0; i < job->group_count; i++) {
        struct tp_device_group *group = &job->groups[i];
        for (uint32_t k = 0; k < group->wave_count; k++) {
            struct tp_wave *wave = group->waves[k];
            uint32_t state = atomic_load_explicit(&wave->state, memory_order_acquire);
            if (state == TP_WAVE_OPEN && tp_wave_close(wave))
                tp_wave_send(wave);
            else if (state == TP_WAVE_SENT)
                tp_wave_query(wave);
        }
        tp_stage_help(&group->staged);
        struct tp_wave *last = group->wave_count ? group->waves[group->wave_count - 1] : NULL;
        if (last && atomic_load_explicit(&last->state, memory_order_acquire) == TP_WAVE_SENT)
            tp_wave_stay(last);
    }
}

void tp_device_reset(struct tp_device_job *job) {
    for (uint32_t i = 0; i < job->group_count; i++) {
        struct tp_device_group *group = &job->groups[i];
        for (uint32_t k = 0; k < group->wave_count; k++)
            tp_wave_let_go(group->waves[k]);
        group->wave_count = 0;
        tp_stage_reset(&group->staged);
        release_ops(group);
    }
    job->group_count = 0;
    job->submitted_ms = 0;
    job->hits = 0;
    job->misses = 0;
}

void tp_device_release(struct tp_device_job *job) {
    for (unsigned i = 0; i < TP_DEVICE_GROUPS; i++) {
        free(job->groups[i].ops);
        free(job->groups[i].chunks);
        free(job->groups[i].waves);
        tp_stage_release(&job->groups[i].staged);
    }
    memset(job, 0, sizeof(*job));
}
