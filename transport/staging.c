/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pipeline of staged copies. To a GPU: a thread takes a free slot and some of what waits, and
 * fills the slot; a driver call sends it, alone or with others; when the call's event has passed
 * they are free. From a GPU: a slot is sent empty, each in a call of its own, lands, and is then
 * emptied by a thread. Any thread may take any step; the lock of a GPU and direction is held only
 * to take and to give back.
 *
 * Slots gather while the GPU has enough to do, since each call costs the link some 2 us: reading
 * 1 MiB a call an H200 moved 45 GB/s, 4 MiB a call 50.
 *
 * It must not know: jobs beyond their pieces, how slots are made and filled, threads, chunks.
 */
#include <pthread.h>
#include <x86intrin.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "transport/copy_device.h"
#include "transport/gpu.h"
#include "transport/stage.h"
#include "transport/stage_slot.h"
#include "transport/stall.h"

#define POLL_TICKS 9000u /* about 3 us between queries */
#define CALL_SLOTS 8u    /* the most that go to the GPU in one call */
#define CALLS 2u         /* to the GPU at once: the end of one overlaps the start of the next */
#define FULL_CALLS 4u    /* so many while there is enough for a call that is full */
#define PIECES_A_SLOT (TP_SLOT_BYTES / TP_PIECE_BYTES)

struct slots {
    struct tp_slot *first, *last;
};

/* | gpu                            | before the GPU can be found         |
 * | waiting, filled(_ops), calls,  |                                     |
 * | landed                         | under the lock, read without: hints |
 * | the rest                       | under the lock                      | */
struct tp_stage {
    pthread_mutex_t lock;
    bool to_device;
    struct tp_gpu *gpu;
    struct tp_stage_piece *first, *last; /* waiting */
    uint64_t waiting_bytes;
    uint32_t in_use; /* slots that have pieces */
    struct slots filled_slots, landed_slots;
    struct slots sent_calls; /* the first slot of each */
    uint64_t polled;         /* time stamp counter */
    bool polling;
    _Atomic uint32_t waiting, filled, calls, landed; /* calls: also those that are being sent */
    _Atomic uint32_t filled_ops;                     /* how long their lists may be */
};

static struct tp_stage stages[TP_DEVICES][2];
static pthread_once_t stages_once = PTHREAD_ONCE_INIT;
static _Atomic int highest_device = -1;

static void init_stages(void) {
    for (int i = 0; i < 2 * TP_DEVICES; i++) {
        pthread_mutex_init(&stages[i / 2][i % 2].lock, NULL);
        stages[i / 2][i % 2].to_device = i % 2;
    }
}

static void hint(_Atomic uint32_t *count, int32_t more) {
    atomic_store(count, atomic_load_explicit(count, memory_order_relaxed) + (uint32_t)more);
}

/* ---- lists of slots, under the lock ---- */

static void push(struct slots *list, struct tp_slot *slot) {
    slot->next = NULL;
    *(list->first ? &list->last->next : &list->first) = slot;
    list->last = slot;
}

static struct tp_slot *pop(struct slots *list) {
    struct tp_slot *slot = list->first;
    if (slot)
        list->first = slot->next;
    return slot;
}

/* ---- the GPUs ---- */

/* This thread does no more of it for now, and may have kept the last slot from the threads. */
static void leave_work(void) {
    if (tp_stage_in_flight() || tp_stage_work_left() > 0)
        tp_stage_rouse();
}

void tp_stage_prepare(struct tp_gpu *gpu) {
    int device = tp_gpu_device(gpu);
    int highest = atomic_load(&highest_device);
    struct tp_stage *pair = stages[device];
    if (!tp_gpu_stages(gpu))
        return;
    pthread_once(&stages_once, init_stages);
    pair[0].gpu = gpu;
    pair[1].gpu = gpu;
    tp_slots_prepare();
    /* The threads look at it from the first job on, whoever's that is. */
    while (highest < device && !atomic_compare_exchange_weak(&highest_device, &highest, device))
        continue;
}

bool tp_stage_ready(struct tp_gpu *gpu) {
    if (tp_slots_made(gpu))
        return !tp_gpu_lost(gpu);
    if (!tp_gpu_stages(gpu))
        return false;
    struct tp_slot *slot = tp_slot_take(gpu);
    if (slot) {
        tp_slot_give(gpu, slot);
        leave_work(); /* of others, who found it made and not free */
    }
    return slot;
}

/* ---- steps ---- */

/* Its pieces have ended; the slot is free. */
static void end_slot(struct tp_stage *stage, struct tp_slot *slot, bool good) {
    struct tp_stage_piece *piece = slot->pieces;
    if (good)
        tp_count(TP_STAGED_BYTES, slot->bytes);
    while (piece) {
        struct tp_stage_piece *next = piece->next;
        tp_stage_end_piece(piece, good);
        piece = next;
    }
    pthread_mutex_lock(&stage->lock);
    stage->in_use--;
    pthread_mutex_unlock(&stage->lock);
    tp_slot_give(stage->gpu, slot);
}

static void end_slots(struct tp_stage *stage, struct tp_slot *first, bool good) {
    while (first) {
        struct tp_slot *also = first->also;
        end_slot(stage, first, good);
        first = also;
    }
}

/* May a call to the GPU be sent now? */
static bool may_send(const struct tp_stage *stage) {
    uint32_t filled = atomic_load(&stage->filled);
    uint32_t calls = atomic_load(&stage->calls);
    bool full = filled >= CALL_SLOTS || atomic_load(&stage->filled_ops) >= TP_SEND_OPS;
    return filled > 0 && calls < (full ? FULL_CALLS : CALLS);
}

/* For how many free slots something waits, about. */
static uint32_t loadable(const struct tp_stage *stage) {
    uint32_t waiting = atomic_load(&stage->waiting);
    uint32_t slots = (waiting + PIECES_A_SLOT - 1) / PIECES_A_SLOT;
    uint32_t free = waiting > 0 ? tp_slots_free(stage->gpu) : 0;
    return slots < free ? slots : free;
}

/* How much of what waits a slot shall take: while there is little to do, each thread its share;
 * once there is more, all that it holds. */
static uint64_t load_bytes(const struct tp_stage *stage) {
    uint32_t threads = tp_stage_threads();
    uint64_t share = stage->waiting_bytes / threads;
    return share < TP_SLOT_BYTES && stage->in_use < threads / 2 ? share : TP_SLOT_BYTES;
}

/* With the lock held, and something waits. */
static void take_pieces(struct tp_stage *stage, struct tp_slot *slot) {
    uint64_t bytes = load_bytes(stage);
    struct tp_stage_piece *piece = stage->first;
    struct tp_stage_piece *last;
    int32_t count = 0;
    slot->also = NULL;
    slot->pieces = piece;
    slot->bytes = 0;
    slot->op_count = 0;
    do {
        slot->bytes += piece->bytes;
        slot->op_count += piece->end - piece->first;
        count++;
        last = piece;
        piece = piece->next;
    } while (piece && tp_slot_fits(slot, piece, bytes));
    last->next = NULL;
    stage->first = piece;
    stage->waiting_bytes -= slot->bytes;
    stage->in_use++;
    hint(&stage->waiting, -count);
}

/* Take a free slot and what waits for it. False: nothing waits, or no slot is free. True without a
 * slot: others were faster, but some may have found none free meanwhile: look again. */
static bool load_slot(struct tp_stage *stage, struct tp_slot **ret_slot) {
    struct tp_slot *slot = loadable(stage) > 0 ? tp_slot_take(stage->gpu) : NULL;
    *ret_slot = NULL;
    if (!slot)
        return false;
    pthread_mutex_lock(&stage->lock);
    if (stage->first) {
        take_pieces(stage, slot);
        hint(&stage->calls, !stage->to_device); /* which is sent as it is */
        *ret_slot = slot;
    }
    pthread_mutex_unlock(&stage->lock);
    if (!*ret_slot)
        tp_slot_give(stage->gpu, slot);
    return true;
}

static bool step_fill(struct tp_stage *stage) {
    struct tp_slot *slot;
    if (!load_slot(stage, &slot))
        return false;
    if (!slot)
        return true;
    if (tp_gpu_lost(stage->gpu)) {
        end_slot(stage, slot, false);
        return true;
    }
    tp_slot_copy(slot, true);
    pthread_mutex_lock(&stage->lock);
    push(&stage->filled_slots, slot);
    hint(&stage->filled, 1);
    hint(&stage->filled_ops, (int32_t)tp_slot_list_max(slot));
    pthread_mutex_unlock(&stage->lock);
    return true;
}

/* Begin a call with what is filled. NULL: nothing is, or the call has to wait. */
static struct tp_slot *take_filled(struct tp_stage *stage) {
    struct tp_slot *first = NULL;
    struct tp_slot **link = &first;
    uint32_t ops = 0;
    uint32_t count = 0;
    if (!may_send(stage))
        return NULL;
    pthread_mutex_lock(&stage->lock);
    while (count < CALL_SLOTS && (count > 0 || may_send(stage))) {
        struct tp_slot *slot = stage->filled_slots.first;
        if (!slot || ops + tp_slot_list_max(slot) > TP_SEND_OPS)
            break;
        *link = pop(&stage->filled_slots);
        link = &slot->also;
        ops += tp_slot_list_max(slot);
        count++;
    }
    hint(&stage->filled, -(int32_t)count);
    hint(&stage->filled_ops, -(int32_t)ops);
    hint(&stage->calls, count > 0);
    pthread_mutex_unlock(&stage->lock);
    return first;
}

static void say_failed(const struct tp_stage *stage, tp_cu_result result) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    tp_log_once(&said, TP_LOG_ERROR, "staged copies %s GPU %d failed: %s; their transfers fail",
                stage->to_device ? "to" : "from", tp_gpu_device(stage->gpu), tp_cuda_error(result));
}

static bool send_call(const struct tp_stage *stage, const struct tp_slot *first) {
    bool to_device = stage->to_device;
    /* The kernel, also for large copies: the copy engines have queues of direct copies before them,
     * behind which slots would wait (an H200: 33 GB/s where the kernel brings 46). */
    bool kernel = tp_gpu_kernel_max(stage->gpu, to_device) > 0;
    enum tp_gpu_method method = kernel ? TP_GPU_KERNEL : TP_GPU_ENGINE;
    size_t most = kernel ? TP_SLOT_CUT_BYTES : SIZE_MAX;
    uint32_t count = 0;
    uint64_t bytes = 0;
    for (const struct tp_slot *slot = first; slot; slot = slot->also) {
        count = tp_slot_list(slot, to_device, most, first->ops, count);
        bytes += slot->bytes;
    }
    tp_cu_result result = tp_gpu_send_staged(stage->gpu, &method, to_device, first->ops, count,
                                             first->scratch, first->event);
    if (result != TP_CUDA_SUCCESS) {
        say_failed(stage, result);
        return false;
    }
    tp_count(method == TP_GPU_KERNEL ? TP_KERNEL_BYTES : TP_DMA_BYTES, bytes);
    return true;
}

static bool step_send(struct tp_stage *stage) {
    struct tp_slot *first = NULL;
    if (stage->to_device)
        first = take_filled(stage);
    else if (load_slot(stage, &first) && !first)
        return true;
    if (!first)
        return false;
    bool sent = !tp_gpu_lost(stage->gpu) && send_call(stage, first);
    pthread_mutex_lock(&stage->lock);
    if (sent)
        push(&stage->sent_calls, first);
    else
        hint(&stage->calls, -1);
    pthread_mutex_unlock(&stage->lock);
    if (!sent)
        end_slots(stage, first, false);
    return true;
}

/* The event of the call that was sent first has passed. The next one's first slot. */
static struct tp_slot *arrived(struct tp_stage *stage, bool good) {
    bool lands = good && !stage->to_device;
    pthread_mutex_lock(&stage->lock);
    struct tp_slot *first = pop(&stage->sent_calls);
    hint(&stage->calls, -1);
    for (struct tp_slot *slot = lands ? first : NULL; slot; slot = slot->also) {
        push(&stage->landed_slots, slot);
        hint(&stage->landed, 1);
    }
    struct tp_slot *next = stage->sent_calls.first;
    pthread_mutex_unlock(&stage->lock);
    if (!lands)
        end_slots(stage, first, good);
    return next;
}

/* Ask the driver, in the order of sending, until one is still under way. One thread at a time. */
static bool step_poll(struct tp_stage *stage) {
    if (atomic_load(&stage->calls) == 0)
        return false;
    uint32_t found = 0;
    pthread_mutex_lock(&stage->lock);
    struct tp_slot *first = stage->sent_calls.first;
    if (!first || stage->polling || __rdtsc() - stage->polled < POLL_TICKS) {
        pthread_mutex_unlock(&stage->lock);
        return false;
    }
    stage->polling = true;
    pthread_mutex_unlock(&stage->lock);
    while (first) {
        tp_cu_result result = tp_gpu_query(stage->gpu, first->event);
        if (result == TP_CUDA_ERROR_NOT_READY)
            break;
        if (result != TP_CUDA_SUCCESS)
            say_failed(stage, result);
        first = arrived(stage, result == TP_CUDA_SUCCESS);
        found++;
    }
    pthread_mutex_lock(&stage->lock);
    stage->polling = false;
    stage->polled = __rdtsc();
    pthread_mutex_unlock(&stage->lock);
    return found > 0;
}

/* Does the slot hold some of a write that is not to be carried out any more? */
static bool is_late(const struct tp_slot *slot) {
    for (const struct tp_stage_piece *piece = slot->pieces; piece; piece = piece->next) {
        if (tp_stall_late(piece->job->submitted_ms))
            return true;
    }
    return false;
}

static bool step_empty(struct tp_stage *stage) {
    if (atomic_load(&stage->landed) == 0)
        return false;
    pthread_mutex_lock(&stage->lock);
    struct tp_slot *slot = pop(&stage->landed_slots);
    if (slot)
        hint(&stage->landed, -1);
    pthread_mutex_unlock(&stage->lock);
    if (!slot)
        return false;
    bool late = is_late(slot);
    if (late)
        tp_count(TP_LATE_WRITES, 1);
    else
        tp_slot_copy(slot, false);
    end_slot(stage, slot, !late);
    return true;
}

/* A slot is taken first: one that gets free in a step is for the next, which goes the other way. */
static bool step(struct tp_stage *stage) {
    bool did = stage->to_device && step_fill(stage);
    did = step_send(stage) || did;
    did = step_poll(stage) || did;
    return step_empty(stage) || did;
}

bool tp_stage_step_any(uint32_t first) {
    uint32_t ways = 2 * ((uint32_t)atomic_load(&highest_device) + 1);
    bool did = false;
    for (uint32_t i = 0; i < ways; i++) {
        uint32_t way = (first + i) % ways;
        did = step(&stages[way / 2][way % 2]) || did;
    }
    return did;
}

static uint32_t sum(uint32_t (*of)(const struct tp_stage *stage)) {
    int ways = 2 * (atomic_load(&highest_device) + 1);
    uint32_t all = 0;
    for (int i = 0; i < ways; i++)
        all += of(&stages[i / 2][i % 2]);
    return all;
}

static uint32_t calls(const struct tp_stage *stage) {
    return atomic_load(&stage->calls);
}

static uint32_t steps(const struct tp_stage *stage) {
    return loadable(stage) + may_send(stage) + atomic_load(&stage->landed);
}

bool tp_stage_in_flight(void) {
    return sum(calls) > 0;
}

uint32_t tp_stage_work_left(void) {
    return sum(steps);
}

/* ---- jobs ---- */

void tp_stage_start(struct tp_stage_job *job, struct tp_gpu *gpu, bool to_device) {
    struct tp_stage *stage = &stages[tp_gpu_device(gpu)][to_device];
    uint32_t count = job->piece_count;
    uint64_t bytes = job->bytes;
    if (count == 0)
        return;
    for (uint32_t i = 0; i < count; i++)
        job->pieces[i].next = i + 1 < count ? &job->pieces[i + 1] : NULL;
    job->stage = stage;
    atomic_store(&job->left, count);
    pthread_mutex_lock(&stage->lock);
    *(stage->first ? &stage->last->next : &stage->first) = job->pieces;
    stage->last = &job->pieces[count - 1];
    stage->waiting_bytes += bytes;
    hint(&stage->waiting, (int32_t)count);
    pthread_mutex_unlock(&stage->lock);
    tp_stage_news(bytes); /* the job may have ended by now */
}

/* The other direction may have all slots, and nobody else who sees to it. */
static bool step_for_slot(struct tp_stage *stage) {
    struct tp_stage *other = &stages[tp_gpu_device(stage->gpu)][!stage->to_device];
    return atomic_load(&stage->waiting) > 0 && step(other);
}

void tp_stage_help(struct tp_stage_job *job) {
    struct tp_stage *stage = job->stage;
    if (!stage || tp_stage_look(job) != TP_STAGE_RUNNING)
        return;
    if (step(stage) || step_for_slot(stage)) /* the job may have ended by now */
        leave_work();                        /* who polls may not come back soon */
}
