/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Single copies and fills. Every rule is checked at submission; the bytes move in the stream's
 * thread. Copies with pageable host memory are asynchronous too, which the documentation allows
 * ("may") and a program may not rely on.
 */
#include "state.h"

#include <stdlib.h>

struct copy_request {
    CUdeviceptr to, from;
    size_t bytes;
    enum fc_side to_side, from_side;
    bool fill;
    unsigned char fill_value;
};

/* A job for the request, with its memory marked as in use. */
static CUresult make_job(struct fc_call *call, const struct fc_context *context,
                         const struct copy_request *request, struct fc_job **ret) {
    struct fc_job *job = fc_job_new();
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

    if (!job)
        return result;
    job->copies = calloc(1, sizeof *job->copies);
    if (!job->copies)
        goto fail;
    job->copy_count = 1;
    job->fill = request->fill;
    job->fill_value = request->fill_value;
    job->copies[0].size = request->bytes;
    result = fc_span_take(call, context, request->to, request->bytes, true, request->to_side,
                          &job->copies[0].to);
    if (result == CUDA_SUCCESS && !request->fill)
        result = fc_span_take(call, context, request->from, request->bytes, false,
                              request->from_side, &job->copies[0].from);
    if (result != CUDA_SUCCESS)
        goto fail;
    *ret = job;
    return CUDA_SUCCESS;
fail:
    fc_job_free(job);
    return result;
}

static CUresult submit(struct fc_call *call, const struct copy_request *request, CUstream handle,
                       bool wait) {
    struct fc_stream *stream = fc_stream_get(call, handle);
    bool recorded = false;
    struct fc_job *job = NULL;
    CUresult result;

    if (!stream)
        return call->result;
    result = fc_capture_check_stream(call, stream, &recorded);
    if (result != CUDA_SUCCESS || !request->bytes)
        return result;
    result = make_job(call, stream->context, request, &job);
    if (result != CUDA_SUCCESS)
        return result;
    if (recorded) {
        fc_job_free(job);
        return CUDA_SUCCESS;
    }
    return fc_submit(call, stream, job, wait);
}

static CUresult copy(const char *name, const struct copy_request *request, CUstream stream,
                     bool wait) {
    struct fc_call call;

    if (fc_enter(&call, name, FC_CONTEXT, "to=0x%llx from=0x%llx bytes=%zu stream=%p", request->to,
                 request->from, request->bytes, (void *)stream))
        call.result = submit(&call, request, stream, wait);
    return fc_leave(&call);
}

static CUdeviceptr host(const void *address) {
    return (CUdeviceptr)(uintptr_t)address;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy("cuMemcpy", &(struct copy_request){.to = to, .from = from, .bytes = bytes}, NULL,
                true);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy("cuMemcpyAsync", &(struct copy_request){.to = to, .from = from, .bytes = bytes},
                stream, false);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return copy("cuMemcpyHtoD_v2",
                &(struct copy_request){.to = to,
                                       .from = host(from),
                                       .bytes = bytes,
                                       .to_side = FC_SIDE_DEVICE,
                                       .from_side = FC_SIDE_HOST},
                NULL, true);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    return copy("cuMemcpyHtoDAsync_v2",
                &(struct copy_request){.to = to,
                                       .from = host(from),
                                       .bytes = bytes,
                                       .to_side = FC_SIDE_DEVICE,
                                       .from_side = FC_SIDE_HOST},
                stream, false);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return copy("cuMemcpyDtoH_v2",
                &(struct copy_request){.to = host(to),
                                       .from = from,
                                       .bytes = bytes,
                                       .to_side = FC_SIDE_HOST,
                                       .from_side = FC_SIDE_DEVICE},
                NULL, true);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy("cuMemcpyDtoHAsync_v2",
                &(struct copy_request){.to = host(to),
                                       .from = from,
                                       .bytes = bytes,
                                       .to_side = FC_SIDE_HOST,
                                       .from_side = FC_SIDE_DEVICE},
                stream, false);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy("cuMemcpyDtoD_v2",
                &(struct copy_request){.to = to,
                                       .from = from,
                                       .bytes = bytes,
                                       .to_side = FC_SIDE_DEVICE,
                                       .from_side = FC_SIDE_DEVICE},
                NULL, true);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy("cuMemcpyDtoDAsync_v2",
                &(struct copy_request){.to = to,
                                       .from = from,
                                       .bytes = bytes,
                                       .to_side = FC_SIDE_DEVICE,
                                       .from_side = FC_SIDE_DEVICE},
                stream, false);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    return copy(
        "cuMemsetD8_v2",
        &(struct copy_request){
            .to = to, .bytes = bytes, .fill = true, .fill_value = value, .to_side = FC_SIDE_DEVICE},
        NULL, true);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    return copy(
        "cuMemsetD8Async",
        &(struct copy_request){
            .to = to, .bytes = bytes, .fill = true, .fill_value = value, .to_side = FC_SIDE_DEVICE},
        stream, false);
}
