/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: an engine maps a store's CUDA host memory, when this process has CUDA, with access for its
 * GPUs; what fails is left to Mooncake; a dead store's memory goes. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "double.h"
#include "env/cuda.h"
#include "rig.h"
#include "segment/segment.h"
#include "segment_bench.h"
#include "transport/peer.h"

#define NAME "127.0.0.1:1"
#define SEGMENT_BYTES (10 * MIB)

/* A store in a process of its own. It answers each byte on `ask` with the byte at that MiB. */
static struct {
    pid_t pid;
    int ask, answer;
    uint64_t base;
} store;
static struct tp_config *config;
static struct tp_engine *engine;
static int engine_key;

static void run_store(int ask, int answer) {
    void *address = NULL;
    unsigned char index;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    config->store.kind = TP_SEGMENT_CUMEM;
    config->store.piece_bytes = 4 * MIB;
    if (tp_segment_allocate(SEGMENT_BYTES, 16 * MIB, config, &address) != 0 ||
        tp_segment_publish(address, config) != 0 || tp_server_set_name(NAME) != 0)
        _exit(1);
    for (unsigned i = 0; i < SEGMENT_BYTES / MIB; i++)
        memset((char *)address + i * MIB, (int)(i + 1), MIB);
    (void)!write(answer, &address, sizeof address);
    while (read(ask, &index, 1) == 1)
        (void)!write(answer, (char *)address + index * MIB, 1);
    _exit(0);
}

static void start(void) {
    int ask[2], answer[2];
    config = bench_config(0);
    config->engine.half = TP_HALF_ON;
    config->engine.copy_threads = 1;
    cr_assert_eq(pipe(ask) + pipe(answer), 0);
    store.pid = fork();
    if (store.pid == 0)
        run_store(ask[0], answer[1]);
    store.ask = ask[1];
    store.answer = answer[0];
    close(answer[1]);
    cr_assert_eq(read(store.answer, &store.base, sizeof store.base), sizeof store.base);
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    tp_engine_open(engine, 1, NAME, sizeof NAME - 1);
}

static void kill_store(void) {
    kill(store.pid, SIGKILL);
    waitpid(store.pid, NULL, 0);
}

static bool reaches(uint64_t offset, unsigned timeout_ms) {
    return rig_wait(engine, 1, store.base + offset, timeout_ms);
}

static void move(int opcode, void *source, uint64_t offset, uint64_t bytes) {
    struct rig_request r = rig_make(opcode, source, 1, store.base + offset, bytes);
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 77, 1, &r, 1, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(77, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(77), 0);
}

static bool all_mapped(void) {
    return reaches(0, 5000) && reaches(4 * MIB, 5000) && reaches(9 * MIB, 5000);
}

static struct tp_peer *the_peer(void) {
    for (uint32_t i = 0; i < TP_PEERS; i++) {
        if (tp_peer_alive(tp_peer_at(i)))
            return tp_peer_at(i);
    }
    return NULL;
}

static bool becomes_open(int device, unsigned timeout_ms) {
    for (uint64_t end = rig_ms() + timeout_ms; rig_ms() < end; usleep(1000)) {
        if (tp_peer_device_access(the_peer(), device))
            return true;
    }
    return false;
}

/* What the driver says about a GPU's access to this byte of the store. */
static unsigned long long access_of(int device, uint64_t offset) {
    struct tp_cu_location location = {TP_CU_LOCATION_DEVICE, device};
    unsigned long long flags = 9;
    void *address = NULL;
    cr_assert_eq(tp_peer_route(the_peer(), store.base + offset, 1, &address), TP_ROUTE_OK);
    cr_assert(tp_peer_address_is_cumem(the_peer(), address));
    cr_assert_eq(DOUBLE(int, "cuMemGetAccess",
                        (unsigned long long *, const struct tp_cu_location *, uint64_t))(
                     &flags, &location, (uintptr_t)address),
                 0);
    return flags;
}

Test(cumem_import, bytes_are_equal_both_ways, .timeout = 30) {
    static unsigned char back[SEGMENT_BYTES], sent[2 * MIB];
    unsigned char index = 4, seen = 0;
    start();
    cr_assert(all_mapped());
    move(TP_OP_READ, back, 0, SEGMENT_BYTES); /* over all pieces at once */
    for (unsigned i = 0; i < SEGMENT_BYTES; i++)
        cr_assert_eq(back[i], i / MIB + 1);
    memset(sent, 99, sizeof sent);
    move(TP_OP_WRITE, sent, 3 * MIB, sizeof sent); /* over the border of two pieces */
    cr_assert_eq(write(store.ask, &index, 1), 1);
    cr_assert_eq(read(store.answer, &seen, 1), 1);
    cr_assert_eq(seen, 99);
    kill_store();
    double_proper(0);
}

Test(cumem_import, cuda_is_not_initialised_before_a_request, .timeout = 30) {
    start();
    (void)double_symbol("cuInit"); /* loaded, not initialised */
    usleep(1500000);
    cr_assert_not_null(the_peer());
    cr_assert_not(tp_cuda_initialised());
    cr_assert(all_mapped());
    cr_assert(tp_cuda_initialised());
    kill_store();
    double_proper(0);
}

Test(cumem_import, pieces_come_by_themselves_once_the_host_has_initialised_cuda, .timeout = 30) {
    start();
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    for (unsigned i = 0; i < 5000 && double_mappings() < 6; i++) /* each piece is mapped twice */
        usleep(1000);
    cr_assert_geq(double_mappings(), 3);
    kill_store();
    double_proper(0);
}

Test(cumem_import, a_killed_stores_memory_goes, .timeout = 30) {
    start();
    cr_assert(all_mapped());
    cr_assert_gt(double_mappings(), 0);
    kill_store();
    for (unsigned i = 0; i < 5000 && double_mappings() > 0; i++)
        usleep(1000);
    cr_assert_eq(double_mappings(), 0);
    cr_assert_not(reaches(0, 50));
    double_proper(0);
}

Test(cumem_import, gpus_in_use_have_access_and_others_get_it_when_asked_for, .timeout = 30) {
    void *context = NULL;
    start();
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    cr_assert_eq(DOUBLE(int, "cuDevicePrimaryCtxRetain", (void **, int))(&context, 0), 0);
    cr_assert(all_mapped());
    cr_assert(becomes_open(0, 5000));
    cr_assert_eq(access_of(0, 0), 3);
    cr_assert_eq(access_of(0, 9 * MIB), 3);
    cr_assert_eq(access_of(1, 0), 0);
    cr_assert_not(tp_peer_device_access(the_peer(), 1));
    cr_assert(becomes_open(1, 5000));
    for (uint64_t offset = 0; offset < SEGMENT_BYTES; offset += MIB)
        cr_assert_eq(access_of(1, offset), 3);
    cr_assert_not(tp_peer_device_access(the_peer(), 64));
    cr_assert_not(tp_peer_address_is_cumem(the_peer(), &context));
    kill_store();
    double_proper(1);
}

Test(cumem_import, a_gpu_that_is_refused_access_is_left_to_mooncake, .timeout = 30) {
    start();
    cr_assert(all_mapped());
    double_fail("cuMemSetAccess:2=800");
    cr_assert_not(becomes_open(1, 500));
    cr_assert_eq(rig_counter(TP_IMPORT_FAILURES), 1);
    cr_assert(becomes_open(0, 5000));
    cr_assert(reaches(0, 1000));
    kill_store();
    double_proper(0);
}

static void fails(const char *rules, unsigned failures) {
    start();
    double_fail(rules);
    cr_assert_not(reaches(0, 700), "%s", rules);
    cr_assert_eq(rig_counter(TP_IMPORT_FAILURES), failures, "%s", rules);
    cr_assert_gt(rig_counter(TP_FALLBACK_NOT_IMPORTED), 0);
    cr_assert_eq(double_mappings(), 0);
    double_fail("");
    kill_store();
    usleep(300000);
    double_proper(0);
}

Test(cumem_import, no_gpu, .timeout = 30) {
    fails("cuInit:*=100", 0);
}
Test(cumem_import, no_addresses, .timeout = 30) {
    fails("cuMemAddressReserve:*=2", 0);
}
Test(cumem_import, no_import, .timeout = 30) {
    fails("cuMemImportFromShareableHandle:*=999", 3);
}
Test(cumem_import, no_mapping, .timeout = 30) {
    fails("cuMemMap:*=2", 3);
}
Test(cumem_import, no_access, .timeout = 30) {
    fails("cuMemSetAccess:*=800", 3);
}

Test(cumem_import, one_piece_that_fails_leaves_the_others, .timeout = 30) {
    start();
    double_fail("cuMemMap:2=2");
    unsigned reached = 0;
    for (uint64_t offset = 0; offset < SEGMENT_BYTES; offset += 4 * MIB)
        reached += reaches(offset, 1000);
    cr_assert_eq(reached, 2);
    kill_store();
    double_proper(0);
}
