/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The runtime's frame: start of the driver at the first call, the primary context of the thread's
 * device where a call needs one (made lazily, never by asking a pointer's attributes), the last
 * error, and devices.
 */
#include "runtime.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_DEVICES 16

static __thread int thread_device;
static __thread int last_error;
static CUcontext primaries[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int primary(int device, CUcontext *ret) {
    int result = CUDA_SUCCESS;

    if (device < 0 || device >= MAX_DEVICES)
        return cudaErrorInvalidDevice;
    pthread_mutex_lock(&lock);
    if (!primaries[device])
        result = (int)cuDevicePrimaryCtxRetain(&primaries[device], device);
    *ret = primaries[device];
    pthread_mutex_unlock(&lock);
    return result;
}

/* A context that the program made current by the driver API is used as it is. */
static int need_context(void) {
    CUcontext context = NULL;
    int result = (int)cuCtxGetCurrent(&context);

    if (result || context)
        return result;
    result = primary(thread_device, &context);
    return result ? result : (int)cuCtxSetCurrent(context);
}

bool rt_begin(const char *name, int needs, int *ret_result) {
    *ret_result = CUDA_SUCCESS;
    if (fakecuda_inject_runtime(name, ret_result))
        return false;
    if (needs & RT_INIT)
        *ret_result = (int)cuInit(0);
    if (!*ret_result && needs == RT_CONTEXT)
        *ret_result = need_context();
    return !*ret_result;
}

cudaError_t rt_end(const char *name, int result, const char *format, ...) {
    char args[256];
    va_list list;

    va_start(list, format);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false alarm of clang-tidy 14 */
    vsnprintf(args, sizeof args, format, list);
    va_end(list);
    fakecuda_log_runtime(name, result, args);
    /* cudaErrorNotReady is no error to remember, as documented. */
    if (result && result != CUDA_ERROR_NOT_READY)
        last_error = result;
    return result;
}

cudaError_t cudaGetDeviceCount(int *count) {
    int result;

    *count = 0;
    if (rt_begin("cudaGetDeviceCount", RT_INIT, &result))
        result = (int)cuDeviceGetCount(count);
    return rt_end("cudaGetDeviceCount", result, "%s", "");
}

cudaError_t cudaGetDevice(int *device) {
    int result;

    if (rt_begin("cudaGetDevice", RT_INIT, &result))
        *device = thread_device;
    return rt_end("cudaGetDevice", result, "%s", "");
}

cudaError_t cudaSetDevice(int device) {
    CUcontext context = NULL;
    int result;

    if (rt_begin("cudaSetDevice", RT_INIT, &result)) {
        CUdevice checked;

        result = (int)cuDeviceGet(&checked, device);
        if (!result)
            result = primary(device, &context);
        if (!result)
            result = (int)cuCtxSetCurrent(context);
        if (!result)
            thread_device = device;
    }
    return rt_end("cudaSetDevice", result, "device=%d", device);
}

/* Where CUDA 13 has the fields of struct cudaDeviceProp; abi_check.c compares. */
cudaError_t cudaGetDeviceProperties(void *properties, int device) {
    int result, value;
    size_t memory;

    if (rt_begin("cudaGetDeviceProperties", RT_INIT, &result)) {
        memset(properties, 0, 1008);
        result = (int)cuDeviceGetName(properties, 256, device);
        if (!result)
            result = (int)cuDeviceTotalMem_v2(&memory, device);
        if (!result) {
            static const struct {
                size_t offset;
                CUdevice_attribute attribute;
            } fields[] = {{296, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK},
                          {308, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
                          {320, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
                          {360, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
                          {364, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
                          {384, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
                          {568, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID},
                          {588, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING}};

            memcpy((char *)properties + 288, &memory, sizeof memory);
            for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
                cuDeviceGetAttribute(&value, fields[i].attribute, device);
                memcpy((char *)properties + fields[i].offset, &value, sizeof value);
            }
        }
    }
    return rt_end("cudaGetDeviceProperties", result, "device=%d", device);
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    int result;

    if (rt_begin("cudaDeviceGetAttribute", RT_INIT, &result))
        result = (int)cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device);
    return rt_end("cudaDeviceGetAttribute", result, "attribute=%d device=%d", attribute, device);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    int result;

    if (rt_begin("cudaDeviceGetPCIBusId", RT_INIT, &result))
        result = (int)cuDeviceGetPCIBusId(text, bytes, device);
    return rt_end("cudaDeviceGetPCIBusId", result, "device=%d", device);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    int result;

    if (rt_begin("cudaDeviceCanAccessPeer", RT_INIT, &result))
        result = (int)cuDeviceCanAccessPeer(can, device, peer);
    return rt_end("cudaDeviceCanAccessPeer", result, "device=%d peer=%d", device, peer);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    CUcontext context = NULL;
    int result;

    if (rt_begin("cudaDeviceEnablePeerAccess", RT_CONTEXT, &result)) {
        result = primary(peer, &context);
        if (!result)
            result = (int)cuCtxEnablePeerAccess(context, flags);
    }
    return rt_end("cudaDeviceEnablePeerAccess", result, "peer=%d", peer);
}

cudaError_t cudaDeviceSynchronize(void) {
    int result;

    if (rt_begin("cudaDeviceSynchronize", RT_CONTEXT, &result))
        result = (int)cuCtxSynchronize();
    return rt_end("cudaDeviceSynchronize", result, "%s", "");
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return rt_end("cudaRuntimeGetVersion", 0, "%s", "");
}

cudaError_t cudaDriverGetVersion(int *version) {
    return rt_end("cudaDriverGetVersion", (int)cuDriverGetVersion(version), "%s", "");
}

cudaError_t cudaGetLastError(void) {
    int result = last_error;

    last_error = 0;
    fakecuda_log_runtime("cudaGetLastError", result, "");
    return result;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorString(cudaError_t error) {
    const char *text = NULL;

    return cuGetErrorString((CUresult)error, &text) ? "unrecognized error code" : text;
}

const char *cudaGetErrorName(cudaError_t error) {
    return cudaGetErrorString(error);
}
