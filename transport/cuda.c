/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver's entry points, in one table, and the question whose memory an address is.
 *
 * It must not know: batches, peers, what the caller does with the answer. It never loads the driver
 * by itself (a process that does not use CUDA keeps out of it), never calls cuInit and never makes
 * a context: all of that belongs to the host process.
 */
#include "transport/cuda.h"

#include "transport/cuda_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

/* How often a process without libcuda is looked at again. Far less than cuInit and the first
 * context take, so no GPU pointer exists before it is noticed. */
#define LOOK_AGAIN_NS UINT64_C(10000000)

static struct driver { tp_cu_pointer_get_attribute_fn pointer_get_attribute; } driver;

/* Every entry point that is used. `exported` is the dlsym name: the driver's versioned one where
 * the plain name is an old signature. `version` is the CUDA version that introduced this signature,
 * which is how cuGetProcAddress chooses between them. */
static const struct entry {
    const char *name, *exported;
    int version;
    size_t field; /* in struct driver */
} entries[] = {
    {"cuPointerGetAttribute", "cuPointerGetAttribute", 4000,
     offsetof(struct driver, pointer_get_attribute)},
};

enum driver_state { DRIVER_ABSENT, DRIVER_READY, DRIVER_UNUSABLE };

static _Atomic int driver_state;
static _Atomic uint64_t next_look_ns;
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

static void *find_entry(void *library, const struct entry *entry) {
    void *function = NULL;
    void *get_v2 = dlsym(library, "cuGetProcAddress_v2");
    void *get_v1 = dlsym(library, "cuGetProcAddress");
    tp_cu_result rc = TP_CUDA_ERROR_INVALID_VALUE;
    if (get_v2) {
        int status = 0;
        rc = ((tp_cu_get_proc_address_v2_fn)get_v2)(entry->name, &function, entry->version,
                                                    TP_CU_GET_PROC_ADDRESS_DEFAULT, &status);
    } else if (get_v1) {
        rc = ((tp_cu_get_proc_address_fn)get_v1)(entry->name, &function, entry->version,
                                                 TP_CU_GET_PROC_ADDRESS_DEFAULT);
    }
    if (rc != TP_CUDA_SUCCESS || !function)
        function = dlsym(library, entry->exported);
    return function;
}

/* The handle is kept for good: the table points into the library. */
static enum driver_state load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    if (!library)
        return DRIVER_ABSENT;
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        void *function = find_entry(library, &entries[i]);
        if (!function)
            return DRIVER_UNUSABLE;
        *(void **)((char *)&driver + entries[i].field) = function;
    }
    return DRIVER_READY;
}

static uint64_t coarse_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static enum driver_state look_for_driver(void) {
    int state = atomic_load_explicit(&driver_state, memory_order_acquire);
    if (state != DRIVER_ABSENT)
        return state;
    uint64_t now = coarse_now_ns();
    if (now < atomic_load_explicit(&next_look_ns, memory_order_relaxed))
        return DRIVER_ABSENT;
    pthread_mutex_lock(&load_lock);
    state = atomic_load_explicit(&driver_state, memory_order_relaxed);
    if (state == DRIVER_ABSENT) {
        state = load_driver();
        atomic_store_explicit(&driver_state, state, memory_order_release);
        atomic_store_explicit(&next_look_ns, now + LOOK_AGAIN_NS, memory_order_relaxed);
    }
    pthread_mutex_unlock(&load_lock);
    return state;
}

/* A driver that does not know the address, or was never started, owns nothing there. */
static bool means_host(tp_cu_result rc) {
    return rc == TP_CUDA_ERROR_INVALID_VALUE || rc == TP_CUDA_ERROR_NOT_INITIALIZED ||
           rc == TP_CUDA_ERROR_DEINITIALIZED || rc == TP_CUDA_ERROR_INVALID_CONTEXT;
}

enum tp_memory tp_cuda_classify(const void *address, int *ret_device) {
    enum driver_state state = look_for_driver();
    if (state != DRIVER_READY)
        return state == DRIVER_ABSENT ? TP_MEMORY_HOST : TP_MEMORY_UNKNOWN;

    tp_cu_deviceptr pointer = (uintptr_t)address;
    unsigned type = 0;
    tp_cu_result rc =
        driver.pointer_get_attribute(&type, TP_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer);
    if (rc != TP_CUDA_SUCCESS)
        return means_host(rc) ? TP_MEMORY_HOST : TP_MEMORY_UNKNOWN;
    if (type == TP_CU_MEMORYTYPE_HOST) {
        unsigned managed = 0;
        rc = driver.pointer_get_attribute(&managed, TP_CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer);
        if (rc != TP_CUDA_SUCCESS)
            return TP_MEMORY_UNKNOWN;
        if (!managed)
            return TP_MEMORY_HOST;
    }
    int device = 0;
    rc = driver.pointer_get_attribute(&device, TP_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer);
    if (rc != TP_CUDA_SUCCESS)
        return TP_MEMORY_UNKNOWN;
    if (ret_device)
        *ret_device = device;
    return TP_MEMORY_DEVICE;
}
