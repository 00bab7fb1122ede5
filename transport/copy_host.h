/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: copying between two addresses of this process, in a small pool of threads and
 * in the threads that poll.
 *
 * It must not know: batches, peers, Mooncake. A job is a list of ops that is split into grains
 * (about TP_GRAIN_BYTES each); threads claim grains with one atomic add. The caller owns the job
 * and its arrays, keeps them until tp_copy_idle, and may reuse them after that.
 */
#ifndef TIDEPOOL_COPY_HOST_H
#define TIDEPOOL_COPY_HOST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The unit of work: what a poll may do before it answers, and what two threads share a job by. */
#define TP_GRAIN_BYTES ((size_t)256 << 10)

/*
 * Jobs up to this size are copied by tp_copy_start itself: offering one costs about 1 us. Measured
 * with a caller and one worker, us a job of 512 to 1024: 64 KiB 5.6 at once, 3.1 offered; 32 KiB
 * 3.1 and 1.9; 16 KiB 1.8 and 1.3; 4 KiB 0.8 and 0.8.
 */
#define TP_COPY_INLINE_BYTES ((size_t)16 << 10)

/* One contiguous copy. bytes > 0; the ranges do not overlap. */
struct tp_copy_op {
    void *to;
    const void *from;
    size_t bytes;
};

/* Ops [first, end) make one grain; a large op was split into several ops by tp_copy_add. */
struct tp_copy_grain {
    uint32_t first, end;
};

/*
 * | field                     | written by                                                      |
 * |---------------------------|-----------------------------------------------------------------|
 * | arrays, counts, total     | the owner, before tp_copy_start                                 |
 * | slot, queued = 1          | tp_copy_start, before the queue refers to the job               |
 * | submitted_ms              | the owner, before tp_copy_start                                 |
 * | next, finished, refused,  | whoever claims and finishes grains                              |
 * | grain_done                |                                                                 |
 * | users, queued = 0         | threads that let go of the job; tp_copy_idle waits for both     |
 */
struct tp_copy_job {
    struct tp_copy_op *ops;       /* capacity op_room */
    struct tp_copy_grain *grains; /* capacity grain_room */
    atomic_uchar *grain_done;     /* one a grain, capacity grain_room */
    uint32_t op_count, op_room, grain_count, grain_room;
    size_t grain_fill; /* bytes in the last grain so far */
    uint64_t total_bytes;
    uint64_t submitted_ms;     /* copies that start late are refused (stall.h); 0: none is */
    _Atomic bool refused;      /* some grain was */
    uint32_t slot;             /* place in the pool's queue, while queued */
    _Atomic uint32_t next;     /* next grain to claim */
    _Atomic uint32_t finished; /* grains done */
    _Atomic int32_t users;     /* threads inside the job that the queue's slot does not count */
    _Atomic uint32_t queued;   /* 1 while the pool's queue refers to it */
};

/* An empty job with no arrays. tp_copy_release frees them; tp_copy_reset empties it and keeps them.
 * Both need an idle job: init, or tp_copy_idle was true. */
void tp_copy_init(struct tp_copy_job *job);
void tp_copy_reset(struct tp_copy_job *job);
void tp_copy_release(struct tp_copy_job *job);

/*
 * Append a copy: merged with the op before when it continues it at both ends, split where it is
 * larger than a grain. Returns through ret_first and ret_last the grains that it lies in (for a
 * task's own status); either may be NULL. 0, or -ENOMEM with the job unchanged. bytes == 0 is
 * -EINVAL. Only before tp_copy_start.
 */
int tp_copy_add(struct tp_copy_job *job, void *to, const void *from, size_t bytes,
                uint32_t *ret_first, uint32_t *ret_last);

/*
 * Begin: small jobs are copied at once in this thread (returns true: all done), others are offered
 * to the pool (one futex call at most; none while a worker is spinning, or for a lone job that the
 * caller's next poll does in less time than a worker takes to wake). Also copies at once when
 * there is nobody to offer it to: in a forked child, after tp_copy_pool_stop, or when the queue is
 * full.
 */
bool tp_copy_start(struct tp_copy_job *job);

/* Are all grains done, copied or refused / grains first..last copied? Acquire loads: the bytes are
 * visible to this thread when true. */
bool tp_copy_done(const struct tp_copy_job *job);
bool tp_copy_range_done(const struct tp_copy_job *job, uint32_t first, uint32_t last);

/* Of a job that is done: was a copy refused as too late / one in grains first..last? */
bool tp_copy_refused(const struct tp_copy_job *job);
bool tp_copy_range_refused(const struct tp_copy_job *job, uint32_t first, uint32_t last);

/* May the job be reused: done, and no pool thread will look at it again. Becomes true within
 * nanoseconds of tp_copy_done unless a helper was preempted just there. */
bool tp_copy_idle(const struct tp_copy_job *job);

/*
 * Do one grain in this thread: of `job` (may be NULL) if it has one unclaimed, otherwise of any job
 * in the queue, oldest first. false: there was nothing to do. No lock, no allocation, no syscall.
 * The caller keeps `job` from being reset during the call.
 */
bool tp_copy_help(struct tp_copy_job *job);

/* As many threads as a user may ask for. */
#define TP_COPY_THREADS_MAX 64u

/* How many threads copy, for one who asked for so many (0: sized to `cpus`). */
unsigned tp_copy_threads(unsigned asked, unsigned cpus);

/* How many threads the pool shall have (0: sized to the machine). Takes effect when it starts. */
void tp_copy_pool_size(unsigned threads);

/*
 * Start the pool's threads now (0: as tp_copy_pool_size said). The first queued job does it by
 * itself; idempotent. Returns 0 also when no thread could be started: helpers then do all the work.
 * stop joins; jobs in the queue are left to the threads that poll.
 */
int tp_copy_pool_start(unsigned threads);
void tp_copy_pool_stop(void);

/*
 * Copy with the best instructions of this CPU (chosen once): memcpy, or streaming stores for blocks
 * where they win. The ranges do not overlap. Other threads may be told of the bytes only after
 * tp_copy_fence, once for any number of copies: a release store does not order streaming stores.
 */
void tp_copy_bytes(void *to, const void *from, size_t bytes);
void tp_copy_fence(void);

/* The same by ordinary stores, for what is read next: it stays in the cache, and needs no fence. */
void tp_copy_bytes_kept(void *to, const void *from, size_t bytes);

#endif
