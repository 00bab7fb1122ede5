/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: the double's numbers and layouts are those of the toolkit. Compiled only where there is a
 * toolkit: values.h, made by the build from cuda_api.h, has one SAME() a value.
 */
#include <cuda.h>
#include <driver_types.h>
#include <stddef.h>

struct double_prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    unsigned char flags[8];
};

#define SAME(name, value) _Static_assert((int)(name) == (value), #name " differs from cuda.h")
#include "values.h"

_Static_assert(sizeof(CUmemAllocationProp) == sizeof(struct double_prop), "CUmemAllocationProp");
_Static_assert(offsetof(CUmemAllocationProp, location) ==
                   offsetof(struct double_prop, location_type),
               "location");
_Static_assert(sizeof(CUmemAccessDesc) == 12 && sizeof(CUmemcpyAttributes) == 24,
               "access and copy attributes");
_Static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, hStream) == 32,
               "CUlaunchConfig");
_Static_assert(sizeof(struct cudaPointerAttributes) == 88 &&
                   offsetof(struct cudaPointerAttributes, devicePointer) == 8,
               "cudaPointerAttributes");
#if CUDART_VERSION >= 13000 || CUDA_VERSION >= 13000
#define AT(field, offset)                                                                          \
    _Static_assert(offsetof(struct cudaDeviceProp, field) == (offset), "cudaDeviceProp." #field)
_Static_assert(sizeof(struct cudaDeviceProp) == 1008, "cudaDeviceProp");
AT(totalGlobalMem, 288);
AT(sharedMemPerBlock, 296);
AT(warpSize, 308);
AT(maxThreadsPerBlock, 320);
AT(major, 360);
AT(minor, 364);
AT(multiProcessorCount, 384);
AT(pciBusID, 568);
AT(unifiedAddressing, 588);
#endif

int main(void) {
    return 0;
}
