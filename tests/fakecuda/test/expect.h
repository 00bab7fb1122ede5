/* SPDX-License-Identifier: Apache-2.0 */
/* For the double's own tests: a call that must break a rule, and the usual start. */
#ifndef FAKECUDA_TEST_EXPECT_H
#define FAKECUDA_TEST_EXPECT_H

#include "../fakecuda.h"
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

/* The call gave `want` and left a violation that says `text`. */
static inline void broke(CUresult got, CUresult want, const char *text) {
    static unsigned long before;

    cr_assert_eq(got, want, "result %d, not %d (last violation: %s)", (int)got, (int)want,
                 fakecuda_last_violation());
    cr_assert_eq(fakecuda_violations(), before + 1, "%lu violations, not %lu",
                 fakecuda_violations(), before + 1);
    cr_assert_not_null(strstr(fakecuda_last_violation(), text), "\"%s\" says nothing of \"%s\"",
                       fakecuda_last_violation(), text);
    before++;
}

static inline void good(CUresult got) {
    cr_assert_eq(got, CUDA_SUCCESS, "result %d (last violation: %s)", (int)got,
                 fakecuda_last_violation());
}

static inline CUcontext start(int device) {
    CUcontext context = NULL;

    setenv("FAKECUDA_LOG", "/dev/null", 0);
    good(cuInit(0));
    good(cuDevicePrimaryCtxRetain(&context, device));
    good(cuCtxPushCurrent_v2(context));
    return context;
}

static inline CUdeviceptr device_bytes(size_t bytes) {
    CUdeviceptr address = 0;

    good(cuMemAlloc_v2(&address, bytes));
    return address;
}

/* Host memory of node 0 by VMM, mapped, with no access for anybody. */
static inline CUdeviceptr numa_bytes(size_t bytes, CUmemGenericAllocationHandle *ret_handle) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = 0}};
    CUdeviceptr address = 0;

    good(cuMemCreate(ret_handle, bytes, &prop, 0));
    good(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    good(cuMemMap(address, bytes, 0, *ret_handle, 0));
    return address;
}

static inline void allow_device(CUdeviceptr address, size_t bytes, int device) {
    CUmemAccessDesc desc = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

    good(cuMemSetAccess(address, bytes, &desc, 1));
}

static inline void allow_host(CUdeviceptr address, size_t bytes, int flags) {
    CUmemAccessDesc desc = {.location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = 0},
                            .flags = flags};

    good(cuMemSetAccess(address, bytes, &desc, 1));
}

#endif
