/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: a store's segments of CUDA host memory are made on the nodes that can hold them, without a
 * context, and given back by whoever frees them; failures leave nothing. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "double.h"
#include "env/stats.h"
#include "segment/segment.h"
#include "segment_bench.h"

#define ALIGNMENT (16 * MIB)

static struct tp_config *cumem_config(uint64_t piece_bytes) {
    struct tp_config *config = bench_config(piece_bytes);
    config->store.kind = TP_SEGMENT_CUMEM;
    return config;
}

static const struct tp_stats_segment *slot(void) {
    return &tp_stats_page()->segments[0];
}

Test(cumem_store, memory_is_aligned_writable_and_freed) {
    struct tp_config *config = cumem_config(4 * MIB);
    void *address = NULL;
    unsigned fds = bench_fds();
    cr_assert_eq(tp_segment_allocate(11 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert_eq((uintptr_t)address % ALIGNMENT, 0);
    memset(address, 7, 11 * MIB);
    cr_assert(tp_segment_contains(address));
    cr_assert(tp_segment_contains((char *)address + 12 * MIB - 1));
    cr_assert_not(tp_segment_contains((char *)address + 12 * MIB));
    cr_assert_not(tp_segment_free((char *)address + 4096));
    cr_assert_not(tp_segment_free(config));
    errno = 5;
    cr_assert(tp_segment_free(address));
    cr_assert_eq(errno, 5);
    cr_assert_not(tp_segment_free(address));
    cr_assert_not(tp_segment_contains(address));
    cr_assert_eq(bench_fds(), fds + 1); /* the page of counters */
    cr_assert_eq(double_mappings(), 0);
    double_proper(0);
    cr_assert(bench_config_free(config));
}

Test(cumem_store, pieces_are_rounded_up_and_the_last_is_the_rest) {
    struct tp_config *config = cumem_config(3 * MIB);
    void *address = NULL;
    cr_assert_eq(tp_segment_allocate(9 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert_eq(slot()->piece_bytes, 4 * MIB);
    cr_assert_eq(slot()->bytes, 10 * MIB);
    cr_assert_eq(slot()->pieces, 3);
    cr_assert_eq(slot()->page_bytes, 2 * MIB);
    cr_assert(tp_segment_free(address));
    config->store.piece_bytes = 0; /* 2 GiB: one piece */
    cr_assert_eq(tp_segment_allocate(9 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert_eq(slot()->pieces, 1);
    cr_assert(tp_segment_free(address));
    double_proper(0);
    cr_assert(bench_config_free(config));
}

Test(cumem_store, restore_only_withdraws) {
    struct tp_config *config = cumem_config(0);
    void *address = NULL;
    cr_assert_eq(tp_segment_allocate(4 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert_eq(tp_segment_publish(address, config), 0);
    cr_assert_eq(tp_segment_restore(address), 0);
    cr_assert(tp_segment_contains(address));
    memset(address, 1, 4 * MIB);
    cr_assert(tp_segment_free(address));
    tp_server_stop();
    double_proper(0);
    cr_assert(bench_config_free(config));
}

Test(cumem_store, nodes_that_refuse_are_skipped) {
    struct tp_config *config = cumem_config(2 * MIB);
    void *address = NULL;
    setenv("FAKECUDA_NUMA_NODES", "2", 1);
    config->store.node_count = 3;
    config->store.nodes[0] = 2; /* not there */
    config->store.nodes[1] = 0;
    config->store.nodes[2] = 1;
    cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert_eq(slot()->nodes, 2);
    cr_assert(tp_segment_free(address));
    double_fail("cuMemCreate:2=801"); /* node 2 fails by itself, node 0 by order */
    cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert_eq(slot()->nodes, 1);
    cr_assert(tp_segment_free(address));
    double_proper(0);
    cr_assert(bench_config_free(config));
}

Test(cumem_store, no_node_left_is_an_error) {
    struct tp_config *config = cumem_config(0);
    void *address = NULL;
    double_fail("cuMemCreate:*=801");
    cr_assert_eq(tp_segment_allocate(4 * MIB, ALIGNMENT, true, config, &address), -ENOMEM);
    cr_assert_null(address);
    double_proper(0);
    cr_assert(bench_config_free(config));
}

/* Call by call: nothing is left of a segment that could not be made, and the next one can be. */
Test(cumem_store, every_failure_leaves_nothing) {
    static const char *const rules[] = {
        "cuInit:1=100",
        "cuMemGetAllocationGranularity:1=1",
        "cuMemCreate:1=2",
        "cuMemCreate:2=2",
        "cuMemCreate:4=2",
        "cuMemAddressReserve:1=2",
        "cuMemMap:1=2",
        "cuMemMap:3=2",
        "cuMemSetAccess:1=2",
        "cuMemSetAccess:4=800",
        "cuMemExportToShareableHandle:1=999",
        "cuMemExportToShareableHandle:2=801",
    };
    struct tp_config *config = cumem_config(2 * MIB);
    void *address = NULL;
    config->store.node_count = 1;
    cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address), 0);
    cr_assert(tp_segment_free(address));
    unsigned fds = bench_fds();
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        address = NULL;
        double_fail(rules[i]);
        cr_assert_lt(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address), 0, "%s",
                     rules[i]);
        cr_assert_null(address);
        cr_assert_eq(bench_fds(), fds, "%s", rules[i]);
        cr_assert_eq(double_mappings(), 0, "%s", rules[i]);
        double_fail("");
        cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address), 0, "%s",
                     rules[i]);
        cr_assert(tp_segment_free(address));
    }
    double_proper(0);
    cr_assert(bench_config_free(config));
}

Test(cumem_store, a_forked_child_keeps_nothing_and_may_free) {
    struct tp_config *config = cumem_config(2 * MIB);
    void *address = NULL;
    cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address), 0);
    memset(address, 7, 8 * MIB);
    unsigned before = bench_fds();
    pid_t pid = fork();
    if (pid == 0) {
        bool empty = *(char *)address == 0;
        *(char *)address = 1;
        bool taken = tp_segment_free(address);
        _exit(!empty ? 1 : !taken ? 2 : bench_fds() > before - 4 ? 3 /* one a piece */ : 0);
    }
    int status = -1;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(status, 0, "the child says %d", WEXITSTATUS(status));
    cr_assert_eq(*(char *)address, 7);
    cr_assert(tp_segment_free(address));
    double_proper(0);
    cr_assert(bench_config_free(config));
}

/* ---- GPUs of the process itself ---- */

typedef void *context_t;

static int gpu_copy(uint64_t to, uint64_t from, size_t bytes) {
    return DOUBLE(int, "cuMemcpy", (uint64_t, uint64_t, size_t))(to, from, bytes);
}

/* The first GPU's primary context, current here, and memory of it. */
static uint64_t use_gpu(size_t bytes) {
    context_t context = NULL;
    uint64_t memory = 0;
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    cr_assert_eq(DOUBLE(int, "cuDevicePrimaryCtxRetain", (context_t *, int))(&context, 0), 0);
    cr_assert_eq(DOUBLE(int, "cuCtxPushCurrent_v2", (context_t))(context), 0);
    cr_assert_eq(DOUBLE(int, "cuMemAlloc_v2", (uint64_t *, size_t))(&memory, bytes), 0);
    return memory;
}

static void copies_reach(char *address, size_t bytes, uint64_t memory) {
    memset(address, 7, bytes);
    cr_assert_eq(gpu_copy(memory, (uintptr_t)address, bytes), 0);
    memset(address, 0, bytes);
    cr_assert_eq(gpu_copy((uintptr_t)address, memory, bytes), 0);
    cr_assert_eq(address[0], 7);
    cr_assert_eq(address[bytes - 1], 7);
}

/* Copies of the host process between its GPU and its own segment, all pieces of it. */
Test(cumem_store, gpus_that_come_into_use_are_let_in) {
    struct tp_config *config = cumem_config(2 * MIB);
    void *address[2] = {NULL};
    cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, true, config, &address[0]), 0);
    tp_segment_open_to_gpus(); /* there is none */
    double_proper(0);
    uint64_t memory = use_gpu(2 * MIB);
    tp_segment_open_to_gpus();
    cr_assert_eq(tp_segment_allocate(4 * MIB, ALIGNMENT, true, config, &address[1]), 0);
    tp_segment_open_to_gpus();
    for (size_t i = 0; i < 4; i++)
        copies_reach((char *)address[0] + i * 2 * MIB, 2 * MIB, memory);
    for (size_t i = 0; i < 2; i++)
        copies_reach((char *)address[1] + i * 2 * MIB, 2 * MIB, memory);
    cr_assert(tp_segment_free(address[0]) && tp_segment_free(address[1]));
    cr_assert_eq(double_mappings(), 0);
    double_proper(1);
    cr_assert(bench_config_free(config));
}

Test(cumem_store, a_gpu_that_is_refused_once_is_let_in_later) {
    struct tp_config *config = cumem_config(2 * MIB);
    void *address = NULL;
    cr_assert_eq(tp_segment_allocate(4 * MIB, ALIGNMENT, true, config, &address), 0);
    uint64_t memory = use_gpu(4 * MIB);
    double_fail("cuMemSetAccess:2=2");
    tp_segment_open_to_gpus();
    tp_segment_open_to_gpus();
    for (size_t i = 0; i < 2; i++)
        copies_reach((char *)address + i * 2 * MIB, 2 * MIB, memory);
    cr_assert(tp_segment_free(address));
    double_proper(1);
    cr_assert(bench_config_free(config));
}

static void *free_it(void *address) {
    return tp_segment_free(address) ? address : NULL;
}

static void *let_in(void *arg) {
    tp_segment_open_to_gpus();
    return arg;
}

/* It waits for the driver, and nothing is left mapped. */
Test(cumem_store, what_is_freed_meanwhile_is_freed_after, .timeout = 60) {
    struct tp_config *config = cumem_config(2 * MIB);
    pthread_t threads[2];
    void *address = NULL;
    void *freed = NULL;
    cr_assert_eq(tp_segment_allocate(4 * MIB, ALIGNMENT, true, config, &address), 0);
    (void)use_gpu(MIB);
    cr_assert_eq(DOUBLE(int, "fakecuda_set_delays", (const char *))("cuMemSetAccess=300000"), 0);
    cr_assert_eq(pthread_create(&threads[0], NULL, let_in, NULL), 0);
    usleep(100000);
    cr_assert_eq(pthread_create(&threads[1], NULL, free_it, address), 0);
    pthread_join(threads[1], &freed);
    pthread_join(threads[0], NULL);
    cr_assert_eq(freed, address);
    cr_assert_eq(double_mappings(), 0);
    cr_assert_not(tp_segment_contains(address));
    double_proper(1);
    cr_assert(bench_config_free(config));
}
