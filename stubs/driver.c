/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for the CUDA driver (libcuda.so.1), for a store in a container that has none: every
 * call says at once, and to nobody else, that there is no device.
 *
 * It must not know: Mooncake, Tidepool's library, or anything of CUDA but its names and two
 * numbers. Nothing in it needs memory, a file or a thread.
 */
#include <stddef.h>

#define NO_DEVICE 100 /* CUDA_ERROR_NO_DEVICE */
#define INVALID_VALUE 1

/* By this Tidepool's library tells it from a driver (env/cuda.c). */
extern const int tidepool_stand_in;
const int tidepool_stand_in = 1;

/* The arguments are not looked at: in the x86-64 calling convention the caller owns them. */
#define DRIVER(name)                                                                               \
    int name(void);                                                                                \
    int name(void) {                                                                               \
        return NO_DEVICE;                                                                          \
    }
#define DRIVER_ANSWER(name)
#define RUNTIME(name)
#define RUNTIME_ANSWER(name)
#include "names.def"

static int tell(int error, const char *success, const char *no_device, const char **ret_text) {
    const char *text = error == 0 ? success : error == NO_DEVICE ? no_device : NULL;

    if (ret_text)
        *ret_text = text;
    return text && ret_text ? 0 : INVALID_VALUE;
}

int cuGetErrorName(int error, const char **ret_text);
int cuGetErrorName(int error, const char **ret_text) {
    return tell(error, "CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE", ret_text);
}

int cuGetErrorString(int error, const char **ret_text);
int cuGetErrorString(int error, const char **ret_text) {
    return tell(error, "no error", "no CUDA-capable device is detected", ret_text);
}
