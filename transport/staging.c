/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pipeline of staged copies. To a GPU: a thread takes a free slot and some of what waits, fills
 * the slot and sends it; when its event has passed the slot is free. From a GPU: a slot is sent
 * empty, lands, and is then emptied by a thread. Any thread may take any step; the lock of a GPU
 * and direction is held only to take and to give back.
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

#define POLL_TICKS 9000u /* about 3 us between queries */

struct slots {
    struct tp_slot *first, *last;
};

/* | gpu                      | before the GPU can be found                |
 * | waiting, sent, landed    | under the lock, read without: hints        |
 * | the rest                 | under the lock                             | */
struct tp_stage {
    pthread_mutex_t lock;
    bool to_device;
    struct tp_gpu *gpu;
    struct tp_stage_piece *first, *last; /* waiting */
    uint64_t waiting_bytes;
    uint32_t in_use; /* slots that have pieces */
    struct slots sent_slots, landed_slots;
    uint64_t polled; /* time stamp counter */
    bool polling;
    _Atomic uint32_t waiting, sent, landed;
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
    if (slot)
        tp_slot_give(gpu, slot);
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

/* How much of what waits a slot shall take: while there is little to do, each thread its share;
 * once there is more, all that it holds, for the sake of fewer calls. */
static uint64_t load_bytes(const struct tp_stage *stage) {
    uint32_t threads = tp_stage_threads();
    uint64_t share = stage->waiting_bytes / threads;
    return share < TP_SLOT_BYTES && stage->in_use < threads / 2 ? share : TP_SLOT_BYTES;
}

/* With the lock held, and something waits. */
static void take_pieces(struct tp_stage *stage, struct tp_slot *slot) {
    uint64_t most = load_bytes(stage);
    struct tp_stage_piece *piece = stage->first;
    struct tp_stage_piece *last;
    int32_t count = 0;
    slot->pieces = piece;
    slot->bytes = 0;
    slot->op_count = 0;
    do {
        slot->bytes += piece->bytes;
        slot->op_count += piece->end - piece->first;
        count++;
        last = piece;
        piece = piece->next;
    } while (piece && tp_slot_fits(slot, piece, most));
    last->next = NULL;
    stage->first = piece;
    stage->waiting_bytes -= slot->bytes;
    stage->in_use++;
    hint(&stage->waiting, -count);
}

/* A slot with pieces; NULL: nothing waits, or no slot is free. */
static struct tp_slot *load_slot(struct tp_stage *stage) {
    bool worth = atomic_load(&stage->waiting) > 0 && tp_slots_free(stage->gpu);
    struct tp_slot *slot = worth ? tp_slot_take(stage->gpu) : NULL;
    if (!slot)
        return NULL;
    pthread_mutex_lock(&stage->lock);
    bool loaded = stage->first;
    if (loaded)
        take_pieces(stage, slot);
    pthread_mutex_unlock(&stage->lock);
    if (!loaded)
        tp_slot_give(stage->gpu, slot);
    return loaded ? slot : NULL;
}

static void say_failed(const struct tp_stage *stage, tp_cu_result result) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    tp_log_once(&said, TP_LOG_ERROR, "staged copies %s GPU %d failed: %s; their transfers fail",
                stage->to_device ? "to" : "from", tp_gpu_device(stage->gpu), tp_cuda_error(result));
}

static bool send_slot(struct tp_stage *stage, struct tp_slot *slot) {
    bool to_device = stage->to_device;
    /* The kernel, also for large copies: the copy engines have queues of direct copies before them,
     * behind which slots would wait (an H200: 33 GB/s where the kernel brings 46). */
    bool kernel = tp_gpu_kernel_max(stage->gpu, to_device) > 0;
    enum tp_gpu_method method = kernel ? TP_GPU_KERNEL : TP_GPU_ENGINE;
    uint32_t count = tp_slot_list(slot, to_device, kernel ? TP_SLOT_CUT_BYTES : SIZE_MAX);
    tp_cu_result result = tp_gpu_send_staged(stage->gpu, &method, to_device, slot->ops, count,
                                             slot->scratch, slot->event);
    if (result != TP_CUDA_SUCCESS) {
        say_failed(stage, result);
        return false;
    }
    tp_count(method == TP_GPU_KERNEL ? TP_KERNEL_BYTES : TP_DMA_BYTES, slot->bytes);
    return true;
}

/* Fill a slot, if need be, and send it. */
static bool step_send(struct tp_stage *stage) {
    struct tp_slot *slot = load_slot(stage);
    if (!slot)
        return false;
    if (tp_gpu_lost(stage->gpu)) {
        end_slot(stage, slot, false);
        return true;
    }
    if (stage->to_device)
        tp_slot_copy(slot, true);
    if (!send_slot(stage, slot)) {
        end_slot(stage, slot, false);
        return true;
    }
    pthread_mutex_lock(&stage->lock);
    push(&stage->sent_slots, slot);
    hint(&stage->sent, 1);
    pthread_mutex_unlock(&stage->lock);
    return true;
}

/* The event of the slot that was sent first has passed. The next one. */
static struct tp_slot *arrived(struct tp_stage *stage, bool good) {
    bool lands = good && !stage->to_device;
    pthread_mutex_lock(&stage->lock);
    struct tp_slot *slot = pop(&stage->sent_slots);
    hint(&stage->sent, -1);
    if (lands) {
        push(&stage->landed_slots, slot);
        hint(&stage->landed, 1);
    }
    struct tp_slot *next = stage->sent_slots.first;
    pthread_mutex_unlock(&stage->lock);
    if (!lands)
        end_slot(stage, slot, good);
    return next;
}

/* Ask the driver, in the order of sending, until one is still under way. One thread at a time. */
static bool step_poll(struct tp_stage *stage) {
    if (atomic_load(&stage->sent) == 0)
        return false;
    uint32_t found = 0;
    pthread_mutex_lock(&stage->lock);
    struct tp_slot *slot = stage->sent_slots.first;
    if (!slot || stage->polling || __rdtsc() - stage->polled < POLL_TICKS) {
        pthread_mutex_unlock(&stage->lock);
        return false;
    }
    stage->polling = true;
    pthread_mutex_unlock(&stage->lock);
    while (slot) {
        tp_cu_result result = tp_gpu_query(stage->gpu, slot->event);
        if (result == TP_CUDA_ERROR_NOT_READY)
            break;
        if (result != TP_CUDA_SUCCESS)
            say_failed(stage, result);
        slot = arrived(stage, result == TP_CUDA_SUCCESS);
        found++;
    }
    pthread_mutex_lock(&stage->lock);
    stage->polling = false;
    stage->polled = __rdtsc();
    pthread_mutex_unlock(&stage->lock);
    return found > 0;
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
    tp_slot_copy(slot, false);
    end_slot(stage, slot, true);
    return true;
}

/* Sent first: a slot that gets free in a step is the next one's, which goes the other way. */
static bool step(struct tp_stage *stage) {
    bool did = step_send(stage);
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

static bool any(bool (*is)(const struct tp_stage *stage)) {
    int ways = 2 * (atomic_load(&highest_device) + 1);
    int i = 0;
    while (i < ways && !is(&stages[i / 2][i % 2]))
        i++;
    return i < ways;
}

static bool is_in_flight(const struct tp_stage *stage) {
    return atomic_load(&stage->sent) > 0;
}

static bool has_work(const struct tp_stage *stage) {
    return atomic_load(&stage->landed) > 0 ||
           (atomic_load(&stage->waiting) > 0 && tp_slots_free(stage->gpu));
}

bool tp_stage_in_flight(void) {
    return any(is_in_flight);
}

bool tp_stage_work_left(void) {
    return any(has_work);
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

/* Who polls may have kept the last slot from the threads meanwhile, and may not come back soon. */
void tp_stage_help(struct tp_stage_job *job) {
    bool did = job->stage && tp_stage_look(job) == TP_STAGE_RUNNING && step(job->stage);
    if (did && (tp_stage_in_flight() || tp_stage_work_left()))
        tp_stage_rouse();
}
