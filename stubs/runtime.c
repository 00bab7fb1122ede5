/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for the CUDA runtime (libcudart.so.12 and .13, which differ by the version node of
 * their symbols alone), for a store in a container that has none: as driver.c.
 *
 * Modules with device code register it from their constructors, before anybody asks for a device:
 * that succeeds, as the real runtime's does without one.
 */
#include <stddef.h>
#include <string.h>

#define NO_DEVICE 100 /* cudaErrorNoDevice */

#define RUNTIME(name)                                                                              \
    int name(void);                                                                                \
    int name(void) {                                                                               \
        return NO_DEVICE;                                                                          \
    }
#define RUNTIME_ANSWER(name)
#define DRIVER(name)
#define DRIVER_ANSWER(name)
#include "names.def"

const char *cudaGetErrorName(int error);
const char *cudaGetErrorName(int error) {
    return error == 0           ? "cudaSuccess"
           : error == NO_DEVICE ? "cudaErrorNoDevice"
                                : "unrecognized error code";
}

const char *cudaGetErrorString(int error);
const char *cudaGetErrorString(int error) {
    return error == 0           ? "no error"
           : error == NO_DEVICE ? "no CUDA-capable device is detected"
                                : "unrecognized error code";
}

int cudaGetDeviceCount(int *ret_count);
int cudaGetDeviceCount(int *ret_count) {
    if (ret_count)
        *ret_count = 0;
    return NO_DEVICE;
}

/* The first fields, which have kept their places since CUDA 11; later ones are not written. */
struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
};

/*
 * A runtime without a device leaves the answer alone. Mooncake takes the error for "host memory"
 * and asks again for each request that comes in over TCP, so the answer says the same for a caller
 * that does not look at the error: memory that CUDA does not know (type 0), of no device.
 */
int cudaPointerGetAttributes(struct pointer_attributes *ret_attributes, const void *pointer);
int cudaPointerGetAttributes(struct pointer_attributes *ret_attributes, const void *pointer) {
    if (ret_attributes) {
        *ret_attributes = (struct pointer_attributes){.device = -1};
        memcpy(&ret_attributes->host_pointer, &pointer, sizeof(pointer));
    }
    return NO_DEVICE;
}

/* ---- device code in a module
 * ------------------------------------------------------------------------------------------- */

static void *registered;

void **__cudaRegisterFatBinary(void *binary);
void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    return &registered;
}

void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaRegisterFatBinaryEnd(void **handle) {
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle);
void __cudaUnregisterFatBinary(void **handle) {
    (void)handle;
}

void __cudaRegisterFunction(void);
void __cudaRegisterFunction(void) {
}

void __cudaRegisterVar(void);
void __cudaRegisterVar(void) {
}
