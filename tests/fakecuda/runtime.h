/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the CUDA 13 runtime API that stock Mooncake's store, engine and client import, over
 * the double of the driver. Its error numbers are the driver's for every error that can come up
 * here. What has no use in Mooncake's tcp path (CUDA IPC) says cudaErrorNotSupported.
 */
#ifndef FAKECUDA_RUNTIME_H
#define FAKECUDA_RUNTIME_H

#include "fakecuda.h"

typedef int cudaError_t;
enum { cudaErrorNotSupported = 801, cudaErrorInvalidValue = 1, cudaErrorInvalidDevice = 101 };
enum {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

struct cudaPointerAttributes {
    int type; /* 0 unregistered, 1 host, 2 device, 3 managed */
    int device;
    void *devicePointer, *hostPointer;
    long reserved[8];
};

/* ---- runtime.c, for its neighbours ---- */
enum { RT_INIT = 1, RT_CONTEXT = 3 };
/* false: *ret_result is the call's result already (injected, or the driver would not start). */
bool rt_begin(const char *name, int needs, int *ret_result);
cudaError_t rt_end(const char *name, int result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

FC_API cudaError_t cudaGetDeviceCount(int *count);
FC_API cudaError_t cudaGetDevice(int *device);
FC_API cudaError_t cudaSetDevice(int device);
FC_API cudaError_t cudaGetDeviceProperties(void *properties, int device);
FC_API cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device);
FC_API cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device);
FC_API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
FC_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags);
FC_API cudaError_t cudaDeviceSynchronize(void);
FC_API cudaError_t cudaRuntimeGetVersion(int *version);
FC_API cudaError_t cudaDriverGetVersion(int *version);
FC_API cudaError_t cudaGetLastError(void);
FC_API cudaError_t cudaPeekAtLastError(void);
FC_API const char *cudaGetErrorString(cudaError_t error);
FC_API const char *cudaGetErrorName(cudaError_t error);

FC_API cudaError_t cudaMalloc(void **address, size_t bytes);
FC_API cudaError_t cudaFree(void *address);
FC_API cudaError_t cudaMallocHost(void **address, size_t bytes);
FC_API cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned int flags);
FC_API cudaError_t cudaFreeHost(void *address);
FC_API cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned int flags);
FC_API cudaError_t cudaHostUnregister(void *address);
FC_API cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags);
FC_API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                            const void *address);
FC_API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind);
FC_API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind,
                                   CUstream stream);
FC_API cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from,
                                        const size_t *sizes, size_t count, void *attrs,
                                        size_t *attr_indexes, size_t attr_count, CUstream stream);
FC_API cudaError_t cudaMemset(void *to, int value, size_t bytes);
FC_API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, CUstream stream);
FC_API cudaError_t cudaIpcGetMemHandle(void *handle, void *address);
struct cudaIpcMemHandle {
    char reserved[64];
};
FC_API cudaError_t cudaIpcOpenMemHandle(void **address, struct cudaIpcMemHandle handle,
                                        unsigned int flags);
FC_API cudaError_t cudaIpcCloseMemHandle(void *address);

FC_API cudaError_t cudaStreamCreate(CUstream *stream);
FC_API cudaError_t cudaStreamCreateWithFlags(CUstream *stream, unsigned int flags);
FC_API cudaError_t cudaStreamDestroy(CUstream stream);
FC_API cudaError_t cudaStreamQuery(CUstream stream);
FC_API cudaError_t cudaStreamSynchronize(CUstream stream);
FC_API cudaError_t cudaStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
FC_API cudaError_t cudaStreamIsCapturing(CUstream stream, int *status);
FC_API cudaError_t cudaLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data);
FC_API cudaError_t cudaEventCreate(CUevent *event);
FC_API cudaError_t cudaEventCreateWithFlags(CUevent *event, unsigned int flags);
FC_API cudaError_t cudaEventDestroy(CUevent event);
FC_API cudaError_t cudaEventQuery(CUevent event);
FC_API cudaError_t cudaEventRecord(CUevent event, CUstream stream);
FC_API cudaError_t cudaEventSynchronize(CUevent event);
FC_API cudaError_t cudaEventElapsedTime(float *ms, CUevent start, CUevent end);

#endif
