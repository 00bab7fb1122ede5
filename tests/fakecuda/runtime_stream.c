/* SPDX-License-Identifier: Apache-2.0 */
/* The runtime's streams and events: the driver's own, one call each. */
#include "runtime.h"

cudaError_t cudaStreamCreate(CUstream *stream) {
    int result;

    if (rt_begin("cudaStreamCreate", RT_CONTEXT, &result))
        result = (int)cuStreamCreate(stream, 0);
    return rt_end("cudaStreamCreate", result, "%s", "");
}

cudaError_t cudaStreamCreateWithFlags(CUstream *stream, unsigned int flags) {
    int result;

    if (rt_begin("cudaStreamCreateWithFlags", RT_CONTEXT, &result))
        result = (int)cuStreamCreate(stream, flags);
    return rt_end("cudaStreamCreateWithFlags", result, "flags=%u", flags);
}

cudaError_t cudaStreamDestroy(CUstream stream) {
    int result;

    if (rt_begin("cudaStreamDestroy", RT_CONTEXT, &result))
        result = (int)cuStreamDestroy_v2(stream);
    return rt_end("cudaStreamDestroy", result, "stream=%p", (void *)stream);
}

cudaError_t cudaStreamQuery(CUstream stream) {
    int result;

    if (rt_begin("cudaStreamQuery", RT_CONTEXT, &result))
        result = (int)cuStreamQuery(stream);
    return rt_end("cudaStreamQuery", result, "stream=%p", (void *)stream);
}

cudaError_t cudaStreamSynchronize(CUstream stream) {
    int result;

    if (rt_begin("cudaStreamSynchronize", RT_CONTEXT, &result))
        result = (int)cuStreamSynchronize(stream);
    return rt_end("cudaStreamSynchronize", result, "stream=%p", (void *)stream);
}

cudaError_t cudaStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    int result;

    if (rt_begin("cudaStreamWaitEvent", RT_CONTEXT, &result))
        result = (int)cuStreamWaitEvent(stream, event, flags);
    return rt_end("cudaStreamWaitEvent", result, "stream=%p event=%p", (void *)stream,
                  (void *)event);
}

cudaError_t cudaStreamIsCapturing(CUstream stream, int *status) {
    int result;

    if (rt_begin("cudaStreamIsCapturing", RT_CONTEXT, &result))
        result = (int)cuStreamIsCapturing(stream, status);
    return rt_end("cudaStreamIsCapturing", result, "stream=%p", (void *)stream);
}

cudaError_t cudaLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data) {
    int result;

    if (rt_begin("cudaLaunchHostFunc", RT_CONTEXT, &result))
        result = (int)cuLaunchHostFunc(stream, function, user_data);
    return rt_end("cudaLaunchHostFunc", result, "stream=%p", (void *)stream);
}

cudaError_t cudaEventCreate(CUevent *event) {
    int result;

    if (rt_begin("cudaEventCreate", RT_CONTEXT, &result))
        result = (int)cuEventCreate(event, 0);
    return rt_end("cudaEventCreate", result, "%s", "");
}

cudaError_t cudaEventCreateWithFlags(CUevent *event, unsigned int flags) {
    int result;

    if (rt_begin("cudaEventCreateWithFlags", RT_CONTEXT, &result))
        result = (int)cuEventCreate(event, flags);
    return rt_end("cudaEventCreateWithFlags", result, "flags=%u", flags);
}

cudaError_t cudaEventDestroy(CUevent event) {
    int result;

    if (rt_begin("cudaEventDestroy", RT_CONTEXT, &result))
        result = (int)cuEventDestroy_v2(event);
    return rt_end("cudaEventDestroy", result, "event=%p", (void *)event);
}

cudaError_t cudaEventQuery(CUevent event) {
    int result;

    if (rt_begin("cudaEventQuery", RT_CONTEXT, &result))
        result = (int)cuEventQuery(event);
    return rt_end("cudaEventQuery", result, "event=%p", (void *)event);
}

cudaError_t cudaEventRecord(CUevent event, CUstream stream) {
    int result;

    if (rt_begin("cudaEventRecord", RT_CONTEXT, &result))
        result = (int)cuEventRecord(event, stream);
    return rt_end("cudaEventRecord", result, "event=%p stream=%p", (void *)event, (void *)stream);
}

cudaError_t cudaEventSynchronize(CUevent event) {
    int result;

    if (rt_begin("cudaEventSynchronize", RT_CONTEXT, &result))
        result = (int)cuEventSynchronize(event);
    return rt_end("cudaEventSynchronize", result, "event=%p", (void *)event);
}

cudaError_t cudaEventElapsedTime(float *ms, CUevent start, CUevent end) {
    int result;

    if (rt_begin("cudaEventElapsedTime", RT_CONTEXT, &result))
        result = (int)cuEventElapsedTime(ms, start, end);
    return rt_end("cudaEventElapsedTime", result, "start=%p end=%p", (void *)start, (void *)end);
}
