/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One GPU: context, streams, kernel, and the calls that copy.
 *
 * The application's primary context is retained and pushed around each call, never created: a
 * context of ours would cost the GPU some 500 MiB. Streams are non-blocking (they do not wait for
 * the legacy stream) and of the lowest priority. Every call runs in the relaxed capture mode, so
 * that a graph that another thread is capturing stays valid.
 *
 * Measured on an H200 (GB/s to / from the GPU, 64 MiB of host VMM memory): one cuMemcpyBatchAsync
 * 40 / 40 at 64 KiB, 50 / 50 at 256 KiB, 53 / 54 at 1 MiB, 55 / 55 at 16 MiB; the kernel with 8
 * thread blocks of 512 threads 50 / 52 from 4 KiB to 1 MiB.
 *
 * It must not know: waves, who waits.
 */
#include "transport/gpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "env/cuda.h"
#include "env/env.h"
#include "transport/calibrate.h"
#include "transport/copy_device.h"
#include "transport/gather_ptx.h"
#include "transport/staging.h"

#define RETRY_MS 1000   /* threads and memory run out and come back */
#define RETRY_DOUBLED 5 /* after each failure, so many times: 32 s */
#define KERNEL_TRIES 3  /* while GPUs are made; then without it */
#define STREAMS 2       /* the end of one list overlaps the start of the next */
#define KERNEL_THREADS 512
#define KERNEL_BLOCKS                                                                              \
    4 /* fill the link from 4 KiB up (50 of 51 GB/s); leave the GPU to its owner */
#define KERNEL_BLOCKS_TINY 8               /* below 4 KiB a copy */
#define MAKE_STACK_BYTES ((size_t)8 << 20) /* the driver compiles PTX in the calling thread */
/* Until it is calibrated. With waves behind each other the copy engines reach 54 GB/s from 64 KiB
 * copies up. */
#define KERNEL_MAX_DEFAULT (UINT64_C(48) << 10)

struct lane {
    tp_cu_stream streams[STREAMS];
    _Atomic uint32_t turn;
};

struct tp_gpu {
    int device;
    tp_cu_context context;
    struct lane lanes[2], staged[2];  /* by direction; staged: without streams, nothing is */
    tp_cu_function kernel;            /* NULL: none */
    unsigned blocks;                  /* 0: by size */
    _Atomic uint64_t kernel_max[2];   /* 0: it is not used */
    _Atomic uint64_t kernel_limit[2]; /* what it was, and comes to be again */
    _Atomic uint64_t kernel_again_ms; /* then; 0: never */
    _Atomic uint32_t kernel_failures;
    _Atomic bool calibrated;
    _Atomic bool lost;               /* its context no longer works: nothing more is sent */
    _Atomic uint64_t rests_until_ms; /* CLOCK_MONOTONIC; 0: it does not rest */
    bool pageable;                   /* reads any memory of the process by itself (HMM, ATS) */
    bool host_pointers;              /* registered memory has one address for the CPU and for it */
};

enum gpu_state { GPU_IDLE, GPU_BEGUN };

static struct {
    _Atomic(struct tp_gpu *) gpu; /* NULL until it is ready */
    _Atomic int state;            /* enum gpu_state: BEGUN also when ready */
    _Atomic uint32_t failures;
    _Atomic uint64_t next_try_ms; /* CLOCK_MONOTONIC; 0: none has failed */
    atomic_flag said;             /* that it cannot be made */
} gpus[TP_DEVICES];

/* The context of one call: pushed, in the relaxed capture mode. */
struct visit {
    const struct tp_cuda *cuda;
    int mode;
};

static tp_cu_result try_enter(const struct tp_gpu *gpu, struct visit *ret_visit) {
    ret_visit->cuda = tp_cuda(false, NULL);
    ret_visit->mode = tp_cuda_begin(ret_visit->cuda);
    tp_cu_result result = ret_visit->cuda->context_push(gpu->context);
    if (result != TP_CUDA_SUCCESS)
        tp_cuda_end(ret_visit->cuda, ret_visit->mode);
    return result;
}

static bool enter(const struct tp_gpu *gpu, struct visit *ret_visit) {
    return try_enter(gpu, ret_visit) == TP_CUDA_SUCCESS;
}

static void leave(const struct visit *visit) {
    tp_cu_context popped;
    (void)visit->cuda->context_pop(&popped);
    tp_cuda_end(visit->cuda, visit->mode);
}

/* ---- making one ---- */

static bool make_streams(struct lane lanes[2], const struct tp_cuda *cuda) {
    int least = 0;
    int greatest = 0;
    (void)cuda->priority_range(&least, &greatest);
    for (unsigned i = 0; i < 2 * STREAMS; i++) {
        if (cuda->stream_create(&lanes[i / STREAMS].streams[i % STREAMS], TP_CU_STREAM_NON_BLOCKING,
                                least) != TP_CUDA_SUCCESS)
            return false;
    }
    return true;
}

static void free_streams(const struct lane lanes[2], const struct tp_cuda *cuda) {
    for (unsigned i = 0; i < 2 * STREAMS; i++) {
        if (lanes[i / STREAMS].streams[i % STREAMS])
            (void)cuda->stream_destroy(lanes[i / STREAMS].streams[i % STREAMS]);
    }
}

/* False: there was no memory for it, and the whole GPU is tried again, not often. */
static bool load_kernel(struct tp_gpu *gpu, const struct tp_cuda *cuda,
                        const struct tp_engine_config *config) {
    tp_cu_module module = NULL;
    uint64_t limit = config->kernel_max_bytes ? config->kernel_max_bytes : KERNEL_MAX_DEFAULT;
    if (config->copy_engine == TP_COPY_DMA)
        return true;
    tp_cu_result result = cuda->module_load(&module, tp_gather_ptx);
    if (result == TP_CUDA_SUCCESS)
        result = cuda->module_function(&gpu->kernel, module, "tp_gather");
    if (result != TP_CUDA_SUCCESS && module)
        (void)cuda->module_unload(module);
    if (result == TP_CUDA_ERROR_OUT_OF_MEMORY &&
        atomic_load(&gpus[gpu->device].failures) < KERNEL_TRIES)
        return false;
    if (result != TP_CUDA_SUCCESS) {
        gpu->kernel = NULL;
        tp_log(TP_LOG_WARN,
               "GPU %d: the copy kernel cannot be loaded (%s); its copy engines do all copies",
               gpu->device, tp_cuda_error(result));
        return true;
    }
    if (config->copy_engine == TP_COPY_KERNEL)
        limit = UINT64_MAX;
    atomic_store(&gpu->kernel_max[0], limit);
    atomic_store(&gpu->kernel_max[1], limit);
    return true;
}

static bool has_attribute(const struct tp_cuda *cuda, tp_cu_device handle, int attribute) {
    int value = 0;
    return cuda->device_get_attribute(&value, attribute, handle) == TP_CUDA_SUCCESS && value != 0;
}

static bool primary_active(const struct tp_cuda *cuda, int device) {
    unsigned flags = 0;
    int active = 0;
    tp_cu_device handle = 0;
    int mode = tp_cuda_begin(cuda);
    bool found = cuda->device_get(&handle, device) == TP_CUDA_SUCCESS &&
                 cuda->primary_get_state(handle, &flags, &active) == TP_CUDA_SUCCESS && active;
    tp_cuda_end(cuda, mode);
    return found;
}

/* All that copies need, in the application's primary context. NULL: something was refused, of which
 * nothing is left. */
static struct tp_gpu *make_gpu(int device, const struct tp_cuda *cuda) {
    const struct tp_engine_config *config = &tp_config()->engine;
    struct visit visit;
    tp_cu_device handle = 0;
    struct tp_gpu *gpu = calloc(1, sizeof(*gpu));
    if (!gpu)
        return NULL;
    if (cuda->device_get(&handle, device) == TP_CUDA_SUCCESS &&
        cuda->primary_retain(&gpu->context, handle) == TP_CUDA_SUCCESS) {
        bool made = false;
        gpu->device = device;
        gpu->blocks = config->kernel_blocks;
        gpu->pageable = has_attribute(cuda, handle, TP_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
        gpu->host_pointers = has_attribute(
            cuda, handle, TP_CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
        if (enter(gpu, &visit)) {
            made = make_streams(gpu->lanes, cuda) &&
                   (gpu->pageable || make_streams(gpu->staged, cuda));
            made = made && load_kernel(gpu, cuda, config);
            if (!made) {
                free_streams(gpu->lanes, cuda);
                free_streams(gpu->staged, cuda);
            }
            leave(&visit);
        }
        if (made)
            return gpu;
        (void)cuda->primary_release(handle);
    }
    free(gpu);
    return NULL;
}

/* Not now; what asks for it then has it tried again. */
static void try_later(int device) {
    uint32_t failures = atomic_fetch_add(&gpus[device].failures, 1);
    atomic_store(&gpus[device].next_try_ms,
                 tp_now_ms() + tp_backoff(RETRY_MS, failures, RETRY_DOUBLED));
    atomic_store(&gpus[device].state, GPU_IDLE);
}

/* The thread that makes one. Detached: it ends by itself within a fraction of a second, and owns
 * nothing that others wait for. */
static void *run_make(void *arg) {
    int device = (int)(intptr_t)arg;
    struct tp_gpu *gpu = make_gpu(device, tp_cuda(false, NULL));
    if (!gpu) {
        try_later(device);
        tp_log_once(&gpus[device].said, TP_LOG_WARN,
                    "GPU %d: its context or streams cannot be used (is its memory, or the host's, "
                    "used up?); its transfers are left to Mooncake, and it is tried again",
                    device);
        return NULL;
    }
    tp_device_prepare(gpu);
    tp_stage_prepare(gpu);
    atomic_store_explicit(&gpus[device].gpu, gpu, memory_order_release);
    tp_calibrate(gpu);
    atomic_store_explicit(&gpu->calibrated, true, memory_order_release);
    return NULL;
}

static bool is_due(int device) {
    uint64_t next = atomic_load_explicit(&gpus[device].next_try_ms, memory_order_relaxed);
    return next == 0 || tp_now_ms() >= next;
}

static void no_thread(int device, int error) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    try_later(device);
    tp_log_once(&said, TP_LOG_WARN,
                "GPU %d: no thread can be started to make it ready: %s (ulimit -u, the cgroup's "
                "pids.max); its transfers are left to Mooncake until one can",
                device, strerror(-error));
}

void tp_gpu_prepare(int device) {
    if (device < 0 || device >= TP_DEVICES || tp_inert() ||
        atomic_load_explicit(&gpus[device].state, memory_order_relaxed) != GPU_IDLE ||
        !is_due(device) || !tp_cuda_has(TP_CUDA_COPY) ||
        !primary_active(tp_cuda(false, NULL), device))
        return;
    int idle = GPU_IDLE;
    if (!atomic_compare_exchange_strong(&gpus[device].state, &idle, GPU_BEGUN))
        return;
    pthread_t thread;
    int rc = tp_thread_start_deep("tidepool-gpu", MAKE_STACK_BYTES, run_make,
                                  (void *)(intptr_t)device, &thread);
    if (rc == 0)
        pthread_detach(thread);
    else
        no_thread(device, rc);
}

struct tp_gpu *tp_gpu_get(int device) {
    if (device < 0 || device >= TP_DEVICES || tp_inert())
        return NULL;
    struct tp_gpu *gpu = atomic_load_explicit(&gpus[device].gpu, memory_order_acquire);
    if (!gpu)
        tp_gpu_prepare(device);
    return gpu && !atomic_load_explicit(&gpu->lost, memory_order_relaxed) ? gpu : NULL;
}

bool tp_gpu_rests(int device) {
    struct tp_gpu *gpu = tp_gpu_get(device);
    uint64_t until = gpu ? atomic_load_explicit(&gpu->rests_until_ms, memory_order_relaxed) : 0;
    if (until && tp_now_ms() >= until) {
        atomic_store_explicit(&gpu->rests_until_ms, 0, memory_order_relaxed);
        until = 0;
    }
    return until != 0;
}

void tp_gpu_rest(struct tp_gpu *gpu, const char *why) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    atomic_store_explicit(&gpu->rests_until_ms, tp_now_ms() + RETRY_MS, memory_order_relaxed);
    tp_log_once(&said, TP_LOG_WARN,
                "GPU %d: %s (is its memory, or the host's, used up?); transfers failed, and "
                "further ones are left to Mooncake for a second each time",
                gpu->device, why);
}

void tp_gpu_give_up(struct tp_gpu *gpu, const char *why) {
    if (!atomic_exchange(&gpu->lost, true))
        tp_log(TP_LOG_WARN, "GPU %d: %s; its further transfers are left to Mooncake", gpu->device,
               why);
}

int tp_gpu_device(const struct tp_gpu *gpu) {
    return gpu->device;
}

/* A kernel that could not be started for want of memory is used again after a while. */
static uint64_t kernel_again(struct tp_gpu *gpu, bool to_device) {
    uint64_t again_ms = atomic_load_explicit(&gpu->kernel_again_ms, memory_order_relaxed);
    if (again_ms == 0 || tp_now_ms() < again_ms)
        return 0;
    if (atomic_compare_exchange_strong(&gpu->kernel_again_ms, &again_ms, 0)) {
        for (unsigned i = 0; i < 2; i++)
            atomic_store(&gpu->kernel_max[i], atomic_load(&gpu->kernel_limit[i]));
    }
    return atomic_load_explicit(&gpu->kernel_max[to_device], memory_order_relaxed);
}

uint64_t tp_gpu_kernel_max(struct tp_gpu *gpu, bool to_device) {
    uint64_t most = atomic_load_explicit(&gpu->kernel_max[to_device], memory_order_relaxed);
    return most ? most : kernel_again(gpu, to_device);
}

void tp_gpu_set_kernel_max(struct tp_gpu *gpu, bool to_device, uint64_t bytes) {
    atomic_store_explicit(&gpu->kernel_max[to_device], bytes, memory_order_relaxed);
}

bool tp_gpu_calibrated(const struct tp_gpu *gpu) {
    return atomic_load_explicit(&gpu->calibrated, memory_order_acquire);
}

void *tp_gpu_pinned_alloc(struct tp_gpu *gpu, size_t bytes) {
    struct visit visit;
    void *memory = NULL;
    if (!enter(gpu, &visit))
        return NULL;
    if (visit.cuda->host_alloc(&memory, bytes,
                               TP_CU_HOST_ALLOC_PORTABLE | TP_CU_HOST_ALLOC_DEVICEMAP) !=
        TP_CUDA_SUCCESS)
        memory = NULL;
    leave(&visit);
    return memory;
}

void tp_gpu_pinned_free(struct tp_gpu *gpu, void *memory) {
    struct visit visit;
    if (memory && enter(gpu, &visit)) {
        (void)visit.cuda->host_free(memory);
        leave(&visit);
    }
}

tp_cu_result tp_gpu_host_register(struct tp_gpu *gpu, void *address, size_t bytes) {
    struct visit visit;
    if (!enter(gpu, &visit))
        return TP_CUDA_ERROR_INVALID_CONTEXT;
    tp_cu_result result = visit.cuda->host_register(
        address, bytes, TP_CU_HOST_REGISTER_PORTABLE | TP_CU_HOST_REGISTER_DEVICEMAP);
    leave(&visit);
    return result;
}

tp_cu_result tp_gpu_host_unregister(struct tp_gpu *gpu, void *address) {
    struct visit visit;
    if (!enter(gpu, &visit))
        return TP_CUDA_ERROR_INVALID_CONTEXT;
    tp_cu_result result = visit.cuda->host_unregister(address);
    leave(&visit);
    return result;
}

bool tp_gpu_wants_registration(const struct tp_gpu *gpu) {
    return !gpu->pageable;
}

bool tp_gpu_stages(const struct tp_gpu *gpu) {
    return gpu->staged[0].streams[0] && !tp_gpu_lost(gpu);
}

bool tp_gpu_takes_host_pointers(const struct tp_gpu *gpu) {
    return gpu->host_pointers;
}

bool tp_gpu_lost(const struct tp_gpu *gpu) {
    return atomic_load_explicit(&gpu->lost, memory_order_relaxed);
}

tp_cu_deviceptr tp_gpu_memory_alloc(struct tp_gpu *gpu, size_t bytes) {
    struct visit visit;
    tp_cu_deviceptr memory = 0;
    if (!enter(gpu, &visit))
        return 0;
    if (visit.cuda->device_alloc(&memory, bytes) != TP_CUDA_SUCCESS)
        memory = 0;
    leave(&visit);
    return memory;
}

void tp_gpu_memory_free(struct tp_gpu *gpu, tp_cu_deviceptr memory) {
    struct visit visit;
    if (memory && enter(gpu, &visit)) {
        (void)visit.cuda->device_free(memory);
        leave(&visit);
    }
}

void tp_gpu_event_free(struct tp_gpu *gpu, tp_cu_event event) {
    struct visit visit;
    if (event && enter(gpu, &visit)) {
        (void)visit.cuda->event_destroy(event);
        leave(&visit);
    }
}

tp_cu_event tp_gpu_event(struct tp_gpu *gpu) {
    struct visit visit;
    tp_cu_event event = NULL;
    if (!enter(gpu, &visit))
        return NULL;
    if (visit.cuda->event_create(&event, TP_CU_EVENT_DISABLE_TIMING) != TP_CUDA_SUCCESS)
        event = NULL;
    leave(&visit);
    return event;
}

/* ---- copying ---- */

static tp_cu_result send_kernel(const struct tp_gpu *gpu, const struct tp_cuda *cuda,
                                const struct tp_copy_op *ops, uint32_t count, tp_cu_stream stream) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += ops[i].bytes;
    unsigned blocks = gpu->blocks                      ? gpu->blocks
                      : bytes < UINT64_C(4096) * count ? KERNEL_BLOCKS_TINY
                                                       : KERNEL_BLOCKS;
    unsigned group = 1; /* copies that a warp takes at a time */
    void *parameters[] = {&ops, &count, &group};
    return cuda->launch(gpu->kernel, blocks, 1, 1, KERNEL_THREADS, 1, 1, 0, stream, parameters,
                        NULL);
}

static tp_cu_result send_singly(const struct tp_cuda *cuda, const struct tp_copy_op *ops,
                                uint32_t count, tp_cu_stream stream) {
    tp_cu_result result = TP_CUDA_SUCCESS;
    for (uint32_t i = 0; i < count && result == TP_CUDA_SUCCESS; i++)
        result =
            cuda->memcpy_async((uintptr_t)ops[i].to, (uintptr_t)ops[i].from, ops[i].bytes, stream);
    return result;
}

/*
 * One call for all where the driver has it (12.8), else one a copy; also after a batch that was
 * refused: copies of it that did start come first in the same stream, so they are only done twice.
 */
static tp_cu_result send_engine(const struct tp_cuda *cuda, const struct tp_copy_op *ops,
                                uint32_t count, uint64_t *scratch, tp_cu_stream stream) {
    struct tp_cu_copy_attributes attributes = {.source_order = TP_CU_SOURCE_ORDER_STREAM};
    size_t index = 0;
    size_t failed = 0;
    if (!cuda->memcpy_batch || count == 1)
        return send_singly(cuda, ops, count, stream);
    uint64_t *to = scratch;
    uint64_t *from = scratch + count;
    size_t *bytes = scratch + 2 * (size_t)count;
    for (uint32_t i = 0; i < count; i++) {
        to[i] = (uintptr_t)ops[i].to;
        from[i] = (uintptr_t)ops[i].from;
        bytes[i] = ops[i].bytes;
    }
    tp_cu_result result =
        cuda->memcpy_batch(to, from, bytes, count, &attributes, &index, 1, &failed, stream);
    return result == TP_CUDA_SUCCESS ? result : send_singly(cuda, ops, count, stream);
}

static void give_kernel_up(struct tp_gpu *gpu, tp_cu_result why) {
    uint64_t limit[2] = {atomic_exchange(&gpu->kernel_max[0], 0),
                         atomic_exchange(&gpu->kernel_max[1], 0)};
    bool again = why == TP_CUDA_ERROR_OUT_OF_MEMORY;
    if (!limit[0] && !limit[1]) /* another thread was faster */
        return;
    uint32_t failures = atomic_fetch_add(&gpu->kernel_failures, 1);
    if (failures == 0 || !again)
        tp_log(TP_LOG_WARN,
               "GPU %d: the copy kernel cannot be started (%s); its copy engines do all copies%s",
               gpu->device, tp_cuda_error(why), again ? " until it is tried again" : "");
    if (!again)
        return;
    for (unsigned i = 0; i < 2; i++) {
        if (limit[i]) /* else another thread is about to use it again */
            atomic_store(&gpu->kernel_limit[i], limit[i]);
    }
    atomic_store(&gpu->kernel_again_ms,
                 tp_now_ms() + tp_backoff(RETRY_MS, failures, RETRY_DOUBLED));
}

static bool settle_lane(const struct lane *lane, const struct tp_cuda *cuda) {
    bool settled = true;
    for (unsigned i = 0; i < STREAMS && lane->streams[i]; i++)
        settled = cuda->stream_synchronize(lane->streams[i]) == TP_CUDA_SUCCESS && settled;
    return settled;
}

/* Wait until nothing of ours is under way. False: the context is lost. Needs no current context. */
static bool settle(struct tp_gpu *gpu, const struct tp_cuda *cuda) {
    bool settled = true;
    for (unsigned i = 0; i < 2; i++) {
        settled = settle_lane(&gpu->lanes[i], cuda) && settled;
        settled = settle_lane(&gpu->staged[i], cuda) && settled;
    }
    if (!settled)
        atomic_store_explicit(&gpu->lost, true, memory_order_relaxed);
    return settled;
}

static tp_cu_result send(struct tp_gpu *gpu, struct lane *lane, enum tp_gpu_method *method,
                         const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                         tp_cu_event event) {
    struct visit visit;
    tp_cu_result result = try_enter(gpu, &visit);
    if (result != TP_CUDA_SUCCESS) {
        if (result != TP_CUDA_ERROR_OUT_OF_MEMORY) /* which comes back */
            tp_gpu_give_up(gpu, "its context cannot be used any more");
        return result;
    }
    uint32_t turn = atomic_fetch_add_explicit(&lane->turn, 1, memory_order_relaxed);
    tp_cu_stream stream = lane->streams[turn % STREAMS];
    if (*method == TP_GPU_KERNEL) {
        result = send_kernel(gpu, visit.cuda, ops, count, stream);
        if (result != TP_CUDA_SUCCESS) {
            give_kernel_up(gpu, result);
            *method = TP_GPU_ENGINE;
        }
    }
    if (*method == TP_GPU_ENGINE)
        result = send_engine(visit.cuda, ops, count, scratch, stream);
    tp_cu_result recorded =
        result == TP_CUDA_SUCCESS ? visit.cuda->event_record(event, stream) : result;
    /* Some of the copies may be under way. An event that could not be recorded counts as passed,
     * which is right after this. */
    if (recorded != TP_CUDA_SUCCESS && settle(gpu, visit.cuda))
        recorded = result;
    leave(&visit);
    return recorded;
}

tp_cu_result tp_gpu_send(struct tp_gpu *gpu, enum tp_gpu_method *method, bool to_device,
                         const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                         tp_cu_event event) {
    return send(gpu, &gpu->lanes[to_device], method, ops, count, scratch, event);
}

tp_cu_result tp_gpu_send_staged(struct tp_gpu *gpu, enum tp_gpu_method *method, bool to_device,
                                const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                                tp_cu_event event) {
    return send(gpu, &gpu->staged[to_device], method, ops, count, scratch, event);
}

tp_cu_result tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    struct visit visit;
    bool entered =
        enter(gpu, &visit); /* events and streams know their context; without it is good enough */
    int mode = entered ? 0 : tp_cuda_begin(cuda);
    tp_cu_result result = cuda->event_query(event);
    if (result != TP_CUDA_SUCCESS && result != TP_CUDA_ERROR_NOT_READY && settle(gpu, cuda))
        result = TP_CUDA_SUCCESS;
    if (entered)
        leave(&visit);
    else
        tp_cuda_end(cuda, mode);
    return result;
}
