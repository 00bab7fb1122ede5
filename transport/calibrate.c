/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copy engine or kernel: where the one begins to be faster depends on the GPU, its link and the
 * driver, so it is measured.
 *
 * The kernel's copies are cut into chunks, so its speed is the same for all sizes from there up,
 * and one measurement is enough; the copy engines get faster with the size. The result is the
 * largest size up to which the kernel is faster.
 *
 * It must not know: waves, who copies what. Transfers of the application run meanwhile and may
 * disturb a measurement: the median of three is taken, and a wrong result costs speed only.
 */
#include "transport/calibrate.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "env/env.h"

#define BYTES ((size_t)16 << 20)
#define SMALLEST ((size_t)64 << 10)
#define LARGEST ((size_t)1 << 20)
#define CHUNK ((size_t)16 << 10) /* as the waves cut copies for the kernel */
#define OPS (BYTES / CHUNK)
#define ROUNDS 3
/* For the measuring; what runs then is waited for, and the memory is made and freed around it. */
#define LIMIT_NS UINT64_C(100000000)
#define PARTS                                                                                      \
    4 /* sent one behind the other, as waves are: the next is prepared while one is copied */
#define AS_FAST 0.98

struct bench {
    struct tp_gpu *gpu;
    char *host;
    tp_cu_deviceptr device;
    struct tp_copy_op *ops; /* pinned */
    uint64_t *scratch;
    tp_cu_event events[PARTS];
    uint64_t deadline_ns;
};

/*
 * Always waits for the end, since the memory is freed afterwards. Spins while it measures: a sleep
 * takes 50 us more than was asked for (prctl(2), PR_SET_TIMERSLACK), a run about 350 us.
 */
static tp_cu_result wait_event(const struct bench *bench, tp_cu_event event) {
    const struct timespec pause = {0, 1000000};
    tp_cu_result result;
    while ((result = tp_gpu_query(bench->gpu, event)) == TP_CUDA_ERROR_NOT_READY) {
        if (tp_now_ns() < bench->deadline_ns)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
    return result;
}

/* Time of one run over all the memory, 0 when it failed. */
static uint64_t run_once(const struct bench *bench, enum tp_gpu_method method, bool to_device,
                         size_t size) {
    uint32_t count = (uint32_t)(BYTES / size);
    enum tp_gpu_method used = method;
    for (uint32_t i = 0; i < count; i++) {
        void *device = (void *)(uintptr_t)(bench->device + i * size);
        void *host = bench->host + i * size;
        bench->ops[i] =
            (struct tp_copy_op){to_device ? device : host, to_device ? host : device, size};
    }
    uint64_t start = tp_now_ns();
    uint32_t part = count / PARTS; /* sizes are powers of two up to BYTES / PARTS */
    tp_cu_result result = TP_CUDA_SUCCESS;
    unsigned sent = 0;
    for (; sent < PARTS && result == TP_CUDA_SUCCESS && used == method; sent++)
        result = tp_gpu_send(bench->gpu, &used, to_device, bench->ops + (size_t)sent * part, part,
                             bench->scratch, bench->events[sent]);
    for (unsigned i = 0; i < sent; i++) {
        tp_cu_result end = wait_event(bench, bench->events[i]);
        result = result == TP_CUDA_SUCCESS ? end : result;
    }
    return result == TP_CUDA_SUCCESS && used == method ? tp_now_ns() - start : 0;
}

/* The median of the rounds; 0 after a failure or when time is up. */
static uint64_t measure(const struct bench *bench, enum tp_gpu_method method, bool to_device,
                        size_t size) {
    uint64_t low = UINT64_MAX;
    uint64_t high = 0;
    uint64_t sum = 0;
    _Static_assert(ROUNDS == 3, "the median of three is what is neither the least nor the most");
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t time =
            tp_now_ns() < bench->deadline_ns ? run_once(bench, method, to_device, size) : 0;
        if (time == 0)
            return 0;
        low = time < low ? time : low;
        high = time > high ? time : high;
        sum += time;
    }
    return sum - low - high;
}

/* 0: could not be found out. */
static uint64_t find_crossover(const struct bench *bench, bool to_device) {
    uint64_t found = SMALLEST / 2;
    if (tp_now_ns() >= bench->deadline_ns)
        return 0;
    (void)run_once(bench, TP_GPU_KERNEL, to_device, CHUNK); /* the first launch loads the code */
    uint64_t kernel = measure(bench, TP_GPU_KERNEL, to_device, CHUNK);
    if (kernel == 0)
        return 0;
    /* Where both are equal the copy engines win: they leave the GPU's multiprocessors alone. */
    for (size_t size = SMALLEST; size <= LARGEST; size *= 2) {
        uint64_t engine = measure(bench, TP_GPU_ENGINE, to_device, size);
        if (engine == 0)
            return 0;
        if ((double)kernel >= (double)engine * AS_FAST)
            break;
        found = size;
    }
    return found;
}

static bool make_bench(struct bench *bench) {
    bench->host = tp_gpu_pinned_alloc(bench->gpu, BYTES);
    bench->ops = tp_gpu_pinned_alloc(bench->gpu, OPS * sizeof(*bench->ops));
    bench->device = tp_gpu_memory_alloc(bench->gpu, BYTES);
    bool events = true;
    for (unsigned i = 0; i < PARTS; i++) {
        bench->events[i] = tp_gpu_event(bench->gpu);
        events = events && bench->events[i];
    }
    bench->scratch = malloc(OPS * 3 * sizeof(*bench->scratch));
    return bench->host && bench->ops && bench->device && events && bench->scratch;
}

static void free_bench(struct bench *bench) {
    tp_gpu_pinned_free(bench->gpu, bench->host);
    tp_gpu_pinned_free(bench->gpu, bench->ops);
    tp_gpu_memory_free(bench->gpu, bench->device);
    for (unsigned i = 0; i < PARTS; i++)
        tp_gpu_event_free(bench->gpu, bench->events[i]);
    free(bench->scratch);
}

void tp_calibrate(struct tp_gpu *gpu) {
    const struct tp_engine_config *config = &tp_config()->engine;
    struct bench bench = {.gpu = gpu};
    uint64_t found[2] = {0};
    if (config->copy_engine != TP_COPY_AUTO || config->kernel_max_bytes ||
        !tp_gpu_kernel_max(gpu, false))
        return;
    uint64_t start = tp_now_ns();
    bench.deadline_ns = start + LIMIT_NS;
    bool made = make_bench(&bench);
    for (int to_device = 0; made && to_device < 2; to_device++)
        found[to_device] = find_crossover(&bench, to_device);
    free_bench(&bench);
    for (int to_device = 0; to_device < 2; to_device++) {
        /* Not when the kernel was given up meanwhile. */
        if (found[to_device] && tp_gpu_kernel_max(gpu, to_device))
            tp_gpu_set_kernel_max(gpu, to_device, found[to_device]);
    }
    tp_log(TP_LOG_DEBUG,
           "GPU %d: the copy kernel takes copies up to %llu KiB to it and %llu KiB from it (%s in "
           "%llu ms)",
           tp_gpu_device(gpu), (unsigned long long)(tp_gpu_kernel_max(gpu, true) >> 10),
           (unsigned long long)(tp_gpu_kernel_max(gpu, false) >> 10),
           found[0] && found[1] ? "measured" : "not all measured",
           (unsigned long long)((tp_now_ns() - start) / 1000000));
}
