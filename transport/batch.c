/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Submits: which requests of a batch are copied here, which are the rest, and starting the copies.
 *
 * A request's runs are partitioned by memory kind here: host memory becomes ops of the part's copy
 * job, a GPU's memory of its device job.
 *
 * It must not know: how a name becomes a peer, how bytes are copied, how a batch's end is answered.
 */
#include "transport/batch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/copy_chunks.h"
#include "transport/engine.h"
#include "transport/gpu.h"
#include "transport/names.h"
#include "transport/peer.h"
#include "transport/ranges.h"
#include "transport/stall.h"

#define TASK_LIMIT (UINT32_C(1) << 28) /* of a batch: numbers stay far from overflow */
#define STRIDE_LIMIT 4096
#define ON_HOST (-1) /* instead of a GPU's ordinal */

/* Why a request is left to Mooncake: a counter, or LOCAL for one that is not. */
#define LOCAL TP_COUNTER_COUNT

/* One submit under plan: on the stack of tp_submit_begin. */
struct plan {
    const struct tp_engine *engine;
    const struct tp_requests *requests;
    struct tp_batch *batch;
    struct tp_part *part;
    struct tp_task *tasks; /* of this submit */
    struct tp_range_hint hint;
    struct tp_chunk_cursor cursor;
    uint32_t index;              /* of the request under plan */
    uint64_t run_start, run_end; /* where requests continue each other in the store */
    /* What the last request's handle stands for: */
    bool known;
    uint64_t handle;
    struct tp_peer *peer; /* NULL: left to Mooncake for `reason` */
    enum tp_counter reason;
    struct tp_name *missed; /* its name, when no attached store bears it */

    uint64_t rest_bytes;
    uint32_t reasons[TP_COUNTER_COUNT];
};

static struct tp_request request_at(const struct tp_requests *requests, size_t index) {
    struct tp_request request;
    memcpy(&request, (const char *)requests->base + index * requests->stride, sizeof(request));
    return request;
}

/* ---- one request
 * ------------------------------------------------------------------------------------------------------
 */

static bool plausible(const struct tp_request *request) {
    uintptr_t source = (uintptr_t)request->source;
    return (request->opcode == TP_OP_READ || request->opcode == TP_OP_WRITE) && source != 0 &&
           request->length != 0 && source + request->length > source &&
           request->target_offset + request->length > request->target_offset;
}

/* Let plan->peer be what `handle` stands for, with a reference held by the part. */
static void resolve(struct plan *plan, uint64_t handle) {
    if (plan->known && plan->handle == handle)
        return;
    plan->known = true;
    plan->handle = handle;
    plan->run_end = 0; /* it was another store's */
    plan->peer = NULL;
    plan->reason = TP_FALLBACK_NO_PEER;
    plan->missed = NULL;
    struct tp_name *name = tp_engine_name(plan->engine, handle);
    if (!name)
        return;
    bool gone = false;
    struct tp_peer *peer = tp_route_peer(name, &gone);
    if (!peer) {
        plan->reason = gone ? TP_FALLBACK_PEER_GONE : TP_FALLBACK_NO_PEER;
        plan->missed = gone ? NULL : name;
        return;
    }
    uint32_t slot = tp_peer_slot(peer);
    uint64_t bit = UINT64_C(1) << slot;
    if (plan->part->held & bit)
        tp_peer_release(peer); /* another handle of the same store */
    else
        plan->part->segments[slot] = 0;
    plan->part->held |= bit;
    plan->peer = peer;
}

/* LOCAL when these bytes can be copied by this process: host memory, and a GPU's where that is
 * wanted. */
static enum tp_counter memory_reason(struct plan *plan, const struct tp_request *request,
                                     int *ret_device) {
    *ret_device = ON_HOST;
    switch (tp_range_memory(request->source, request->length, &plan->hint, ret_device)) {
    case TP_MEMORY_HOST:
        *ret_device = ON_HOST;
        return LOCAL;
    case TP_MEMORY_DEVICE:
        /* Asking starts making it ready, if nothing has yet. */
        if (tp_config()->engine.device_copy && !tp_gpu_rests(*ret_device))
            return LOCAL;
        break;
    case TP_MEMORY_UNKNOWN:
        break;
    }
    return TP_FALLBACK_DEVICE_MEMORY;
}

static bool overlap(uintptr_t a, uintptr_t b, uint64_t bytes) {
    return a < b ? b - a < bytes : a - b < bytes;
}

/* How much this submit moves from this request's target on without a gap. Each request is looked at
 * once. */
static uint64_t run_bytes(struct plan *plan, const struct tp_request *request) {
    uint64_t at = request->target_offset;
    if (at >= plan->run_start && at < plan->run_end && request->length <= plan->run_end - at)
        return plan->run_end - at;
    plan->run_start = at;
    plan->run_end = at + request->length;
    for (size_t i = plan->index + 1; i < plan->requests->count; i++) {
        struct tp_request next = request_at(plan->requests, i);
        if (next.target_offset != plan->run_end || next.target_id != request->target_id ||
            next.opcode != request->opcode || plan->run_end + next.length < plan->run_end)
            break;
        plan->run_end += next.length;
    }
    return plan->run_end - at;
}

/*
 * A GPU's copy from or to store memory of which nothing is registered: CUDA's own, or plain memory,
 * which goes through pinned bounce buffers unless the GPU reads it by itself or there are none.
 */
static int add_unregistered(struct plan *plan, const struct tp_request *request, void *there,
                            int device, uint8_t *ret_group) {
    bool write = request->opcode == TP_OP_WRITE;
    struct tp_device_job *job = &plan->part->gpu;
    struct tp_gpu *gpu = tp_gpu_get(device);
    bool cumem = tp_peer_address_is_cumem(plan->peer, there);
    if (cumem || !gpu || !tp_stage_ready(gpu))
        return tp_device_add(job, device, !write, cumem, write ? there : request->source,
                             write ? request->source : there, request->length, ret_group);
    int rc = tp_device_reserve_staged(job, device, !write, false, request->length, 1);
    if (rc == 0)
        rc = tp_device_add_staged(job, device, !write, false, there, request->source,
                                  request->length, ret_group);
    return rc;
}

/* Add the copy to the job of its kind of memory. 0 or -errno with nothing added. */
static int add_copy(struct plan *plan, const struct tp_request *request, void *there, int device,
                    struct tp_task *ret_task) {
    bool write = request->opcode == TP_OP_WRITE;
    void *to = write ? there : request->source;
    const void *from = write ? request->source : there;
    uint8_t group = 0;
    int rc;
    if (device == ON_HOST)
        return tp_copy_add(&plan->part->job, to, from, request->length, &ret_task->first,
                           &ret_task->last);
    plan->part->gpu.gpu_start = tp_range_start(&plan->hint, request->source);
    struct tp_chunks *chunks = tp_registrar_on() ? tp_peer_chunks(plan->peer, there) : NULL;
    if (chunks) {
        struct tp_chunk_copy copy = {device,          !write,          there,
                                     request->source, request->length, run_bytes(plan, request)};
        rc = tp_chunks_add(&plan->part->gpu, chunks, &plan->cursor, &copy, &group);
    } else {
        rc = add_unregistered(plan, request, there, device, &group);
    }
    ret_task->first = TP_TASK_ON_DEVICE;
    ret_task->last = group;
    return rc;
}

/* Plan one request into *ret_task. LOCAL, or the counter that says why it is Mooncake's. */
static enum tp_counter plan_request(struct plan *plan, const struct tp_request *request,
                                    struct tp_task *ret_task) {
    if (!plausible(request))
        return TP_FALLBACK_BAD_REQUEST;
    resolve(plan, request->target_id);
    if (!plan->peer) {
        if (plan->missed)
            tp_name_missed(plan->missed, request->length);
        return plan->reason;
    }
    int device;
    enum tp_counter reason = memory_reason(plan, request, &device);
    if (reason != LOCAL)
        return reason;
    void *there = NULL;
    switch (tp_peer_route(plan->peer, request->target_offset, request->length, &there,
                          &ret_task->segment)) {
    case TP_ROUTE_OK:
        break;
    case TP_ROUTE_OUT_OF_RANGE:
        return TP_FALLBACK_OUT_OF_RANGE;
    case TP_ROUTE_NOT_IMPORTED:
        return TP_FALLBACK_NOT_IMPORTED;
    }
    /* Asked after the route: a segment that was mapped meanwhile is then seen by both. */
    if (device != ON_HOST && !tp_peer_device_access(plan->peer, device, there, request->length))
        return TP_FALLBACK_NOT_IMPORTED;
    /* The copies may run in any order and direction. A process that is its own store has the memory
     * at two addresses. */
    uintptr_t source = (uintptr_t)request->source;
    if (overlap(source, (uintptr_t)there, request->length) ||
        (tp_peer_self(plan->peer) && overlap(source, request->target_offset, request->length)))
        return TP_FALLBACK_BAD_REQUEST;
    bool write = request->opcode == TP_OP_WRITE;
    int rc = add_copy(plan, request, there, device, ret_task);
    if (rc != 0)
        return device == ON_HOST || rc != -ENODEV ? TP_FALLBACK_LIMIT : TP_FALLBACK_DEVICE_MEMORY;
    ret_task->part = plan->part;
    ret_task->bytes = request->length;
    ret_task->peer = (uint8_t)tp_peer_slot(plan->peer);
    ret_task->write = write;
    plan->part->segments[ret_task->peer] |= UINT64_C(1) << ret_task->segment;
    *(write ? &plan->part->write_bytes : &plan->part->read_bytes) += request->length;
    return LOCAL;
}

/* ---- the whole submit
 * --------------------------------------------------------------------------------------------------
 */

static void plan_requests(struct plan *plan) {
    struct tp_part *part = plan->part;
    uint32_t count = (uint32_t)plan->requests->count;
    for (uint32_t i = 0; i < count; i++) {
        struct tp_request request = request_at(plan->requests, i);
        struct tp_task *task = &plan->tasks[i];
        task->seen = false;
        plan->index = i;
        enum tp_counter reason = plan_request(plan, &request, task);
        if (reason == LOCAL)
            continue;
        task->part = NULL;
        task->bytes = plan->batch->real_count + part->rest_count;
        part->rest_count++;
        plan->rest_bytes += request.length;
        plan->reasons[reason]++;
    }
    part->task_count = count;
}

static void count_forwarded(const struct plan *plan, uint64_t requests, uint64_t bytes) {
    tp_count(TP_FORWARD_REQUESTS, requests);
    tp_count(TP_FORWARD_BYTES, bytes);
    for (int i = 0; i < TP_COUNTER_COUNT; i++) {
        if (plan->reasons[i])
            tp_count((enum tp_counter)i, plan->reasons[i]);
    }
}

/* A call that is left to Mooncake before any of it was planned. */
static enum tp_plan forward_unplanned(const struct tp_requests *requests, enum tp_counter reason) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < requests->count; i++)
        bytes += request_at(requests, i).length;
    tp_count(TP_FORWARD_REQUESTS, requests->count);
    tp_count(TP_FORWARD_BYTES, bytes);
    tp_count(reason, requests->count);
    return TP_PLAN_NONE;
}

/* Copies of the rest's elements, whole: their tails are Mooncake's and differ between versions. */
static bool copy_rest(struct plan *plan) {
    struct tp_part *part = plan->part;
    size_t stride = plan->requests->stride;
    size_t need = (size_t)part->rest_count * stride;
    if (need > part->rest_room) {
        unsigned char *grown = realloc(part->rest, need);
        if (!grown)
            return false;
        part->rest = grown;
        part->rest_room = need;
    }
    unsigned char *at = part->rest;
    for (uint32_t i = 0; i < part->task_count; i++) {
        if (plan->tasks[i].part)
            continue;
        memcpy(at, (const char *)plan->requests->base + i * stride, stride);
        at += stride;
    }
    return true;
}

static void release_peers(struct tp_part *part) {
    while (part->held) {
        uint32_t slot = (uint32_t)__builtin_ctzll(part->held);
        part->held &= part->held - 1;
        tp_peer_release(tp_peer_at(slot));
    }
}

/* Under the lock: room for `count` more tasks. */
static bool reserve_tasks(struct tp_batch *batch, size_t count) {
    size_t need = batch->task_count + count;
    if (need <= batch->task_room)
        return true;
    size_t room = need < 16 ? 16 : need + need / 2;
    struct tp_task *grown = realloc(batch->tasks, room * sizeof(*grown));
    if (!grown)
        return false;
    batch->tasks = grown;
    batch->task_room = (uint32_t)room;
    return true;
}

/* The batch with a pending part and room for the tasks; NULL when this call is Mooncake's for
 * `*ret_reason`. */
static struct tp_batch *open_batch(uint64_t batch_id, size_t capacity, size_t count,
                                   enum tp_counter *ret_reason) {
    struct tp_shard *shard = tp_shard_lock(batch_id);
    struct tp_batch *batch = tp_shard_find(shard, batch_id);
    bool fresh = !batch;
    *ret_reason = TP_FALLBACK_LIMIT;
    if (fresh)
        batch = tp_shard_take(shard, batch_id);
    /* Two submits at once for one batch, or more tasks than it was made for: Mooncake knows what to
     * say. */
    if (batch && !fresh && (batch->pending || (capacity && batch->task_count + count > capacity)))
        batch = NULL;
    if (batch) {
        batch->pending = reserve_tasks(batch, count) ? tp_part_take(batch) : NULL;
        if (!batch->pending) {
            if (fresh) {
                tp_shard_drop(shard, batch);
                tp_shard_keep(shard, batch);
            }
            batch = NULL;
        }
    }
    tp_shard_unlock(shard);
    return batch;
}

/* Take the pending part back; forget a batch that has nothing here unless its calls must be
 * counted. */
static void close_pending(struct tp_batch *batch, bool count_calls) {
    struct tp_shard *shard = tp_shard_lock(batch->id);
    struct tp_part *part = batch->pending;
    batch->pending = NULL;
    tp_device_reset(&part->gpu); /* chunks of the peers' memory, while the peers are held */
    release_peers(part);
    tp_part_keep(batch, part);
    if (count_calls)
        batch->counts_calls = true;
    if (batch->task_count == 0 && !batch->counts_calls) {
        tp_shard_drop(shard, batch);
        tp_shard_keep(shard, batch);
    }
    tp_shard_unlock(shard);
}

static enum tp_plan plan_submit(struct plan *plan, bool all_or_nothing) {
    struct tp_part *part = plan->part;
    plan_requests(plan);
    uint32_t local = part->task_count - part->rest_count;
    uint64_t all_bytes = plan->rest_bytes + part->read_bytes + part->write_bytes;
    if (local > 0 && part->rest_count == 0)
        return TP_PLAN_ALL;
    if (local > 0 && all_or_nothing)
        plan->reasons[TP_FALLBACK_SCATTER_MIXED] += local;
    else if (local > 0 && !copy_rest(plan))
        plan->reasons[TP_FALLBACK_LIMIT] += local;
    else if (local > 0) {
        count_forwarded(plan, part->rest_count, plan->rest_bytes);
        tp_count(TP_MIXED_BATCHES, 1);
        return TP_PLAN_MIXED;
    }
    count_forwarded(plan, part->task_count, all_bytes);
    return TP_PLAN_NONE;
}

enum tp_plan tp_submit_begin(struct tp_engine *engine, uint64_t batch_id, size_t capacity,
                             const struct tp_requests *requests, bool all_or_nothing,
                             struct tp_submit *ret_submit) {
    size_t count = requests->count;
    if (!tp_transport_on() || !engine || count == 0 ||
        requests->stride < sizeof(struct tp_request) || requests->stride > STRIDE_LIMIT)
        return TP_PLAN_NONE;
    enum tp_counter reason = TP_FALLBACK_LIMIT;
    struct tp_batch *batch =
        count < TASK_LIMIT ? open_batch(batch_id, capacity, count, &reason) : NULL;
    if (!batch)
        return forward_unplanned(requests, reason);
    struct plan plan = {.engine = engine,
                        .requests = requests,
                        .batch = batch,
                        .part = batch->pending,
                        .tasks = batch->tasks + batch->task_count};
    plan.part->submitted_ms = tp_stall_look();
    enum tp_plan result = plan_submit(&plan, all_or_nothing);
    if (result == TP_PLAN_NONE) {
        /* When this call fills the batch, no later one can follow it whose numbers would depend on
         * it. */
        close_pending(batch, count != capacity);
        return TP_PLAN_NONE;
    }
    *ret_submit = (struct tp_submit){.batch = batch,
                                     .first_task = batch->task_count,
                                     .rest = {result == TP_PLAN_MIXED ? batch->pending->rest : NULL,
                                              requests->stride, batch->pending->rest_count}};
    return result;
}

void tp_submit_commit(struct tp_submit *submit) {
    struct tp_batch *batch = submit->batch;
    struct tp_part *part = batch->pending;
    /* Host copies of both directions may share a piece of work; Mooncake submits only one at once.
     */
    part->job.submitted_ms = part->write_bytes ? part->submitted_ms : 0;
    part->gpu.submitted_ms = part->submitted_ms;
    /* Before it can be seen: nobody asks about this submit before it has returned, so one lock is
     * enough. */
    bool done = tp_copy_start(&part->job);
    if (part->gpu.group_count)
        tp_device_start(&part->gpu);
    struct tp_shard *shard = tp_shard_lock(batch->id);
    batch->pending = NULL;
    part->next = batch->parts;
    batch->parts = part;
    batch->task_count += part->task_count;
    batch->local_count += part->task_count - part->rest_count;
    batch->real_count += part->rest_count;
    if (done)
        tp_part_decide(batch, part);
    tp_shard_unlock(shard);
}

void tp_submit_abort(struct tp_submit *submit) {
    close_pending(submit->batch, false);
}

/* A whole call's tasks get their numbers at Mooncake; batches without any here are asked about at
 * Mooncake alone. */
void tp_batch_count_call(struct tp_batch *batch, size_t count) {
    if (batch->pending || count > TASK_LIMIT || !reserve_tasks(batch, count))
        return;
    for (size_t i = 0; i < count; i++)
        batch->tasks[batch->task_count++] = (struct tp_task){.bytes = batch->real_count++};
}

/* ---- the end of the copies
 * ---------------------------------------------------------------------------------------------- */

/* Those of `segments` that the store does not publish any more. */
static uint64_t lost_segments(const struct tp_peer *peer, uint64_t segments) {
    uint64_t lost = 0;
    for (uint64_t left = segments; left; left &= left - 1) {
        if (!tp_peer_publishes(peer, (uint8_t)__builtin_ctzll(left)))
            lost |= left & -left;
    }
    return lost;
}

static void find_lost(struct tp_part *part) {
    for (uint64_t held = part->held; held; held &= held - 1) {
        uint32_t slot = (uint32_t)__builtin_ctzll(held);
        uint64_t lost = lost_segments(tp_peer_at(slot), part->segments[slot]);
        if (!lost)
            continue;
        part->lost |= held & -held;
        part->segments[slot] = lost;
    }
}

bool tp_task_failed(const struct tp_task *task) {
    const struct tp_part *part = task->part;
    bool lost = part->lost >> task->peer & 1 && part->segments[task->peer] >> task->segment & 1;
    if (task->first == TP_TASK_ON_DEVICE)
        return lost || tp_device_look(&part->gpu, task->last) == TP_DEVICE_FAILED;
    return lost || tp_copy_range_refused(&part->job, task->first, task->last);
}

static void count_bytes(struct tp_peer *peer, uint64_t read_bytes, uint64_t write_bytes) {
    if (read_bytes) {
        tp_count(TP_LOCAL_READ_BYTES, read_bytes);
        tp_peer_count(peer, false, read_bytes);
    }
    if (write_bytes) {
        tp_count(TP_LOCAL_WRITE_BYTES, write_bytes);
        tp_peer_count(peer, true, write_bytes);
    }
}

/* Each task by itself: of several stores, or when not all of them have completed. Tasks that were
 * answered as completed count as such, whatever became of their store afterwards. */
static void count_tasks(const struct tp_batch *batch, const struct tp_part *part) {
    uint64_t bytes[TP_PEERS][2] = {{0}};
    uint32_t completed = 0;
    uint32_t failed = 0;
    for (uint32_t i = 0; i < batch->task_count; i++) {
        const struct tp_task *task = &batch->tasks[i];
        if (task->part != part)
            continue;
        if (part->state == TP_PART_FAILED && !task->seen && tp_task_failed(task)) {
            failed++;
            continue;
        }
        completed++;
        bytes[task->peer][task->write] += task->bytes;
    }
    for (uint64_t held = part->held; held; held &= held - 1) {
        uint32_t slot = (uint32_t)__builtin_ctzll(held);
        count_bytes(tp_peer_at(slot), bytes[slot][false], bytes[slot][true]);
    }
    tp_count(TP_LOCAL_REQUESTS, completed);
    tp_count(TP_COPY_FAILED, failed);
}

static void count_part(const struct tp_batch *batch, const struct tp_part *part) {
    bool several = part->held & (part->held - 1);
    if (several || part->state == TP_PART_FAILED) {
        count_tasks(batch, part);
    } else {
        tp_count(TP_LOCAL_REQUESTS, part->task_count - part->rest_count);
        count_bytes(tp_peer_at((uint32_t)__builtin_ctzll(part->held)), part->read_bytes,
                    part->write_bytes);
    }
    if (part->state == TP_PART_COMPLETED)
        tp_count(TP_LOCAL_BATCHES, 1);
}

bool tp_part_done(const struct tp_part *part) {
    return tp_copy_done(&part->job) &&
           tp_device_look(&part->gpu, TP_DEVICE_GROUPS) != TP_DEVICE_RUNNING;
}

/*
 * The pages of a dead store, and those that a store has taken back, stay readable and writable, so
 * the end of the copies alone proves nothing: success is answered only if the store still published
 * the memory after the end was seen. The end is loaded first, with acquire; for a GPU's copies the
 * driver was asked before. Other segments and stores of the batch have nothing to do with it.
 */
void tp_part_decide(const struct tp_batch *batch, struct tp_part *part) {
    if (part->state != TP_PART_RUNNING || !tp_part_done(part))
        return;
    bool copied = tp_device_look(&part->gpu, TP_DEVICE_GROUPS) == TP_DEVICE_DONE &&
                  !tp_copy_refused(&part->job);
    find_lost(part);
    part->state = copied && !part->lost ? TP_PART_COMPLETED : TP_PART_FAILED;
    count_part(batch, part);
    release_peers(part);
}

#define REAP 256 /* batches a round; the peer thread comes again */

/* The peer thread's own: ids of batches whose copies nobody has seen the end of. */
static uint64_t reap_ids[REAP];
static unsigned reap_count;

static void note_running(struct tp_batch *batch) {
    for (const struct tp_part *part = batch->parts; part; part = part->next) {
        if (part->state == TP_PART_RUNNING && reap_count < REAP) {
            reap_ids[reap_count++] = batch->id;
            return;
        }
    }
}

/* Asks as a caller would, so that no lock is held over the copies and the driver. Small jobs wake
 * nobody and wait for a poll; one that never comes must not hold a dead store's memory. */
void tp_batch_reap(void) {
    struct tp_task_status status;
    reap_count = 0;
    tp_shard_visit(note_running);
    for (unsigned i = 0; i < 4 * reap_count; i++)
        (void)tp_batch_status(reap_ids[i % reap_count], &status);
}

static _Thread_local bool gathering;

void tp_gather_begin(void) {
    if (!gathering)
        tp_device_defer_begin();
    gathering = true;
}

void tp_gather_end(void) {
    if (gathering)
        tp_device_defer_end();
    gathering = false;
}
