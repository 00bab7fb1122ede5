/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few types and values of the CUDA driver's binary interface that this library uses, declared
 * here so that the build needs no CUDA toolkit. Names follow the driver's with a tp_/TP_ prefix,
 * values are those of "CUDA Driver API" (NVIDIA), chapters "Data types used by CUDA driver",
 * "Unified Addressing", "Virtual Memory Management" and "Driver Entry Point Access"; they are part
 * of the driver's ABI.
 *
 * It must not know: how the driver is loaded, who calls it.
 */
#ifndef TIDEPOOL_CUDA_ABI_H
#define TIDEPOOL_CUDA_ABI_H

#include <stdint.h>

typedef int tp_cu_result;
typedef uint64_t tp_cu_deviceptr;
typedef int tp_cu_device;
typedef void *tp_cu_context;
typedef void *tp_cu_stream;
typedef void *tp_cu_event;
typedef void *tp_cu_module;
typedef void *tp_cu_function;
typedef uint64_t tp_cu_handle; /* CUmemGenericAllocationHandle */

enum {
    TP_CUDA_SUCCESS = 0,
    TP_CUDA_ERROR_INVALID_VALUE = 1,
    TP_CUDA_ERROR_OUT_OF_MEMORY = 2,
    TP_CUDA_ERROR_NOT_INITIALIZED = 3,
    TP_CUDA_ERROR_DEINITIALIZED = 4,
    TP_CUDA_ERROR_NO_DEVICE = 100,
    TP_CUDA_ERROR_INVALID_CONTEXT = 201,
    TP_CUDA_ERROR_NOT_READY = 600,
    TP_CUDA_ERROR_NOT_PERMITTED = 800,
    TP_CUDA_ERROR_NOT_SUPPORTED = 801,
};

/* CUpointer_attribute */
enum {
    TP_CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,    /* unsigned int, CUmemorytype */
    TP_CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,     /* boolean; the driver writes an unsigned int */
    TP_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9, /* int */
};

/* CUmemorytype */
enum {
    TP_CU_MEMORYTYPE_HOST = 1,
    TP_CU_MEMORYTYPE_DEVICE = 2,
    TP_CU_MEMORYTYPE_ARRAY = 3,
    TP_CU_MEMORYTYPE_UNIFIED = 4,
};

/* CUdevice_attribute */
enum {
    TP_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
    TP_CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    TP_CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
};

/* CUdriverProcAddress_flags, CUmemLocationType, CUmemAllocationType, ... : one value of each is
 * used */
enum {
    TP_CU_GET_PROC_ADDRESS_DEFAULT = 0,
    TP_CU_LOCATION_DEVICE = 1,
    TP_CU_LOCATION_HOST = 2,
    TP_CU_LOCATION_HOST_NUMA = 3,
    TP_CU_ALLOCATION_PINNED = 1,
    TP_CU_HANDLE_POSIX_FD = 1,
    TP_CU_ACCESS_READWRITE = 3,
    TP_CU_GRANULARITY_MINIMUM = 0,
    TP_CU_STREAM_NON_BLOCKING = 1,
    TP_CU_EVENT_DISABLE_TIMING = 2,
    TP_CU_CAPTURE_RELAXED = 2,
    TP_CU_HOST_ALLOC_PORTABLE = 1,
    TP_CU_HOST_ALLOC_DEVICEMAP = 2,
    TP_CU_HOST_REGISTER_PORTABLE = 1,
    TP_CU_HOST_REGISTER_DEVICEMAP = 2,
    TP_CU_SOURCE_ORDER_STREAM = 1,
};

/* CUmemLocation */
struct tp_cu_location {
    int type, id;
};

/* CUmemAllocationProp */
struct tp_cu_allocation_prop {
    int type, handle_types;
    struct tp_cu_location location;
    void *unused_win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
_Static_assert(sizeof(struct tp_cu_allocation_prop) == 32, "CUmemAllocationProp");

/* CUmemAccessDesc */
struct tp_cu_access {
    struct tp_cu_location location;
    int flags;
};
_Static_assert(sizeof(struct tp_cu_access) == 12, "CUmemAccessDesc");

/* CUmemcpyAttributes */
struct tp_cu_copy_attributes {
    int source_order;
    struct tp_cu_location source_hint, target_hint;
    unsigned flags;
};
_Static_assert(sizeof(struct tp_cu_copy_attributes) == 24, "CUmemcpyAttributes");

/* CUDA 11.3 to 11.8, and from 12.0 on with the query result appended. */
typedef tp_cu_result (*tp_cu_get_proc_address_fn)(const char *symbol, void **ret_function,
                                                  int cuda_version, uint64_t flags);
typedef tp_cu_result (*tp_cu_get_proc_address_v2_fn)(const char *symbol, void **ret_function,
                                                     int cuda_version, uint64_t flags,
                                                     int *ret_status);

#endif
