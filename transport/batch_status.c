/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers about batches: tasks, whole batches, and freeing them.
 *
 * Mooncake polls in a loop, so a poll that finds work left does a bounded part of it: on a busy
 * machine the caller is the one thread that is certain to run.
 *
 * It must not know: requests, how anything was planned.
 */
#include <errno.h>

#include "env/env.h"
#include "transport/batch.h"
#include "transport/peer.h"
#include "transport/stall.h"

/* Help with the part's copies without the lock. The batch cannot be reused meanwhile: `users`
 * counts. */
static struct tp_shard *help(struct tp_shard *shard, struct tp_batch *batch, struct tp_part *part) {
    uint64_t id = batch->id;
    batch->users++;
    tp_shard_unlock(shard);
    (void)tp_stall_look();
    if (part->gpu.group_count)
        tp_device_poll(&part->gpu);
    if (!tp_copy_done(&part->job))
        (void)tp_copy_help(&part->job);
    shard = tp_shard_lock(id);
    batch->users--;
    tp_part_decide(batch, part);
    return shard;
}

/* Under the lock. Decides when the end is seen; helps once otherwise. */
static struct tp_shard *advance(struct tp_shard *shard, struct tp_batch *batch,
                                struct tp_part *part) {
    tp_part_decide(batch, part);
    if (part->state == TP_PART_RUNNING)
        shard = help(shard, batch, part);
    return shard;
}

/* Are the bytes of this one task where they belong? */
static bool task_copied(const struct tp_task *task) {
    const struct tp_part *part = task->part;
    if (task->first == TP_TASK_ON_DEVICE)
        return tp_device_look(&part->gpu, task->last) == TP_DEVICE_DONE;
    return tp_copy_range_done(&part->job, task->first, task->last);
}

static void task_answer(struct tp_task *task, struct tp_task_status *ret_status) {
    const struct tp_part *part = task->part;
    *ret_status = (struct tp_task_status){.state = TP_TASK_WAITING};
    if (task->seen || part->state == TP_PART_COMPLETED) {
        *ret_status = (struct tp_task_status){.state = TP_TASK_COMPLETED, .bytes = task->bytes};
    } else if (part->state == TP_PART_FAILED) {
        if (tp_task_failed(task))
            ret_status->state = TP_TASK_FAILED;
        else
            *ret_status = (struct tp_task_status){.state = TP_TASK_COMPLETED, .bytes = task->bytes};
    } else if (task_copied(task) && tp_peer_publishes(tp_peer_at(task->peer), task->segment)) {
        task->seen = true;
        *ret_status = (struct tp_task_status){.state = TP_TASK_COMPLETED, .bytes = task->bytes};
    }
}

enum tp_answer tp_batch_task_status(uint64_t batch_id, uint64_t task_number,
                                    struct tp_task_status *ret_status) {
    if (!tp_batches_used() || tp_inert())
        return TP_ANSWER_UNKNOWN;
    struct tp_shard *shard = tp_shard_lock(batch_id);
    struct tp_batch *batch = tp_shard_find(shard, batch_id);
    enum tp_answer answer = TP_ANSWER_LOCAL;
    if (!batch || batch->local_count == 0)
        answer = TP_ANSWER_UNKNOWN;
    else if (task_number >= batch->task_count)
        answer = TP_ANSWER_RANGE;
    if (answer != TP_ANSWER_LOCAL) {
        tp_shard_unlock(shard);
        return answer;
    }
    struct tp_part *part = batch->tasks[task_number].part;
    if (!part) {
        *ret_status = (struct tp_task_status){.real_task = batch->tasks[task_number].bytes};
        answer = TP_ANSWER_REAL;
    } else {
        shard = advance(shard, batch, part);
        task_answer(&batch->tasks[task_number], ret_status);
    }
    tp_shard_unlock(shard);
    return answer;
}

/* Mooncake's rule: failed once one task has failed, completed when all are, waiting otherwise. */
static void batch_answer(const struct tp_batch *batch, struct tp_task_status *ret_status) {
    *ret_status = (struct tp_task_status){.state = TP_TASK_COMPLETED};
    for (const struct tp_part *part = batch->parts; part; part = part->next) {
        if (part->state == TP_PART_FAILED) {
            *ret_status = (struct tp_task_status){.state = TP_TASK_FAILED};
            return;
        }
        if (part->state == TP_PART_RUNNING)
            ret_status->state = TP_TASK_WAITING;
        ret_status->bytes += part->read_bytes + part->write_bytes;
    }
    if (ret_status->state != TP_TASK_COMPLETED)
        ret_status->bytes = 0;
}

enum tp_answer tp_batch_status(uint64_t batch_id, struct tp_task_status *ret_status) {
    if (!tp_batches_used() || tp_inert())
        return TP_ANSWER_UNKNOWN;
    struct tp_shard *shard = tp_shard_lock(batch_id);
    struct tp_batch *batch = tp_shard_find(shard, batch_id);
    enum tp_answer answer = TP_ANSWER_UNKNOWN;
    if (batch && batch->local_count > 0) {
        bool helped = false;
        for (struct tp_part *part = batch->parts; part && !helped; part = part->next) {
            helped = part->state == TP_PART_RUNNING && !tp_part_done(part);
            shard = advance(shard, batch, part);
        }
        batch_answer(batch, ret_status);
        answer = batch->real_count > 0 ? TP_ANSWER_REAL : TP_ANSWER_LOCAL;
    }
    tp_shard_unlock(shard);
    return answer;
}

void tp_batch_forwarded(uint64_t batch_id, size_t count) {
    if (!tp_batches_used() || tp_inert())
        return;
    struct tp_shard *shard = tp_shard_lock(batch_id);
    struct tp_batch *batch = tp_shard_find(shard, batch_id);
    if (batch)
        tp_batch_count_call(batch, count);
    tp_shard_unlock(shard);
}

int tp_batch_detach(uint64_t batch_id, struct tp_batch **ret_batch) {
    if (!tp_batches_used() || tp_inert())
        return -ENOENT;
    int result = -ENOENT;
    struct tp_shard *shard = tp_shard_lock(batch_id);
    struct tp_batch *batch = tp_shard_find(shard, batch_id);
    if (batch) {
        result = batch->pending ? -EBUSY : 0;
        for (struct tp_part *part = batch->parts; part && result == 0; part = part->next) {
            tp_part_decide(batch, part);
            if (part->state == TP_PART_RUNNING)
                result = -EBUSY;
        }
        if (result == 0) {
            tp_shard_drop(shard, batch);
            *ret_batch = batch;
        }
    }
    tp_shard_unlock(shard);
    return result;
}

void tp_batch_recycle(struct tp_batch *batch) {
    if (!batch || tp_inert())
        return;
    struct tp_shard *shard = tp_shard_lock(batch->id);
    tp_shard_keep(shard, batch);
    tp_shard_unlock(shard);
}

void tp_batch_reattach(uint64_t batch_id, struct tp_batch *batch) {
    if (!batch || tp_inert())
        return;
    struct tp_shard *shard = tp_shard_lock(batch_id);
    tp_shard_insert(shard, batch);
    tp_shard_unlock(shard);
}
