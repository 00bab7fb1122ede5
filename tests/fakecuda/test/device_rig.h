/* SPDX-License-Identifier: Apache-2.0 */
/* For tests of GPU copies on the double: load it as an application does, make memory, run a job. */
#ifndef FAKECUDA_TEST_DEVICE_RIG_H
#define FAKECUDA_TEST_DEVICE_RIG_H

#include "../fakecuda.h"
#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "transport/copy_device.h"
#include "transport/gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

/* A plain program's assertion: Criterion's cannot be used in threads. */
static inline void must(bool good, const char *what) {
    if (good)
        return;
    fprintf(stderr, "failed: %s\n", what);
    abort();
}

static inline void *driver_symbol(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    must(library, "libcuda.so.1 loads");
    void *symbol = dlsym(library, name);
    must(symbol, name);
    return symbol;
}

#define DRIVER(name) ((__typeof__(&(name)))driver_symbol(#name))

static inline void load_driver(const char *shm_settings) {
    char conf[512];
    snprintf(conf, sizeof(conf),
             "{\"transports\": {\"shm\": {\"enable\": true, \"socket_dir\": \"/nowhere\"%s%s}}}",
             shm_settings[0] ? ", " : "", shm_settings);
    setenv("MC_TENT_CONF", conf, 1);
    setenv("FAKECUDA_LOG", "/dev/null", 0);
    setenv("TIDEPOOL_LOG", "error", 0);
    must(DRIVER(cuInit)(0) == CUDA_SUCCESS, "cuInit");
}

static inline CUcontext use_device(int device) {
    CUcontext context = NULL;
    must(DRIVER(cuDevicePrimaryCtxRetain)(&context, device) == CUDA_SUCCESS, "retain");
    must(DRIVER(cuCtxSetCurrent)(context) == CUDA_SUCCESS, "set current");
    return context;
}

/* NULL when it is not ready within this time. */
static inline struct tp_gpu *wait_gpu(int device, uint64_t limit_ms) {
    uint64_t end = tp_now_ms() + limit_ms;
    struct tp_gpu *gpu;
    while (!(gpu = tp_gpu_get(device)) && tp_now_ms() < end)
        usleep(1000);
    return gpu;
}

static inline CUdeviceptr device_memory(size_t bytes) {
    CUdeviceptr address = 0;
    must(DRIVER(cuMemAlloc_v2)(&address, bytes) == CUDA_SUCCESS, "cuMemAlloc");
    return address;
}

static inline unsigned char *pinned_memory(size_t bytes) {
    void *address = NULL;
    must(DRIVER(cuMemHostAlloc)(&address, bytes, 3) == CUDA_SUCCESS, "cuMemHostAlloc");
    return address;
}

/* As an allocator with expandable segments has it: one range of several mappings. */
static inline CUdeviceptr pieced_memory(int device, size_t piece_bytes, unsigned pieces) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    CUmemAccessDesc access = {.location = prop.location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address = 0;
    must(DRIVER(cuMemAddressReserve)(&address, piece_bytes * pieces, 0, 0, 0) == CUDA_SUCCESS,
         "reserve");
    for (unsigned i = 0; i < pieces; i++) {
        CUmemGenericAllocationHandle handle;
        must(DRIVER(cuMemCreate)(&handle, piece_bytes, &prop, 0) == CUDA_SUCCESS, "create");
        must(DRIVER(cuMemMap)(address + i * piece_bytes, piece_bytes, 0, handle, 0) == CUDA_SUCCESS,
             "map");
        must(DRIVER(cuMemRelease)(handle) == CUDA_SUCCESS, "release");
    }
    must(DRIVER(cuMemSetAccess)(address, piece_bytes * pieces, &access, 1) == CUDA_SUCCESS,
         "access");
    return address;
}

/* Poll to the end. RUNNING when it does not come within 20 s. */
static inline enum tp_device_state finish(struct tp_device_job *job) {
    uint64_t end = tp_now_ms() + 20000;
    enum tp_device_state state;
    while ((state = tp_device_look(job, TP_DEVICE_GROUPS)) == TP_DEVICE_RUNNING &&
           tp_now_ms() < end) {
        tp_device_poll(job);
        sched_yield();
    }
    return state;
}

static inline uint32_t rig_random(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static inline void fill_random(unsigned char *bytes, size_t count, uint64_t *state) {
    for (size_t i = 0; i < count; i += 4) {
        uint32_t word = rig_random(state);
        memcpy(bytes + i, &word, count - i < 4 ? count - i : 4);
    }
}

static inline uint64_t counted(enum tp_counter counter) {
    return atomic_load(&tp_stats_page()->counters[counter]);
}

/*
 * `count` random pieces between a GPU's memory and the host's, any alignment, gaps between them,
 * checked to the byte, gaps included. Returns how the job ended.
 */
struct random_copies {
    int device;
    bool to_device, mapped;
    CUdeviceptr gpu;
    unsigned char *host;
    size_t room; /* of both */
    unsigned count;
    size_t largest;
};

static inline enum tp_device_state run_random(const struct random_copies *c,
                                              struct tp_device_job *job, uint64_t *seed) {
    unsigned char *from = malloc(c->room);
    unsigned char *want = malloc(c->room);
    unsigned char *got = malloc(c->room);
    size_t there = 0;
    size_t here = 0;
    uint8_t group = 0;
    fill_random(from, c->room, seed);
    fill_random(want, c->room, seed);
    must(DRIVER(fakecuda_poke)(c->gpu, c->to_device ? want : from, c->room) == 0, "poke");
    memcpy(c->host, c->to_device ? from : want, c->room);
    for (unsigned i = 0; i < c->count; i++) {
        there += rig_random(seed) % 3 ? rig_random(seed) % 40 : 0;
        here += rig_random(seed) % 3 ? rig_random(seed) % 40 : 0;
        size_t bytes = 1 + rig_random(seed) % (rig_random(seed) % 4 ? 300 : c->largest);
        if (there + bytes > c->room || here + bytes > c->room)
            break;
        unsigned char *gpu = (unsigned char *)(uintptr_t)c->gpu + there;
        void *to = c->to_device ? gpu : c->host + here;
        const void *source = c->to_device ? c->host + here : gpu;
        must(tp_device_add(job, c->device, c->to_device, c->mapped, to, source, bytes, &group) == 0,
             "add");
        memcpy(want + (c->to_device ? there : here), from + (c->to_device ? here : there), bytes);
        there += bytes;
        here += bytes;
    }
    tp_device_start(job);
    enum tp_device_state state = finish(job);
    if (state == TP_DEVICE_DONE) {
        if (c->to_device)
            must(DRIVER(fakecuda_peek)(got, c->gpu, c->room) == 0, "peek");
        must(memcmp(c->to_device ? got : c->host, want, c->room) == 0, "success means these bytes");
    }
    tp_device_reset(job);
    free(from);
    free(want);
    free(got);
    return state;
}

#endif
