/* SPDX-License-Identifier: Apache-2.0 */
/* The runtime's memory calls over the driver's. */
#include "runtime.h"

#include <string.h>

static CUdeviceptr number(const void *address) {
    return (CUdeviceptr)(uintptr_t)address;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    CUdeviceptr got = 0;
    int result;

    if (rt_begin("cudaMalloc", RT_CONTEXT, &result)) {
        result = (int)cuMemAlloc_v2(&got, bytes);
        *address = (void *)(uintptr_t)got;
    }
    return rt_end("cudaMalloc", result, "bytes=%zu", bytes);
}

cudaError_t cudaFree(void *address) {
    int result;

    if (rt_begin("cudaFree", RT_CONTEXT, &result) && address)
        result = (int)cuMemFree_v2(number(address));
    return rt_end("cudaFree", result, "address=%p", address);
}

cudaError_t cudaMallocHost(void **address, size_t bytes) {
    int result;

    if (rt_begin("cudaMallocHost", RT_CONTEXT, &result))
        result = (int)cuMemHostAlloc(address, bytes, 0);
    return rt_end("cudaMallocHost", result, "bytes=%zu", bytes);
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned int flags) {
    int result;

    if (rt_begin("cudaHostAlloc", RT_CONTEXT, &result))
        result = (int)cuMemHostAlloc(address, bytes, flags);
    return rt_end("cudaHostAlloc", result, "bytes=%zu flags=%u", bytes, flags);
}

cudaError_t cudaFreeHost(void *address) {
    int result;

    if (rt_begin("cudaFreeHost", RT_CONTEXT, &result) && address)
        result = (int)cuMemFreeHost(address);
    return rt_end("cudaFreeHost", result, "address=%p", address);
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned int flags) {
    int result;

    if (rt_begin("cudaHostRegister", RT_CONTEXT, &result))
        result = (int)cuMemHostRegister_v2(address, bytes, flags);
    return rt_end("cudaHostRegister", result, "address=%p bytes=%zu flags=%u", address, bytes,
                  flags);
}

cudaError_t cudaHostUnregister(void *address) {
    int result;

    if (rt_begin("cudaHostUnregister", RT_CONTEXT, &result))
        result = (int)cuMemHostUnregister(address);
    return rt_end("cudaHostUnregister", result, "address=%p", address);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags) {
    CUdeviceptr got = 0;
    int result;

    if (rt_begin("cudaHostGetDevicePointer", RT_CONTEXT, &result)) {
        result = (int)cuMemHostGetDevicePointer_v2(&got, host, flags);
        *device = (void *)(uintptr_t)got;
    }
    return rt_end("cudaHostGetDevicePointer", result, "host=%p", host);
}

/* Memory that CUDA does not know is "unregistered" and no error, since CUDA 11. */
static void describe(struct cudaPointerAttributes *attributes, const void *address) {
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    int type = 0, device = CU_DEVICE_INVALID;
    bool managed = false;
    void *data[] = {&type, &managed, &device};

    memset(attributes, 0, sizeof *attributes);
    if (cuPointerGetAttributes(3, wanted, data, number(address)))
        type = 0;
    attributes->type = managed ? 3 : type;
    attributes->device = device;
    attributes->devicePointer = type ? (void *)address : NULL;
    attributes->hostPointer = attributes->type == CU_MEMORYTYPE_DEVICE ? NULL : (void *)address;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                     const void *address) {
    int result;

    if (rt_begin("cudaPointerGetAttributes", RT_INIT, &result))
        describe(attributes, address);
    return rt_end("cudaPointerGetAttributes", result, "address=%p", address);
}

static int copy(void *to, const void *from, size_t bytes, int kind) {
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return (int)cuMemcpyHtoD_v2(number(to), from, bytes);
    case cudaMemcpyDeviceToHost:
        return (int)cuMemcpyDtoH_v2(to, number(from), bytes);
    case cudaMemcpyDeviceToDevice:
        return (int)cuMemcpyDtoD_v2(number(to), number(from), bytes);
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return (int)cuMemcpy(number(to), number(from), bytes);
    default:
        return 21; /* cudaErrorInvalidMemcpyDirection */
    }
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    int result;

    if (rt_begin("cudaMemcpy", RT_CONTEXT, &result))
        result = copy(to, from, bytes, kind);
    return rt_end("cudaMemcpy", result, "to=%p from=%p bytes=%zu kind=%d", to, from, bytes, kind);
}

static int copy_async(void *to, const void *from, size_t bytes, int kind, CUstream stream) {
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return (int)cuMemcpyHtoDAsync_v2(number(to), from, bytes, stream);
    case cudaMemcpyDeviceToHost:
        return (int)cuMemcpyDtoHAsync_v2(to, number(from), bytes, stream);
    case cudaMemcpyDeviceToDevice:
        return (int)cuMemcpyDtoDAsync_v2(number(to), number(from), bytes, stream);
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return (int)cuMemcpyAsync(number(to), number(from), bytes, stream);
    default:
        return 21; /* cudaErrorInvalidMemcpyDirection */
    }
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, CUstream stream) {
    int result;

    if (rt_begin("cudaMemcpyAsync", RT_CONTEXT, &result))
        result = copy_async(to, from, bytes, kind, stream);
    return rt_end("cudaMemcpyAsync", result, "to=%p from=%p bytes=%zu kind=%d stream=%p", to, from,
                  bytes, kind, (void *)stream);
}

typedef CUresult (*batch_function)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t,
                                   CUmemcpyAttributes *, size_t *, size_t, CUstream);

/* By cuGetProcAddress, as the real runtime does: the driver may be older than the call. */
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes,
                                 size_t count, void *attrs, size_t *attr_indexes, size_t attr_count,
                                 CUstream stream) {
    batch_function function = NULL;
    void *found = NULL;
    int result, status;

    if (rt_begin("cudaMemcpyBatchAsync", RT_CONTEXT, &result)) {
        if (cuGetProcAddress_v2("cuMemcpyBatchAsync", &found, 13000, 0, &status) || !found) {
            result = 36; /* cudaErrorCallRequiresNewerDriver */
        } else {
            memcpy(&function, &found, sizeof function);
            result = (int)function((CUdeviceptr *)(uintptr_t)to, (CUdeviceptr *)(uintptr_t)from,
                                   (size_t *)(uintptr_t)sizes, count, attrs, attr_indexes,
                                   attr_count, stream);
        }
    }
    return rt_end("cudaMemcpyBatchAsync", result, "count=%zu stream=%p", count, (void *)stream);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    int result;

    if (rt_begin("cudaMemset", RT_CONTEXT, &result))
        result = (int)cuMemsetD8_v2(number(to), (unsigned char)value, bytes);
    return rt_end("cudaMemset", result, "to=%p bytes=%zu", to, bytes);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, CUstream stream) {
    int result;

    if (rt_begin("cudaMemsetAsync", RT_CONTEXT, &result))
        result = (int)cuMemsetD8Async(number(to), (unsigned char)value, bytes, stream);
    return rt_end("cudaMemsetAsync", result, "to=%p bytes=%zu stream=%p", to, bytes,
                  (void *)stream);
}

cudaError_t cudaIpcGetMemHandle(void *handle, void *address) {
    return rt_end("cudaIpcGetMemHandle", cudaErrorNotSupported, "address=%p", address);
}

cudaError_t cudaIpcOpenMemHandle(void **address, struct cudaIpcMemHandle handle,
                                 unsigned int flags) {
    return rt_end("cudaIpcOpenMemHandle", cudaErrorNotSupported, "flags=%u", flags);
}

cudaError_t cudaIpcCloseMemHandle(void *address) {
    return rt_end("cudaIpcCloseMemHandle", cudaErrorNotSupported, "address=%p", address);
}
