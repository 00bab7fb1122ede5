/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPUs of `copy_limits`: the pinned-copy limit, and copy engines against the copy kernel for
 * each block size.
 *
 * The library never makes a context, and uses one that the application has. Here the application is
 * this program, so it makes them: about 500 MiB on each GPU, for as long as it runs.
 *
 * It must not know: stores, how it is printed.
 */
#include "tests/bench/limits/limits.h"

#include "env/cuda.h"
#include "env/env.h"
#include "transport/copy_device.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define READY_NS UINT64_C(5000000000)  /* for the kernel to be compiled, and calibrated */
#define KERNEL_PART ((size_t)16 << 10) /* as waves cut copies for the kernel */
#define WAVE_OPS_MAX (BENCH_PART / BENCH_BLOCK_MIN)
#define LIMIT_COPIES 2

/* ---- making them ready ---- */

/* NULL: none, and `why` says it. */
static const struct tp_cuda *open_driver(char *why, size_t bytes) {
    bool unusable = false;
    const struct tp_cuda *cuda = tp_cuda(true, &unusable);

    if (!cuda || !tp_cuda_has(TP_CUDA_COPY)) {
        (void)snprintf(why, bytes, "%s",
                       cuda || unusable ? "libcuda.so.1 is too old for GPU copies"
                                        : "no libcuda.so.1 can be loaded here");
        return NULL;
    }
    tp_cu_result result = cuda->init(0);
    if (result != TP_CUDA_SUCCESS) {
        (void)snprintf(why, bytes, "cuInit: %s", tp_cuda_error(result));
        return NULL;
    }
    return cuda;
}

static void wait_ready(struct bench_gpu *gpu) {
    const struct timespec pause = {0, 1000000};
    uint64_t end = tp_now_ns() + READY_NS;
    struct tp_gpu *found = NULL;

    while (tp_now_ns() < end) {
        found = tp_gpu_get(gpu->device);
        if (found && tp_gpu_calibrated(found)) {
            break;
        }
        (void)nanosleep(&pause, NULL);
    }
    if (found) {
        gpu->gpu = found;
        gpu->memory = tp_gpu_memory_alloc(found, BENCH_AREA);
    }
    if (!found || !gpu->memory) {
        gpu->gpu = NULL;
        (void)snprintf(gpu->problem, sizeof(gpu->problem), "%s",
                       found ? "no 64 MiB of its memory are free"
                             : "its streams could not be made ready in time");
        return;
    }
    gpu->kernel_max[0] = tp_gpu_kernel_max(found, false);
    gpu->kernel_max[1] = tp_gpu_kernel_max(found, true);
}

static void open_gpu(const struct tp_cuda *cuda, struct bench_gpu *gpu) {
    tp_cu_device handle = 0;
    tp_cu_context context = NULL;
    tp_cu_result result = cuda->device_get(&handle, gpu->device);

    if (result == TP_CUDA_SUCCESS) {
        result = cuda->primary_retain(&context, handle);
    }
    if (result != TP_CUDA_SUCCESS) {
        (void)snprintf(gpu->problem, sizeof(gpu->problem), "no context can be made: %s",
                       tp_cuda_error(result));
        return;
    }
    tp_gpu_prepare(gpu->device);
    wait_ready(gpu);
    if (!gpu->gpu) {
        (void)cuda->primary_release(handle);
    }
}

int bench_gpus_open(struct bench *bench, int only) {
    const struct tp_cuda *cuda = open_driver(bench->no_gpu, sizeof(bench->no_gpu));
    int count = 0;

    if (!cuda) {
        return 0;
    }
    (void)cuda->device_get_count(&count);
    count = count < TP_DEVICES ? count : TP_DEVICES;
    if (count == 0 || only >= count) {
        (void)snprintf(bench->no_gpu, sizeof(bench->no_gpu),
                       count ? "there is no GPU %d: this process sees %d, from 0 on"
                             : "the driver shows none to this process",
                       only, count);
        return 0;
    }
    bench->gpu_count = only < 0 ? (unsigned)count : 1;
    bench->gpus = calloc(bench->gpu_count, sizeof(*bench->gpus));
    if (!bench->gpus) {
        bench->gpu_count = 0;
        return -ENOMEM;
    }
    for (unsigned i = 0; i < bench->gpu_count; i++) {
        char text[64];
        bench->gpus[i].device = only < 0 ? (int)i : only;
        (void)snprintf(text, sizeof(text), "making GPU %d ready", bench->gpus[i].device);
        bench_progress(&bench->time, text);
        open_gpu(cuda, &bench->gpus[i]);
    }
    return 0;
}

unsigned bench_gpus_usable(const struct bench *bench) {
    unsigned count = 0;

    for (unsigned i = 0; i < bench->gpu_count; i++) {
        count += bench->gpus[i].gpu != NULL;
    }
    return count;
}

/* The library keeps its streams and pinned memory for the life of the process, and with them the
 * contexts: the driver takes all of it back at the end. */
void bench_gpus_close(struct bench *bench) {
    for (unsigned i = 0; i < bench->gpu_count; i++) {
        if (bench->gpus[i].gpu) {
            tp_gpu_memory_free(bench->gpus[i].gpu, bench->gpus[i].memory);
        }
    }
    free(bench->gpus);
    bench->gpus = NULL;
    bench->gpu_count = 0;
}

/* ---- sending copies ---- */

struct wave {
    uint32_t first, count; /* in ops */
    tp_cu_event event;
};

/* What one round sends. */
struct round {
    struct tp_gpu *gpu;
    enum tp_gpu_method method;
    bool to_device;
    struct tp_copy_op *ops; /* pinned: the kernel reads them; WAVE_OPS_MAX a wave */
    uint64_t *scratch;
    struct wave waves[BENCH_PARTS];
    unsigned wave_count;
};

static bool round_make(struct round *round, struct tp_gpu *gpu) {
    bool events = true;

    *round = (struct round){.gpu = gpu};
    round->ops = tp_gpu_pinned_alloc(gpu, BENCH_PARTS * WAVE_OPS_MAX * sizeof(*round->ops));
    round->scratch = malloc(3 * WAVE_OPS_MAX * sizeof(*round->scratch));
    for (unsigned i = 0; i < BENCH_PARTS; i++) {
        round->waves[i].event = tp_gpu_event(gpu);
        events = events && round->waves[i].event;
    }
    return round->ops && round->scratch && events;
}

static void round_free(struct round *round) {
    for (unsigned i = 0; i < BENCH_PARTS; i++) {
        tp_gpu_event_free(round->gpu, round->waves[i].event);
    }
    free(round->scratch);
    tp_gpu_pinned_free(round->gpu, round->ops);
}

static struct tp_copy_op copy_op(bool to_device, char *host, tp_cu_deviceptr device, size_t bytes) {
    void *gpu = (void *)(uintptr_t)device; /* NOLINT(performance-no-int-to-ptr) */

    return (struct tp_copy_op){to_device ? gpu : host, to_device ? host : gpu, bytes};
}

/* A wave of one part of the memory, in blocks of this size; each cut into `cut` bytes. */
static void fill_wave(struct round *round, unsigned index, char *host, tp_cu_deviceptr device,
                      size_t block, size_t cut) {
    struct wave *wave = &round->waves[index];
    size_t blocks = BENCH_PART / block;

    wave->first = index * (uint32_t)WAVE_OPS_MAX;
    wave->count = 0;
    for (size_t i = 0; i < blocks; i++) {
        struct bench_pair pair = bench_pair(i, blocks);
        for (size_t done = 0; done < block; done += cut) {
            round->ops[wave->first + wave->count++] =
                copy_op(round->to_device, host + pair.one * block + done,
                        device + pair.other * block + done, cut);
        }
    }
}

static tp_cu_result wait_event(struct tp_gpu *gpu, tp_cu_event event) {
    tp_cu_result result;

    while ((result = tp_gpu_query(gpu, event)) == TP_CUDA_ERROR_NOT_READY) {
        (void)sched_yield();
    }
    return result;
}

/* Seconds from the first wave to the end of the last; negative when the driver refused. */
static double run_round(void *arg) {
    struct round *round = arg;
    enum tp_gpu_method used = round->method;
    tp_cu_result result = TP_CUDA_SUCCESS;
    unsigned sent = 0;
    uint64_t start = tp_now_ns();

    for (; sent < round->wave_count && result == TP_CUDA_SUCCESS && used == round->method; sent++) {
        struct wave *wave = &round->waves[sent];
        result = tp_gpu_send(round->gpu, &used, round->to_device, round->ops + wave->first,
                             wave->count, round->scratch, wave->event);
    }
    for (unsigned i = 0; i < sent; i++) {
        tp_cu_result ended = wait_event(round->gpu, round->waves[i].event);
        result = result == TP_CUDA_SUCCESS ? ended : result;
    }
    uint64_t end = tp_now_ns();
    return result == TP_CUDA_SUCCESS && used == round->method ? (double)(end - start) * 1e-9 : -1;
}

/* ---- what is measured ---- */

/* Whole blocks of pinned memory, one copy behind the other. */
static void measure_limit(struct bench *bench, struct bench_gpu *gpu, struct round *round) {
    struct bench_scratch pinned;

    if (bench_scratch_pinned(gpu->gpu, &pinned) != 0) {
        (void)snprintf(gpu->problem, sizeof(gpu->problem), "no 64 MiB can be pinned");
        bench_skip(&bench->time, 2);
        return;
    }
    round->method = TP_GPU_ENGINE;
    round->wave_count = LIMIT_COPIES;
    for (int to_device = 0; to_device < 2; to_device++) {
        round->to_device = to_device;
        for (unsigned i = 0; i < LIMIT_COPIES; i++) {
            round->waves[i].first = i;
            round->waves[i].count = 1;
            round->ops[i] = copy_op(to_device, pinned.memory.parts[0], gpu->memory, BENCH_AREA);
        }
        gpu->pinned[to_device] =
            bench_rate(&bench->time, run_round, round, LIMIT_COPIES * BENCH_AREA);
    }
    bench_scratch_free(&pinned);
}

static void measure_blocks(struct bench *bench, struct bench_gpu *gpu, struct round *round) {
    const struct bench_memory *memory = &bench->gpu_scratch.memory;

    round->wave_count = BENCH_PARTS;
    for (unsigned i = 0; i < BENCH_BLOCKS; i++) {
        size_t block = bench_block(i);
        size_t cut = round->method == TP_GPU_KERNEL && block > KERNEL_PART ? KERNEL_PART : block;
        for (unsigned k = 0; k < BENCH_PARTS; k++) {
            fill_wave(round, k, memory->parts[k], gpu->memory + k * BENCH_PART, block, cut);
        }
        if (i == 0) {
            (void)run_round(round); /* the first launch loads the code */
        }
        double *rate = &gpu->rates[round->to_device][round->method][i];
        *rate = bench_rate(&bench->time, run_round, round, BENCH_AREA);
        if (*rate <= 0 && round->method == TP_GPU_ENGINE) {
            (void)snprintf(gpu->problem, sizeof(gpu->problem), "its copy engines failed");
        }
    }
}

unsigned bench_gpu_measurements(void) {
    return 2 + 2 * TP_GPU_METHODS * BENCH_BLOCKS;
}

void bench_gpu_measure(struct bench *bench, struct bench_gpu *gpu) {
    struct round round;
    char text[64];

    (void)snprintf(text, sizeof(text), "measuring GPU %d", gpu->device);
    bench_progress(&bench->time, text);
    if (!round_make(&round, gpu->gpu)) {
        (void)snprintf(gpu->problem, sizeof(gpu->problem), "no pinned memory or no event is left");
        round_free(&round);
        return;
    }
    measure_limit(bench, gpu, &round);
    for (int way = 0; way < 2 * TP_GPU_METHODS; way++) {
        round.to_device = way < TP_GPU_METHODS;
        round.method = (enum tp_gpu_method)(way % TP_GPU_METHODS);
        if (round.method == TP_GPU_KERNEL && !gpu->kernel_max[round.to_device]) {
            bench_skip(&bench->time, BENCH_BLOCKS);
            continue; /* the kernel is off, or was refused */
        }
        measure_blocks(bench, gpu, &round);
    }
    round_free(&round);
}

enum tp_gpu_method bench_chosen(const struct bench_gpu *gpu, bool to_device, size_t block) {
    return block <= gpu->kernel_max[to_device] ? TP_GPU_KERNEL : TP_GPU_ENGINE;
}
