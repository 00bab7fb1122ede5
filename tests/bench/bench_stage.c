/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CPU's side of staged copies can move: the library's own pipeline and threads over a GPU
 * that only takes its time (a link of 55 GB/s each way, 4 us a call under one lock, nothing is
 * copied there). A caller submits objects as Mooncake does and polls them in order. One side is a
 * MAP_SHARED memfd, as a store's memory is.
 *
 * Usage: bench_stage [rounds]          TIDEPOOL_COPY_THREADS=N for another number of threads
 */
#include "env/env.h"
#include "transport/gpu.h"
#include "transport/registrar.h"
#include "transport/staging.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)
#define AREA ((uint64_t)1 << 30)
#define OBJECTS_MOST 1024
#define LINK_GBPS 55
#define CALL_NS 4000
#define QUERY_NS 700

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void spend(uint64_t ns) {
    for (uint64_t end = now_ns() + ns; now_ns() < end;)
        __builtin_ia32_pause();
}

/* ---- the GPU, instead of gpu.c's (linked with --wrap) ---- */

static pthread_mutex_t driver = PTHREAD_MUTEX_INITIALIZER;
static uint64_t link_free_ns[2];

bool __wrap_tp_gpu_stages(const struct tp_gpu *gpu);
int __wrap_tp_gpu_device(const struct tp_gpu *gpu);
bool __wrap_tp_gpu_lost(const struct tp_gpu *gpu);
tp_cu_event __wrap_tp_gpu_event(struct tp_gpu *gpu);
void *__wrap_tp_gpu_pinned_alloc(struct tp_gpu *gpu, size_t bytes);
uint64_t __wrap_tp_gpu_kernel_max(const struct tp_gpu *gpu, bool to_device);
tp_cu_result __wrap_tp_gpu_send_staged(struct tp_gpu *gpu, enum tp_gpu_method *method,
                                       bool to_device, const struct tp_copy_op *ops, uint32_t count,
                                       uint64_t *scratch, tp_cu_event event);
tp_cu_result __wrap_tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event);

bool __wrap_tp_gpu_stages(const struct tp_gpu *gpu) {
    return gpu;
}

int __wrap_tp_gpu_device(const struct tp_gpu *gpu) {
    return 0;
}

bool __wrap_tp_gpu_lost(const struct tp_gpu *gpu) {
    return false;
}

tp_cu_event __wrap_tp_gpu_event(struct tp_gpu *gpu) {
    return calloc(1, sizeof(uint64_t));
}

void *__wrap_tp_gpu_pinned_alloc(struct tp_gpu *gpu, size_t bytes) {
    void *memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    return memory ? memset(memory, 1, bytes) : NULL;
}

uint64_t __wrap_tp_gpu_kernel_max(const struct tp_gpu *gpu, bool to_device) {
    return 48 << 10;
}

tp_cu_result __wrap_tp_gpu_send_staged(struct tp_gpu *gpu, enum tp_gpu_method *method,
                                       bool to_device, const struct tp_copy_op *ops, uint32_t count,
                                       uint64_t *scratch, tp_cu_event event) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += ops[i].bytes;
    pthread_mutex_lock(&driver);
    spend(CALL_NS);
    uint64_t now = now_ns();
    uint64_t start = link_free_ns[to_device] > now ? link_free_ns[to_device] : now;
    link_free_ns[to_device] = start + bytes / LINK_GBPS;
    *(uint64_t *)event = link_free_ns[to_device];
    pthread_mutex_unlock(&driver);
    return TP_CUDA_SUCCESS;
}

tp_cu_result __wrap_tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event) {
    spend(QUERY_NS);
    return now_ns() >= *(const uint64_t *)event ? TP_CUDA_SUCCESS : TP_CUDA_ERROR_NOT_READY;
}

/* ---- the work ---- */

static struct tp_stage_job jobs[OBJECTS_MOST];

/* GB/s of all objects, in blocks whose places in the GPU's memory are not next to each other. */
static double run(char *area, bool to_device, uint64_t object_bytes, uint64_t block_bytes) {
    struct tp_gpu *gpu = (struct tp_gpu *)(uintptr_t)4096;
    uint32_t count = (uint32_t)(AREA / object_bytes);
    char *device = (char *)(uintptr_t)(UINT64_C(1) << 44);
    uint64_t start = now_ns();
    for (uint32_t i = 0; i < count; i++) {
        char *host = area + i * object_bytes;
        for (uint64_t at = 0; at < object_bytes; at += block_bytes) {
            if (!tp_stage_reserve(&jobs[i], block_bytes, 1))
                exit(1);
            tp_stage_add(&jobs[i], host + at, device + at * count + i * block_bytes, block_bytes,
                         0);
        }
        tp_stage_start(&jobs[i], gpu, to_device);
    }
    for (uint32_t i = 0; i < count; i++) {
        while (tp_stage_look(&jobs[i]) == TP_STAGE_RUNNING)
            tp_stage_help(&jobs[i]);
        tp_stage_reset(&jobs[i]);
    }
    return (double)AREA / (double)(now_ns() - start);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void row(char *area, const char *name, uint64_t object_bytes, uint64_t block_bytes,
                unsigned rounds) {
    double rates[2][64];
    for (unsigned i = 0; i < rounds; i++) {
        for (int way = 0; way < 2; way++)
            rates[way][i] = run(area, way, object_bytes, block_bytes);
    }
    for (int way = 0; way < 2; way++)
        qsort(rates[way], rounds, sizeof(double), by_value);
    printf("%-24s put %5.1f  get %5.1f GB/s\n", name, rates[0][rounds / 2], rates[1][rounds / 2]);
}

int main(int argc, char **argv) {
    unsigned rounds = argc > 1 ? (unsigned)atoi(argv[1]) : 5;
    int fd = memfd_create("bench", MFD_CLOEXEC);
    if (rounds < 1 || rounds > 64 || fd < 0 || ftruncate(fd, (off_t)AREA) < 0)
        return 1;
    char *area = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct tp_gpu *gpu = (struct tp_gpu *)(uintptr_t)4096;
    tp_stage_prepare(gpu);
    if (area == MAP_FAILED || !tp_stage_ready(gpu))
        return 1;
    memset(area, 1, AREA);
    row(area, "objects of 16 MiB", 16 * MIB, 16 * MIB, rounds);
    row(area, "objects of 128 x 16 KiB", 2 * MIB, 16384, rounds);
    row(area, "objects of 1 MiB", MIB, MIB, rounds);
    return 0;
}
