/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stores of `copy_limits`: what copies from their memory reach, by the library's waves and
 * copy pool.
 *
 * A store's memory is read and never written: what is measured as puts goes to scratch memory. It
 * must not know: how stores are found (bench_attach), how it is printed.
 */
#include "tests/bench/limits/limits.h"

#include "env/env.h"
#include "transport/copy_device.h"
#include "transport/peer.h"
#include "transport/transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ATTACH_NS UINT64_C(3000000000) /* all stores together */

/* ---- copying ---- */

/* One round: all of a memory, by the library's waves or its copy pool. */
struct transfer {
    const struct bench_gpu *gpu; /* NULL: host memory */
    bool put;                    /* into `memory`, which is scratch then */
    bool mapped;                 /* GPUs reach `memory` by themselves */
    const struct bench_memory *memory;
    char *other; /* as large: host memory */
    size_t block;
    struct tp_device_job device_job;
    struct tp_copy_job host_job;
};

static int add(struct transfer *transfer, void *to, const void *from) {
    uint8_t group;

    return transfer->gpu
               ? tp_device_add(&transfer->device_job, transfer->gpu->device, !transfer->put,
                               transfer->mapped, to, from, transfer->block, &group)
               : tp_copy_add(&transfer->host_job, to, from, transfer->block, NULL, NULL);
}

static bool add_all(struct transfer *transfer) {
    size_t a_part = transfer->memory->part_bytes / transfer->block;
    size_t count = BENCH_PARTS * a_part;
    char *other =
        transfer->gpu
            ? (char *)(uintptr_t)transfer->gpu->memory /* NOLINT(performance-no-int-to-ptr) */
            : transfer->other;

    for (size_t i = 0; i < count; i++) {
        struct bench_pair pair = bench_pair(i, count);
        char *one =
            transfer->memory->parts[pair.one / a_part] + pair.one % a_part * transfer->block;
        char *two = other + pair.other * transfer->block;
        if (add(transfer, transfer->put ? one : two, transfer->put ? two : one) != 0) {
            return false;
        }
    }
    return true;
}

static bool run_device(struct tp_device_job *job) {
    enum tp_device_state state;

    tp_device_start(job);
    while ((state = tp_device_look(job, TP_DEVICE_GROUPS)) == TP_DEVICE_RUNNING) {
        tp_device_poll(job);
    }
    return state == TP_DEVICE_DONE;
}

static void run_host(struct tp_copy_job *job) {
    (void)tp_copy_start(job);
    while (!tp_copy_idle(job)) {
        (void)tp_copy_help(job);
    }
}

static double run_round(void *arg) {
    struct transfer *transfer = arg;
    bool copied = add_all(transfer);
    uint64_t start = tp_now_ns();

    if (copied && transfer->gpu) {
        copied = run_device(&transfer->device_job);
    } else if (copied) {
        run_host(&transfer->host_job);
    }
    uint64_t end = tp_now_ns();
    tp_device_reset(&transfer->device_job);
    tp_copy_reset(&transfer->host_job);
    return copied ? (double)(end - start) * 1e-9 : -1;
}

struct work {
    struct bench *bench;
    const struct tp_config *config;
    struct tp_peer *peer;
    struct bench_memory sample;          /* the store's: only ever read */
    const struct bench_scratch *scratch; /* ours */
    char *host;                          /* BENCH_AREA of ours; without a GPU */
    bool cumem;
};

/* False: a copy failed. Nothing more is measured once the store has ended. */
static bool measure_way(const struct work *work, struct transfer *transfer, double *ret_rates) {
    struct bench_time *time = &work->bench->time;
    bool copied = true;

    for (unsigned i = 0; i < BENCH_STORE_BLOCKS; i++) {
        transfer->block = bench_store_block(i);
        if (transfer->block > transfer->memory->part_bytes || !tp_peer_alive(work->peer)) {
            bench_skip(time, 1);
            continue;
        }
        ret_rates[i] =
            bench_rate(time, run_round, transfer, BENCH_PARTS * transfer->memory->part_bytes);
        copied = copied && ret_rates[i] > 0;
    }
    return copied;
}

/* ---- one store ---- */

static unsigned register_parts(struct tp_gpu *gpu, const struct bench_memory *memory) {
    unsigned done = 0;

    while (done < BENCH_PARTS &&
           tp_gpu_host_register(gpu, memory->parts[done], memory->part_bytes) == TP_CUDA_SUCCESS) {
        done++;
    }
    return done;
}

static void unregister_parts(struct tp_gpu *gpu, const struct bench_memory *memory,
                             unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        (void)tp_gpu_host_unregister(gpu, memory->parts[i]);
    }
}

static void measure_row(const struct work *work, struct bench_row *row) {
    struct transfer get = {.gpu = row->gpu, .memory = &work->sample, .other = work->host};
    struct transfer put = {
        .gpu = row->gpu, .put = true, .memory = &work->scratch->memory, .other = work->host};
    bool host_pointers = row->gpu && tp_gpu_takes_host_pointers(row->gpu->gpu);

    get.mapped = work->cumem || (row->registered && host_pointers);
    put.mapped = get.mapped;
    tp_copy_init(&get.host_job);
    tp_copy_init(&put.host_job);
    bool copied = measure_way(work, &get, row->rates[BENCH_GET]);
    if (work->scratch->kind[0]) {
        copied = measure_way(work, &put, row->rates[BENCH_PUT]) && copied;
    } else {
        bench_skip(&work->bench->time, BENCH_STORE_BLOCKS);
    }
    if (!copied) {
        (void)snprintf(row->problem, sizeof(row->problem), "a copy failed");
    }
    tp_device_release(&get.device_job);
    tp_device_release(&put.device_job);
    tp_copy_release(&get.host_job);
    tp_copy_release(&put.host_job);
}

static void measure_registered(const struct work *work, struct bench_row *row) {
    struct tp_gpu *gpu = row->gpu->gpu;
    unsigned own = register_parts(gpu, &work->sample);
    unsigned scratch = own == BENCH_PARTS ? register_parts(gpu, &work->scratch->memory) : 0;

    if (scratch == BENCH_PARTS) {
        measure_row(work, row);
    } else {
        (void)snprintf(row->problem, sizeof(row->problem),
                       "CUDA does not register it (ulimit -l unlimited?)");
        bench_skip(&work->bench->time, 2 * BENCH_STORE_BLOCKS);
    }
    unregister_parts(gpu, &work->scratch->memory, scratch);
    unregister_parts(gpu, &work->sample, own);
}

static unsigned rows_at_most(const struct bench *bench) {
    return bench->gpu_count ? 2 * bench->gpu_count : 1;
}

/* A row for each GPU, and a second one where registering would help; or one for host memory. */
static bool make_rows(const struct work *work, struct bench_store *store) {
    struct bench *bench = work->bench;

    store->rows = calloc(rows_at_most(bench), sizeof(*store->rows));
    if (!store->rows) {
        return false;
    }
    for (unsigned i = 0; i < bench->gpu_count; i++) {
        struct bench_gpu *gpu = &bench->gpus[i];
        if (!gpu->gpu) {
            continue;
        }
        store->rows[store->row_count++].gpu = gpu;
        if (!work->cumem && work->scratch->kind[0] && tp_gpu_wants_registration(gpu->gpu)) {
            store->rows[store->row_count].registered = true;
            store->rows[store->row_count++].gpu = gpu;
        }
    }
    store->row_count = store->row_count ? store->row_count : 1;
    bench_skip(&bench->time, (rows_at_most(bench) - store->row_count) * 2 * BENCH_STORE_BLOCKS);
    return true;
}

static void measure_store(struct work *work, struct bench_store *store) {
    struct bench *bench = work->bench;

    work->cumem = tp_peer_address_is_cumem(work->peer, work->sample.parts[0]);
    work->scratch = work->cumem ? &bench->gpu_scratch : &bench->host_scratch;
    if (!work->cumem && !work->scratch->kind[0]) {
        (void)bench_scratch_memfd(work->config, &bench->host_scratch);
    }
    (void)snprintf(store->scratch, sizeof(store->scratch), "%s", work->scratch->kind);
    if (!make_rows(work, store)) {
        (void)snprintf(store->problem, sizeof(store->problem), "no memory is left");
        return;
    }
    for (unsigned i = 0; i < store->row_count; i++) {
        if (store->rows[i].registered) {
            measure_registered(work, &store->rows[i]);
        } else {
            measure_row(work, &store->rows[i]);
        }
    }
    if (!tp_peer_alive(work->peer)) {
        (void)snprintf(store->problem, sizeof(store->problem), "it ended while it was measured");
    }
}

static void attach_and_measure(struct bench *bench, struct work *work) {
    uint64_t end = tp_now_ns() + ATTACH_NS;
    char text[256];

    for (unsigned i = 0; i < bench->store_count; i++) {
        struct bench_store *store = &bench->stores[i];
        if (store->problem[0]) {
            continue;
        }
        bench->time.left = (bench->store_count - i) * rows_at_most(bench) * 2 * BENCH_STORE_BLOCKS;
        (void)snprintf(text, sizeof(text), "measuring store %s", store->name);
        bench_progress(&bench->time, text);
        work->peer = bench_store_attach(bench, store, end, &work->sample);
        if (!work->peer) {
            continue;
        }
        measure_store(work, store);
        tp_peer_release(work->peer);
    }
}

void bench_stores_free(struct bench *bench) {
    for (unsigned i = 0; i < bench->store_count; i++) {
        free(bench->stores[i].rows);
    }
    free(bench->stores);
    bench->stores = NULL;
    bench->store_count = 0;
}

void bench_stores_measure(struct bench *bench, const struct tp_config *config) {
    struct work work = {.bench = bench, .config = config};
    bool gpus = bench_gpus_usable(bench) > 0;
    int error = -ENOMEM;

    if (!gpus) {
        work.host = malloc(BENCH_AREA);
    }
    if (work.host) {
        memset(work.host, 1, BENCH_AREA); /* pages of its own, not the zero page */
    }
    if (gpus || work.host) {
        error = tp_transport_start(config);
    }
    for (unsigned i = 0; error && i < bench->store_count; i++) {
        (void)snprintf(bench->stores[i].problem, sizeof(bench->stores[i].problem),
                       "this process cannot attach: %s", strerror(-error));
    }
    if (!error) {
        attach_and_measure(bench, &work);
        tp_transport_stop();
    }
    tp_copy_pool_stop();
    free(work.host);
}
