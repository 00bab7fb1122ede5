/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few types and values of the CUDA driver's binary interface that this library uses, declared
 * here so that the build needs no CUDA toolkit. Names follow the driver's with a tp_/TP_ prefix,
 * values are those of "CUDA Driver API" (NVIDIA), chapters "Data types used by CUDA driver",
 * "Unified Addressing" and "Driver Entry Point Access"; they are part of the driver's ABI.
 *
 * It must not know: how the driver is loaded, who calls it.
 */
#ifndef TIDEPOOL_CUDA_ABI_H
#define TIDEPOOL_CUDA_ABI_H

#include <stdint.h>

typedef int tp_cu_result;
typedef uint64_t tp_cu_deviceptr;

enum {
    TP_CUDA_SUCCESS = 0,
    TP_CUDA_ERROR_INVALID_VALUE = 1,
    TP_CUDA_ERROR_NOT_INITIALIZED = 3,
    TP_CUDA_ERROR_DEINITIALIZED = 4,
    TP_CUDA_ERROR_INVALID_CONTEXT = 201,
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

/* CUdriverProcAddress_flags */
enum { TP_CU_GET_PROC_ADDRESS_DEFAULT = 0 };

typedef tp_cu_result (*tp_cu_pointer_get_attribute_fn)(void *data, int attribute,
                                                       tp_cu_deviceptr address);
/* CUDA 11.3 to 11.8, and from 12.0 on with the query result appended. */
typedef tp_cu_result (*tp_cu_get_proc_address_fn)(const char *symbol, void **ret_function,
                                                  int cuda_version, uint64_t flags);
typedef tp_cu_result (*tp_cu_get_proc_address_v2_fn)(const char *symbol, void **ret_function,
                                                     int cuda_version, uint64_t flags,
                                                     int *ret_status);

#endif
