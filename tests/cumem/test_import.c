/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: an engine maps a store's CUDA host memory, when this process has CUDA, with access for its
 * GPUs; what fails is left to Mooncake; a dead store's memory goes. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "double.h"
#include "env/cuda.h"
#include "fake_store.h"
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
static uint64_t segment_bytes;
static struct tp_engine *engine;
static int engine_key;

static void run_store(int ask, int answer) {
    void *address = NULL;
    unsigned char index;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    config->store.kind = TP_SEGMENT_CUMEM;
    if (tp_segment_allocate(segment_bytes, 16 * MIB, true, config, &address) != 0 ||
        tp_segment_publish(address, config) != 0 || tp_server_set_name(NAME) != 0)
        _exit(1);
    for (unsigned i = 0; i < segment_bytes / MIB; i++)
        memset((char *)address + i * MIB, (int)(i + 1), MIB);
    (void)!write(answer, &address, sizeof address);
    while (read(ask, &index, 1) == 1)
        (void)!write(answer, (char *)address + index * MIB, 1);
    _exit(0);
}

static void start_store(uint64_t bytes, uint64_t piece_bytes) {
    int ask[2], answer[2];
    segment_bytes = bytes;
    config = bench_config(0);
    config->store.piece_bytes = piece_bytes;
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
}

static void start_engine(void) {
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    tp_engine_open(engine, 1, NAME, sizeof NAME - 1);
    usleep(60000); /* until then requests wait for what is missing (route.c) */
}

static void start(void) {
    start_store(SEGMENT_BYTES, 4 * MIB);
    start_engine();
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

/* Is the whole segment open to this GPU? Each look is a request's. */
static bool is_open(int device) {
    void *address = NULL;
    cr_assert_eq(tp_peer_route(the_peer(), store.base, SEGMENT_BYTES, &address, NULL), TP_ROUTE_OK);
    return tp_peer_device_access(the_peer(), device, address, SEGMENT_BYTES);
}

static bool becomes_open(int device, unsigned timeout_ms) {
    for (uint64_t end = tp_now_ms() + timeout_ms; tp_now_ms() < end; usleep(1000)) {
        if (is_open(device))
            return true;
    }
    return false;
}

/* What the driver says about a GPU's access to this byte of the store. */
static unsigned long long access_of(int device, uint64_t offset) {
    struct tp_cu_location location = {TP_CU_LOCATION_DEVICE, device};
    unsigned long long flags = 9;
    void *address = NULL;
    cr_assert_eq(tp_peer_route(the_peer(), store.base + offset, 1, &address, NULL), TP_ROUTE_OK);
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
    cr_assert_not(is_open(1));
    cr_assert(becomes_open(1, 5000));
    for (uint64_t offset = 0; offset < SEGMENT_BYTES; offset += MIB)
        cr_assert_eq(access_of(1, offset), 3);
    cr_assert_not(is_open(64));
    cr_assert_not(tp_peer_address_is_cumem(the_peer(), &context));
    kill_store();
    double_proper(1);
}

Test(cumem_import, a_gpu_that_is_refused_access_is_left_to_mooncake, .timeout = 30) {
    start();
    cr_assert(all_mapped());
    double_fail("cuMemSetAccess:*=800");
    uint64_t start_ms = tp_now_ms();
    cr_assert_not(becomes_open(1, 300));
    cr_assert_gt(rig_counter(TP_IMPORT_FAILURES), 0);
    /* Tried again after a second, which may have passed on a machine that stood still. */
    cr_assert_leq(rig_counter(TP_IMPORT_FAILURES), 2 * (1 + (tp_now_ms() - start_ms) / 1000),
                  "at most what was under way");
    double_fail("");
    cr_assert(!becomes_open(1, 200) || tp_now_ms() - start_ms >= 1000,
              "it is not tried again at once");
    cr_assert(becomes_open(0, 5000));
    cr_assert(reaches(0, 1000));
    cr_assert(becomes_open(1, 5000), "but later");
    kill_store();
    double_proper(0);
}

Test(cumem_import, a_gpu_that_is_refused_leaves_the_others_theirs, .timeout = 30) {
    void *context = NULL, *address = NULL;
    start_store(4 * MIB, 4 * MIB);
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    cr_assert_eq(DOUBLE(int, "cuDevicePrimaryCtxRetain", (void **, int))(&context, 0), 0);
    cr_assert_eq(DOUBLE(int, "cuDevicePrimaryCtxRetain", (void **, int))(&context, 1), 0);
    /* All at once is refused; then the CPU alone is not, GPU 0 is, GPU 1 is not. */
    double_fail("cuMemSetAccess:1=800,cuMemSetAccess:2=800"); /* the 2nd does not see the 1st */
    start_engine();
    cr_assert(reaches(0, 5000));
    cr_assert_eq(tp_peer_route(the_peer(), store.base, MIB, &address, NULL), TP_ROUTE_OK);
    cr_assert(tp_peer_device_access(the_peer(), 1, address, MIB));
    cr_assert_not(tp_peer_device_access(the_peer(), 0, address, MIB));
    kill_store();
    double_proper(2);
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
        reached += reaches(offset, 300);
    cr_assert_eq(reached, 2);
    kill_store();
    double_proper(0);
}

Test(cumem_import, a_piece_that_fails_once_is_tried_again, .timeout = 30) {
    start();
    double_fail("cuMemMap:2=2");
    cr_assert(all_mapped());
    cr_assert_eq(rig_counter(TP_IMPORT_FAILURES), 1);
    kill_store();
    double_proper(0);
}

Test(cumem_import, addresses_that_are_refused_once_are_asked_for_again, .timeout = 30) {
    start();
    double_fail("cuMemAddressReserve:1=2");
    cr_assert_not(reaches(0, 300));
    cr_assert(all_mapped());
    kill_store();
    double_proper(0);
}

Test(cumem_import, cuda_that_cannot_be_initialised_once_is_tried_again, .timeout = 30) {
    start();
    double_fail("cuInit:1=2");
    cr_assert_not(reaches(0, 300));
    cr_assert(all_mapped());
    kill_store();
    double_proper(0);
}

Test(cumem_import, cuda_that_the_host_initialises_later_is_used, .timeout = 30) {
    start();
    double_fail("cuInit:*=2");
    cr_assert_not(reaches(0, 3300)); /* tried at 0, 1 and 3 s; the next time is at 7 s */
    double_fail("");
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    cr_assert(reaches(0, 3000), "without waiting for a next try of ours");
    kill_store();
    double_proper(0);
}

static void check_that_it_goes(const char *rules) {
    start();
    double_fail(rules);
    cr_assert(all_mapped());
    kill_store();
    for (uint64_t end = tp_now_ms() + 5000; double_mappings() > 0 && tp_now_ms() < end;)
        usleep(1000);
    cr_assert_eq(double_mappings(), 0, "%s", rules);
    double_proper(0);
}

Test(cumem_import, memory_that_is_not_unmapped_once_goes_later, .timeout = 30) {
    check_that_it_goes("cuMemUnmap:2=2");
}

Test(cumem_import, a_handle_that_is_not_released_once_goes_too, .timeout = 30) {
    check_that_it_goes("cuMemRelease:2=2");
}

Test(cumem_import, what_is_never_unmapped_keeps_its_addresses, .timeout = 30) {
    start();
    cr_assert(all_mapped());
    double_fail("cuMemUnmap:*=2");
    kill_store();
    usleep(1500000);
    double_fail("");
    double_proper(0);
}

/* Tried at once, after one second and after two more: never a flood. */
Test(cumem_import, what_goes_on_failing_is_tried_ever_later, .timeout = 30) {
    start();
    double_fail("cuMemMap:*=2");
    cr_assert_not(reaches(0, 5500));
    cr_assert_geq(rig_counter(TP_IMPORT_FAILURES), 6);
    cr_assert_leq(rig_counter(TP_IMPORT_FAILURES), 9);
    kill_store();
    double_proper(0);
}

/* ---- how long it takes: 32 pieces whose access takes 25 ms each, as 64 GiB do ---- */

#define PIECES UINT64_C(32)
#define SLOW "cuMemSetAccess=25000"

/* What was opened to this process: from the double's log, so that a busy machine changes nothing.
 */
struct opened {
    uint64_t start_ns; /* first: they are sorted by it */
    uint64_t address;
    long thread; /* one that is not let run may be late by any number of the others' */
    bool note;   /* no piece, but where the test says that it has asked */
};
static int call_log = -1;

static void start_slow(bool initialised) {
    void *context = NULL;
    char path[32];
    call_log = memfd_create("calls", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", call_log);
    setenv("FAKECUDA_LOG", path, 1);
    start_store(2 * PIECES * MIB, 2 * MIB);
    if (initialised) {
        cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
        cr_assert_eq(DOUBLE(int, "cuDevicePrimaryCtxRetain", (void **, int))(&context, 0), 0);
    }
    cr_assert_eq(DOUBLE(int, "fakecuda_set_delays", (const char *))(SLOW), 0);
    start_engine();
}

static void wait_for_peer(void) {
    for (unsigned i = 0; i < 10000 && !the_peer(); i++)
        usleep(1000);
    cr_assert_not_null(the_peer());
}

static char *address_of(uint64_t piece) {
    void *address = NULL;
    enum tp_route route =
        tp_peer_route(the_peer(), store.base + piece * 2 * MIB, 1, &address, NULL);
    cr_assert_eq(route, TP_ROUTE_OK, "piece %u: %d", (unsigned)piece, (int)route);
    return address;
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* In the order of their beginning. */
static unsigned read_opened(struct opened *opened, unsigned room) {
    char line[2048], pid[32];
    unsigned count = 0;
    FILE *file = fdopen(dup(call_log), "r");
    cr_assert_not_null(file);
    rewind(file);
    snprintf(pid, sizeof pid, "\"pid\":%d,", (int)getpid());
    while (fgets(line, sizeof line, file) && count < room) {
        const char *address = strstr(line, "address="), *start = strstr(line, "\"t_ns\":"),
                   *thread = strstr(line, "\"tid\":");
        bool note = strstr(line, "\"call\":\"note\"") != NULL;
        if (!strstr(line, pid) || !start || !thread ||
            !(note || strstr(line, "\"cuMemSetAccess\"")))
            continue;
        opened[count++] = (struct opened){
            .address = note ? 0 : strtoull(address + strlen("address="), NULL, 16),
            .thread = strtol(thread + strlen("\"tid\":"), NULL, 10),
            .start_ns = strtoull(start + strlen("\"t_ns\":"), NULL, 10),
            .note = note,
        };
    }
    (void)fclose(file);
    qsort(opened, count, sizeof *opened, by_value);
    return count;
}

/* Ask for a byte of the piece, then wait for it: how many others the thread that opened it opened
 * first, from the question on. */
static unsigned others_before(uint64_t piece) {
    static unsigned char byte;
    struct opened opened[3 * PIECES];
    struct rig_request r = rig_make(TP_OP_READ, &byte, 1, store.base + piece * 2 * MIB, 1);
    struct tp_submit submit;
    unsigned others = 0;
    cr_assert_eq(rig_begin(engine, 79, 1, &r, 1, &submit), TP_PLAN_NONE);
    DOUBLE(void, "fakecuda_note", (const char *))("asked");
    cr_assert(reaches(piece * 2 * MIB, 10000), "piece %u", (unsigned)piece);
    unsigned count = read_opened(opened, 3 * PIECES);
    unsigned at = 0;
    while (at < count && opened[at].address != (uintptr_t)address_of(piece))
        at++;
    cr_assert_lt(at, count);
    for (unsigned i = 0; i < at; i++) {
        if (opened[i].note)
            others = 0;
        else if (opened[i].thread == opened[at].thread)
            others++;
    }
    return others;
}

static unsigned mapped_pieces(void) {
    const struct tp_stats_peer *stats = &tp_stats_page()->peers[tp_peer_slot(the_peer())];
    return stats->pieces_mapped;
}

/* What the thread has begun, and what was next, may come before. */
Test(cumem_import, a_piece_that_is_asked_for_comes_first, .timeout = 30) {
    start_slow(false);
    wait_for_peer();
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    cr_assert_leq(others_before(PIECES - 1), 2);
    usleep(60000); /* the others come meanwhile */
    cr_assert_leq(others_before(PIECES - 5), 2);
    kill_store();
}

/* Was this piece chosen by its thread after the note? What the thread opens first after it may have
 * been chosen before. */
static bool chosen_later(const struct opened *opened, unsigned index) {
    bool noted = false;
    bool later = false;
    for (unsigned i = 0; i < index; i++) {
        later = later || (noted && opened[i].thread == opened[index].thread);
        noted = noted || opened[i].note;
    }
    return later;
}

/* Where in the order this piece stands; `count`: nowhere. */
static unsigned place_in(const unsigned *order, unsigned count, uint64_t address) {
    unsigned place = 0;
    while (place < count && (uintptr_t)address_of(order[place]) != address)
        place++;
    return place;
}

Test(cumem_import, pieces_come_in_the_order_of_first_use, .timeout = 30) {
    static const unsigned order[] = {30, 7, 22, 3, 15};
    struct opened opened[3 * PIECES];
    unsigned char byte;
    start_slow(false);
    wait_for_peer();
    struct rig_request requests[5];
    for (unsigned i = 0; i < 5; i++)
        requests[i] = rig_make(TP_OP_READ, &byte, 1, store.base + (uint64_t)order[i] * 2 * MIB, 1);
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 78, 5, requests, 5, &submit), TP_PLAN_NONE);
    DOUBLE(void, "fakecuda_note", (const char *))("asked");
    for (unsigned i = 0; i < 5; i++)
        cr_assert(reaches((uint64_t)order[i] * 2 * MIB, 10000), "piece %u", order[i]);
    unsigned count = read_opened(opened, 3 * PIECES);
    /* Two threads open them: each as they were asked for, and no other piece before. */
    for (unsigned i = 0; i < count; i++) {
        for (unsigned j = 0; j < i; j++)
            cr_assert(opened[i].thread != opened[j].thread || !chosen_later(opened, j) ||
                          place_in(order, 5, opened[j].address) <=
                              place_in(order, 5, opened[i].address),
                      "number %u came before number %u", j, i);
    }
    kill_store();
}

Test(cumem_import, registering_gpu_memory_starts_it, .timeout = 30) {
    void *context = NULL, *popped = NULL;
    uint64_t memory = 0;
    setenv("MC_TENT_CONF", "{\"transports\":{\"shm\":{\"enable\":true,\"socket_dir\":\"/x\"}}}", 1);
    start_slow(false);
    wait_for_peer();
    usleep(100000);
    cr_assert_eq(DOUBLE(int, "cuInit", (unsigned))(0), 0);
    cr_assert_eq(DOUBLE(int, "cuDevicePrimaryCtxRetain", (void **, int))(&context, 0), 0);
    cr_assert_eq(DOUBLE(int, "cuCtxPushCurrent_v2", (void *))(context), 0);
    cr_assert_eq(DOUBLE(int, "cuMemAlloc_v2", (uint64_t *, size_t))(&memory, MIB), 0);
    cr_assert_eq(DOUBLE(int, "cuCtxPopCurrent_v2", (void **))(&popped), 0);
    usleep(100000);
    cr_assert_eq(mapped_pieces(), 0);
    tp_register_range((void *)(uintptr_t)memory, MIB, "cuda:0"); /* NOLINT */
    for (unsigned i = 0; i < 10000 && mapped_pieces() < 4; i++)
        usleep(1000);
    cr_assert_geq(mapped_pieces(), 4);
    void *address = address_of(0);
    cr_assert(tp_peer_device_access(the_peer(), 0, address, MIB));
    kill_store();
}

/* Most pairs take about 50 ms, on a busy machine too: a pause would follow each piece or pair. */
Test(cumem_import, all_pieces_come_without_pauses, .timeout = 30) {
    struct opened opened[3 * PIECES];
    uint64_t pairs[PIECES - 2];
    start_slow(true);
    uint64_t end_ms = tp_now_ms() + 20000;
    while ((!the_peer() || mapped_pieces() < PIECES) && tp_now_ms() < end_ms)
        usleep(1000);
    cr_assert_eq(read_opened(opened, 3 * PIECES), PIECES);
    for (unsigned i = 0; i + 2 < PIECES; i++)
        pairs[i] = opened[i + 2].start_ns - opened[i].start_ns;
    qsort(pairs, PIECES - 2, sizeof *pairs, by_value);
    cr_assert_leq(pairs[PIECES / 2], UINT64_C(75000000), "%u us",
                  (unsigned)(pairs[PIECES / 2] / 1000));
    kill_store();
}

Test(cumem_import, the_end_while_pieces_are_mapped, .timeout = 30) {
    start_slow(true);
    wait_for_peer();
    usleep(60000);
    tp_transport_stop();
    cr_assert_eq(double_mappings(), 0);
    kill_store();
    double_proper(1);
}

Test(cumem_import, a_store_that_dies_while_pieces_are_mapped, .timeout = 30) {
    start_slow(true);
    wait_for_peer();
    usleep(60000);
    kill_store();
    for (unsigned i = 0; i < 5000 && double_mappings() > 0; i++)
        usleep(1000);
    cr_assert_eq(double_mappings(), 0);
    double_proper(1);
}

/* Unmapping takes 3 s here, as 120 GiB do. Another store's end is seen between two pieces. */
Test(cumem_import, a_dead_stores_memory_goes_between_the_messages_of_others, .timeout = 60) {
    struct fake_store other;
    start_slow(true);
    fake_start(&other, config, &(struct fake_options){.name = "127.0.0.1:2"});
    cr_assert(reaches(0, 10000));
    for (unsigned i = 0; i < 10000 && mapped_pieces() < PIECES; i++)
        usleep(1000);
    for (unsigned i = 0; i < 10000 && rig_counter(TP_PEERS_ATTACHED) < 2; i++)
        usleep(1000);
    cr_assert_eq(DOUBLE(int, "fakecuda_set_delays", (const char *))("cuMemUnmap=100000"), 0);
    kill_store();
    for (unsigned i = 0; i < 10000 && rig_counter(TP_PEERS_LOST) < 1; i++)
        usleep(1000);
    fake_end(&other);
    for (unsigned i = 0; i < 10000 && rig_counter(TP_PEERS_LOST) < 2; i++)
        usleep(1000);
    cr_assert_gt(double_mappings(), 0, "it was seen while there was more to unmap");
    for (unsigned i = 0; i < 20000 && double_mappings() > 0; i++)
        usleep(1000);
    cr_assert_eq(double_mappings(), 0);
    double_proper(1);
}
