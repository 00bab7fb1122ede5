/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `copy_limits` measures, and its parts. Rates are GB/s (10^9 bytes a second), medians, 0
 * where nothing was measured.
 *
 * A store's memory is only ever read. What is measured as puts goes to scratch memory of this
 * process's own.
 */
#ifndef TIDEPOOL_LIMITS_H
#define TIDEPOOL_LIMITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "segment/pieces.h"
#include "transport/gpu.h"

struct tp_config;

#define BENCH_AREA ((size_t)64 << 20) /* copied over and over */
/* Memory is taken in parts, since a store's lies on several NUMA nodes; waves are of this size
 * too. */
#define BENCH_PARTS 8
#define BENCH_PART (BENCH_AREA / BENCH_PARTS)
#define BENCH_BLOCKS 9       /* 4 KiB to 1 MiB, each twice the one before */
#define BENCH_STORE_BLOCKS 5 /* the same range, each four times the one before */
#define BENCH_BLOCK_MIN ((size_t)4096)

enum { BENCH_GET, BENCH_PUT };

/* Host memory that is copied from or to. */
struct bench_memory {
    char *parts[BENCH_PARTS];
    size_t part_bytes; /* a power of two */
};

/* ---- time ---- */

struct bench_time {
    uint64_t end_ns;  /* CLOCK_MONOTONIC */
    uint64_t most_ns; /* a measurement */
    unsigned left;    /* measurements to come */
    bool progress;    /* lines on standard error */
};

/* `text` is shown where somebody watches; NULL: take it away. */
void bench_progress(const struct bench_time *time, const char *text);

/*
 * Run `round` again and again, as long as this measurement's share of the time lasts, but at least
 * once. It returns the seconds that copying `bytes` took, or a negative number when it failed. The
 * rate is the median's; 0 after a failure.
 */
double bench_rate(struct bench_time *time, double (*round)(void *arg), void *arg, uint64_t bytes);

/* `count` measurements will not be made: the others have more time. */
void bench_skip(struct bench_time *time, unsigned count);

/*
 * Between which blocks of `count` (a power of two) copy number `i` runs: of the one memory and of
 * the other. All of them have their turn, and no copy continues the one before, so that nothing is
 * merged.
 */
struct bench_pair {
    size_t one, other;
};
struct bench_pair bench_pair(size_t i, size_t count);

/* ---- scratch memory: as a store would have it, but ours ---- */

struct bench_scratch {
    struct bench_memory memory;
    char kind[64];            /* in words; empty: there is none */
    struct tp_pieces pieces;  /* CUDA host memory */
    char *mapped;             /* memfd */
    struct tp_gpu *pinned_by; /* pinned memory */
};

/* As stores on CUDA host memory have it, open to the GPUs of `devices` (a bit each). 0 or -errno.
 */
int bench_scratch_cumem(const struct tp_config *config, uint64_t devices,
                        struct bench_scratch *ret_scratch);
/* As other stores have it: memfd. 0 or -errno, with one line logged. */
int bench_scratch_memfd(const struct tp_config *config, struct bench_scratch *ret_scratch);
/* Pinned memory of the driver's, where there can be no CUDA host memory. 0 or -ENOMEM. */
int bench_scratch_pinned(struct tp_gpu *gpu, struct bench_scratch *ret_scratch);
void bench_scratch_free(struct bench_scratch *scratch);

/* ---- GPUs ---- */

struct bench_gpu {
    int device;
    struct tp_gpu *gpu;     /* NULL: `problem` says why */
    tp_cu_deviceptr memory; /* BENCH_AREA */
    uint64_t kernel_max[2]; /* by to_device: what the library chose */
    double pinned[2];
    double rates[2][TP_GPU_METHODS][BENCH_BLOCKS];
    char problem[160]; /* empty: none */
};

struct bench {
    struct bench_gpu *gpus;
    unsigned gpu_count;
    char no_gpu[160]; /* why there is none */
    struct bench_scratch gpu_scratch, host_scratch;
    const char *directory; /* NULL: none */
    struct bench_store *stores;
    unsigned store_count;
    double seconds; /* that it took */
    struct bench_time time;
};

/*
 * Make GPU `only` (or all of them: -1) ready in this process, which means a context on each. Fills
 * in gpus and no_gpu. 0, or -ENOMEM.
 */
int bench_gpus_open(struct bench *bench, int only);
void bench_gpus_close(struct bench *bench);
/* Those without a problem; 0: copies are of host memory. */
unsigned bench_gpus_usable(const struct bench *bench);
/* The limit, and both methods with every block size. */
void bench_gpu_measure(struct bench *bench, struct bench_gpu *gpu);
unsigned bench_gpu_measurements(void);

/* ---- stores ---- */

/* One way to copy with one store's memory. */
struct bench_row {
    struct bench_gpu *gpu;               /* NULL: host memory, by the copy pool */
    bool registered;                     /* the memory registered with CUDA first */
    double rates[2][BENCH_STORE_BLOCKS]; /* BENCH_GET, BENCH_PUT */
    char problem[160];
};

struct bench_store {
    char id[33];
    char name[128]; /* cleaned */
    char detail[64];
    int pid;                      /* 0: unknown */
    uint64_t bytes, sample_bytes; /* in all; of which so many are read */
    char scratch[64];             /* where puts go, in words */
    struct bench_row *rows;
    unsigned row_count;
    char problem[320];
};

/* The stores of the directory that `dir_fd` is. 0 or -errno. */
int bench_stores_find(struct bench *bench, int dir_fd, const struct tp_config *config);
/*
 * Attach to one as an engine does, once tp_transport_start has run; wait for it until `end_ns`. The
 * peer, with a reference held, and a sample of its memory, mapped and open to all GPUs; NULL with
 * the problem told.
 */
struct tp_peer;
struct tp_peer *bench_store_attach(const struct bench *bench, struct bench_store *store,
                                   uint64_t end_ns, struct bench_memory *ret_memory);
/* Attach to them as an engine does, and measure. `config` names the directory, and stays. */
void bench_stores_measure(struct bench *bench, const struct tp_config *config);
void bench_stores_free(struct bench *bench);

/* ---- the report ---- */

size_t bench_block(unsigned index);       /* of BENCH_BLOCKS */
size_t bench_store_block(unsigned index); /* of BENCH_STORE_BLOCKS */
/* What the library would choose for copies of this size. */
enum tp_gpu_method bench_chosen(const struct bench_gpu *gpu, bool to_device, size_t block);
void bench_print_text(const struct bench *bench, FILE *out);
void bench_print_json(const struct bench *bench, FILE *out);

#endif
