/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stores of `tidepool bench`: attached to as an engine does it, by the library's own code, and
 * copied from.
 *
 * A store's memory is read and never written: what is measured as puts goes to scratch memory. It
 * must not know: how it is printed.
 */
#include "tools/bench.h"

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "tools/scan.h"
#include "tools/tool.h"
#include "transport/copy_device.h"
#include "transport/slot.h"
#include "transport/transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ANSWER_MS 1000
#define ATTACH_NS UINT64_C(3000000000) /* all stores together */
#define IMPORT_NS UINT64_C(5000000000) /* the first pieces of one */

/* ---- which there are ---- */

static void describe(const struct scan_entry *entry, struct bench_store *store) {
    const struct tp_stats_page *page = entry->page;

    (void)snprintf(store->id, sizeof(store->id), "%s", entry->id);
    store->pid = entry->known_owner ? entry->pid : 0;
    if (entry->state != SCAN_LIVE) {
        (void)snprintf(store->problem, sizeof(store->problem), "%s: %s",
                       scan_state_word(entry->state), entry->detail);
        return;
    }
    text_clean(store->name, sizeof(store->name), page->name);
    for (size_t i = 0; i < TP_STATS_SEGMENTS; i++) {
        const struct tp_stats_segment *segment = &page->segments[i];
        if (atomic_load(&segment->state) != TP_SLOT_LIVE) {
            continue;
        }
        store->bytes += segment->bytes;
        if (!store->detail[0]) {
            text_clean(store->detail, sizeof(store->detail), segment->detail);
        }
    }
}

int bench_stores_find(struct bench *bench, int dir_fd, const struct tp_config *config) {
    struct scan scan = {0};
    int error = scan_directory(dir_fd, config, ANSWER_MS, &scan);

    bench->stores = error ? NULL : calloc(scan.count + 1, sizeof(*bench->stores));
    if (!error && !bench->stores) {
        error = -ENOMEM;
    }
    for (size_t i = 0; i < scan.count && !error; i++) {
        const struct scan_entry *entry = &scan.entries[i];
        if (entry->kind == 's' && entry->state != SCAN_STALE && bench->store_count < TP_PEERS) {
            describe(entry, &bench->stores[bench->store_count++]);
        }
    }
    scan_free(&scan);
    return error;
}

void bench_stores_free(struct bench *bench) {
    for (unsigned i = 0; i < bench->store_count; i++) {
        free(bench->stores[i].rows);
    }
    free(bench->stores);
    bench->stores = NULL;
    bench->store_count = 0;
}

/* ---- attaching ---- */

static bool is_instance(const uint8_t instance[static 16], const char *id) {
    char text[33];

    for (size_t i = 0; i < 16; i++) {
        (void)snprintf(text + 2 * i, 3, "%02x", instance[i]);
    }
    return strcmp(text, id) == 0;
}

/* Attached, with a reference held, and its memory announced; NULL: not yet. */
static struct tp_peer *take_peer(const struct bench_store *store) {
    for (uint32_t slot = 0; slot < TP_PEERS; slot++) {
        uint64_t generation = atomic_load(&tp_peer_at(slot)->generation);
        if (!generation || !is_instance(tp_stats_page()->peers[slot].instance, store->id)) {
            continue;
        }
        struct tp_peer *peer = tp_peer_acquire(slot, generation);
        if (peer && atomic_load(&peer->segment_high) > 0) {
            return peer;
        }
        if (peer) {
            tp_peer_release(peer);
        }
    }
    return NULL;
}

static struct tp_peer *wait_peer(const struct bench_store *store, uint64_t end) {
    const struct timespec pause = {0, 1000000};
    struct tp_peer *peer = take_peer(store);

    while (!peer && bench_now_ns() < end) {
        (void)nanosleep(&pause, NULL);
        peer = take_peer(store);
    }
    return peer;
}

static const struct tp_peer_segment *largest_segment(struct tp_peer *peer) {
    const struct tp_peer_segment *largest = NULL;
    uint32_t high = atomic_load(&peer->segment_high);

    for (uint32_t i = 0; i < high; i++) {
        const struct tp_peer_segment *segment = &peer->segments[i];
        if (atomic_load(&segment->state) == TP_SEGMENT_LIVE &&
            (!largest || segment->message.bytes > largest->message.bytes)) {
            largest = segment;
        }
    }
    return largest;
}

/* Where the sample lies: BENCH_PARTS ranges of the store's addresses. */
struct sample {
    uint64_t offsets[BENCH_PARTS];
    size_t part_bytes;
};

/* Pieces lie on the NUMA nodes in turn, so the parts are spread over the first few. False: the
 * segment is too small. */
static bool plan_sample(const struct tp_msg_segment *message, struct sample *ret_sample) {
    uint64_t whole = message->bytes / message->piece_bytes;
    uint64_t pieces = whole < BENCH_PARTS ? whole : BENCH_PARTS;
    uint64_t room = pieces ? message->piece_bytes : message->bytes;
    size_t part = BENCH_PART;

    pieces = pieces ? pieces : 1;
    uint64_t in_one = (BENCH_PARTS + pieces - 1) / pieces;
    while (part >= BENCH_BLOCK_MIN && part * in_one > room) {
        part /= 2;
    }
    for (uint64_t i = 0; i < BENCH_PARTS; i++) {
        ret_sample->offsets[i] =
            message->base + i % pieces * message->piece_bytes + i / pieces * part;
    }
    ret_sample->part_bytes = part;
    return part >= BENCH_BLOCK_MIN;
}

/* Is all of it mapped here, and open to the GPUs? What is not is asked for by looking. */
static bool look(const struct bench *bench, struct tp_peer *peer, const struct sample *sample,
                 struct bench_memory *ret_memory) {
    bool ready = true;

    ret_memory->part_bytes = sample->part_bytes;
    for (unsigned i = 0; i < BENCH_PARTS; i++) {
        void *address = NULL;
        if (tp_peer_route(peer, sample->offsets[i], sample->part_bytes, &address) != TP_ROUTE_OK) {
            ready = false;
            continue;
        }
        ret_memory->parts[i] = address;
        for (unsigned k = 0; k < bench->gpu_count; k++) {
            ready = (!bench->gpus[k].gpu || tp_peer_device_access(peer, bench->gpus[k].device,
                                                                  address, sample->part_bytes)) &&
                    ready;
        }
    }
    return ready;
}

/* 0, or -errno with the problem told. */
static int import(const struct bench *bench, struct bench_store *store, struct tp_peer *peer,
                  struct bench_memory *ret_memory) {
    const struct timespec pause = {0, 1000000};
    const struct tp_peer_segment *segment = largest_segment(peer);
    uint64_t end = bench_now_ns() + IMPORT_NS;
    struct sample sample;

    if (!segment || !plan_sample(&segment->message, &sample)) {
        (void)snprintf(store->problem, sizeof(store->problem), "it has too little memory");
        return -ENOENT;
    }
    if (segment->message.kind == TP_WIRE_CUMEM && !tp_cuda_initialised()) {
        (void)snprintf(store->problem, sizeof(store->problem),
                       "its CUDA host memory cannot be mapped without a GPU");
        return -ENODEV;
    }
    while (!look(bench, peer, &sample, ret_memory)) {
        if (bench_now_ns() >= end || !tp_peer_alive(peer)) {
            (void)snprintf(store->problem, sizeof(store->problem), "%s",
                           tp_peer_alive(peer) ? "its memory could not be mapped in time"
                                               : "it has ended");
            return -ETIMEDOUT;
        }
        (void)nanosleep(&pause, NULL);
    }
    return 0;
}

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
    uint64_t start = bench_now_ns();

    if (copied && transfer->gpu) {
        copied = run_device(&transfer->device_job);
    } else if (copied) {
        run_host(&transfer->host_job);
    }
    uint64_t end = bench_now_ns();
    tp_device_reset(&transfer->device_job);
    tp_copy_reset(&transfer->host_job);
    return copied ? (double)(end - start) * 1e-9 : -1;
}

/* False: a copy failed. */
static bool measure_way(struct bench *bench, struct transfer *transfer, double *ret_rates) {
    bool copied = true;

    for (unsigned i = 0; i < BENCH_STORE_BLOCKS; i++) {
        transfer->block = bench_store_block(i);
        if (transfer->block > transfer->memory->part_bytes) {
            bench_skip(&bench->time, 1);
            continue;
        }
        ret_rates[i] = bench_rate(&bench->time, run_round, transfer,
                                  BENCH_PARTS * transfer->memory->part_bytes);
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

struct work {
    struct bench *bench;
    const struct tp_config *config;
    struct tp_peer *peer;
    struct bench_memory sample;          /* the store's: only ever read */
    const struct bench_scratch *scratch; /* ours */
    char *host;                          /* BENCH_AREA of ours; without a GPU */
    bool cumem;
};

static void measure_row(const struct work *work, struct bench_row *row) {
    struct transfer get = {.gpu = row->gpu, .memory = &work->sample, .other = work->host};
    struct transfer put = {
        .gpu = row->gpu, .put = true, .memory = &work->scratch->memory, .other = work->host};
    bool host_pointers = row->gpu && tp_gpu_takes_host_pointers(row->gpu->gpu);

    get.mapped = work->cumem || (row->registered && host_pointers);
    put.mapped = get.mapped;
    tp_copy_init(&get.host_job);
    tp_copy_init(&put.host_job);
    bool copied = measure_way(work->bench, &get, row->rates[BENCH_GET]);
    if (work->scratch->kind[0]) {
        copied = measure_way(work->bench, &put, row->rates[BENCH_PUT]) && copied;
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
    char text[256];

    (void)snprintf(text, sizeof(text), "measuring store %s", store->name);
    bench_progress(&bench->time, text);
    if (import(bench, store, work->peer, &work->sample) != 0) {
        return;
    }
    store->sample_bytes = BENCH_PARTS * (uint64_t)work->sample.part_bytes;
    work->cumem = tp_peer_address_is_cumem(work->peer, work->sample.parts[0]);
    work->scratch = work->cumem ? &bench->gpu_scratch : &bench->host_scratch;
    if (!work->cumem && !work->scratch->kind[0]) {
        (void)bench_scratch_memfd(work->config, &bench->host_scratch);
    }
    (void)snprintf(store->scratch, sizeof(store->scratch), "%s", work->scratch->kind);
    if (!make_rows(work, store)) {
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
    uint64_t end = bench_now_ns() + ATTACH_NS;

    for (unsigned i = 0; i < bench->store_count; i++) {
        struct bench_store *store = &bench->stores[i];
        if (store->problem[0]) {
            continue;
        }
        bench->time.left = (bench->store_count - i) * rows_at_most(bench) * 2 * BENCH_STORE_BLOCKS;
        work->peer = wait_peer(store, end);
        if (!work->peer) {
            (void)snprintf(store->problem, sizeof(store->problem), "%s",
                           store->name[0] ? "this process could not attach to it"
                                          : "it has no name yet: Mooncake has not started in it");
            continue;
        }
        measure_store(work, store);
        tp_peer_release(work->peer);
    }
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
