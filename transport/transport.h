/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's side: which requests of a batch can go through shared memory, and moving them. The
 * public header of transport/.
 *
 * It must not know: C++ types, mangled names, how the real engine is reached (shim/), or how a
 * store makes its memory.
 *
 * Every request has one of two ends: it is taken (copied here, its status answered here), or it is
 * the rest (the shim gives it to Mooncake's own function, and a counter says why). Nothing here
 * blocks, with two exceptions. Where memory of a store is registered with CUDA (registrar.h),
 * planning a GPU copy may wait for the driver, no longer than a copy of unregistered memory would
 * keep the thread. In the first 50 ms after a name was first opened, its requests wait for a store
 * that is being attached. No function may be called with a lock held.
 */
#ifndef TIDEPOOL_TRANSPORT_H
#define TIDEPOOL_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tp_config;

/* ---- engines: one for each Mooncake TransferEngine in this process
 * ---------------------------------------------------- */

struct tp_engine; /* lives for ever once made */

/*
 * The engine known under `key` (the address of a TransferEngine, or of the MultiTransport inside
 * it), made on first use when `create`. NULL when unknown, or when 64 engines exist. Lock-free for
 * known keys. Any thread.
 */
struct tp_engine *tp_engine_find(const void *key, bool create);

/* Let `alias` (a MultiTransport's address) name the engine as well. Idempotent, cheap. */
void tp_engine_alias(struct tp_engine *engine, const void *alias);

/* The object at `key` is gone. An engine ends with its last key: its handles are forgotten. */
void tp_engine_forget(const void *key);

/* If exactly one engine is known to this process, that one; else NULL. */
struct tp_engine *tp_engine_only(void);

/*
 * Handle `handle` of this engine names the segment `name` (the string given to openSegment). Called
 * on every openSegment: a known pair costs a lookup and a compare, no lock, no allocation. An
 * engine that is also configured looks for the store.
 */
void tp_engine_open(struct tp_engine *engine, uint64_t handle, const char *name, size_t name_bytes);
void tp_engine_close(struct tp_engine *engine, uint64_t handle);

/*
 * Start the engine half: the thread that finds stores in config->engine.socket_dir, attaches to
 * them and imports their pieces. Idempotent. 0 or -errno with one line logged (the half is then
 * off). Never waits for a store. `config` must live until tp_transport_stop.
 */
int tp_transport_start(const struct tp_config *config);

/* `look` is called about once a second from the thread of tp_transport_start, which goes on after
 * it.
 */
void tp_transport_set_look(void (*look)(void));

/* End the thread, unmap what no copy uses. Safe to call twice, or never. */
void tp_transport_stop(void);

/* Started, and not in a forked child: worth looking at batches at all. One load. */
bool tp_transport_on(void);

/* ---- registered ranges: which memory is a GPU's
 * ------------------------------------------------------------------------ */

/* Mooncake's registerLocalMemory: the location ("cuda:0", "cpu:1", "*") is a hint that saves
 * pointer queries. */
void tp_register_range(const void *address, size_t bytes, const char *location);
void tp_unregister_range(const void *address);

/* ---- batches
 * --------------------------------------------------------------------------------------------------------------
 */

enum tp_opcode { TP_OP_READ = 0, TP_OP_WRITE = 1 };

/*
 * One request as Mooncake lays it out in its first 40 bytes (x86-64, every version from 0.3.6 to
 * 0.3.14: UPSTREAM.md). The 4 bytes after the opcode are garbage.
 */
struct tp_request {
    int32_t opcode;
    int32_t garbage;
    void *source;           /* this process's memory */
    uint64_t target_id;     /* handle from openSegment */
    uint64_t target_offset; /* address in the store */
    uint64_t length;        /* bytes */
};
_Static_assert(sizeof(struct tp_request) == 40,
               "the part of TransferRequest that every version shares");

/* `count` requests, `stride` bytes apart. Borrowed: valid during the call only. */
struct tp_requests {
    const void *base;
    size_t stride, count;
};

enum tp_plan {
    TP_PLAN_NONE,  /* nothing is local: give the whole call to Mooncake. No state was made */
    TP_PLAN_ALL,   /* everything is local: call tp_submit_commit */
    TP_PLAN_MIXED, /* give tp_submit.rest to Mooncake, then commit or abort */
};

struct tp_batch;

/* A submit under way: on the shim's stack. */
struct tp_submit {
    struct tp_batch *batch;
    uint32_t first_task;     /* of this submit within the batch */
    struct tp_requests rest; /* the requests for Mooncake, in order, copied whole (stride bytes
                                each); lives until the batch is freed */
};

/*
 * Route `requests` of `engine` and plan the local part. `all_or_nothing`: a mixed batch is left to
 * Mooncake whole (scatter batches, whose tasks Mooncake groups). `capacity` is the n of
 * allocateBatchID (0: unknown or unlimited): a batch that already has tasks here and would exceed
 * it is left to Mooncake, which refuses it. On TP_PLAN_NONE the counters say why. On the others the
 * caller must call commit or abort, from the same thread.
 */
enum tp_plan tp_submit_begin(struct tp_engine *engine, uint64_t batch_id, size_t capacity,
                             const struct tp_requests *requests, bool all_or_nothing,
                             struct tp_submit *ret_submit);
/* Start the copies; from here the batch answers for its tasks. */
void tp_submit_commit(struct tp_submit *submit);
/* Mooncake refused the rest: nothing is copied and no task is added. */
void tp_submit_abort(struct tp_submit *submit);

/*
 * A call for this batch went to Mooncake whole, adding `count` tasks there. Only matters for a
 * batch that already has tasks here: keeps the numbering of both in step. Cheap when the batch is
 * unknown.
 */
void tp_batch_forwarded(uint64_t batch_id, size_t count);

/* Mooncake's values. */
enum tp_task_state { TP_TASK_WAITING = 0, TP_TASK_COMPLETED = 4, TP_TASK_FAILED = 6 };

struct tp_task_status {
    enum tp_task_state state;
    uint64_t bytes;     /* transferred */
    uint64_t real_task; /* when the answer is TP_ANSWER_REAL: the task's number at Mooncake */
};

enum tp_answer {
    TP_ANSWER_UNKNOWN, /* the batch has nothing here: call Mooncake's function as it came */
    TP_ANSWER_LOCAL,   /* *ret_status is the answer */
    TP_ANSWER_REAL,  /* task: ask Mooncake about real_task. batch: the local part is in *ret_status,
                        ask Mooncake too */
    TP_ANSWER_RANGE, /* no such task */
};

/*
 * The state of a task, and of a whole batch. Polled: a poll that finds unfinished work does one
 * bounded part of it (at most about 100 us of copying) in the calling thread before it answers. No
 * lock shared by all threads, no allocation, no syscall.
 */
enum tp_answer tp_batch_task_status(uint64_t batch_id, uint64_t task,
                                    struct tp_task_status *ret_status);
enum tp_answer tp_batch_status(uint64_t batch_id, struct tp_task_status *ret_status);

/*
 * freeBatchID in two steps, since Mooncake reuses the id as soon as its own function returns.
 * tp_batch_detach: 0 with *ret_batch (the id is unknown here from now on), -EBUSY while copies are
 * under way (answer BatchBusy and do not call Mooncake), -ENOENT when the batch has nothing here.
 * Then call Mooncake's function, and tp_batch_recycle when it succeeded or tp_batch_reattach when
 * it answered BatchBusy.
 */
int tp_batch_detach(uint64_t batch_id, struct tp_batch **ret_batch);
void tp_batch_recycle(struct tp_batch *batch);
void tp_batch_reattach(uint64_t batch_id, struct tp_batch *batch);

/* ---- gathering
 * ------------------------------------------------------------------------------------------------------------
 */

/*
 * Between begin and end, GPU copies of this thread's submits may wait for each other, and go out
 * together: when enough has gathered, at the first poll of one of them, or at the end. Pairs do not
 * nest: an end that never comes (an exception) is made good by the next pair's, and polls send out
 * what gathers meanwhile. Host memory is copied as ever.
 */
void tp_gather_begin(void);
void tp_gather_end(void);

#endif
