/* SPDX-License-Identifier: Apache-2.0 */
/* What a pointer is: attributes and ranges. Asking about memory that CUDA does not know fails and
 * breaks no rule. */
#include "state.h"

#include <string.h>

static bool on_host(const struct fc_range *range) {
    return range->kind == FC_RANGE_PINNED || range->kind == FC_RANGE_REGISTERED ||
           (range->kind == FC_RANGE_MAPPED && range->block->place != FC_PLACE_DEVICE);
}

/* Host memory of VMM is of device 0 to driver 580, wherever it lies. */
static int ordinal(const struct fc_range *range) {
    if (range->kind == FC_RANGE_MAPPED)
        return on_host(range) ? 0 : range->block->location;
    return range->context->device;
}

/* A GPU's pointer needs a GPU with access, a host pointer anybody with access (driver 580). */
static bool has_device_pointer(const struct fc_range *range) {
    bool any = range->kind != FC_RANGE_MAPPED || !on_host(range);

    for (int i = 0; i < FC_MAX_DEVICES; i++)
        any |= range->access[i] != 0;
    return any;
}

static bool has_host_pointer(const struct fc_range *range) {
    if (range->kind == FC_RANGE_MAPPED && on_host(range))
        return range->host_access || has_device_pointer(range);
    return on_host(range) || range->kind == FC_RANGE_MANAGED;
}

static void put_int(void *data, int value) {
    memcpy(data, &value, sizeof value);
}

static void put_long(void *data, uint64_t value) {
    memcpy(data, &value, sizeof value);
}

static void put_bool(void *data, bool value) {
    memcpy(data, &value, sizeof value);
}

/* For the addresses that cuPointerGetAttributes is asked about and that CUDA does not know:
 * documented defaults. */
static void put_unknown(void *data, CUpointer_attribute attribute) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        put_int(data, 0);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        put_int(data, CU_DEVICE_INVALID);
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
        put_bool(data, false);
        break;
    default:
        put_long(data, 0);
    }
}

static CUresult put(void *data, CUpointer_attribute attribute, const struct fc_range *range,
                    CUdeviceptr address) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        put_long(data, range->context ? range->context->handle : 0);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        put_int(data, on_host(range) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        if (!has_device_pointer(range))
            return CUDA_ERROR_INVALID_VALUE;
        put_long(data, address);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!has_host_pointer(range))
            return CUDA_ERROR_INVALID_VALUE;
        put_long(data, address);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        put_int(data, 0);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        put_long(data, range->kind == FC_RANGE_MAPPED ? range->block->id : range->id);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        put_bool(data, range->kind == FC_RANGE_MANAGED);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        put_int(data, ordinal(range));
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        put_long(data, range->address);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        put_long(data, range->size);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        put_bool(data, true);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        put_long(data, range->kind == FC_RANGE_MAPPED ? (uint64_t)range->block->handle_types : 0);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuPointerGetAttribute", FC_INIT | FC_QUIET, "attribute=%d address=0x%llx",
                 (int)attribute, address)) {
        range = fc_range_at((uintptr_t)address);
        call.result = range ? put(data, attribute, range, address) : CUDA_ERROR_INVALID_VALUE;
    }
    return fc_leave(&call);
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr address) {
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuPointerGetAttributes", FC_INIT | FC_QUIET, "count=%u address=0x%llx",
                 count, address)) {
        range = fc_range_at((uintptr_t)address);
        for (unsigned i = 0; i < count; i++) {
            if (!range || put(data[i], attributes[i], range, address) != CUDA_SUCCESS)
                put_unknown(data[i], attributes[i]);
        }
    }
    return fc_leave(&call);
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                               CUdeviceptr address) {
    struct fc_call call;

    if (fc_enter(&call, "cuPointerSetAttribute", FC_INIT, "attribute=%d address=0x%llx",
                 (int)attribute, address) &&
        (!fc_range_at((uintptr_t)address) || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS))
        call.result = CUDA_ERROR_INVALID_VALUE;
    return fc_leave(&call);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemGetAddressRange_v2", FC_INIT, "address=0x%llx", address)) {
        range = fc_range_at((uintptr_t)address);
        if (!range) {
            call.result = CUDA_ERROR_NOT_FOUND;
        } else {
            if (base)
                *base = range->address;
            if (bytes)
                *bytes = range->size;
        }
    }
    return fc_leave(&call);
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, int type,
                                       unsigned long long flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemGetHandleForAddressRange", FC_INIT,
                 "address=0x%llx bytes=%zu type=%d", address, bytes, type))
        call.result = CUDA_ERROR_NOT_SUPPORTED; /* no dma-buf */
    return fc_leave(&call);
}
