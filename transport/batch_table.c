/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of batches: shards with a lock each, so that threads with different batches do not
 * meet, and lists of unused objects that keep their arrays, so that a batch costs no allocation
 * once as many were live at one time.
 *
 * It must not know: requests, peers, how a batch is answered.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "transport/batch.h"

#define SHARDS 64
#define SHARD_BUCKETS 64
#define SHARD_BATCHES 16384 /* live at once: about a million in all shards */
#define KEEP_UNUSED 256     /* objects that a shard keeps */
#define KEEP_TASKS 65536    /* arrays larger than this are not kept */
#define KEEP_REST ((size_t)4 << 20)

struct tp_shard {
    _Alignas(64) pthread_mutex_t lock;
    uint32_t live, unused_count;
    struct tp_batch *unused;
    struct tp_batch *resting; /* emptied by their owner, but a thread still looks at a job */
    struct tp_batch *buckets[SHARD_BUCKETS];
};

static struct tp_shard shards[SHARDS] = {
    [0 ... SHARDS - 1] = {.lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP}};
static _Atomic bool batches_used;

/* Ids are addresses of heap objects: the low bits say little. */
static uint64_t mix(uint64_t id) {
    id = (id ^ (id >> 31)) * UINT64_C(0x9e3779b97f4a7c15);
    return id ^ (id >> 29);
}

struct tp_shard *tp_shard_lock(uint64_t batch_id) {
    struct tp_shard *shard = &shards[mix(batch_id) % SHARDS];
    pthread_mutex_lock(&shard->lock);
    return shard;
}

void tp_shard_unlock(struct tp_shard *shard) {
    pthread_mutex_unlock(&shard->lock);
}

static struct tp_batch **bucket_of(struct tp_shard *shard, uint64_t batch_id) {
    return &shard->buckets[mix(batch_id) / SHARDS % SHARD_BUCKETS];
}

struct tp_batch *tp_shard_find(struct tp_shard *shard, uint64_t batch_id) {
    struct tp_batch *batch = *bucket_of(shard, batch_id);
    while (batch && batch->id != batch_id)
        batch = batch->next;
    return batch;
}

void tp_shard_insert(struct tp_shard *shard, struct tp_batch *batch) {
    struct tp_batch **bucket = bucket_of(shard, batch->id);
    batch->next = *bucket;
    *bucket = batch;
    shard->live++;
}

void tp_shard_drop(struct tp_shard *shard, struct tp_batch *batch) {
    struct tp_batch **link = bucket_of(shard, batch->id);
    while (*link && *link != batch)
        link = &(*link)->next;
    if (!*link)
        return;
    *link = batch->next;
    batch->next = NULL;
    shard->live--;
}

static bool batch_idle(const struct tp_batch *batch) {
    if (batch->users)
        return false;
    for (const struct tp_part *part = batch->parts; part; part = part->next) {
        if (!tp_copy_idle(&part->job) ||
            tp_device_look(&part->gpu, TP_DEVICE_GROUPS) == TP_DEVICE_RUNNING)
            return false;
    }
    return true;
}

static void part_free(struct tp_part *part) {
    tp_copy_release(&part->job);
    tp_device_release(&part->gpu);
    free(part->rest);
    free(part);
}

/* The arrays of an idle part go with it into the next use, unless they are out of the ordinary. */
void tp_part_keep(struct tp_batch *batch, struct tp_part *part) {
    tp_device_reset(&part->gpu);
    if (part->job.op_room > KEEP_TASKS)
        tp_copy_release(&part->job);
    else
        tp_copy_reset(&part->job);
    if (part->rest_room > KEEP_REST) {
        free(part->rest);
        part->rest = NULL;
        part->rest_room = 0;
    }
    if (batch->spare) { /* one is enough: callers submit once a batch */
        part_free(part);
        return;
    }
    part->next = NULL;
    batch->spare = part;
}

static void batch_free(struct tp_batch *batch) {
    if (batch->spare)
        part_free(batch->spare);
    free(batch->tasks);
    free(batch);
}

/* Empty an idle batch. */
static void batch_reset(struct tp_batch *batch) {
    while (batch->parts) {
        struct tp_part *part = batch->parts;
        batch->parts = part->next;
        tp_part_keep(batch, part);
    }
    if (batch->task_room > KEEP_TASKS) {
        free(batch->tasks);
        batch->tasks = NULL;
        batch->task_room = 0;
    }
    batch->task_count = 0;
    batch->local_count = 0;
    batch->real_count = 0;
    batch->counts_calls = false;
}

static void keep_idle(struct tp_shard *shard, struct tp_batch *batch) {
    batch_reset(batch);
    if (shard->unused_count >= KEEP_UNUSED) {
        batch_free(batch);
        return;
    }
    batch->next = shard->unused;
    shard->unused = batch;
    shard->unused_count++;
}

void tp_shard_keep(struct tp_shard *shard, struct tp_batch *batch) {
    if (batch_idle(batch)) {
        keep_idle(shard, batch);
        return;
    }
    batch->next = shard->resting;
    shard->resting = batch;
}

static void collect_resting(struct tp_shard *shard) {
    struct tp_batch **link = &shard->resting;
    while (*link) {
        struct tp_batch *batch = *link;
        if (batch_idle(batch)) {
            *link = batch->next;
            keep_idle(shard, batch);
        } else {
            link = &batch->next;
        }
    }
}

struct tp_batch *tp_shard_take(struct tp_shard *shard, uint64_t batch_id) {
    atomic_store_explicit(&batches_used, true, memory_order_relaxed);
    if (shard->live >= SHARD_BATCHES)
        return NULL;
    if (shard->resting)
        collect_resting(shard);
    struct tp_batch *batch = shard->unused;
    if (batch) {
        shard->unused = batch->next;
        shard->unused_count--;
    } else {
        batch = calloc(1, sizeof(*batch));
        if (!batch)
            return NULL;
    }
    batch->id = batch_id;
    tp_shard_insert(shard, batch);
    return batch;
}

struct tp_part *tp_part_take(struct tp_batch *batch) {
    struct tp_part *part = batch->spare;
    batch->spare = NULL;
    if (!part) {
        part = calloc(1, sizeof(*part));
        if (!part)
            return NULL;
        tp_copy_init(&part->job);
    }
    part->next = NULL;
    part->state = TP_PART_RUNNING;
    part->held = 0;
    part->lost = 0;
    part->read_bytes = 0;
    part->write_bytes = 0;
    part->task_count = 0;
    part->rest_count = 0;
    return part;
}

bool tp_batches_used(void) {
    return atomic_load_explicit(&batches_used, memory_order_relaxed);
}

void tp_shard_visit(void (*visit)(struct tp_batch *batch)) {
    for (unsigned i = 0; i < SHARDS; i++) {
        pthread_mutex_lock(&shards[i].lock);
        for (unsigned j = 0; j < SHARD_BUCKETS; j++) {
            for (struct tp_batch *batch = shards[i].buckets[j]; batch; batch = batch->next)
                visit(batch);
        }
        pthread_mutex_unlock(&shards[i].lock);
    }
}
