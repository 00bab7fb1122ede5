/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding the stores of a directory, and attaching to one as an engine does it, by the library's
 * own code.
 *
 * It must not know: what is copied, how it is printed.
 */
#include "tests/bench/limits/limits.h"

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "tools/scan.h"
#include "tools/tool.h"
#include "transport/slot.h"
#include "transport/transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ANSWER_MS 1000
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

    while (!peer && tp_now_ns() < end) {
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
        if (tp_peer_route(peer, sample->offsets[i], sample->part_bytes, &address, NULL) !=
            TP_ROUTE_OK) {
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

/* False, with the problem told. */
static bool import(const struct bench *bench, struct bench_store *store, struct tp_peer *peer,
                   struct bench_memory *ret_memory) {
    const struct timespec pause = {0, 1000000};
    const struct tp_peer_segment *segment = largest_segment(peer);
    uint64_t end = tp_now_ns() + IMPORT_NS;
    struct sample sample;

    if (!segment || !plan_sample(&segment->message, &sample)) {
        (void)snprintf(store->problem, sizeof(store->problem), "it has too little memory");
        return false;
    }
    if (segment->message.kind == TP_WIRE_CUMEM && !tp_cuda_initialised()) {
        (void)snprintf(store->problem, sizeof(store->problem),
                       "its CUDA host memory cannot be mapped without a GPU");
        return false;
    }
    while (!look(bench, peer, &sample, ret_memory)) {
        if (tp_now_ns() >= end || !tp_peer_alive(peer)) {
            (void)snprintf(store->problem, sizeof(store->problem), "%s",
                           tp_peer_alive(peer) ? "its memory could not be mapped in time"
                                               : "it has ended");
            return false;
        }
        (void)nanosleep(&pause, NULL);
    }
    store->sample_bytes = BENCH_PARTS * (uint64_t)sample.part_bytes;
    return true;
}

struct tp_peer *bench_store_attach(const struct bench *bench, struct bench_store *store,
                                   uint64_t end_ns, struct bench_memory *ret_memory) {
    struct tp_peer *peer = wait_peer(store, end_ns);

    if (!peer) {
        (void)snprintf(store->problem, sizeof(store->problem), "%s",
                       store->name[0] ? "this process could not attach to it"
                                      : "it has no name yet: Mooncake has not started in it");
        return NULL;
    }
    if (import(bench, store, peer, ret_memory)) {
        return peer;
    }
    tp_peer_release(peer);
    return NULL;
}
