/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pipeline of staged copies. To a GPU: a thread takes a free slot and some of what waits, fills
 * the slot and sends it; when its event has passed the slot is free. From a GPU: a slot is sent
 * empty, lands, and is then emptied by a thread. Any thread may take any step; the lock of a GPU
 * and direction is held only to take and to give back.
 *
 * Slots are taken up again last in, first out, so that few are in use when few will do, and those
 * stay in the CPU's cache.
 *
 * It must not know: jobs beyond their pieces, threads, chunks.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <x86intrin.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "transport/copy_device.h"
#include "transport/copy_host.h"
#include "transport/gpu.h"
#include "transport/registrar.h"
#include "transport/stage.h"

/* A direction: as many as eight threads fill or empty, and twice as many for the link (each 20 us
 * there). */
#define SLOTS 24u
#define SLOT_OPS 1024u
/* Where a copy lies in a slot differs from its place in the GPU's memory by a multiple of this: the
 * kernel moves 16 bytes at a time only then. */
#define ALIGN 64u
#define DATA_BYTES ((size_t)TP_SLOT_BYTES + (size_t)SLOT_OPS * ALIGN)
#define CUT_BYTES ((size_t)16 << 10) /* a warp's share */
#define SEND_OPS (SLOT_OPS + TP_SLOT_BYTES / CUT_BYTES)
#define PINNED_BYTES (DATA_BYTES + SEND_OPS * sizeof(struct tp_copy_op))
#define POLL_TICKS 9000u                /* about 3 us between queries */
#define RETRY_TICKS (UINT64_C(1) << 25) /* about 10 ms, after a slot that could not be made */

struct slot {
    struct slot *next;
    char *data;             /* pinned */
    struct tp_copy_op *ops; /* pinned: SEND_OPS */
    uint64_t *scratch;
    tp_cu_event event;
    struct tp_stage_piece *pieces;
    uint32_t bytes, op_count;
};

struct slots {
    struct slot *first, *last;
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
    struct slot *unused;
    uint32_t in_use; /* slots that have pieces */
    struct slots sent_slots, landed_slots;
    _Atomic uint32_t made;
    uint32_t making;
    uint64_t retry, polled; /* time stamp counter */
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

static void push(struct slots *list, struct slot *slot) {
    slot->next = NULL;
    *(list->first ? &list->last->next : &list->first) = slot;
    list->last = slot;
}

static struct slot *pop(struct slots *list) {
    struct slot *slot = list->first;
    if (slot)
        list->first = slot->next;
    return slot;
}

static void push_unused(struct tp_stage *stage, struct slot *slot) {
    slot->next = stage->unused;
    stage->unused = slot;
}

/* ---- making slots ---- */

static void free_slot(struct tp_gpu *gpu, struct slot *slot) {
    tp_gpu_pinned_free(gpu, slot->data);
    tp_gpu_event_free(gpu, slot->event);
    free(slot->scratch);
    free(slot);
}

/* Calls the driver, with no lock held. */
static struct slot *new_slot(struct tp_gpu *gpu) {
    if (!tp_registrar_take_pinned(PINNED_BYTES))
        return NULL;
    struct slot *slot = calloc(1, sizeof(*slot));
    if (slot) {
        slot->scratch = malloc(3 * SEND_OPS * sizeof(*slot->scratch));
        slot->event = tp_gpu_event(gpu);
        slot->data = tp_gpu_pinned_alloc(gpu, PINNED_BYTES);
        if (slot->scratch && slot->event && slot->data) {
            slot->ops = (struct tp_copy_op *)(void *)(slot->data + DATA_BYTES);
            tp_count(TP_STAGING_BYTES, PINNED_BYTES);
            return slot;
        }
        free_slot(gpu, slot);
    }
    tp_registrar_give_pinned(PINNED_BYTES);
    return NULL;
}

static uint32_t slots_allowed(void) {
    uint64_t share = tp_registrar_pinned_share();
    uint64_t each_way = share / 2 / PINNED_BYTES;
    if (each_way == 0 && share >= PINNED_BYTES)
        each_way = 1;
    return each_way < SLOTS ? (uint32_t)each_way : SLOTS;
}

/* With the lock held, which is let go meanwhile. NULL: as many as there may be, or none to be had.
 */
static struct slot *make_slot(struct tp_stage *stage) {
    uint32_t made = atomic_load_explicit(&stage->made, memory_order_relaxed);
    if (made + stage->making >= slots_allowed() || __rdtsc() < stage->retry)
        return NULL;
    stage->making++;
    pthread_mutex_unlock(&stage->lock);
    struct slot *slot = new_slot(stage->gpu);
    pthread_mutex_lock(&stage->lock);
    stage->making--;
    if (slot)
        hint(&stage->made, 1);
    else
        stage->retry = __rdtsc() + RETRY_TICKS;
    return slot;
}

void tp_stage_prepare(struct tp_gpu *gpu) {
    struct tp_stage *pair = stages[tp_gpu_device(gpu)];
    if (!tp_gpu_stages(gpu))
        return;
    pthread_once(&stages_once, init_stages);
    pair[0].gpu = gpu;
    pair[1].gpu = gpu;
    tp_registrar_keep_pinned(PINNED_BYTES * 2 * SLOTS);
}

bool tp_stage_ready(struct tp_gpu *gpu, bool to_device) {
    int device = tp_gpu_device(gpu);
    struct tp_stage *stage = &stages[device][to_device];
    if (atomic_load_explicit(&stage->made, memory_order_acquire) > 0)
        return !tp_gpu_lost(gpu);
    if (!tp_gpu_stages(gpu))
        return false;
    pthread_mutex_lock(&stage->lock);
    struct slot *slot = make_slot(stage);
    if (slot)
        push_unused(stage, slot);
    pthread_mutex_unlock(&stage->lock);
    int highest = atomic_load(&highest_device);
    while (slot && highest < device &&
           !atomic_compare_exchange_weak(&highest_device, &highest, device))
        continue;
    return slot;
}

/* ---- what is in a slot ---- */

struct walk {
    const struct tp_stage_piece *piece;
    uint32_t op;
    size_t end; /* of the last one in the slot */
};

static struct walk walk(const struct slot *slot) {
    return (struct walk){.piece = slot->pieces, .op = slot->pieces->first};
}

/* The next copy and its place in the slot. NULL: there is none. */
static const struct tp_stage_op *next_op(struct walk *walk, size_t *ret_at) {
    while (walk->piece && walk->op == walk->piece->end) {
        walk->piece = walk->piece->next;
        walk->op = walk->piece ? walk->piece->first : 0;
    }
    if (!walk->piece)
        return NULL;
    const struct tp_stage_op *op = &walk->piece->job->ops[walk->op++];
    size_t at = walk->end + (((uintptr_t)op->device - walk->end) & (ALIGN - 1));
    walk->end = at + op->bytes;
    *ret_at = at;
    return op;
}

static void copy_run(char *host, char *in_slot, size_t bytes, bool to_device) {
    if (bytes && !to_device)
        tp_copy_bytes(host, in_slot, bytes);
    /* By ordinary stores, so that the slot stays in the cache; in parts, since memcpy streams what is
     * larger. */
    for (size_t at = 0; to_device && at < bytes; at += 16384)
        memcpy(in_slot + at, host + at, bytes - at < 16384 ? bytes - at : 16384);
}

/* Between the slot and the host's memory. Blocks of one object lie behind each other in both. */
static void copy_host(const struct slot *slot, bool to_device) {
    struct walk way = walk(slot);
    const struct tp_stage_op *op;
    char *host = NULL;
    size_t start = 0;
    size_t bytes = 0;
    size_t at = 0;
    while ((op = next_op(&way, &at))) {
        if (bytes && op->host == host + bytes && at == start + bytes) {
            bytes += op->bytes;
            continue;
        }
        copy_run(host, slot->data + start, bytes, to_device);
        host = op->host;
        start = at;
        bytes = op->bytes;
    }
    copy_run(host, slot->data + start, bytes, to_device);
    tp_copy_fence();
}

static bool goes_on(const struct tp_copy_op *op, const char *to, const char *from) {
    return (char *)op->to + op->bytes == to && (const char *)op->from + op->bytes == from;
}

/* Append to the list what lies at `to` and `from`: to the last one where it continues that, none
 * larger than `most`. */
static uint32_t list_op(struct tp_copy_op *ops, uint32_t count, char *to, const char *from,
                        size_t bytes, size_t most) {
    while (bytes > 0) {
        if (count == 0 || ops[count - 1].bytes >= most || !goes_on(&ops[count - 1], to, from))
            ops[count++] = (struct tp_copy_op){to, from, 0};
        struct tp_copy_op *last = &ops[count - 1];
        size_t part = bytes < most - last->bytes ? bytes : most - last->bytes;
        last->bytes += part;
        to += part;
        from += part;
        bytes -= part;
    }
    return count;
}

static uint32_t list_ops(struct slot *slot, bool to_device, size_t most) {
    struct walk way = walk(slot);
    const struct tp_stage_op *op;
    uint32_t count = 0;
    size_t at = 0;
    while ((op = next_op(&way, &at))) {
        char *in_slot = slot->data + at;
        count = list_op(slot->ops, count, to_device ? op->device : in_slot,
                        to_device ? in_slot : op->device, op->bytes, most);
    }
    return count;
}

/* ---- steps ---- */

/* Its pieces have ended; the slot is free. */
static void end_slot(struct tp_stage *stage, struct slot *slot, bool good) {
    struct tp_stage_piece *piece = slot->pieces;
    if (good)
        tp_count(TP_STAGED_BYTES, slot->bytes);
    while (piece) {
        struct tp_stage_piece *next = piece->next;
        tp_stage_end_piece(piece, good);
        piece = next;
    }
    pthread_mutex_lock(&stage->lock);
    push_unused(stage, slot);
    stage->in_use--;
    pthread_mutex_unlock(&stage->lock);
}

/* Does the piece go into the slot beside what is there? `most`: bytes that it shall take. */
static bool fits(const struct slot *slot, const struct tp_stage_piece *piece, uint64_t most) {
    return slot->bytes + piece->bytes <= most &&
           slot->op_count + piece->end - piece->first <= SLOT_OPS;
}

/* How much of what waits a slot shall take: while there is little to do, each thread its share;
 * once there is more, all that it holds, for the sake of fewer calls. */
static uint64_t load_bytes(const struct tp_stage *stage) {
    uint32_t threads = tp_stage_threads();
    uint64_t share = stage->waiting_bytes / threads;
    return share < TP_SLOT_BYTES && stage->in_use < threads / 2 ? share : TP_SLOT_BYTES;
}

/* With the lock held, and something waits. */
static void take_pieces(struct tp_stage *stage, struct slot *slot) {
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
    } while (piece && fits(slot, piece, most));
    last->next = NULL;
    stage->first = piece;
    stage->waiting_bytes -= slot->bytes;
    stage->in_use++;
    hint(&stage->waiting, -count);
}

/* A slot with pieces; NULL: nothing waits, or no slot is free. */
static struct slot *load_slot(struct tp_stage *stage) {
    if (atomic_load(&stage->waiting) == 0)
        return NULL;
    pthread_mutex_lock(&stage->lock);
    struct slot *slot = NULL;
    if (stage->first) {
        slot = stage->unused;
        if (slot)
            stage->unused = slot->next;
        else
            slot = make_slot(stage);
    }
    if (slot && stage->first) {
        take_pieces(stage, slot);
    } else if (slot) {
        push_unused(stage, slot);
        slot = NULL;
    }
    pthread_mutex_unlock(&stage->lock);
    return slot;
}

static void say_failed(const struct tp_stage *stage, tp_cu_result result) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    tp_log_once(&said, TP_LOG_ERROR, "staged copies %s GPU %d failed: %s; their transfers fail",
                stage->to_device ? "to" : "from", tp_gpu_device(stage->gpu), tp_cuda_error(result));
}

static bool send_slot(struct tp_stage *stage, struct slot *slot) {
    bool to_device = stage->to_device;
    bool kernel = slot->op_count > 0 &&
                  slot->bytes / slot->op_count <= tp_gpu_kernel_max(stage->gpu, to_device);
    enum tp_gpu_method method = kernel ? TP_GPU_KERNEL : TP_GPU_ENGINE;
    uint32_t count = list_ops(slot, to_device, kernel ? CUT_BYTES : SIZE_MAX);
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
    struct slot *slot = load_slot(stage);
    if (!slot)
        return false;
    if (tp_gpu_lost(stage->gpu)) {
        end_slot(stage, slot, false);
        return true;
    }
    if (stage->to_device)
        copy_host(slot, true);
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
static struct slot *arrived(struct tp_stage *stage, bool good) {
    bool lands = good && !stage->to_device;
    pthread_mutex_lock(&stage->lock);
    struct slot *slot = pop(&stage->sent_slots);
    hint(&stage->sent, -1);
    if (lands) {
        push(&stage->landed_slots, slot);
        hint(&stage->landed, 1);
    }
    struct slot *next = stage->sent_slots.first;
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
    struct slot *slot = stage->sent_slots.first;
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
    struct slot *slot = pop(&stage->landed_slots);
    if (slot)
        hint(&stage->landed, -1);
    pthread_mutex_unlock(&stage->lock);
    if (!slot)
        return false;
    copy_host(slot, false);
    end_slot(stage, slot, true);
    return true;
}

static bool step(struct tp_stage *stage) {
    bool did = step_poll(stage);
    did = step_send(stage) || did;
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
           (atomic_load(&stage->waiting) > 0 &&
            atomic_load(&stage->sent) < atomic_load(&stage->made));
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

void tp_stage_help(struct tp_stage_job *job) {
    if (job->stage && tp_stage_look(job) == TP_STAGE_RUNNING)
        (void)step(job->stage);
}
