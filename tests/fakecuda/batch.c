/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuMemcpyBatchAsync, in the form of 12.8 (with the index of the copy that failed) and of 13.0.
 * Left out of the library in driver-12.4.
 *
 * Source access order: STREAM reads when the work runs; DURING_API_CALL before the call returns;
 * ANY at any time, so here every second copy is read during the call and the others when the work
 * runs: a program that chose ANY wrongly fails either way.
 */
#include "state.h"

#include <stdlib.h>

struct batch {
    CUdeviceptr *to, *from;
    size_t *sizes, count, *attr_indexes, attr_count;
    CUmemcpyAttributes *attrs;
};

static CUresult check_attributes(struct fc_call *call, const struct batch *batch) {
    if (!batch->count || !batch->to || !batch->from || !batch->sizes)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "no copies or no arrays");
    if (!batch->attr_count || !batch->attrs || !batch->attr_indexes ||
        batch->attr_count > batch->count)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "%zu attributes for %zu copies",
                          batch->attr_count, batch->count);
    if (batch->attr_indexes[0])
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "the first attribute index must be 0");
    for (size_t i = 0; i < batch->attr_count; i++) {
        int order = batch->attrs[i].srcAccessOrder;

        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                              "attribute %zu: unknown source access order %d", i, order);
        if (i && (batch->attr_indexes[i] <= batch->attr_indexes[i - 1] ||
                  batch->attr_indexes[i] >= batch->count))
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "attribute index %zu is out of order",
                              i);
    }
    return CUDA_SUCCESS;
}

struct interval {
    uintptr_t start, end;
};

static int by_start(const void *left, const void *right) {
    const struct interval *a = left, *b = right;

    return a->start < b->start ? -1 : a->start > b->start;
}

/* Does [start, end) meet one of the sorted, disjoint intervals? */
static bool meets(const struct interval *sorted, size_t count, uintptr_t start, uintptr_t end) {
    size_t low = 0, high = count;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (sorted[middle].end <= start)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && sorted[low].start < end;
}

/* Copies of a batch have no order among themselves: what one writes no other may read or write. */
static CUresult check_independent(struct fc_call *call, const struct batch *batch) {
    struct interval *written = calloc(batch->count + 1, sizeof *written);
    CUresult result = CUDA_SUCCESS;

    if (!written)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < batch->count; i++)
        written[i] =
            (struct interval){.start = batch->to[i], .end = batch->to[i] + batch->sizes[i]};
    qsort(written, batch->count, sizeof *written, by_start);
    for (size_t i = 1; i < batch->count && result == CUDA_SUCCESS; i++) {
        if (written[i].start < written[i - 1].end)
            result = fc_violate(call, CUDA_SUCCESS, "two copies of the batch write 0x%zx",
                                written[i].start);
    }
    for (size_t i = 0; i < batch->count && !call->violation[0]; i++) {
        if (meets(written, batch->count, batch->from[i], batch->from[i] + batch->sizes[i]))
            result = fc_violate(call, CUDA_SUCCESS,
                                "copy %zu reads what another copy of the batch writes", i);
    }
    free(written);
    return result;
}

static CUresult stage(struct fc_copy *copy) {
    struct fc_piece piece = {.size = copy->size};
    struct fc_span to = {.pieces = &piece, .count = 1};

    copy->staged = malloc(copy->size);
    piece.bytes = copy->staged;
    if (!copy->staged)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (fc_move(&to, &copy->from, copy->size))
        return CUDA_ERROR_INVALID_VALUE;
    fc_span_give(&copy->from);
    return CUDA_SUCCESS;
}

/* NOLINTBEGIN(clang-analyzer-core.NullDereference): check_attributes has refused NULL arrays */
static CUresult add_copy(struct fc_call *call, const struct fc_context *context,
                         const struct batch *batch, size_t i, int order, struct fc_job *job) {
    struct fc_copy *copy = &job->copies[i];
    CUresult result;

    if (!batch->sizes[i])
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "copy %zu has no bytes", i);
    job->copy_count = i + 1;
    copy->size = batch->sizes[i];
    result =
        fc_span_take(call, context, batch->to[i], batch->sizes[i], true, FC_SIDE_ANY, &copy->to);
    if (result == CUDA_SUCCESS)
        result = fc_span_take(call, context, batch->from[i], batch->sizes[i], false, FC_SIDE_ANY,
                              &copy->from);
    if (result == CUDA_SUCCESS && (order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL ||
                                   (order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY && i % 2)))
        result = stage(copy);
    return result;
}
/* NOLINTEND(clang-analyzer-core.NullDereference) */

static CUresult make_job(struct fc_call *call, const struct fc_context *context,
                         const struct batch *batch, size_t *ret_failed, struct fc_job **ret) {
    struct fc_job *job = fc_job_new();
    CUresult result = CUDA_SUCCESS;
    size_t attr = 0;

    if (!job)
        return CUDA_ERROR_OUT_OF_MEMORY;
    job->copies = calloc(batch->count + 1, sizeof *job->copies);
    if (!job->copies)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < batch->count && result == CUDA_SUCCESS; i++) {
        if (attr + 1 < batch->attr_count && batch->attr_indexes[attr + 1] == i)
            attr++;
        result = add_copy(call, context, batch, i, batch->attrs[attr].srcAccessOrder, job);
        if (result != CUDA_SUCCESS)
            *ret_failed = i;
    }
    if (result == CUDA_SUCCESS)
        *ret = job;
    else
        fc_job_free(job);
    return result;
}

static CUresult submit(struct fc_call *call, const struct batch *batch, size_t *ret_failed,
                       CUstream handle) {
    struct fc_stream *stream;
    bool recorded = false;
    struct fc_job *job;
    CUresult result;

    if (fc_settings()->driver_version < 12080)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!handle || handle == CU_STREAM_LEGACY)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "a batch must not go into the legacy stream");
    stream = fc_stream_get(call, handle);
    if (!stream)
        return call->result;
    result = check_attributes(call, batch);
    if (result == CUDA_SUCCESS)
        result = check_independent(call, batch);
    if (result == CUDA_SUCCESS)
        result = fc_capture_check_stream(call, stream, &recorded);
    if (result != CUDA_SUCCESS || recorded)
        return result;
    result = make_job(call, stream->context, batch, ret_failed, &job);
    return result == CUDA_SUCCESS ? fc_submit(call, stream, job, false) : result;
}

static CUresult copy_batch(const char *name, const struct batch *batch, size_t *ret_failed,
                           CUstream stream) {
    size_t failed = SIZE_MAX; /* as documented where no one copy is to blame */
    struct fc_call call;

    if (fc_enter(&call, name, FC_CONTEXT, "count=%zu attrs=%zu stream=%p first=0x%llx<-0x%llx+%zu",
                 batch->count, batch->attr_count, (void *)stream,
                 batch->count && batch->to ? batch->to[0] : 0,
                 batch->count && batch->from ? batch->from[0] : 0,
                 batch->count && batch->sizes ? batch->sizes[0] : 0))
        call.result = submit(&call, batch, &failed, stream);
    if (call.result != CUDA_SUCCESS && ret_failed)
        *ret_failed = failed;
    return fc_leave(&call);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attrs, size_t *attr_indexes, size_t attr_count,
                            size_t *fail_index, CUstream stream) {
    return copy_batch("cuMemcpyBatchAsync",
                      &(struct batch){.to = to,
                                      .from = from,
                                      .sizes = sizes,
                                      .count = count,
                                      .attrs = attrs,
                                      .attr_indexes = attr_indexes,
                                      .attr_count = attr_count},
                      fail_index, stream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attrs, size_t *attr_indexes, size_t attr_count,
                               CUstream stream) {
    return copy_batch("cuMemcpyBatchAsync_v2",
                      &(struct batch){.to = to,
                                      .from = from,
                                      .sizes = sizes,
                                      .count = count,
                                      .attrs = attrs,
                                      .attr_indexes = attr_indexes,
                                      .attr_count = attr_count},
                      NULL, stream);
}
