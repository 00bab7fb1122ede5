/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: copies between a GPU and host memory that CUDA does not know, by way of a few
 * pinned slots that threads of the library fill or empty while the GPU copies others.
 *
 * The driver copies such memory at 8 to 15 GB/s by itself, with one thread; registering it for one
 * use costs more than copying it (chunk.h).
 *
 * It must not know: chunks, peers, batches, what memory is registered, waves.
 */
#ifndef TIDEPOOL_STAGING_H
#define TIDEPOOL_STAGING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tp_gpu;
struct tp_stage_op;
struct tp_stage_piece;
struct tp_stage;

/*
 * Copies of one direction of one GPU. The owner keeps it, its host memory and the GPU's until
 * tp_stage_look no longer says RUNNING, and then may use it again. All zero: empty, no arrays.
 *
 * | field                | written                                           |
 * |----------------------|---------------------------------------------------|
 * | arrays, counts       | by the owner, before tp_stage_start               |
 * | stage                | by tp_stage_start                                 |
 * | left, failed         | by whoever ends a piece; `left` last of all       |
 */
struct tp_stage_job {
    struct tp_stage_op *ops;
    struct tp_stage_piece *pieces; /* what a slot takes as a whole */
    uint32_t op_count, op_room, piece_count, piece_room;
    uint64_t bytes;
    uint64_t submitted_ms;  /* of a write: it does not reach the host's memory late; 0: a read */
    struct tp_stage *stage; /* NULL: not started */
    _Atomic uint32_t left;  /* pieces that have not ended */
    _Atomic bool failed;
};

enum tp_stage_state { TP_STAGE_DONE, TP_STAGE_RUNNING, TP_STAGE_FAILED };

/* For one that tp_gpu_get does not give yet: its slots may be made, and room is kept for them
 * within register_max_bytes. Once. */
void tp_stage_prepare(struct tp_gpu *gpu);

/*
 * Can copies be staged? Once true, true until the GPU's context is lost. The first call
 * makes a slot, which takes a millisecond; false when there is no pinned memory to be had within
 * register_max_bytes (asked again after a while). Otherwise one load. Any thread, no lock held.
 */
bool tp_stage_ready(struct tp_gpu *gpu);

/* Make room for `bytes` in at most `count` copies, so that adding them cannot fail. False: no
 * memory. */
bool tp_stage_reserve(struct tp_stage_job *job, uint64_t bytes, uint32_t count);

/* Append a copy between `host` and `device`, for which there is room. bytes > 0. `gpu_start`: as of
 * tp_device_job. */
void tp_stage_add(struct tp_stage_job *job, char *host, char *device, uint64_t bytes,
                  uintptr_t gpu_start);

/* Begin. The threads are started if they are not there. Calls no driver; takes the lock of this GPU
 * and direction. An empty job is done at once. */
void tp_stage_start(struct tp_stage_job *job, struct tp_gpu *gpu, bool to_device);

/* One load. DONE: all bytes are where they belong, visible to this thread. Also of a job that was
 * not started. */
enum tp_stage_state tp_stage_look(const struct tp_stage_job *job);

/* Do a part of what is to be done for this GPU and direction, in this thread: at most one slot is
 * copied and one call sent. While it waits for a slot: for the other direction, which has them. Any
 * thread, no lock held; the job is kept meanwhile. */
void tp_stage_help(struct tp_stage_job *job);

/* Empty a job that does not run. release: its arrays as well. */
void tp_stage_reset(struct tp_stage_job *job);
void tp_stage_release(struct tp_stage_job *job);

/* End the threads; what is not copied yet is left to the threads that poll. For
 * tp_transport_stop. */
void tp_stage_stop(void);

#endif
