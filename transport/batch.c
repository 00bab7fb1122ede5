/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What we know of a BatchID: which of its tasks are copied here, which are Mooncake's, and how far the copies are.
 *
 * A batch is made by its first submit that has something local, and lives until freeBatchID. Each submit is a part: its own copy job,
 * the peers that it copies from or to (references held until the part is decided), and a run of tasks. A part is decided once,
 * by whoever first sees its copies ended: completed for the peers that are alive then, failed for the others. Shared pages stay
 * readable after their store has died, so success must be refused explicitly.
 *
 * The table is sharded by id; a shard's lock covers its chains and its free list only, never a copy, a route or a log line.
 *
 * It must not know: how bytes are copied, how a name becomes an address.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/batch.h"
#include "transport/copy_host.h"
#include "transport/engine.h"
#include "transport/names.h"
#include "transport/peer.h"
#include "transport/ranges.h"
#include "transport/transport.h"

#define SHARDS 64
#define BUCKETS 128
#define KEPT 128         /* free batches a shard keeps with their arrays; more are freed */
#define PART_PEERS 4     /* stores in one submit; requests to further ones are left to Mooncake */
#define MIN_TASKS 8
#define NOT_LOCAL UINT8_MAX

struct task {
    uint64_t bytes; /* local: its length */
    uint64_t real;  /* not local: its number at Mooncake */
    uint32_t first_grain, last_grain;
    uint8_t peer;   /* index in the part's peers, NOT_LOCAL for Mooncake's */
    atomic_uchar seen_done;
};

struct part {
    struct part *next;
    struct tp_copy_job job;
    struct task *tasks;
    uint32_t task_count, task_room, first_task;
    uint32_t local_count;
    uint64_t local_bytes;
    struct tp_peer *peers[PART_PEERS];
    struct tp_name *names[PART_PEERS];
    uint64_t peer_written[PART_PEERS], peer_read[PART_PEERS];
    uint32_t peer_count;
    _Atomic uint32_t decided; /* 0: not yet; else 1 + a bit for each peer that failed, from bit 1 on */
    char *rest;               /* elements given to Mooncake, which keeps pointers to them */
    size_t rest_bytes, rest_room;
    uint32_t rest_count;
};

struct tp_batch {
    struct tp_batch *next; /* in a bucket or the free list */
    uint64_t id;
    struct part first;   /* nearly every batch has one submit */
    struct part *last;
    uint32_t task_count; /* of all parts */
    uint64_t real_count; /* of them Mooncake's */
    bool fresh;          /* not in the table yet: the submit that made it is under way */
};

struct shard {
    _Alignas(64) pthread_mutex_t lock;
    struct tp_batch *buckets[BUCKETS];
    struct tp_batch *free_list;
    uint32_t kept;
};

static struct shard shards[SHARDS] = {[0 ... SHARDS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

/* ---- the table --------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t id) {
    return (id >> 4) * UINT64_C(0x9e3779b97f4a7c15); /* ids are malloc addresses: 16 apart */
}

static struct shard *shard_of(uint64_t id) {
    return &shards[mix(id) >> 58];
}

static struct tp_batch **bucket_of(struct shard *shard, uint64_t id) {
    return &shard->buckets[(mix(id) >> 32) % BUCKETS];
}

static struct tp_batch *table_find(uint64_t id) {
    struct shard *shard = shard_of(id);
    pthread_mutex_lock(&shard->lock);
    struct tp_batch *batch = *bucket_of(shard, id);
    while (batch && batch->id != id)
        batch = batch->next;
    pthread_mutex_unlock(&shard->lock);
    return batch;
}

static void table_add(struct tp_batch *batch) {
    struct shard *shard = shard_of(batch->id);
    pthread_mutex_lock(&shard->lock);
    struct tp_batch **bucket = bucket_of(shard, batch->id);
    batch->next = *bucket;
    *bucket = batch;
    pthread_mutex_unlock(&shard->lock);
}

static void table_remove(struct tp_batch *batch) {
    struct shard *shard = shard_of(batch->id);
    pthread_mutex_lock(&shard->lock);
    struct tp_batch **at = bucket_of(shard, batch->id);
    while (*at && *at != batch)
        at = &(*at)->next;
    if (*at)
        *at = batch->next;
    pthread_mutex_unlock(&shard->lock);
}

/* ---- parts and batches as objects ---------------------------------------------------------------------------------- */

static void part_reset(struct part *part) {
    tp_copy_reset(&part->job);
    part->next = NULL;
    part->task_count = part->first_task = part->local_count = part->rest_count = part->peer_count = 0;
    part->local_bytes = 0;
    part->rest_bytes = 0;
    atomic_store_explicit(&part->decided, 0, memory_order_relaxed);
}

static void part_release(struct part *part) {
    tp_copy_release(&part->job);
    free(part->tasks);
    free(part->rest);
}

static bool batch_idle(const struct tp_batch *batch) {
    for (const struct part *part = &batch->first; part; part = part->next) {
        if (!tp_copy_idle(&part->job))
            return false;
    }
    return true;
}

static void drop_further_parts(struct tp_batch *batch) {
    struct part *part = batch->first.next;
    while (part) {
        struct part *next = part->next;
        part_release(part);
        free(part);
        part = next;
    }
    batch->first.next = NULL;
}

/* A batch of the free list whose copy job nobody looks at any more, or a new one. */
static struct tp_batch *batch_take(uint64_t id) {
    struct shard *shard = shard_of(id);
    pthread_mutex_lock(&shard->lock);
    struct tp_batch **at = &shard->free_list;
    while (*at && !batch_idle(*at)) /* nearly always the first */
        at = &(*at)->next;
    struct tp_batch *batch = *at;
    if (batch) {
        *at = batch->next;
        shard->kept--;
    }
    pthread_mutex_unlock(&shard->lock);
    if (!batch) {
        batch = calloc(1, sizeof(*batch));
        if (!batch)
            return NULL;
        tp_copy_init(&batch->first.job);
    }
    drop_further_parts(batch);
    part_reset(&batch->first);
    batch->id = id;
    batch->last = &batch->first;
    batch->task_count = 0;
    batch->real_count = 0;
    batch->fresh = true;
    return batch;
}

/* Back to the free list; one that a pool thread still looks at waits there as well. */
static void batch_put(struct tp_batch *batch) {
    struct shard *shard = shard_of(batch->id);
    bool keep = true;
    pthread_mutex_lock(&shard->lock);
    keep = shard->kept < KEPT || !batch_idle(batch);
    if (keep) {
        batch->next = shard->free_list;
        shard->free_list = batch;
        shard->kept++;
    }
    pthread_mutex_unlock(&shard->lock);
    if (!keep) {
        drop_further_parts(batch);
        part_release(&batch->first);
        free(batch);
    }
}

/* ---- planning a submit --------------------------------------------------------------------------------------------- */

struct plan {
    struct tp_engine *engine;
    const struct tp_requests *requests;
    struct part *part;
    struct tp_range_hint hint;
    uint64_t last_target;  /* the handle routed last, */
    uint32_t last_peer;    /* and the index of its peer; NOT_LOCAL with the reason below */
    enum tp_counter last_reason;
    bool any_target;
    uint64_t reasons[TP_COUNTER_COUNT];
};

static void read_request(const struct tp_requests *requests, size_t index, struct tp_request *ret) {
    memcpy(ret, (const char *)requests->base + index * requests->stride, sizeof(*ret));
}

static int tasks_reserve(struct part *part, size_t count) {
    if (count > UINT32_MAX / 2)
        return -E2BIG;
    if (count <= part->task_room)
        return 0;
    uint32_t room = part->task_room < MIN_TASKS ? MIN_TASKS : part->task_room;
    while (room < count)
        room *= 2;
    struct task *tasks = reallocarray(part->tasks, room, sizeof(*tasks));
    if (!tasks)
        return -ENOMEM;
    part->tasks = tasks;
    part->task_room = room;
    return 0;
}

/* The index of the peer that `target` stands for, holding a reference on its first use; NOT_LOCAL and why otherwise. */
static uint32_t plan_peer(struct plan *plan, uint64_t target, enum tp_counter *ret_reason) {
    struct part *part = plan->part;
    bool gone = false;
    struct tp_name *name = tp_engine_name(plan->engine, target);
    if (!name) {
        *ret_reason = TP_FALLBACK_NO_PEER;
        return NOT_LOCAL;
    }
    for (uint32_t i = 0; i < part->peer_count; i++) {
        if (part->names[i] == name)
            return i;
    }
    if (part->peer_count == PART_PEERS) {
        *ret_reason = TP_FALLBACK_LIMIT;
        return NOT_LOCAL;
    }
    struct tp_peer *peer = tp_route_peer(name, &gone);
    if (!peer) {
        *ret_reason = gone ? TP_FALLBACK_PEER_GONE : TP_FALLBACK_NO_PEER;
        return NOT_LOCAL;
    }
    uint32_t index = part->peer_count++;
    part->peers[index] = peer;
    part->names[index] = name;
    part->peer_written[index] = 0;
    part->peer_read[index] = 0;
    return index;
}

static bool plausible(const struct tp_request *request) {
    uintptr_t source = (uintptr_t)request->source;
    return (request->opcode == TP_OP_READ || request->opcode == TP_OP_WRITE) && source != 0 && request->length != 0 &&
           source + request->length > source && request->target_offset + request->length > request->target_offset;
}

/* Where the request's bytes are here; NULL and why when it is for Mooncake. */
static char *plan_route(struct plan *plan, const struct tp_request *request, uint32_t *ret_peer, enum tp_counter *ret_reason) {
    void *address = NULL;
    if (!plausible(request)) {
        *ret_reason = TP_FALLBACK_BAD_REQUEST;
        return NULL;
    }
    if (!plan->any_target || plan->last_target != request->target_id) {
        plan->last_peer = plan_peer(plan, request->target_id, &plan->last_reason);
        plan->last_target = request->target_id;
        plan->any_target = true;
    }
    *ret_peer = plan->last_peer;
    if (plan->last_peer == NOT_LOCAL) {
        *ret_reason = plan->last_reason;
        return NULL;
    }
    switch (tp_peer_route(plan->part->peers[plan->last_peer], request->target_offset, request->length, &address)) {
    case TP_ROUTE_OK:
        break;
    case TP_ROUTE_OUT_OF_RANGE:
        *ret_reason = TP_FALLBACK_OUT_OF_RANGE;
        return NULL;
    case TP_ROUTE_NOT_IMPORTED:
        *ret_reason = TP_FALLBACK_NOT_IMPORTED;
        return NULL;
    }
    if (tp_range_memory(request->source, request->length, &plan->hint) != TP_MEMORY_HOST) {
        *ret_reason = TP_FALLBACK_DEVICE_MEMORY;
        return NULL;
    }
    return address;
}

static bool overlap(const char *a, const char *b, uint64_t bytes) {
    return a < b + bytes && b < a + bytes;
}

/* Plan request `index` as task `index` of the part. */
static void plan_request(struct plan *plan, size_t index) {
    struct part *part = plan->part;
    struct task *task = &part->tasks[index];
    struct tp_request request;
    enum tp_counter reason = TP_FALLBACK_LIMIT;
    uint32_t peer = NOT_LOCAL;

    read_request(plan->requests, index, &request);
    char *there = plan_route(plan, &request, &peer, &reason);
    char *here = request.source;
    bool write = request.opcode == TP_OP_WRITE;
    if (there && overlap(there, here, request.length)) {
        there = NULL;
        reason = TP_FALLBACK_BAD_REQUEST;
    }
    task->bytes = request.length;
    task->peer = NOT_LOCAL;
    atomic_store_explicit(&task->seen_done, 0, memory_order_relaxed);
    if (!there || tp_copy_add(&part->job, write ? there : here, write ? here : there, request.length, &task->first_grain,
                              &task->last_grain) != 0) {
        plan->reasons[reason]++;
        part->rest_bytes += request.length;
        part->rest_count++;
        return;
    }
    task->peer = (uint8_t)peer;
    part->local_count++;
    part->local_bytes += request.length;
    *(write ? &part->peer_written[peer] : &part->peer_read[peer]) += request.length;
}

/* Copy the elements that are Mooncake's, whole, into memory that lives as long as the batch. */
static int collect_rest(struct plan *plan, struct tp_submit *submit) {
    struct part *part = plan->part;
    size_t stride = plan->requests->stride;
    size_t need = part->rest_count * stride;
    if (need > part->rest_room) {
        char *rest = realloc(part->rest, need);
        if (!rest)
            return -ENOMEM;
        part->rest = rest;
        part->rest_room = need;
    }
    char *at = part->rest;
    for (size_t i = 0; i < part->task_count; i++) {
        if (part->tasks[i].peer == NOT_LOCAL) {
            memcpy(at, (const char *)plan->requests->base + i * stride, stride);
            at += stride;
        }
    }
    submit->rest = (struct tp_requests){.base = part->rest, .stride = stride, .count = part->rest_count};
    return 0;
}

static void release_peers(struct part *part) {
    for (uint32_t i = 0; i < part->peer_count; i++)
        tp_peer_release(part->peers[i]);
    part->peer_count = 0;
}

static void count_forwarded(const struct plan *plan, uint64_t requests, uint64_t bytes) {
    for (int i = TP_FALLBACK_NO_PEER; i <= TP_FALLBACK_LIMIT; i++) {
        if (plan->reasons[i])
            tp_count((enum tp_counter)i, plan->reasons[i]);
    }
    tp_count(TP_FORWARD_REQUESTS, requests);
    tp_count(TP_FORWARD_BYTES, bytes);
}

/* The part for this submit: the first of a fresh batch, or a further one. */
static struct part *part_for(struct tp_batch *batch) {
    if (batch->fresh)
        return &batch->first;
    struct part *part = calloc(1, sizeof(*part));
    if (part)
        tp_copy_init(&part->job);
    return part;
}

static void drop_submit(struct tp_batch *batch, struct part *part) {
    release_peers(part);
    if (batch->fresh) {
        batch_put(batch);
    } else {
        part_release(part);
        free(part);
    }
}

enum tp_plan tp_submit_begin(struct tp_engine *engine, uint64_t batch_id, size_t capacity, const struct tp_requests *requests,
                             bool all_or_nothing, struct tp_submit *ret_submit) {
    struct plan plan = {.engine = engine, .requests = requests};
    struct tp_batch *batch = table_find(batch_id);
    size_t before = batch ? batch->task_count : 0;
    /*
     * A batch whose earlier tasks went to Mooncake is unknown here, and their number with it: only a submit that fills the
     * whole batch is known to be its first. Every caller of Mooncake does that (MOONCAKE-ABI.md section 2).
     */
    bool first = batch || all_or_nothing || capacity == requests->count;
    if (first && !(batch && capacity && before + requests->count > capacity) && !batch)
        batch = batch_take(batch_id);
    else if (!first || (capacity && before + requests->count > capacity))
        batch = NULL;
    plan.part = batch ? part_for(batch) : NULL;
    if (!plan.part || tasks_reserve(plan.part, requests->count) != 0) {
        if (plan.part)
            drop_submit(batch, plan.part);
        tp_count(TP_FALLBACK_LIMIT, requests->count);
        tp_count(TP_FORWARD_REQUESTS, requests->count);
        return TP_PLAN_NONE;
    }
    struct part *part = plan.part;
    part->task_count = (uint32_t)requests->count;
    part->first_task = batch->task_count;
    for (size_t i = 0; i < requests->count; i++)
        plan_request(&plan, i);

    ret_submit->batch = batch;
    ret_submit->first_task = part->first_task;
    ret_submit->part = part;
    ret_submit->rest = (struct tp_requests){0};
    bool mixed = part->local_count < requests->count;
    if (mixed && all_or_nothing && part->local_count)
        plan.reasons[TP_FALLBACK_SCATTER_MIXED] += part->local_count;
    if (part->local_count == 0 || (mixed && (all_or_nothing || collect_rest(&plan, ret_submit) != 0))) {
        count_forwarded(&plan, requests->count, part->rest_bytes + part->local_bytes);
        drop_submit(batch, part);
        return TP_PLAN_NONE;
    }
    if (mixed) {
        count_forwarded(&plan, part->rest_count, part->rest_bytes);
        tp_count(TP_MIXED_BATCHES, 1);
    }
    return mixed ? TP_PLAN_MIXED : TP_PLAN_ALL;
}

static void number_real_tasks(struct tp_batch *batch, struct part *part) {
    if (part->rest_count == 0)
        return;
    for (uint32_t i = 0; i < part->task_count; i++) {
        if (part->tasks[i].peer == NOT_LOCAL)
            part->tasks[i].real = batch->real_count++;
    }
}

static void count_local(struct part *part) {
    uint64_t written = 0;
    uint64_t read = 0;
    for (uint32_t i = 0; i < part->peer_count; i++) {
        written += part->peer_written[i];
        read += part->peer_read[i];
        if (part->peer_written[i])
            tp_peer_count(part->peers[i], true, part->peer_written[i]);
        if (part->peer_read[i])
            tp_peer_count(part->peers[i], false, part->peer_read[i]);
    }
    if (written)
        tp_count(TP_LOCAL_WRITE_BYTES, written);
    if (read)
        tp_count(TP_LOCAL_READ_BYTES, read);
    tp_count(TP_LOCAL_REQUESTS, part->local_count);
    tp_count(TP_LOCAL_BATCHES, 1);
}

void tp_submit_commit(struct tp_submit *submit) {
    struct tp_batch *batch = submit->batch;
    struct part *part = submit->part;
    number_real_tasks(batch, part);
    count_local(part);
    batch->task_count += part->task_count;
    if (batch->fresh) {
        batch->fresh = false;
        table_add(batch);
    } else {
        batch->last->next = part;
        batch->last = part;
    }
    if (tp_copy_start(&part->job))
        tp_count(TP_INLINE_COPIES, 1);
}

void tp_submit_abort(struct tp_submit *submit) {
    drop_submit(submit->batch, submit->part);
}

void tp_batch_forwarded(uint64_t batch_id, size_t count) {
    struct tp_batch *batch = tp_inert() ? NULL : table_find(batch_id);
    if (!batch)
        return;
    struct part *part = calloc(1, sizeof(*part));
    if (part && tasks_reserve(part, count) != 0) {
        free(part);
        part = NULL;
    }
    if (!part)
        return; /* the numbering ends here: tasks beyond it are answered as out of range, never wrongly */
    tp_copy_init(&part->job);
    part->first_task = batch->task_count;
    part->task_count = part->rest_count = (uint32_t)count;
    for (uint32_t i = 0; i < count; i++) {
        part->tasks[i] = (struct task){.peer = NOT_LOCAL};
        part->tasks[i].real = batch->real_count++;
    }
    atomic_store(&part->decided, 1);
    batch->task_count += part->task_count;
    batch->last->next = part;
    batch->last = part;
}

/* ---- status ---------------------------------------------------------------------------------------------------------- */

/* Which peers are gone, as bits from 1 on. */
static uint32_t dead_peers(const struct part *part) {
    uint32_t dead = 0;
    for (uint32_t i = 0; i < part->peer_count; i++) {
        if (!tp_peer_alive(part->peers[i]))
            dead |= UINT32_C(2) << i;
    }
    return dead;
}

/* The copies of this part have ended: settle for good what became of them. The first who comes decides and lets the peers go. */
static uint32_t decide(struct part *part) {
    uint32_t decided = atomic_load_explicit(&part->decided, memory_order_acquire);
    if (decided)
        return decided;
    uint32_t dead = dead_peers(part);
    if (!atomic_compare_exchange_strong(&part->decided, &decided, 1 | dead))
        return decided;
    if (dead) {
        for (uint32_t i = 0; i < part->task_count; i++) {
            if (part->tasks[i].peer != NOT_LOCAL && dead & UINT32_C(2) << part->tasks[i].peer)
                tp_count(TP_COPY_FAILED, 1);
        }
    }
    release_peers(part);
    return 1 | dead;
}

/* 0 while copies are under way, after having done a bounded part of them here. */
static uint32_t settle(struct part *part) {
    uint32_t decided = atomic_load_explicit(&part->decided, memory_order_acquire);
    if (decided)
        return decided;
    if (!tp_copy_done(&part->job))
        (void)tp_copy_help(&part->job);
    return tp_copy_done(&part->job) ? decide(part) : 0;
}

static struct part *part_of(struct tp_batch *batch, uint64_t task) {
    for (struct part *part = &batch->first; part; part = part->next) {
        if (task >= part->first_task && task - part->first_task < part->task_count)
            return part;
    }
    return NULL;
}

/* The state of a local task whose part is undecided: done as soon as its own bytes are, if its store is there to vouch for it. */
static bool task_done_early(struct part *part, struct task *task) {
    if (atomic_load_explicit(&task->seen_done, memory_order_relaxed))
        return true;
    if (!tp_copy_range_done(&part->job, task->first_grain, task->last_grain) || !tp_peer_alive(part->peers[task->peer]))
        return false;
    atomic_store_explicit(&task->seen_done, 1, memory_order_relaxed);
    return true;
}

enum tp_answer tp_batch_task_status(uint64_t batch_id, uint64_t number, struct tp_task_status *ret_status) {
    struct tp_batch *batch = tp_inert() ? NULL : table_find(batch_id);
    if (!batch)
        return TP_ANSWER_UNKNOWN;
    struct part *part = part_of(batch, number);
    if (!part)
        return TP_ANSWER_RANGE;
    struct task *task = &part->tasks[number - part->first_task];
    if (task->peer == NOT_LOCAL) {
        (void)settle(part); /* a caller that waits for Mooncake's part moves ours on */
        ret_status->real_task = task->real;
        return TP_ANSWER_REAL;
    }
    uint32_t decided = settle(part);
    bool failed = decided & UINT32_C(2) << task->peer && !atomic_load_explicit(&task->seen_done, memory_order_relaxed);
    bool done = decided || task_done_early(part, task);
    ret_status->state = failed ? TP_TASK_FAILED : done ? TP_TASK_COMPLETED : TP_TASK_WAITING;
    ret_status->bytes = done && !failed ? task->bytes : 0;
    return TP_ANSWER_LOCAL;
}

enum tp_answer tp_batch_status(uint64_t batch_id, struct tp_task_status *ret_status) {
    struct tp_batch *batch = tp_inert() ? NULL : table_find(batch_id);
    if (!batch)
        return TP_ANSWER_UNKNOWN;
    enum tp_task_state state = TP_TASK_COMPLETED;
    uint64_t bytes = 0;
    for (struct part *part = &batch->first; part; part = part->next) {
        uint32_t decided = settle(part);
        if (decided > 1)
            state = TP_TASK_FAILED;
        else if (!decided && state != TP_TASK_FAILED)
            state = TP_TASK_WAITING;
        bytes += part->local_bytes;
    }
    ret_status->state = state;
    ret_status->bytes = state == TP_TASK_COMPLETED ? bytes : 0;
    ret_status->real_task = 0;
    return batch->real_count ? TP_ANSWER_REAL : TP_ANSWER_LOCAL;
}

/* ---- free ------------------------------------------------------------------------------------------------------------ */

int tp_batch_detach(uint64_t batch_id, struct tp_batch **ret_batch) {
    struct tp_batch *batch = tp_inert() ? NULL : table_find(batch_id);
    if (!batch)
        return -ENOENT;
    for (struct part *part = &batch->first; part; part = part->next) {
        if (!settle(part))
            return -EBUSY;
    }
    table_remove(batch);
    *ret_batch = batch;
    return 0;
}

void tp_batch_recycle(struct tp_batch *batch) {
    batch_put(batch);
}

void tp_batch_reattach(uint64_t batch_id, struct tp_batch *batch) {
    batch->id = batch_id;
    table_add(batch);
}

/* Copies that have ended and that nobody asks about must not hold a dead store's memory. */
void tp_batch_reap(void) {
    for (unsigned s = 0; s < SHARDS; s++) {
        pthread_mutex_lock(&shards[s].lock);
        for (unsigned b = 0; b < BUCKETS; b++) {
            for (struct tp_batch *batch = shards[s].buckets[b]; batch; batch = batch->next) {
                for (struct part *part = &batch->first; part; part = part->next) {
                    if (part->peer_count && dead_peers(part) && tp_copy_done(&part->job))
                        (void)decide(part);
                }
            }
        }
        pthread_mutex_unlock(&shards[s].lock);
    }
}
