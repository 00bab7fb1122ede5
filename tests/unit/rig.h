/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of batches share: an engine that is attached to a fake store, and short calls. */
#ifndef TIDEPOOL_RIG_H
#define TIDEPOOL_RIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "fake_store.h"
#include "transport/transport.h"

#define RIG_STRIDE 56

/* A request as the wheels lay it out: what follows the first 40 bytes is theirs. */
struct rig_request {
    struct tp_request request;
    unsigned char tail[RIG_STRIDE - sizeof(struct tp_request)];
};

static inline uint64_t rig_counter(enum tp_counter counter) {
    return atomic_load(&tp_stats_page()->counters[counter]);
}

static inline struct rig_request rig_make(int opcode, void *source, uint64_t handle,
                                          uint64_t offset, uint64_t bytes) {
    struct rig_request r = {.request = {opcode, 0x5a5a5a5a, source, handle, offset, bytes}};
    memset(r.tail, 0xa5, sizeof(r.tail));
    return r;
}

static inline enum tp_plan rig_begin(struct tp_engine *engine, uint64_t id, size_t capacity,
                                     const struct rig_request *requests, size_t count,
                                     struct tp_submit *submit) {
    struct tp_requests list = {requests, sizeof(*requests), count};
    return tp_submit_begin(engine, id, capacity, &list, false, submit);
}

/* Wait until a one-byte read at `offset` of the handle is local. */
static inline bool rig_wait(struct tp_engine *engine, uint64_t handle, uint64_t offset,
                            unsigned timeout_ms) {
    static unsigned char byte;
    struct rig_request r = rig_make(TP_OP_READ, &byte, handle, offset, 1);
    for (uint64_t end = tp_now_ms() + timeout_ms; tp_now_ms() < end; usleep(2000)) {
        struct tp_submit submit;
        if (rig_begin(engine, 0x1111, 1, &r, 1, &submit) != TP_PLAN_NONE) {
            tp_submit_abort(&submit);
            return true;
        }
    }
    return false;
}

/* Wait for the end of a batch that is local. */
static inline enum tp_task_state rig_finish(uint64_t id, uint64_t *ret_bytes) {
    struct tp_task_status status = {0};
    for (uint64_t end = tp_now_ms() + 20000; tp_now_ms() < end;) {
        if (tp_batch_status(id, &status) != TP_ANSWER_LOCAL)
            return (enum tp_task_state)99;
        if (status.state != TP_TASK_WAITING)
            break;
    }
    if (ret_bytes)
        *ret_bytes = status.bytes;
    return status.state;
}

static inline int rig_free(uint64_t id) {
    struct tp_batch *batch;
    int error = tp_batch_detach(id, &batch);
    if (error == 0)
        tp_batch_recycle(batch);
    return error;
}

#endif
