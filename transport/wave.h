/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: waves, in which the copies of many submits gather for one driver call.
 *
 * A wave belongs to one device, direction and method. While it gathers it is the queue's `open`
 * wave and changes under the queue's lock; whoever takes it out of there sends it, without the
 * lock. From then on only `state` changes. It lives until every group that has copies in it has let
 * go, and is then used again.
 *
 * It must not know: jobs and groups (copy_device.c), batches, peers, contexts and streams (gpu.c).
 */
#ifndef TIDEPOOL_WAVE_H
#define TIDEPOOL_WAVE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "env/cuda.h"
#include "transport/copy_host.h"
#include "transport/gpu.h"
#include "transport/registrar.h"

#define TP_WAVE_OPS 4096u

enum tp_wave_state { TP_WAVE_OPEN, TP_WAVE_SENT, TP_WAVE_ENDING, TP_WAVE_DONE, TP_WAVE_FAILED };

struct tp_wave_queue;

struct tp_wave {
    struct tp_wave *next; /* in the queue's list of unused ones */
    struct tp_wave *also; /* in the list of all of them */
    struct tp_wave_queue *queue;
    struct tp_gpu *gpu;
    _Atomic uint32_t state;
    _Atomic uint32_t refs;   /* groups that have copies in it */
    _Atomic uint64_t polled; /* time stamp counter */
    uint64_t sent;           /* the same, before its state says so */
    struct tp_copy_op *ops;  /* TP_WAVE_OPS; the kernel's are pinned */
    uint64_t *scratch;       /* for the copy engines' lists */
    struct tp_chunk **held;  /* chunks of its copies, until it has ended; NULL: no registrar */
    uint32_t held_count;
    tp_cu_event event;
    uint32_t count;
    uint64_t bytes;
    uint64_t submitted_ms; /* of the oldest write in it; 0: none (stall.h) */
};

struct tp_wave_queue {
    pthread_mutex_t lock;
    bool to_device;
    enum tp_gpu_method method;
    struct tp_wave *open;
    struct tp_wave *unused;
    uint64_t opened;             /* counts waves that were opened */
    uint64_t seen;               /* the flusher's: `opened` when it last found one open */
    struct tp_wave *_Atomic all; /* ever made: they are never freed */
    _Atomic uint32_t under_way;  /* waves sent whose end nobody has seen */
};

/* The two queues (by method) of this direction, of a GPU below TP_DEVICES. Any thread. */
struct tp_wave_queue *tp_wave_queues(int device, bool to_device);

/*
 * The queue's open wave with the queue's lock held, opening one first if there is none; the caller
 * unlocks. NULL: no memory, or the driver gave none; no lock is held then. May call the driver.
 */
struct tp_wave *tp_wave_lock_open(struct tp_wave_queue *queue, struct tp_gpu *gpu);

/* Is it to be sent now? Under the queue's lock. */
bool tp_wave_full(const struct tp_wave *wave);

/* Keep the chunk registered until the wave has ended; NULL does nothing. Under the queue's lock, at
 * most once an op. */
void tp_wave_hold_chunk(struct tp_wave *wave, struct tp_chunk *chunk);

/* Take this wave out of the queue to send it; false when somebody else has. */
bool tp_wave_close(struct tp_wave *wave);

/* Call the driver with a wave that was taken out of its queue, without locks. Its state is SENT or
 * FAILED afterwards. */
void tp_wave_send(struct tp_wave *wave);

/* Ask the driver whether a sent wave has ended; at most one query every 2 us. For those who have a
 * reference. */
void tp_wave_query(struct tp_wave *wave);

/* Query until it ends when it is the only one under way and its end is near; 130 us at most. */
void tp_wave_stay(struct tp_wave *wave);

/* Give one reference back. */
void tp_wave_let_go(struct tp_wave *wave);

/* Do submits of this thread gather (tp_device_defer_begin)? */
bool tp_wave_gathering(void);

/* An open wave was left behind to gather: see that it goes out in time. Without locks; a system
 * call after a pause only. */
void tp_wave_wake_flusher(void);

#endif
