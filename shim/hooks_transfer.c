/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks on the way of every transfer: batches, submits, status, free. Each translates and
 * delegates to transport/, or to the original. In the classic engine MultiTransport decides; in
 * modules with TENT switched on, TransferEngine does.
 *
 * It must not know how anything is copied.
 */
#include "env/env.h"
#include "env/stats.h"
#include "shim/hooks.h"
#include "shim/modules.h"
#include "transport/transport.h"

#include <errno.h>
#include <string.h>

#define CALLER() __builtin_return_address(0)

/* What allocateBatchID was asked for last in this thread: submits follow at once in every version
 * seen (UPSTREAM.md). */
struct last_allocation {
    uint64_t batch_id;
    size_t count;
};
static _Thread_local struct last_allocation last_allocation;

static struct cxx_status *answer(struct cxx_status *ret, uint16_t code) {
    ret->code = code;
    ret->message = NULL;
    return ret;
}

/* Does this layer decide for callers in `module`? Then a batch may have something here. */
static bool decides(const struct tp_module *module, bool at_engine) {
    return module && tp_transport_on() && !module->layout_refused && module->tent == at_engine;
}

/* ---- allocate
 * ----------------------------------------------------------------------------------------------------------
 */

static uint64_t remember(uint64_t batch_id, size_t count) {
    last_allocation.batch_id = batch_id;
    last_allocation.count = count;
    return batch_id;
}

uint64_t tp_hook_mt_allocate(void *self, size_t batch_size) {
    tp_real_mt_allocate real =
        (tp_real_mt_allocate)tp_next(TP_HOOK_mt_allocate, tp_module_of(CALLER()));
    return real ? remember(real(self, batch_size), batch_size) : UINT64_MAX;
}

uint64_t tp_hook_te_allocate(void *self, size_t batch_size) {
    tp_real_te_allocate real =
        (tp_real_te_allocate)tp_next(TP_HOOK_te_allocate, tp_module_of(CALLER()));
    return real ? remember(real(self, batch_size), batch_size) : UINT64_MAX;
}

/* ---- the size of a request
 * --------------------------------------------------------------------------------------------- */

static bool plausible(const struct cxx_vector *requests, size_t stride) {
    for (const char *at = requests->begin; at < requests->end; at += stride) {
        struct tp_request request;
        memcpy(&request, at, sizeof(request));
        if ((request.opcode != TP_OP_READ && request.opcode != TP_OP_WRITE) || !request.source ||
            request.target_id > UINT32_MAX || request.length == 0 || request.length >> 48) {
            return false;
        }
    }
    return true;
}

/* The bytes of one request in this vector, 0 when unknown. Modules that do not show it are learned
 * from a batch of known count. */
static size_t element_bytes(struct tp_module *module, uint64_t batch_id,
                            const struct cxx_vector *requests) {
    size_t known = atomic_load_explicit(&module->element_bytes, memory_order_relaxed);
    size_t bytes = (size_t)(requests->end - requests->begin);
    size_t count = last_allocation.batch_id == batch_id ? last_allocation.count : 0;

    if (known) {
        return bytes % known == 0 ? known : 0;
    }
    if (count == 0 || bytes % count != 0 || !tp_element_known(bytes / count) ||
        !plausible(requests, bytes / count)) {
        return 0;
    }
    atomic_store_explicit(&module->element_bytes, bytes / count, memory_order_relaxed);
    tp_log(TP_LOG_DEBUG, "%s: TransferRequest of %zu bytes, learned from a batch of %zu",
           module->path, bytes / count, count);
    return bytes / count;
}

/* ---- submit
 * ------------------------------------------------------------------------------------------------------------
 */

struct submit_call {
    enum tp_hook hook;
    struct tp_module *module;
    void *self;
    uint64_t batch_id;
    struct cxx_vector
        *task_sizes; /* NULL unless this is the form with three arguments, called for scatter */
};

static struct cxx_status *submit_real(const struct submit_call *call, struct cxx_status *ret,
                                      const struct cxx_vector *requests) {
    void *real = tp_next(call->hook, call->module);

    if (!real) {
        return answer(ret, CXX_STATUS_NOT_IMPLEMENTED);
    }
    if (call->hook == TP_HOOK_mt_submit3) {
        return ((tp_real_mt_submit3)real)(ret, call->self, call->batch_id, requests,
                                          call->task_sizes);
    }
    return ((tp_real_mt_submit2)real)(ret, call->self, call->batch_id, requests);
}

/*
 * Scatter callers count tasks by this vector: one entry a task, with the number of requests in it.
 * Ours are one each. The storage is std::vector's, so it grows with the module's own operator new.
 */
static bool append_task_sizes(const struct tp_module *module, struct cxx_vector *sizes,
                              size_t count) {
    size_t used = (size_t)(sizes->end - sizes->begin);
    size_t need = used + count * sizeof(size_t);

    if (need > (size_t)(sizes->capacity_end - sizes->begin)) {
        char *grown =
            module->operator_new && module->operator_delete ? module->operator_new(need) : NULL;
        if (!grown) {
            return false;
        }
        if (sizes->begin) {
            memcpy(grown, sizes->begin, used);
            module->operator_delete(sizes->begin);
        }
        *sizes =
            (struct cxx_vector){.begin = grown, .end = grown + used, .capacity_end = grown + need};
    }
    for (size_t i = 0; i < count; i++) {
        size_t one = 1;
        memcpy(sizes->end, &one, sizeof(one));
        sizes->end += sizeof(one);
    }
    return true;
}

static struct cxx_status *submit_mixed(const struct submit_call *call, struct cxx_status *ret,
                                       struct tp_submit *submit) {
    char *begin = (char *)(uintptr_t)submit->rest.base;
    char *end = begin + submit->rest.count * submit->rest.stride;
    struct cxx_vector rest = {.begin = begin, .end = end, .capacity_end = end};

    submit_real(call, ret, &rest);
    if (ret->code != CXX_STATUS_OK) {
        tp_submit_abort(submit);
    } else {
        tp_submit_commit(submit);
    }
    return ret;
}

static struct cxx_status *submit_whole(const struct submit_call *call, struct cxx_status *ret,
                                       const struct cxx_vector *requests, size_t count) {
    submit_real(call, ret, requests);
    if (ret->code == CXX_STATUS_OK) {
        tp_batch_forwarded(call->batch_id, count);
    }
    return ret;
}

static struct cxx_status *submit(const struct submit_call *call, struct cxx_status *ret,
                                 const struct cxx_vector *vector) {
    size_t stride = element_bytes(call->module, call->batch_id, vector);
    struct tp_engine *engine = tp_engine_find(call->self, false);
    struct tp_submit submit;

    if (!engine) {
        engine = tp_engine_only();
    }
    if (!stride || !engine || vector->begin == vector->end) {
        tp_count(stride ? TP_FALLBACK_NO_PEER : TP_FALLBACK_UNKNOWN_LAYOUT, 1);
        return submit_real(call, ret, vector);
    }
    struct tp_requests requests = {.base = vector->begin,
                                   .stride = stride,
                                   .count = (size_t)(vector->end - vector->begin) / stride};
    size_t capacity = last_allocation.batch_id == call->batch_id ? last_allocation.count : 0;

    switch (tp_submit_begin(engine, call->batch_id, capacity, &requests, call->task_sizes != NULL,
                            &submit)) {
    case TP_PLAN_ALL:
        if (call->task_sizes &&
            !append_task_sizes(call->module, call->task_sizes, requests.count)) {
            tp_submit_abort(&submit);
            return submit_whole(call, ret, vector, requests.count);
        }
        tp_submit_commit(&submit);
        return answer(ret, CXX_STATUS_OK);
    case TP_PLAN_MIXED:
        return submit_mixed(call, ret, &submit);
    case TP_PLAN_NONE:
        break;
    }
    return submit_whole(call, ret, vector, requests.count);
}

struct cxx_status *tp_hook_mt_submit3(struct cxx_status *ret, void *self, uint64_t batch_id,
                                      const struct cxx_vector *requests,
                                      struct cxx_vector *task_sizes) {
    struct submit_call call = {TP_HOOK_mt_submit3, tp_module_of(CALLER()), self, batch_id,
                               task_sizes};
    return decides(call.module, false) ? submit(&call, ret, requests)
                                       : submit_real(&call, ret, requests);
}

struct cxx_status *tp_hook_mt_submit2(struct cxx_status *ret, void *self, uint64_t batch_id,
                                      const struct cxx_vector *requests) {
    struct submit_call call = {TP_HOOK_mt_submit2, tp_module_of(CALLER()), self, batch_id, NULL};
    bool last = decides(call.module, false) && !tp_has(TP_HOOK_mt_submit3, call.module);
    return last ? submit(&call, ret, requests) : submit_real(&call, ret, requests);
}

struct cxx_status *tp_hook_te_submit(struct cxx_status *ret, void *self, uint64_t batch_id,
                                     const struct cxx_vector *requests) {
    struct submit_call call = {TP_HOOK_te_submit, tp_module_of(CALLER()), self, batch_id, NULL};
    return decides(call.module, true) ? submit(&call, ret, requests)
                                      : submit_real(&call, ret, requests);
}

struct cxx_status *tp_hook_te_submit_notify(struct cxx_status *ret, void *self, uint64_t batch_id,
                                            const struct cxx_vector *requests, void *notify) {
    struct tp_module *module = tp_module_of(CALLER());
    tp_real_te_submit_notify real =
        (tp_real_te_submit_notify)tp_next(TP_HOOK_te_submit_notify, module);
    size_t stride = module && decides(module, true) ? element_bytes(module, batch_id, requests) : 0;

    if (!real) {
        return answer(ret, CXX_STATUS_NOT_IMPLEMENTED);
    }
    real(ret, self, batch_id, requests, notify);
    if (stride && ret->code == CXX_STATUS_OK) {
        tp_batch_forwarded(batch_id, (size_t)(requests->end - requests->begin) / stride);
    }
    return ret;
}

/* ---- status
 * ------------------------------------------------------------------------------------------------------------
 */

static struct cxx_status *task_status(enum tp_hook hook, struct tp_module *module,
                                      struct cxx_status *ret, void *self, uint64_t batch_id,
                                      size_t task_id, struct cxx_transfer_status *status) {
    struct tp_task_status task;

    if (decides(module, hook == TP_HOOK_te_task_status)) {
        switch (tp_batch_task_status(batch_id, task_id, &task)) {
        case TP_ANSWER_LOCAL:
            status->state = (int32_t)task.state;
            status->bytes = task.bytes;
            return answer(ret, CXX_STATUS_OK);
        case TP_ANSWER_REAL:
            task_id = task.real_task;
            break;
        case TP_ANSWER_RANGE:
            return answer(ret, CXX_STATUS_INVALID_ARGUMENT);
        case TP_ANSWER_UNKNOWN:
            break;
        }
    }
    tp_real_mt_task_status real = (tp_real_mt_task_status)tp_next(hook, module);
    return real ? real(ret, self, batch_id, task_id, status)
                : answer(ret, CXX_STATUS_NOT_IMPLEMENTED);
}

struct cxx_status *tp_hook_mt_task_status(struct cxx_status *ret, void *self, uint64_t batch_id,
                                          size_t task_id, struct cxx_transfer_status *status) {
    return task_status(TP_HOOK_mt_task_status, tp_module_of(CALLER()), ret, self, batch_id, task_id,
                       status);
}

struct cxx_status *tp_hook_te_task_status(struct cxx_status *ret, void *self, uint64_t batch_id,
                                          size_t task_id, struct cxx_transfer_status *status) {
    return task_status(TP_HOOK_te_task_status, tp_module_of(CALLER()), ret, self, batch_id, task_id,
                       status);
}

/* Both parts of a mixed batch as one answer, by Mooncake's own rules: failed once one has failed,
 * done when all are. */
static void combine(const struct tp_task_status *local, struct cxx_transfer_status *status) {
    bool real_done = status->state == CXX_TASK_COMPLETED;

    if (local->state == TP_TASK_FAILED || status->state == CXX_TASK_FAILED ||
        status->state == CXX_TASK_TIMEOUT) {
        status->state = CXX_TASK_FAILED;
    } else if (real_done && local->state == TP_TASK_COMPLETED) {
        status->bytes += local->bytes;
    } else {
        status->state = CXX_TASK_WAITING;
    }
}

static struct cxx_status *batch_status(enum tp_hook hook, struct tp_module *module,
                                       struct cxx_status *ret, void *self, uint64_t batch_id,
                                       struct cxx_transfer_status *status) {
    enum tp_answer found = TP_ANSWER_UNKNOWN;
    struct tp_task_status local;

    if (decides(module, hook == TP_HOOK_te_batch_status)) {
        found = tp_batch_status(batch_id, &local);
    }
    if (found == TP_ANSWER_LOCAL) {
        status->state = (int32_t)local.state;
        status->bytes = local.bytes;
        return answer(ret, CXX_STATUS_OK);
    }
    tp_real_mt_batch_status real = (tp_real_mt_batch_status)tp_next(hook, module);
    if (!real) {
        return answer(ret, CXX_STATUS_NOT_IMPLEMENTED);
    }
    real(ret, self, batch_id, status);
    if (found == TP_ANSWER_REAL && ret->code == CXX_STATUS_OK) {
        combine(&local, status);
    }
    return ret;
}

struct cxx_status *tp_hook_mt_batch_status(struct cxx_status *ret, void *self, uint64_t batch_id,
                                           struct cxx_transfer_status *status) {
    return batch_status(TP_HOOK_mt_batch_status, tp_module_of(CALLER()), ret, self, batch_id,
                        status);
}

struct cxx_status *tp_hook_te_batch_status(struct cxx_status *ret, void *self, uint64_t batch_id,
                                           struct cxx_transfer_status *status) {
    return batch_status(TP_HOOK_te_batch_status, tp_module_of(CALLER()), ret, self, batch_id,
                        status);
}

/* ---- free
 * --------------------------------------------------------------------------------------------------------------
 */

struct free_call {
    enum tp_hook hook;
    struct tp_module *module;
    void *self;
    uint64_t batch_id;
    const void *before_delete;
};

static struct cxx_status *free_real(const struct free_call *call, struct cxx_status *ret) {
    void *real = tp_next(call->hook, call->module);

    if (!real) {
        return answer(ret, CXX_STATUS_NOT_IMPLEMENTED);
    }
    if (call->hook == TP_HOOK_mt_free_after) {
        return ((tp_real_mt_free_after)real)(ret, call->self, call->batch_id, call->before_delete);
    }
    return ((tp_real_mt_free)real)(ret, call->self, call->batch_id);
}

/* Mooncake reuses the id as soon as its own function has freed it: our entry goes first, and comes
 * back if it was busy. */
static struct cxx_status *free_batch(const struct free_call *call, bool at_engine,
                                     struct cxx_status *ret) {
    struct tp_batch *batch = NULL;
    int rc = decides(call->module, at_engine) ? tp_batch_detach(call->batch_id, &batch) : -1;

    if (batch == NULL && rc == -EBUSY) {
        return answer(ret, CXX_STATUS_BATCH_BUSY);
    }
    free_real(call, ret);
    if (batch && ret->code == CXX_STATUS_OK) {
        tp_batch_recycle(batch);
    } else if (batch) {
        tp_batch_reattach(call->batch_id, batch);
    }
    return ret;
}

struct cxx_status *tp_hook_mt_free(struct cxx_status *ret, void *self, uint64_t batch_id) {
    struct free_call call = {TP_HOOK_mt_free, tp_module_of(CALLER()), self, batch_id, NULL};
    return free_batch(&call, false, ret);
}

struct cxx_status *tp_hook_mt_free_after(struct cxx_status *ret, void *self, uint64_t batch_id,
                                         const void *before_delete) {
    struct free_call call = {TP_HOOK_mt_free_after, tp_module_of(CALLER()), self, batch_id,
                             before_delete};
    return free_batch(&call, false, ret);
}

struct cxx_status *tp_hook_te_free(struct cxx_status *ret, void *self, uint64_t batch_id) {
    struct free_call call = {TP_HOOK_te_free, tp_module_of(CALLER()), self, batch_id, NULL};
    return free_batch(&call, true, ret);
}
