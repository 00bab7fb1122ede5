/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose memory an address is, as the driver says.
 *
 * It must not know: batches, peers, what the caller does with the answer.
 */
#include "transport/cuda.h"

#include <stddef.h>

#include "env/cuda.h"

/*
 * A driver that does not know the address, or was never started, owns nothing there. The driver
 * answers so from any thread, with or without a current context (seen with 580.159 on an H200:
 * INVALID_VALUE for plain memory, NOT_INITIALIZED before cuInit, GPU memory recognised in threads
 * without a context). INVALID_CONTEXT is therefore no such answer: to take GPU memory for the
 * host's would fault in the host process, while UNKNOWN only leaves the request to Mooncake.
 */
static bool means_host(tp_cu_result rc) {
    return rc == TP_CUDA_ERROR_INVALID_VALUE || rc == TP_CUDA_ERROR_NOT_INITIALIZED ||
           rc == TP_CUDA_ERROR_DEINITIALIZED;
}

enum tp_memory tp_cuda_classify(const void *address, int *ret_device) {
    bool unusable = false;
    const struct tp_cuda *cuda = tp_cuda(false, &unusable);
    if (!cuda)
        return unusable ? TP_MEMORY_UNKNOWN : TP_MEMORY_HOST;

    tp_cu_deviceptr pointer = (uintptr_t)address;
    unsigned type = 0;
    tp_cu_result rc =
        cuda->pointer_get_attribute(&type, TP_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer);
    if (rc != TP_CUDA_SUCCESS)
        return means_host(rc) ? TP_MEMORY_HOST : TP_MEMORY_UNKNOWN;
    if (type == TP_CU_MEMORYTYPE_HOST) {
        unsigned managed = 0;
        rc = cuda->pointer_get_attribute(&managed, TP_CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer);
        if (rc != TP_CUDA_SUCCESS)
            return TP_MEMORY_UNKNOWN;
        if (!managed)
            return TP_MEMORY_HOST;
    }
    int device = 0;
    rc = cuda->pointer_get_attribute(&device, TP_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
    if (rc != TP_CUDA_SUCCESS)
        return TP_MEMORY_UNKNOWN;
    if (ret_device)
        *ret_device = device;
    return TP_MEMORY_DEVICE;
}
