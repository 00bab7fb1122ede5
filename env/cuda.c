/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver's entry points, in one table.
 *
 * It must not know: segments, copies, whose memory is what. It loads the driver by itself only when
 * asked to (a store on CUDA VMM memory), never calls cuInit and never makes a context: all of that
 * belongs to its callers or to the host process.
 */
#include "env/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* How often a process without libcuda is looked at again. Far less than cuInit and the first
 * context take, so no GPU pointer exists before it is noticed. */
#define LOOK_AGAIN_NS UINT64_C(10000000)

enum need { BASE, COPY, VMM, LATER };

static struct tp_cuda driver;
static unsigned driver_groups; /* enum tp_cuda_group */

static const struct entry {
    const char *name, *exported;
    int version;
    enum need need;
    size_t field; /* in struct tp_cuda */
} entries[] = {
#define CUDA_ENTRY(field, name, exported, version, need, parameters)                               \
    {name, exported, version, need, offsetof(struct tp_cuda, field)},
#include "env/cuda_entries.def"
#undef CUDA_ENTRY
};

enum driver_state { DRIVER_ABSENT, DRIVER_READY, DRIVER_UNUSABLE, DRIVER_STAND_IN };

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
static enum driver_state load_driver(bool load) {
    void *library = dlopen("libcuda.so.1", load ? RTLD_NOW : RTLD_NOLOAD | RTLD_NOW);
    unsigned groups = TP_CUDA_COPY | TP_CUDA_VMM;
    if (!library)
        return DRIVER_ABSENT;
    if (dlsym(library, "tidepool_stand_in")) /* stubs/: what a container without a driver gets */
        return DRIVER_STAND_IN;
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        void *function = find_entry(library, &entries[i]);
        if (!function && entries[i].need == BASE)
            return DRIVER_UNUSABLE;
        if (!function && entries[i].need == COPY)
            groups &= ~(unsigned)TP_CUDA_COPY;
        if (!function && entries[i].need == VMM)
            groups &= ~(unsigned)TP_CUDA_VMM;
        *(void **)((char *)&driver + entries[i].field) = function;
    }
    driver_groups = groups;
    return DRIVER_READY;
}

static uint64_t coarse_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static enum driver_state look_for_driver(bool load) {
    int state = atomic_load_explicit(&driver_state, memory_order_acquire);
    if (state != DRIVER_ABSENT)
        return state;
    uint64_t now = coarse_now_ns();
    if (!load && now < atomic_load_explicit(&next_look_ns, memory_order_relaxed))
        return DRIVER_ABSENT;
    pthread_mutex_lock(&load_lock);
    state = atomic_load_explicit(&driver_state, memory_order_relaxed);
    if (state == DRIVER_ABSENT) {
        state = load_driver(load);
        atomic_store_explicit(&driver_state, state, memory_order_release);
        atomic_store_explicit(&next_look_ns, now + LOOK_AGAIN_NS, memory_order_relaxed);
    }
    pthread_mutex_unlock(&load_lock);
    return state;
}

const struct tp_cuda *tp_cuda(bool load, bool *ret_unusable) {
    enum driver_state state = look_for_driver(load);
    if (ret_unusable)
        *ret_unusable = state == DRIVER_UNUSABLE;
    return state == DRIVER_READY ? &driver : NULL;
}

bool tp_cuda_has(enum tp_cuda_group group) {
    return tp_cuda(false, NULL) && driver_groups & group;
}

/* A question that the driver answers without being initialised: with NOT_INITIALIZED (driver 580).
 */
bool tp_cuda_initialised(void) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    unsigned type = 0;
    if (!cuda)
        return false;
    tp_cu_result result = cuda->pointer_get_attribute(&type, TP_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                      (uintptr_t)&driver_state);
    return result != TP_CUDA_ERROR_NOT_INITIALIZED && result != TP_CUDA_ERROR_DEINITIALIZED;
}

uint64_t tp_cuda_active_devices(void) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    uint64_t devices = 0;
    int count = 0;
    if (!cuda || !tp_cuda_has(TP_CUDA_COPY) || cuda->device_get_count(&count) != TP_CUDA_SUCCESS)
        return 0;
    for (int i = 0; i < count && i < TP_CUDA_DEVICES; i++) {
        tp_cu_device device = 0;
        unsigned flags = 0;
        int active = 0;
        if (cuda->device_get(&device, i) == TP_CUDA_SUCCESS &&
            cuda->primary_get_state(device, &flags, &active) == TP_CUDA_SUCCESS && active)
            devices |= UINT64_C(1) << i;
    }
    return devices;
}

const char *tp_cuda_error(tp_cu_result result) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    const char *name = NULL;
    if (cuda && cuda->get_error_name && cuda->get_error_name(result, &name) == TP_CUDA_SUCCESS &&
        name)
        return name;
    return "an unknown CUDA error";
}

#define MODE_UNCHANGED (-1)
#define MODE_TRIES 3 /* the thread is the host's: a mode that stays would be too */

int tp_cuda_begin(const struct tp_cuda *cuda) {
    int mode = TP_CU_CAPTURE_RELAXED;
    if (!cuda->capture_mode || cuda->capture_mode(&mode) != TP_CUDA_SUCCESS)
        return MODE_UNCHANGED;
    return mode;
}

void tp_cuda_end(const struct tp_cuda *cuda, int mode) {
    for (int i = 0; i < MODE_TRIES && mode != MODE_UNCHANGED; i++) {
        int given = mode;
        if (cuda->capture_mode(&given) == TP_CUDA_SUCCESS)
            return;
    }
}
