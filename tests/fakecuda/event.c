/* SPDX-License-Identifier: Apache-2.0 */
/* Events: a place in a stream's order. */
#include "state.h"

#include <stdlib.h>

static struct fc_event *get(struct fc_call *call, CUevent handle) {
    struct fc_event *event = fc_handle_get(FC_EVENT_HANDLE, (uintptr_t)handle);

    if (!event)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "not an event: %p", (void *)handle);
    else if (!event->context->alive)
        call->result =
            fc_violate(call, CUDA_ERROR_CONTEXT_IS_DESTROYED, "the event's context was destroyed");
    else if (!event->alive)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "event %p was destroyed", (void *)handle);
    return call->result == CUDA_SUCCESS ? event : NULL;
}

CUresult cuEventCreate(CUevent *ret, unsigned int flags) {
    struct fc_event *event;
    struct fc_call call;

    if (fc_enter(&call, "cuEventCreate", FC_CONTEXT, "flags=%u", flags)) {
        event = calloc(1, sizeof *event);
        if (flags > 7) {
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "unknown flags %u", flags);
            free(event);
        } else if (!event) {
            call.result = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            *event = (struct fc_event){.context = call.context, .flags = flags, .alive = true};
            event->handle = fc_handle_new(FC_EVENT_HANDLE, event);
            *ret = (CUevent)event->handle;
        }
    }
    return fc_leave(&call);
}

CUresult cuEventDestroy_v2(CUevent handle) {
    struct fc_event *event;
    struct fc_call call;

    if (fc_enter(&call, "cuEventDestroy_v2", FC_INIT, "event=%p", (void *)handle)) {
        event = get(&call, handle);
        if (event)
            event->alive = false;
    }
    return fc_leave(&call);
}

static CUresult record(struct fc_call *call, CUevent handle, CUstream stream_handle) {
    struct fc_stream *stream = fc_stream_get(call, stream_handle);
    struct fc_event *event = stream ? get(call, handle) : NULL;
    bool recorded = false;
    struct fc_job *job;
    CUresult result;

    if (!event)
        return call->result;
    if (event->context != stream->context)
        return fc_violate(call, CUDA_ERROR_INVALID_HANDLE,
                          "the event and the stream are of different contexts");
    result = fc_capture_check_stream(call, stream, &recorded);
    if (result != CUDA_SUCCESS)
        return result;
    event->captured = recorded;
    if (recorded)
        return CUDA_SUCCESS;
    job = fc_job_new();
    if (!job)
        return CUDA_ERROR_OUT_OF_MEMORY;
    job->event = event;
    job->event_turn = ++event->turn;
    event->recorded = true;
    event->stream = stream;
    event->count = stream->submitted + 1;
    return fc_submit(call, stream, job, false);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    struct fc_call call;

    if (fc_enter(&call, "cuEventRecord", FC_CONTEXT, "event=%p stream=%p", (void *)event,
                 (void *)stream))
        call.result = record(&call, event, stream);
    return fc_leave(&call);
}

static bool done(const struct fc_event *event) {
    return !event->recorded || event->stream->done >= event->count;
}

CUresult cuEventQuery(CUevent handle) {
    const struct fc_event *event;
    struct fc_call call;

    if (fc_enter(&call, "cuEventQuery", FC_INIT | FC_UNSAFE, "event=%p", (void *)handle)) {
        event = get(&call, handle);
        if (event && event->captured)
            call.result =
                fc_violate(&call, CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture");
        else if (event)
            call.result = event->context->sticky ? event->context->sticky
                          : done(event)          ? CUDA_SUCCESS
                                                 : CUDA_ERROR_NOT_READY;
    }
    return fc_leave(&call);
}

CUresult cuEventSynchronize(CUevent handle) {
    const struct fc_event *event;
    struct fc_call call;

    if (fc_enter(&call, "cuEventSynchronize", FC_INIT | FC_UNSAFE, "event=%p", (void *)handle)) {
        event = get(&call, handle);
        if (event && event->captured)
            call.result =
                fc_violate(&call, CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture");
        else if (event) {
            if (event->recorded)
                fc_wait(event->stream, event->count);
            call.result = event->context->sticky;
        }
    }
    return fc_leave(&call);
}

static CUresult elapsed(const char *name, float *ms, CUevent start_handle, CUevent end_handle) {
    const struct fc_event *start, *end;
    struct fc_call call;

    if (fc_enter(&call, name, FC_INIT, "start=%p end=%p", (void *)start_handle,
                 (void *)end_handle)) {
        start = get(&call, start_handle);
        end = start ? get(&call, end_handle) : NULL;
        if (!end)
            ;
        else if (!start->recorded || !end->recorded ||
                 (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_HANDLE,
                                     "an event was not recorded or has no timing");
        else if (!done(start) || !done(end))
            call.result = CUDA_ERROR_NOT_READY;
        else
            *ms = (float)((double)((int64_t)(end->done_ns - start->done_ns)) / 1e6);
    }
    return fc_leave(&call);
}

CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    return elapsed("cuEventElapsedTime", ms, start, end);
}

CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    return elapsed("cuEventElapsedTime_v2", ms, start, end);
}
