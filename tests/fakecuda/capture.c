/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream capture, as far as other threads must not disturb it: what is captured is counted and
 * thrown away. Which calls are "potentially unsafe" is said where they are entered (FC_UNSAFE).
 * NVIDIA gives examples only. Asked of driver 580: waiting and querying, cuMemAlloc, cuMemHostAlloc
 * and cuMemHostRegister are; synchronous copies, the VMM calls, and making and recording streams
 * and events are not. Freeing, unregistering and loading modules were not asked and count as
 * unsafe.
 */
#include "state.h"

#include <sys/syscall.h>
#include <unistd.h>

static __thread int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static unsigned captures; /* open, so that most calls need not look */

static long tid(void) {
    return syscall(SYS_gettid);
}

static bool forbids(const struct fc_stream *stream, long me) {
    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_NONE ||
        stream->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    if (stream->capture_tid == me)
        return true;
    return stream->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
           thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult fc_capture_check_unsafe(struct fc_call *call) {
    CUresult result = CUDA_SUCCESS;
    struct fc_stream *stream;
    long me = tid();

    if (!captures || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (size_t i = 0; (stream = fc_handle_at(FC_STREAM_HANDLE, i)); i++) {
        if (!forbids(stream, me))
            continue;
        stream->capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        result =
            fc_violate(call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                       "an unsafe call during a stream capture of thread %ld, which it invalidates "
                       "(cuThreadExchangeStreamCaptureMode)",
                       stream->capture_tid);
    }
    return result;
}

/* Work in the legacy stream would have to order itself with blocking streams that are being
 * captured. */
static CUresult check_implicit(struct fc_call *call, const struct fc_stream *legacy) {
    struct fc_stream *stream;

    for (size_t i = 0; (stream = fc_handle_at(FC_STREAM_HANDLE, i)); i++) {
        if (stream->context != legacy->context || stream->flags & CU_STREAM_NON_BLOCKING ||
            stream->capture_status == CU_STREAM_CAPTURE_STATUS_NONE)
            continue;
        stream->capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        return fc_violate(call, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                          "work in the legacy stream depends on a stream that is being captured");
    }
    return CUDA_SUCCESS;
}

CUresult fc_capture_check_stream(struct fc_call *call, struct fc_stream *stream,
                                 bool *ret_recorded) {
    if (!captures)
        return CUDA_SUCCESS;
    if (stream->legacy)
        return check_implicit(call, stream);
    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        stream->captured++;
        *ret_recorded = true;
    }
    return CUDA_SUCCESS;
}

CUresult fc_capture_check_sync(struct fc_call *call, struct fc_stream *stream) {
    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_NONE)
        return captures && stream->legacy ? check_implicit(call, stream) : CUDA_SUCCESS;
    stream->capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return fc_violate(call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                      "waiting for a stream that is being captured");
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    struct fc_call call;

    if (fc_enter(&call, "cuThreadExchangeStreamCaptureMode", FC_INIT, "mode=%d", *mode)) {
        if (*mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "unknown mode");
        } else {
            thread_mode = *mode;
            *mode = before;
        }
    }
    return fc_leave(&call);
}

CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamBeginCapture_v2", FC_CONTEXT, "stream=%p mode=%d", (void *)handle,
                 mode)) {
        stream = fc_stream_get(&call, handle);
        if (stream && stream->legacy)
            call.result = fc_violate(&call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                                     "the legacy stream cannot be captured");
        else if (stream && stream->capture_status != CU_STREAM_CAPTURE_STATUS_NONE)
            call.result =
                fc_violate(&call, CUDA_ERROR_ILLEGAL_STATE, "the stream is being captured already");
        else if (stream) {
            stream->capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
            stream->capture_mode = mode;
            stream->capture_tid = tid();
            stream->captured = 0;
            captures++;
        }
    }
    return fc_leave(&call);
}

static CUresult end(struct fc_call *call, struct fc_stream *stream, CUgraph *graph) {
    bool sound = stream->capture_status == CU_STREAM_CAPTURE_STATUS_ACTIVE;

    if (stream->capture_status == CU_STREAM_CAPTURE_STATUS_NONE)
        return fc_violate(call, CUDA_ERROR_ILLEGAL_STATE, "the stream is not being captured");
    if (stream->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && stream->capture_tid != tid())
        return fc_violate(call, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                          "the capture was begun by another thread");
    stream->capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
    captures--;
    *graph = (CUgraph)(sound ? fc_handle_new(FC_GRAPH_HANDLE, stream) : 0);
    return sound ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamEndCapture", FC_CONTEXT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            call.result = end(&call, stream, graph);
    }
    return fc_leave(&call);
}

CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    const struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamIsCapturing", FC_CONTEXT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            *status = stream->capture_status;
    }
    return fc_leave(&call);
}

CUresult cuGraphDestroy(CUgraph graph) {
    struct fc_call call;

    if (fc_enter(&call, "cuGraphDestroy", FC_INIT, "graph=%p", (void *)graph) &&
        !fc_handle_get(FC_GRAPH_HANDLE, (uintptr_t)graph))
        call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "not a graph: %p", (void *)graph);
    return fc_leave(&call);
}
