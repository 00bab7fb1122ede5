/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: what is known of a BatchID. batch_table.c keeps the objects, batch.c plans and
 * starts, batch_status.c answers.
 *
 * | field of tp_batch          | written                                                        |
 * |----------------------------|----------------------------------------------------------------|
 * | next, id, counts, parts    | under the shard's lock                                         |
 * | tasks[0 .. task_count)     | `seen` under the lock, the rest never again                    |
 * | tasks beyond task_count    | by the thread whose submit is pending, without the lock        |
 * | pending                    | set and cleared under the lock; its contents by that thread    |
 * | users                      | under the lock                                                 |
 */
#ifndef TIDEPOOL_BATCH_H
#define TIDEPOOL_BATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/copy_device.h"
#include "transport/copy_host.h"
#include "transport/peer.h"
#include "transport/transport.h"

enum tp_part_state { TP_PART_RUNNING, TP_PART_COMPLETED, TP_PART_FAILED };

#define TP_TASK_ON_DEVICE UINT32_MAX

struct tp_task {
    struct tp_part *part; /* NULL: Mooncake's */
    uint64_t bytes;       /* Mooncake's: its number there */
    uint32_t first, last; /* grains; of a GPU's copy: TP_TASK_ON_DEVICE and its group */
    uint8_t peer;         /* slot of the store whose memory it needs */
    uint8_t segment;      /* and which segment of it */
    bool write;
    bool seen; /* was answered as completed: stays so */
};

/* One submit: what of it is copied here. */
struct tp_part {
    struct tp_part *next;
    /* Decided once, when the end of the copies is first seen. FAILED: some task has failed, those
     * of segments in `lost`, of failed groups of the GPU's job, and those whose copies were refused
     * as too late; the others have completed. */
    enum tp_part_state state;
    struct tp_copy_job job;   /* between host memory and host memory */
    struct tp_device_job gpu; /* between a GPU's memory and host memory */
    uint64_t held;            /* a bit a peer's slot: references that the copies need */
    uint64_t lost;            /* of those, stores that did not publish all of `segments` any more
                                 when the copies had ended */
    /* A bit a segment, of each store in `held`: those that the copies need. Of stores in `lost`,
     * once that is decided: those that were not published any more. Others are undefined. */
    uint64_t segments[TP_PEERS];
    uint64_t submitted_ms; /* tp_stall_look */
    uint64_t read_bytes, write_bytes;
    uint32_t task_count, rest_count; /* of the submit; rest_count of them are Mooncake's */
    unsigned char
        *rest; /* Mooncake keeps pointers to the elements it was given until the batch is freed */
    size_t rest_room;
};

struct tp_batch {
    struct tp_batch *next; /* in its bucket, or in a list of unused ones */
    uint64_t id;
    struct tp_task *tasks;
    uint32_t task_count, task_room;
    uint32_t local_count,
        real_count;          /* of task_count; real_count: also calls that went to Mooncake whole */
    struct tp_part *parts;   /* started */
    struct tp_part *pending; /* between begin and commit */
    struct tp_part *spare;   /* kept for the next use */
    uint32_t users;          /* threads that help with its copies without the lock */
    bool counts_calls;       /* known here only to keep count of calls that went to Mooncake */
};

struct tp_shard;

/* The shard of an id, locked. */
struct tp_shard *tp_shard_lock(uint64_t batch_id);
void tp_shard_unlock(struct tp_shard *shard);

/* Under the lock. take: a new entry, NULL without memory or beyond the limit. drop: out of the
 * table, not reused yet. */
struct tp_batch *tp_shard_find(struct tp_shard *shard, uint64_t batch_id);
struct tp_batch *tp_shard_take(struct tp_shard *shard, uint64_t batch_id);
void tp_shard_insert(struct tp_shard *shard, struct tp_batch *batch);
void tp_shard_drop(struct tp_shard *shard, struct tp_batch *batch);
/* Empty a dropped batch and keep it for reuse; also when threads still look at it: it then waits
 * until they are gone. */
void tp_shard_keep(struct tp_shard *shard, struct tp_batch *batch);

/* Call `visit` under the lock for each batch in the table, shard by shard. */
void tp_shard_visit(void (*visit)(struct tp_batch *batch));

/* A part for a submit: a spare one or a new one. NULL: no memory. Back: its job must be idle. */
struct tp_part *tp_part_take(struct tp_batch *batch);
void tp_part_keep(struct tp_batch *batch, struct tp_part *part);

/* Has any batch ever been here? One load, so that a process without local transfers takes no lock.
 */
bool tp_batches_used(void);

/* Have all copies of a started part ended, well or not? */
bool tp_part_done(const struct tp_part *part);

/* Under the lock: when the copies of this started part have ended, decide how, once, and let go of
 * its peers. */
void tp_part_decide(const struct tp_batch *batch, struct tp_part *part);
/* Has a task of a part that has FAILED failed itself? */
bool tp_task_failed(const struct tp_task *task);
/* Under the lock: `count` tasks of this batch were given to Mooncake in one call. */
void tp_batch_count_call(struct tp_batch *batch, size_t count);

/* Let go of peers and end copies that nobody asks about. For the peer thread, while a dead store's
 * memory is referred to. */
void tp_batch_reap(void);

#endif
