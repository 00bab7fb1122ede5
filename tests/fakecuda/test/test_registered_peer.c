/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: batches between a GPU and a store on ordinary shared memory go by registered chunks, or
 * are staged; when the store or its segment goes, chunks are unregistered first, and nothing goes
 * under a copy. */
#include "device_rig.h"
#include "rig.h"
#include "segment/wire.h"
#include "transport/engine.h"
#include "transport/peer.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define NAME "127.0.0.1:1"
#define CHUNK (4 * MIB)
#define BYTES (20 * MIB)
#define REGISTER "\"register_peer_memory\": true, \"register_ahead_chunks\": 0"

static struct tp_config *config;
static struct tp_engine *engine;
static struct fake_store store;
static int engine_key;
static CUdeviceptr gpu;

static void start_cut(const char *settings, enum fake_manner manner, uint64_t piece_bytes) {
    config = fake_config();
    load_driver(settings);
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    gpu = device_memory(BYTES);
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    fake_start(&store, config,
               &(struct fake_options){.name = NAME,
                                      .bytes = BYTES,
                                      .piece_bytes = piece_bytes,
                                      .manner = manner,
                                      .gone_ms = 1500});
    tp_engine_open(engine, 1, NAME, strlen(NAME));
    for (uint64_t offset = 0; offset < BYTES; offset += piece_bytes)
        cr_assert(rig_wait(engine, 1, FAKE_BASE + offset, 5000));
    for (uint64_t i = 0; i < BYTES; i++)
        store.memory[i] = (unsigned char)(i * 7 + i / 4099);
}

/* Pieces of 6 MiB: chunks of 4, 2, 4, 2, 4, 2 and 2 MiB. */
static void start(const char *settings, enum fake_manner manner) {
    start_cut(settings, manner, 6 * MIB);
}

static void *gpu_at(uint64_t offset) {
    return (void *)(uintptr_t)(gpu + offset);
}

static void submit(uint64_t id, const struct rig_request *requests, size_t count) {
    struct tp_submit begun;
    cr_assert_eq(rig_begin(engine, id, count, requests, count, &begun), TP_PLAN_ALL);
    tp_submit_commit(&begun);
}

static void submit_one(uint64_t id, int opcode, uint64_t offset, uint64_t bytes) {
    struct rig_request r = rig_make(opcode, gpu_at(0), 1, FAKE_BASE + offset, bytes);
    submit(id, &r, 1);
}

static void no_violation(void) {
    cr_assert_eq(DRIVER(fakecuda_violations)(), 0, "%s", DRIVER(fakecuda_last_violation)());
}

/* ---- what lies behind a request in its submit ---- */

/* It would go on from where the good request ends, beyond the segment. */
static void check_behind(uint64_t bytes) {
    static unsigned char got[CHUNK];
    struct rig_request r[2];
    struct tp_submit begun;
    struct tp_task_status status = {0};
    start(REGISTER, FAKE_GOOD);
    r[0] = rig_make(TP_OP_READ, gpu_at(0), 1, FAKE_BASE + BYTES - CHUNK, CHUNK);
    r[1] = rig_make(TP_OP_READ, gpu_at(CHUNK), 1, FAKE_BASE + BYTES, bytes);
    cr_assert_eq(rig_begin(engine, 0x18, 2, r, 2, &begun), TP_PLAN_MIXED);
    tp_submit_commit(&begun);
    for (uint64_t end = tp_now_ms() + 5000; tp_now_ms() < end && status.state != TP_TASK_COMPLETED;)
        cr_assert_eq(tp_batch_task_status(0x18, 0, &status), TP_ANSWER_LOCAL);
    cr_assert_eq(status.state, TP_TASK_COMPLETED);
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, CHUNK), 0);
    cr_assert_eq(memcmp(got, store.memory + BYTES - CHUNK, CHUNK), 0);
    cr_assert_eq(counted(TP_FALLBACK_OUT_OF_RANGE), 1);
    cr_assert_eq(rig_free(0x18), 0);
    fake_end(&store);
    no_violation();
}

Test(registered_peer, a_request_beyond_the_segment, .timeout = 60) {
    check_behind(3 * CHUNK);
}

Test(registered_peer, a_request_far_beyond_the_segment, .timeout = 60) {
    check_behind(UINT64_C(1) << 40);
}

static bool becomes(enum tp_counter counter, uint64_t value) {
    for (uint64_t end = tp_now_ms() + 5000; tp_now_ms() < end; usleep(1000)) {
        if (counted(counter) == value)
            return true;
    }
    return false;
}

static void register_chunks(uint64_t count) {
    submit_one(0x70, TP_OP_READ, 0, BYTES);
    cr_assert_eq(rig_finish(0x70, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(0x70), 0);
    cr_assert(becomes(TP_REGISTERED_BYTES, BYTES));
    cr_assert_eq(counted(TP_REGISTRATIONS), count);
}

static void register_all(void) {
    register_chunks(7);
}

Test(registered_peer, blocks_that_together_are_half_a_chunk, .timeout = 60) {
    enum { N = 128, BLOCK = 16384 };
    struct rig_request r[N];
    static unsigned char got[N * BLOCK];
    start(REGISTER ", \"kernel_max_bytes\": 65536", FAKE_GOOD);
    for (int write = 0; write < 2; write++) {
        /* One object of the store, in blocks that lie the other way round in the GPU's memory. */
        for (int i = 0; i < N; i++)
            r[i] = rig_make(write ? TP_OP_WRITE : TP_OP_READ, gpu_at((uint64_t)(N - 1 - i) * BLOCK),
                            1, FAKE_BASE + (uint64_t)i * BLOCK + (write ? 6 * MIB : 0), BLOCK);
        submit(0x10 + (uint64_t)write, r, N);
        cr_assert_eq(rig_finish(0x10 + (uint64_t)write, NULL), TP_TASK_COMPLETED);
        cr_assert_eq(rig_free(0x10 + (uint64_t)write), 0);
    }
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, sizeof(got)), 0);
    for (size_t i = 0; i < N; i++)
        cr_assert_eq(memcmp(got + (N - 1 - i) * BLOCK, store.memory + i * BLOCK, BLOCK), 0);
    cr_assert_eq(memcmp(store.memory, store.memory + 6 * MIB, sizeof(got)), 0);
    cr_assert_eq(counted(TP_REGISTER_HITS), 2 * N);
    cr_assert_eq(counted(TP_REGISTER_MISSES), 0);
    cr_assert_eq(counted(TP_REGISTRATIONS), 2);
    cr_assert_eq(counted(TP_KERNEL_BYTES), 2 * N * BLOCK);
    fake_end(&store);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    no_violation();
}

/* There is room for one of two chunks; either may be the first. Whoever submits does not wait long
 * for another thread to register it, so that the first request may find none. */
Test(registered_peer, a_request_that_is_registered_in_part, .timeout = 60) {
    static unsigned char got[6 * MIB];
    start(REGISTER ", \"register_max_bytes\": \"6M\", \"copy_engine\": \"kernel\"", FAKE_GOOD);
    for (uint64_t round = 1; round <= 2; round++) {
        uint64_t staged = counted(TP_STAGED_BYTES);
        submit_one(0x20, TP_OP_READ, 0, 6 * MIB);
        cr_assert_eq(rig_finish(0x20, NULL), TP_TASK_COMPLETED);
        cr_assert_eq(rig_free(0x20), 0);
        cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, sizeof(got)), 0);
        cr_assert_eq(memcmp(got, store.memory, sizeof(got)), 0);
        memset(got, 0, sizeof(got));
        cr_assert_eq(DRIVER(fakecuda_poke)(gpu, got, sizeof(got)), 0);
        cr_assert_eq(counted(TP_REGISTER_MISSES), round);
        cr_assert_eq(counted(TP_KERNEL_BYTES), round * 6 * MIB);
        staged = counted(TP_STAGED_BYTES) - staged;
        cr_assert(staged == 2 * MIB || staged == 4 * MIB || (round == 1 && staged == 6 * MIB),
                  "%zu in round %u", (size_t)staged, (unsigned)round);
        cr_assert(becomes(TP_REGISTRATIONS, 1));
    }
    fake_end(&store);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    no_violation();
}

/* What lies between them is none of the submit's. */
Test(registered_peer, a_little_here_and_a_little_before_it, .timeout = 60) {
    struct rig_request r[2];
    start(REGISTER, FAKE_GOOD);
    r[0] = rig_make(TP_OP_READ, gpu_at(0), 1, FAKE_BASE + 18 * MIB, 4096);
    r[1] = rig_make(TP_OP_READ, gpu_at(CHUNK), 1, FAKE_BASE, 4096);
    submit(0x1d, r, 2);
    cr_assert_eq(rig_finish(0x1d, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(0x1d), 0);
    cr_assert_eq(counted(TP_REGISTER_MISSES), 2);
    cr_assert(becomes(TP_REGISTRATIONS, 2));
    usleep(50000);
    cr_assert_eq(counted(TP_REGISTRATIONS), 2, "%zu", (size_t)counted(TP_REGISTRATIONS));
    fake_end(&store);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    no_violation();
}

/* Its addresses lie within what the submit has moved of another store's. */
Test(registered_peer, a_little_of_one_store_after_much_of_another, .timeout = 60) {
    struct fake_store other;
    struct rig_request r[2];
    start(REGISTER, FAKE_GOOD);
    fake_start(&other, config, &(struct fake_options){.name = "127.0.0.1:2"});
    tp_engine_open(engine, 2, "127.0.0.1:2", strlen("127.0.0.1:2"));
    cr_assert(rig_wait(engine, 2, FAKE_BASE, 5000));
    r[0] = rig_make(TP_OP_READ, gpu_at(0), 1, FAKE_BASE, CHUNK);
    r[1] = rig_make(TP_OP_READ, gpu_at(CHUNK), 2, FAKE_BASE + MIB, 4096);
    submit(0x1c, r, 2);
    cr_assert_eq(rig_finish(0x1c, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(0x1c), 0);
    cr_assert_eq(counted(TP_REGISTER_HITS), 1);
    cr_assert_eq(counted(TP_REGISTER_MISSES), 1);
    fake_end(&other);
    fake_end(&store);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    no_violation();
}

Test(registered_peer, a_killed_stores_chunks_go, .timeout = 60) {
    start(REGISTER, FAKE_GOOD);
    register_all();
    fake_end(&store);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    no_violation();
}

static _Atomic unsigned slept;
int __real_epoll_wait(int fd, struct epoll_event *events, int count, int timeout);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int count, int timeout);

int __wrap_epoll_wait(int fd, struct epoll_event *events, int count, int timeout) {
    int found = __real_epoll_wait(fd, events, count, timeout);
    if (found == 0 && timeout > 0)
        atomic_fetch_add(&slept, 1);
    return found;
}

/* Much registered memory takes the driver longer than one slice, and the next store waits for it.
 */
Test(registered_peer, a_killed_stores_chunks_go_without_a_pause, .timeout = 60) {
    start_cut(REGISTER, FAKE_GOOD, 320 << 10);
    register_chunks(64);
    cr_assert_eq(DRIVER(fakecuda_set_delays)("cuMemHostUnregister=5000"), 0);
    fake_kill(&store);
    for (uint64_t end = tp_now_ms() + 10000;
         counted(TP_REGISTERED_BYTES) == BYTES && tp_now_ms() < end;)
        usleep(1000);
    unsigned before = atomic_load(&slept);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    unsigned pauses = atomic_load(&slept) - before;
    cr_assert_leq(pauses, 1, "%u", pauses);
    fake_end(&store);
    no_violation();
}

Test(registered_peer, but_not_under_a_copy, .timeout = 60) {
    setenv("FAKECUDA_DELAY_US", "500000", 1);
    start(REGISTER ", \"copy_engine\": \"dma\"", FAKE_GOOD);
    register_all();
    submit_one(0x40, TP_OP_WRITE, 0, BYTES);
    fake_kill(&store);
    usleep(200000);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), BYTES);
    cr_assert_eq(rig_finish(0x40, NULL), TP_TASK_FAILED, "its store is gone");
    cr_assert_eq(rig_free(0x40), 0);
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    fake_end(&store);
    no_violation();
}

/* ---- what is not registered ---- */

/* From here on, and slowly. */
static void start_staged(enum fake_manner manner) {
    setenv("FAKECUDA_DELAY_US", "30000", 1);
    start(REGISTER ", \"copy_engine\": \"dma\"", manner);
    cr_assert_eq(DRIVER(fakecuda_set_failures)("cuMemHostRegister:*=2"), 0);
}

static void check_read(uint64_t id) {
    unsigned char *got = malloc(BYTES);
    cr_assert_eq(rig_finish(id, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(id), 0);
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, BYTES), 0);
    cr_assert_eq(memcmp(got, store.memory, BYTES), 0);
    free(got);
}

Test(registered_peer, what_is_not_registered_is_staged, .timeout = 60) {
    start_staged(FAKE_GOOD);
    submit_one(0x80, TP_OP_READ, 0, BYTES);
    check_read(0x80);
    memset(store.memory, 0, BYTES);
    submit_one(0x81, TP_OP_WRITE, 0, BYTES);
    check_read(0x81);
    cr_assert_eq(counted(TP_STAGED_BYTES), 2 * BYTES);
    cr_assert_eq(counted(TP_LOCAL_READ_BYTES) + counted(TP_LOCAL_WRITE_BYTES), 2 * BYTES);
    fake_end(&store);
    no_violation();
}

Test(registered_peer, a_child_of_a_fork_knows_of_no_copies, .timeout = 60) {
    struct tp_task_status status;
    start_staged(FAKE_GOOD);
    submit_one(0x88, TP_OP_READ, 0, BYTES);
    for (unsigned i = 0; i < 10; i++) {
        pid_t child = fork();
        if (child == 0)
            _exit(tp_batch_status(0x88, &status) != TP_ANSWER_UNKNOWN);
        int ended = 1;
        cr_assert_eq(waitpid(child, &ended, 0), child);
        cr_assert_eq(ended, 0);
    }
    check_read(0x88);
    fake_end(&store);
    no_violation();
}

static bool unmapped(const char *address) {
    unsigned char resident;
    for (uint64_t end = tp_now_ms() + 5000; tp_now_ms() < end; usleep(1000)) {
        if (mincore((void *)((uintptr_t)address & ~UINT64_C(4095)), 1, &resident) != 0)
            return true;
    }
    return false;
}

static char *mapped_address(void) {
    struct tp_peer *peer = tp_peer_at(0);
    void *there = NULL;
    cr_assert_eq(tp_peer_route(peer, FAKE_BASE, 1, &there, NULL), TP_ROUTE_OK);
    return there;
}

/* Its memory is mapped until the copies have ended, and not for longer. */
static void check_killed(int opcode) {
    start_staged(FAKE_GOOD);
    char *address = mapped_address();
    submit_one(0x90, opcode, 0, BYTES);
    usleep(5000);
    fake_kill(&store);
    cr_assert_eq(rig_finish(0x90, NULL), TP_TASK_FAILED, "its store is gone");
    cr_assert_eq(rig_free(0x90), 0);
    cr_assert(unmapped(address));
    cr_assert_eq(counted(TP_COPY_FAILED), 1);
    fake_end(&store);
    no_violation();
}

Test(registered_peer, a_store_that_is_killed_under_a_staged_put, .timeout = 60) {
    check_killed(TP_OP_WRITE);
}

Test(registered_peer, a_store_that_is_killed_under_a_staged_get, .timeout = 60) {
    check_killed(TP_OP_READ);
}

/* As a caller that has given up: the peer thread sees to the end. */
Test(registered_peer, a_store_that_is_killed_and_nobody_polls, .timeout = 60) {
    start_staged(FAKE_GOOD);
    char *address = mapped_address();
    submit_one(0x98, TP_OP_WRITE, 0, BYTES);
    fake_kill(&store);
    cr_assert(unmapped(address));
    cr_assert_eq(rig_finish(0x98, NULL), TP_TASK_FAILED);
    cr_assert_eq(rig_free(0x98), 0);
    fake_end(&store);
    no_violation();
}

Test(registered_peer, a_segment_that_is_withdrawn_under_staged_copies, .timeout = 60) {
    start_staged(FAKE_GONE);
    char *address = mapped_address();
    uint64_t rounds = 0;
    /* Again and again, until it is gone. */
    for (uint64_t end = tp_now_ms() + 10000; tp_now_ms() < end; rounds++) {
        struct rig_request r = rig_make(TP_OP_READ, gpu_at(0), 1, FAKE_BASE, BYTES);
        struct tp_submit begun;
        if (rig_begin(engine, 0xa0, 1, &r, 1, &begun) != TP_PLAN_ALL)
            break;
        tp_submit_commit(&begun);
        check_read(0xa0);
    }
    cr_assert_geq(rounds, 2);
    cr_assert(unmapped(address));
    cr_assert_eq(counted(TP_STAGED_BYTES), rounds * BYTES);
    fake_end(&store);
    no_violation();
}

Test(registered_peer, a_withdrawn_segments_chunks_go, .timeout = 60) {
    start(REGISTER, FAKE_GONE);
    register_all();
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    no_violation();
    fake_end(&store);
}

/* It takes long, and whoever comes meanwhile must not see what is about to be freed. */
Test(registered_peer, a_withdrawn_segments_chunks_are_nobodys_while_they_go, .timeout = 60) {
    start(REGISTER, FAKE_GONE);
    char *address = mapped_address();
    struct tp_peer *peer = tp_peer_at(0);
    register_all();
    cr_assert_not_null(tp_peer_chunks(peer, address));
    cr_assert_eq(DRIVER(fakecuda_set_delays)("cuMemHostUnregister=500000"), 0);
    for (uint64_t end = tp_now_ms() + 10000;
         counted(TP_REGISTERED_BYTES) == BYTES && tp_now_ms() < end;)
        usleep(1000);
    cr_assert_gt(counted(TP_REGISTERED_BYTES), 0, "it has only begun");
    struct tp_name *name = tp_engine_name(engine, 1);
    bool gone = false;
    cr_assert_eq(tp_route_peer(name, &gone), peer);
    cr_assert_null(tp_peer_chunks(peer, address));
    /* Nor does a reference that came later keep it. */
    cr_assert(becomes(TP_REGISTERED_BYTES, 0));
    cr_assert(unmapped(address));
    tp_peer_release(peer);
    fake_end(&store);
    no_violation();
}

/* ---- a fork while a piece is being mapped ---- */

static _Atomic bool hold_up, held_up;
int __real_tp_steady_check(int fd, uint64_t bytes);
int __wrap_tp_steady_check(int fd, uint64_t bytes);

int __wrap_tp_steady_check(int fd, uint64_t bytes) {
    if (atomic_exchange(&hold_up, false)) {
        atomic_store(&held_up, true);
        usleep(1000000);
    }
    return __real_tp_steady_check(fd, bytes);
}

static int memory_fds(void) {
    int count = 0;
    for (int fd = 0; fd < 256; fd++) {
        char path[32];
        char target[64] = "";
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        count += readlink(path, target, sizeof(target) - 1) > 0 &&
                 strncmp(target, "/memfd:fake ", 12) == 0;
    }
    return count;
}

static void *fork_meanwhile(void *ret_count) {
    int status = -1;
    while (!atomic_load(&held_up))
        usleep(1000);
    pid_t child = fork();
    if (child == 0)
        _exit(memory_fds());
    must(waitpid(child, &status, 0) == child, "the child ends");
    *(int *)ret_count = WEXITSTATUS(status);
    return NULL;
}

Test(registered_peer, a_child_of_a_fork_has_no_fd_of_a_stores_memory, .timeout = 60) {
    pthread_t forker;
    int inherited = -1;
    atomic_store(&hold_up, true);
    cr_assert_eq(pthread_create(&forker, NULL, fork_meanwhile, &inherited), 0);
    start(REGISTER, FAKE_GOOD);
    pthread_join(forker, NULL);
    cr_assert_eq(inherited, 0, "%d", inherited);
    fake_end(&store);
}

/* ---- what runs out and comes back ---- */

static _Atomic int chunks_refused;
struct tp_chunks *__real_tp_chunks_new(char *address, const struct tp_msg_segment *message,
                                       const atomic_uchar *mapped);
struct tp_chunks *__wrap_tp_chunks_new(char *address, const struct tp_msg_segment *message,
                                       const atomic_uchar *mapped);

struct tp_chunks *__wrap_tp_chunks_new(char *address, const struct tp_msg_segment *message,
                                       const atomic_uchar *mapped) {
    bool refused = atomic_exchange(&chunks_refused, 0) != 0;
    return refused ? NULL : __real_tp_chunks_new(address, message, mapped);
}

Test(registered_peer, no_memory_for_chunks_at_first, .timeout = 60) {
    atomic_store(&chunks_refused, 1);
    start(REGISTER, FAKE_GOOD);
    cr_assert_eq(atomic_load(&chunks_refused), 0);
    register_all();
    fake_end(&store);
    no_violation();
}

Test(registered_peer, a_gpu_that_rests_is_left_to_mooncake_and_comes_back, .timeout = 60) {
    struct rig_request r;
    struct tp_submit begun;
    start(REGISTER, FAKE_GOOD);
    r = rig_make(TP_OP_READ, gpu_at(0), 1, FAKE_BASE, BYTES);
    tp_gpu_rest(tp_gpu_get(0), "a test has said so");
    cr_assert_eq(rig_begin(engine, 0xc0, 1, &r, 1, &begun), TP_PLAN_NONE);
    cr_assert_eq(counted(TP_FALLBACK_DEVICE_MEMORY), 1);
    for (uint64_t end = tp_now_ms() + 10000; tp_gpu_rests(0) && tp_now_ms() < end;)
        usleep(1000);
    register_all();
    fake_end(&store);
    no_violation();
}

Test(registered_peer, nothing_is_registered_unless_asked_for, .timeout = 60) {
    start("", FAKE_GOOD);
    submit_one(0x60, TP_OP_READ, 0, BYTES);
    cr_assert_eq(rig_finish(0x60, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(counted(TP_REGISTRATIONS) + counted(TP_REGISTER_MISSES), 0);
    cr_assert_eq(rig_free(0x60), 0);
    fake_end(&store);
    no_violation();
}

/* ---- two allocations of one GPU whose addresses touch: no copy may cross their border ---- */

/* Each request continues the one before, on both sides; the fifth begins the second allocation. */
static void check_touching(const char *settings, bool registered) {
    enum { N = 8, BLOCK = 65536 };
    static unsigned char got[N * BLOCK];
    struct rig_request r[N];
    setenv("FAKECUDA_TOUCHING", "1", 1);
    start(settings, FAKE_GOOD);
    cr_assert_eq(device_memory(4 * MIB), gpu + BYTES, "they do not touch");
    if (registered) {
        tp_register_range(gpu_at(0), BYTES, "cuda:0");
        tp_register_range(gpu_at(BYTES), 4 * MIB, "cuda:0");
    }
    for (int write = 0; write < 2; write++) {
        for (uint64_t i = 0; i < N; i++)
            r[i] = rig_make(write ? TP_OP_WRITE : TP_OP_READ, gpu_at(BYTES + i * BLOCK - 4 * BLOCK),
                            1, FAKE_BASE + i * BLOCK + (write ? 6 * MIB : 0), BLOCK);
        submit(0xb0, r, N);
        cr_assert_eq(rig_finish(0xb0, NULL), TP_TASK_COMPLETED);
        cr_assert_eq(rig_free(0xb0), 0);
    }
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu + BYTES - 4 * BLOCK, 4 * BLOCK), 0);
    cr_assert_eq(DRIVER(fakecuda_peek)(got + 4 * BLOCK, gpu + BYTES, 4 * BLOCK), 0);
    cr_assert_eq(memcmp(got, store.memory, sizeof(got)), 0);
    cr_assert_eq(memcmp(got, store.memory + 6 * MIB, sizeof(got)), 0);
    fake_end(&store);
    no_violation();
}

static const char *const TOUCHING[] = {
    "\"copy_engine\": \"dma\"",
    REGISTER ", \"copy_engine\": \"dma\"",
    REGISTER ", \"copy_engine\": \"kernel\"",
    REGISTER ", \"copy_engine\": \"dma\", \"register_max_bytes\": \"3M\"", /* all is staged */
    REGISTER ", \"copy_engine\": \"kernel\", \"register_max_bytes\": \"3M\"",
};

#define TOUCHING_COUNT (sizeof(TOUCHING) / sizeof(*TOUCHING))

ParameterizedTestParameters(registered_peer, touching_allocations) {
    static unsigned cases[2 * TOUCHING_COUNT];
    for (unsigned i = 0; i < 2 * TOUCHING_COUNT; i++)
        cases[i] = i;
    return cr_make_param_array(unsigned, cases, 2 * TOUCHING_COUNT);
}

ParameterizedTest(unsigned *which, registered_peer, touching_allocations, .timeout = 60) {
    check_touching(TOUCHING[*which / 2], *which % 2);
}
