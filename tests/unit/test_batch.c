/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: of a batch, exactly the requests that a live store holds are copied here, right, and each
 * task is answered for once. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>

#include "rig.h"
#include "tests/fakecuda/test/stood_still.h"
#include "transport/copy_host.h"

#define NAME "127.0.0.1:1"
#define MIB (UINT64_C(1) << 20)

static struct tp_config *config;
static struct tp_engine *engine;
static struct fake_store store;
static int engine_key;
static unsigned char *buffer;

static void start(void) {
    config = fake_config();
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    fake_start(&store, config, &(struct fake_options){.name = NAME});
    tp_engine_open(engine, 1, NAME, strlen(NAME));
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    buffer = malloc(store.bytes);
    for (uint64_t i = 0; i < store.bytes; i++) {
        buffer[i] = (unsigned char)(i * 13 + i / 997);
        store.memory[i] = (unsigned char)(i * 7 + i / 4099);
    }
}

static void stop(void) {
    fake_end(&store);
}

TestSuite(batch, .init = start, .fini = stop, .timeout = 30);

/* What tp_submit_begin says of one request. */
static enum tp_plan plan_of(struct rig_request request) {
    struct tp_submit submit;
    enum tp_plan plan = rig_begin(engine, 0x99, 1, &request, 1, &submit);
    if (plan != TP_PLAN_NONE)
        tp_submit_abort(&submit);
    return plan;
}

Test(batch, copies_both_ways) {
    enum { N = 61 };
    struct rig_request r[2 * N];
    for (int i = 0; i < N; i++) {
        r[i] = rig_make(TP_OP_WRITE, buffer + i * 1000, 1, FAKE_BASE + (uint64_t)i * 2000, 1000);
        r[N + i] = rig_make(TP_OP_READ, buffer + MIB + i * 3000, 1,
                            FAKE_BASE + 2 * MIB + (uint64_t)i * 5000, 3000);
    }
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 0x10, 2 * N, r, 2 * N, &submit), TP_PLAN_ALL);
    cr_assert_eq(submit.first_task, 0);
    tp_submit_commit(&submit);
    uint64_t bytes = 0;
    cr_assert_eq(rig_finish(0x10, &bytes), TP_TASK_COMPLETED);
    cr_assert_eq(bytes, N * 4000);
    for (int i = 0; i < N; i++) {
        cr_assert_eq(memcmp(store.memory + i * 2000, buffer + i * 1000, 1000), 0);
        cr_assert_eq(memcmp(buffer + MIB + i * 3000, store.memory + 2 * MIB + i * 5000, 3000), 0);
    }
    struct tp_task_status status;
    for (int i = 0; i < 2 * N; i++) {
        cr_assert_eq(tp_batch_task_status(0x10, (uint64_t)i, &status), TP_ANSWER_LOCAL);
        cr_assert_eq(status.state, TP_TASK_COMPLETED);
        cr_assert_eq(status.bytes, r[i].request.length);
    }
    cr_assert_eq(tp_batch_task_status(0x10, 2 * N, &status), TP_ANSWER_RANGE);
    cr_assert_eq(rig_free(0x10), 0);
    cr_assert_eq(tp_batch_task_status(0x10, 0, &status), TP_ANSWER_UNKNOWN);
    cr_assert_eq(rig_free(0x10), -ENOENT);
    cr_assert_eq(rig_counter(TP_LOCAL_WRITE_BYTES), N * 1000);
    cr_assert_eq(rig_counter(TP_LOCAL_READ_BYTES), N * 3000);
    cr_assert_eq(rig_counter(TP_LOCAL_REQUESTS), 2 * N);
    cr_assert_eq(rig_counter(TP_LOCAL_BATCHES), 1);
}

Test(batch, range_edges) {
    uint64_t end = FAKE_BASE + store.bytes;
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, end - 1, 1)), TP_PLAN_ALL);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, FAKE_BASE, store.bytes)), TP_PLAN_ALL);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, end, 1)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, end - 1, 2)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, FAKE_BASE - 1, 2)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, FAKE_BASE, store.bytes + 1)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, FAKE_BASE + 1, UINT64_MAX)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, UINT64_MAX, UINT64_MAX)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, 0, 1)), TP_PLAN_NONE);
}

Test(batch, implausible_requests_are_left_to_mooncake) {
    cr_expect_eq(plan_of(rig_make(2, buffer, 1, FAKE_BASE, 1)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(-1, buffer, 1, FAKE_BASE, 1)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, NULL, 1, FAKE_BASE, 1)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, buffer, 1, FAKE_BASE, 0)), TP_PLAN_NONE);
    cr_expect_eq(plan_of(rig_make(0, (void *)UINTPTR_MAX, 1, FAKE_BASE, 4096)), TP_PLAN_NONE);
    cr_expect_eq(rig_counter(TP_FALLBACK_BAD_REQUEST), 5);
    uint64_t before = rig_counter(TP_FALLBACK_NO_PEER);
    cr_expect_eq(plan_of(rig_make(0, buffer, 2, FAKE_BASE, 1)), TP_PLAN_NONE);
    cr_expect_eq(rig_counter(TP_FALLBACK_NO_PEER), before + 1);
    tp_register_range(buffer, 4096, "cuda:0");
    cr_expect_eq(plan_of(rig_make(0, buffer + 100, 1, FAKE_BASE, 1)), TP_PLAN_NONE);
    cr_expect_eq(rig_counter(TP_FALLBACK_DEVICE_MEMORY), 1);
    tp_unregister_range(buffer);
    cr_expect_eq(plan_of(rig_make(0, buffer + 100, 1, FAKE_BASE, 1)), TP_PLAN_ALL);
}

Test(batch, mixed) {
    struct rig_request r[4] = {
        rig_make(TP_OP_WRITE, buffer, 1, FAKE_BASE, 64),
        rig_make(TP_OP_WRITE, buffer, 2, FAKE_BASE, 65),
        rig_make(TP_OP_READ, buffer + 100, 1, FAKE_BASE + 100, 66),
        rig_make(TP_OP_READ, buffer + 200, 1, 4096, 67),
    };
    r[1].tail[3] = 1;
    r[3].tail[3] = 3;
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 0x20, 4, r, 4, &submit), TP_PLAN_MIXED);
    cr_assert_eq(submit.rest.count, 2);
    cr_assert_eq(submit.rest.stride, sizeof(r[0]));
    cr_assert_eq(memcmp(submit.rest.base, &r[1], sizeof(r[0])), 0, "elements are copied whole");
    cr_assert_eq(memcmp((const char *)submit.rest.base + sizeof(r[0]), &r[3], sizeof(r[0])), 0);
    tp_submit_commit(&submit);
    struct tp_task_status status;
    cr_assert_eq(tp_batch_task_status(0x20, 1, &status), TP_ANSWER_REAL);
    cr_assert_eq(status.real_task, 0);
    cr_assert_eq(tp_batch_task_status(0x20, 3, &status), TP_ANSWER_REAL);
    cr_assert_eq(status.real_task, 1);
    while (tp_batch_task_status(0x20, 2, &status) == TP_ANSWER_LOCAL && !status.state)
        ;
    cr_assert_eq(status.state, TP_TASK_COMPLETED);
    cr_assert_eq(tp_batch_status(0x20, &status), TP_ANSWER_REAL);
    cr_assert_eq(status.state, TP_TASK_COMPLETED);
    cr_assert_eq(status.bytes, 64 + 66);
    cr_assert_eq(rig_free(0x20), 0);
    cr_assert_eq(rig_counter(TP_FORWARD_REQUESTS) >= 2, true);
}

Test(batch, all_or_nothing_and_abort_leave_nothing) {
    struct rig_request r[2] = {rig_make(TP_OP_WRITE, buffer, 1, FAKE_BASE, 64),
                               rig_make(TP_OP_WRITE, buffer, 2, FAKE_BASE, 65)};
    struct tp_requests list = {r, sizeof(r[0]), 2};
    struct tp_submit submit;
    struct tp_task_status status;
    unsigned char before = store.memory[0];
    cr_assert_eq(tp_submit_begin(engine, 0x30, 2, &list, true, &submit), TP_PLAN_NONE);
    cr_assert_eq(rig_counter(TP_FALLBACK_SCATTER_MIXED), 1);
    cr_assert_eq(rig_free(0x30), -ENOENT);
    cr_assert_eq(tp_submit_begin(engine, 0x30, 2, &list, false, &submit), TP_PLAN_MIXED);
    tp_submit_abort(&submit);
    cr_assert_eq(tp_batch_status(0x30, &status), TP_ANSWER_UNKNOWN);
    cr_assert_eq(rig_free(0x30), -ENOENT);
    cr_assert_eq(store.memory[0], before, "nothing was copied");
}

Test(batch, several_submits_keep_the_numbering_of_both_sides) {
    struct rig_request here = rig_make(TP_OP_READ, buffer, 1, FAKE_BASE, 10);
    struct rig_request there = rig_make(TP_OP_READ, buffer, 2, FAKE_BASE, 10);
    struct tp_submit submit;
    struct tp_task_status status;
    /* 0: Mooncake's. 1: here. 2, 3: Mooncake's. 4: here. */
    cr_assert_eq(rig_begin(engine, 0x40, 5, &there, 1, &submit), TP_PLAN_NONE);
    tp_batch_forwarded(0x40, 1);
    cr_assert_eq(tp_batch_task_status(0x40, 0, &status), TP_ANSWER_UNKNOWN);
    cr_assert_eq(rig_begin(engine, 0x40, 5, &here, 1, &submit), TP_PLAN_ALL);
    cr_assert_eq(submit.first_task, 1);
    tp_submit_commit(&submit);
    struct rig_request two[2] = {there, there};
    cr_assert_eq(rig_begin(engine, 0x40, 5, two, 2, &submit), TP_PLAN_NONE);
    tp_batch_forwarded(0x40, 2);
    cr_assert_eq(rig_begin(engine, 0x40, 5, &here, 1, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_begin(engine, 0x40, 5, &here, 1, &submit), TP_PLAN_NONE, "full");
    cr_assert_eq(tp_batch_task_status(0x40, 0, &status), TP_ANSWER_REAL);
    cr_assert_eq(status.real_task, 0);
    cr_assert_eq(tp_batch_task_status(0x40, 3, &status), TP_ANSWER_REAL);
    cr_assert_eq(status.real_task, 2);
    cr_assert_eq(tp_batch_task_status(0x40, 4, &status), TP_ANSWER_LOCAL);
    cr_assert_eq(status.state, TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(0x40), 0);
}

Test(batch, an_id_is_new_after_its_batch_was_freed) {
    struct rig_request r = rig_make(TP_OP_READ, buffer, 1, FAKE_BASE, 10);
    struct tp_submit submit;
    for (int i = 0; i < 1000; i++) {
        cr_assert_eq(rig_begin(engine, 0x50, 1, &r, 1, &submit), TP_PLAN_ALL);
        cr_assert_eq(submit.first_task, 0);
        tp_submit_commit(&submit);
        cr_assert_eq(rig_finish(0x50, NULL), TP_TASK_COMPLETED);
        struct tp_batch *batch;
        cr_assert_eq(tp_batch_detach(0x50, &batch), 0);
        if (i % 2) {
            tp_batch_reattach(0x50, batch);
            cr_assert_eq(rig_finish(0x50, NULL), TP_TASK_COMPLETED);
            cr_assert_eq(tp_batch_detach(0x50, &batch), 0);
        }
        tp_batch_recycle(batch);
    }
}

Test(batch, several_stores_in_one_batch) {
    struct fake_store other;
    fake_start(&other, config,
               &(struct fake_options){.name = "127.0.0.1:2", .base = FAKE_BASE + (1 << 30)});
    tp_engine_open(engine, 2, "127.0.0.1:2", 11);
    cr_assert(rig_wait(engine, 2, FAKE_BASE + (1 << 30), 5000));
    struct rig_request r[40];
    for (int i = 0; i < 40; i++)
        r[i] = rig_make(TP_OP_WRITE, buffer + i * 100, 1 + (uint64_t)i % 2,
                        FAKE_BASE + (i % 2 ? 1u << 30 : 0) + (uint64_t)i * 100, 100);
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 0x60, 40, r, 40, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x60, NULL), TP_TASK_COMPLETED);
    for (int i = 0; i < 40; i++)
        cr_assert_eq(memcmp((i % 2 ? &other : &store)->memory + i * 100, buffer + i * 100, 100), 0);
    cr_assert_eq(rig_free(0x60), 0);
    fake_end(&other);
}

Test(batch, a_store_that_dies_fails_what_was_not_seen_done) {
    struct rig_request r = rig_make(TP_OP_READ, buffer, 1, FAKE_BASE, store.bytes);
    struct tp_submit submit;
    struct tp_task_status status;
    cr_assert_eq(rig_begin(engine, 0x70, 1, &r, 1, &submit), TP_PLAN_ALL);
    fake_kill(&store);
    uint64_t end = tp_now_ms() + 5000;
    while (rig_counter(TP_PEERS_LOST) == 0 && tp_now_ms() < end)
        usleep(1000);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x70, NULL), TP_TASK_FAILED);
    cr_assert_eq(tp_batch_task_status(0x70, 0, &status), TP_ANSWER_LOCAL);
    cr_assert_eq(status.state, TP_TASK_FAILED);
    cr_assert_eq(rig_counter(TP_COPY_FAILED), 1);
    cr_assert_eq(rig_free(0x70), 0);
}

Test(batch, a_store_that_dies_fails_its_own_tasks_only) {
    struct fake_store other;
    fake_start(&other, config,
               &(struct fake_options){.name = "127.0.0.1:2", .base = FAKE_BASE + (1 << 30)});
    tp_engine_open(engine, 2, "127.0.0.1:2", 11);
    cr_assert(rig_wait(engine, 2, FAKE_BASE + (1 << 30), 5000));
    enum { N = 10, BYTES = 100000 };
    struct rig_request r[N];
    for (int i = 0; i < N; i++)
        r[i] =
            rig_make(i % 4 < 2 ? TP_OP_WRITE : TP_OP_READ, buffer + i * BYTES, 1 + (uint64_t)i % 2,
                     FAKE_BASE + (i % 2 ? 1u << 30 : 0) + (uint64_t)i * BYTES, BYTES);
    struct tp_submit submit;
    struct tp_task_status status;
    uint64_t requests = rig_counter(TP_LOCAL_REQUESTS);
    uint64_t written = rig_counter(TP_LOCAL_WRITE_BYTES);
    uint64_t read = rig_counter(TP_LOCAL_READ_BYTES);
    cr_assert_eq(rig_begin(engine, 0x72, N, r, N, &submit), TP_PLAN_ALL);
    fake_kill(&other);
    uint64_t end = tp_now_ms() + 5000;
    while (rig_counter(TP_PEERS_LOST) == 0 && tp_now_ms() < end)
        usleep(1000);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x72, NULL), TP_TASK_FAILED, "Mooncake's rule for the whole batch");
    for (int i = 0; i < N; i++) {
        cr_assert_eq(tp_batch_task_status(0x72, (uint64_t)i, &status), TP_ANSWER_LOCAL);
        cr_expect_eq(status.state, i % 2 ? TP_TASK_FAILED : TP_TASK_COMPLETED, "task %d", i);
        cr_expect_eq(status.bytes, i % 2 ? 0 : BYTES);
        cr_expect(i % 2 || memcmp(store.memory + i * BYTES, buffer + i * BYTES, BYTES) == 0);
    }
    cr_assert_eq(rig_counter(TP_COPY_FAILED), 5);
    cr_assert_eq(rig_counter(TP_LOCAL_REQUESTS) - requests, 5);
    cr_assert_eq(rig_counter(TP_LOCAL_WRITE_BYTES) - written, 3 * BYTES);
    cr_assert_eq(rig_counter(TP_LOCAL_READ_BYTES) - read, 2 * BYTES);
    cr_assert_eq(rig_free(0x72), 0);
}

/* ---- the lease page: no message of the store has been read yet ---- */

enum lease_end { WITHDRAWN, SERVER_ENDED, KILLED };

static void end_lease(enum lease_end how) {
    if (how == WITHDRAWN)
        atomic_store(&store.lease->segments[FAKE_SLOT], 0);
    else
        atomic_store(&store.lease->owner, how == KILLED ? TP_LEASE_OWNER_DIED : 0);
}

static void submit_and_end_lease(int opcode, enum lease_end how) {
    struct rig_request r = rig_make(opcode, buffer, 1, FAKE_BASE, store.bytes);
    struct tp_submit submit;
    struct tp_task_status status;
    cr_assert_eq(rig_begin(engine, 0x90, 1, &r, 1, &submit), TP_PLAN_ALL);
    end_lease(how);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x90, NULL), TP_TASK_FAILED);
    cr_assert_eq(tp_batch_task_status(0x90, 0, &status), TP_ANSWER_LOCAL);
    cr_assert_eq(status.state, TP_TASK_FAILED);
    cr_assert_eq(rig_counter(TP_COPY_FAILED), 1);
    cr_assert_eq(rig_free(0x90), 0);
    cr_assert_eq(rig_begin(engine, 0x90, 1, &r, 1, &submit), TP_PLAN_NONE);
    cr_assert_eq(rig_counter(how == WITHDRAWN ? TP_FALLBACK_OUT_OF_RANGE : TP_FALLBACK_PEER_GONE),
                 1);
    cr_assert_eq(rig_counter(TP_PEERS_LOST), 0, "the connection is still there");
}

Test(batch, a_put_into_memory_that_was_taken_back_fails) {
    submit_and_end_lease(TP_OP_WRITE, WITHDRAWN);
}

Test(batch, a_get_from_memory_that_was_taken_back_fails) {
    submit_and_end_lease(TP_OP_READ, WITHDRAWN);
}

Test(batch, a_put_into_a_dead_stores_memory_fails) {
    submit_and_end_lease(TP_OP_WRITE, KILLED);
}

Test(batch, a_get_from_a_store_that_serves_no_more_fails) {
    submit_and_end_lease(TP_OP_READ, SERVER_ENDED);
}

Test(batch, a_segment_that_was_taken_back_fails_its_own_tasks_only) {
    struct fake_store other;
    fake_start(&other, config,
               &(struct fake_options){.name = "127.0.0.1:2",
                                      .base = FAKE_BASE + (1 << 30),
                                      .manner = FAKE_TWO_SEGMENTS});
    tp_engine_open(engine, 2, "127.0.0.1:2", 11);
    cr_assert(rig_wait(engine, 2, FAKE_BASE + (1 << 30), 5000));
    cr_assert(rig_wait(engine, 2, FAKE_SECOND_BASE, 5000));
    enum { N = 12, BYTES = 100000 };
    struct rig_request r[N];
    for (int i = 0; i < N; i++) {
        uint64_t base = i % 3 == 0   ? FAKE_BASE
                        : i % 3 == 1 ? FAKE_BASE + (1 << 30)
                                     : FAKE_SECOND_BASE;
        r[i] = rig_make(TP_OP_WRITE, buffer + i * BYTES, i % 3 == 0 ? 1 : 2,
                        base + (uint64_t)i * BYTES, BYTES);
    }
    struct tp_submit submit;
    struct tp_task_status status;
    cr_assert_eq(rig_begin(engine, 0x91, N, r, N, &submit), TP_PLAN_ALL);
    atomic_store(&other.lease->segments[FAKE_SLOT + 1], 0);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x91, NULL), TP_TASK_FAILED, "Mooncake's rule for the whole batch");
    for (int i = 0; i < N; i++) {
        cr_assert_eq(tp_batch_task_status(0x91, (uint64_t)i, &status), TP_ANSWER_LOCAL);
        cr_expect_eq(status.state, i % 3 == 2 ? TP_TASK_FAILED : TP_TASK_COMPLETED, "task %d", i);
    }
    cr_assert_eq(rig_counter(TP_COPY_FAILED), 4);
    cr_assert_eq(rig_free(0x91), 0);
    fake_end(&other);
}

/* ---- a process that stood still: the clock jumps while no thread looks at it ---- */

static void submit_and_stand_still(int opcode, uint64_t bytes, enum tp_task_state expected) {
    struct rig_request r = rig_make(opcode, buffer, 1, FAKE_BASE, bytes);
    struct tp_submit submit;
    struct tp_task_status status;
    cr_assert_eq(rig_begin(engine, 0x92, 1, &r, 1, &submit), TP_PLAN_ALL);
    stand_still();
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x92, NULL), expected);
    cr_assert_eq(tp_batch_task_status(0x92, 0, &status), TP_ANSWER_LOCAL);
    cr_assert_eq(status.state, expected);
    cr_assert_eq(rig_free(0x92), 0);
    bool same = memcmp(buffer, store.memory, bytes) == 0;
    cr_assert_eq(same, expected == TP_TASK_COMPLETED, "what fails is not copied at all");
    /* What is submitted afterwards is not affected. */
    cr_assert_eq(rig_begin(engine, 0x92, 1, &r, 1, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(0x92, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(rig_free(0x92), 0);
}

Test(batch, a_write_that_was_submitted_before_the_process_stood_still_fails) {
    submit_and_stand_still(TP_OP_WRITE, store.bytes, TP_TASK_FAILED);
    cr_assert_eq(rig_counter(TP_COPY_FAILED), 1);
    cr_assert_eq(rig_counter(TP_LATE_WRITES), store.bytes / TP_GRAIN_BYTES);
}

Test(batch, a_small_write_too) {
    submit_and_stand_still(TP_OP_WRITE, 4096, TP_TASK_FAILED);
    cr_assert_eq(rig_counter(TP_LATE_WRITES), 1);
}

Test(batch, a_read_does_not_fail_because_the_process_stood_still) {
    submit_and_stand_still(TP_OP_READ, store.bytes, TP_TASK_COMPLETED);
    cr_assert_eq(rig_counter(TP_LATE_WRITES), 0);
}

/* The kernel says so before anybody can have waited for the process's end. */
Test(batch, a_killed_store_is_dead_by_its_lease_page_at_once) {
    for (int i = 0; i < 20; i++) {
        struct fake_store victim;
        fake_start(&victim, config, &(struct fake_options){.name = "127.0.0.1:3"});
        while (atomic_load(&victim.lease->owner) == 0)
            usleep(1000);
        cr_assert_eq(atomic_load(&victim.lease->owner), (uint32_t)victim.pid);
        fake_kill(&victim);
        cr_assert(atomic_load(&victim.lease->owner) & TP_LEASE_OWNER_DIED);
        fake_end(&victim);
    }
}

static unsigned views(void) {
    char line[512];
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof(line), maps))
        count += strstr(line, "memfd:fake") != NULL;
    fclose(maps);
    return count;
}

Test(batch, a_batch_that_nobody_asks_about_does_not_hold_a_dead_stores_memory) {
    struct rig_request r = rig_make(TP_OP_READ, buffer, 1, FAKE_BASE, 3 * MIB);
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 0x71, 1, &r, 1, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    fake_kill(&store);
    uint64_t end = tp_now_ms() + 1000;
    while (views() > 1 && tp_now_ms() < end)
        usleep(5000);
    cr_assert_eq(views(), 1);
}

/* ---- threads ---- */

static void *hammer(void *arg) {
    uint64_t me = (uint64_t)(uintptr_t)arg;
    unsigned char *mine = malloc(65536);
    for (unsigned i = 0; i < 300; i++) {
        uint64_t id = 0x1000000 + me * 4096 + i % 7 * 64;
        uint64_t at = me * 65536 + i % 13 * 1000;
        uint64_t bytes = 1 + (i * 977) % 40000;
        memset(mine, (int)(i + me), bytes);
        struct rig_request w = rig_make(TP_OP_WRITE, mine, 1, FAKE_BASE + at, bytes);
        struct tp_submit submit;
        if (rig_begin(engine, id, 1, &w, 1, &submit) != TP_PLAN_ALL)
            return (void *)1;
        tp_submit_commit(&submit);
        if (rig_finish(id, NULL) != TP_TASK_COMPLETED || rig_free(id) != 0 ||
            memcmp(store.memory + at, mine, bytes) != 0)
            return (void *)2;
    }
    free(mine);
    return NULL;
}

Test(batch, twenty_threads) {
    pthread_t threads[20];
    for (uintptr_t i = 0; i < 20; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, hammer, (void *)i), 0);
    for (int i = 0; i < 20; i++) {
        void *result;
        pthread_join(threads[i], &result);
        cr_assert_null(result, "thread %d: %p", i, result);
    }
}

Test(batch, a_forked_child_knows_nothing_and_hangs_on_nothing) {
    struct rig_request r = rig_make(TP_OP_READ, buffer, 1, FAKE_BASE, 10);
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 0x80, 1, &r, 1, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    pid_t pid = fork();
    if (pid == 0) {
        struct tp_task_status status;
        struct tp_batch *batch;
        bool right = tp_batch_task_status(0x80, 0, &status) == TP_ANSWER_UNKNOWN &&
                     tp_batch_status(0x80, &status) == TP_ANSWER_UNKNOWN &&
                     tp_batch_detach(0x80, &batch) == -ENOENT && !tp_transport_on() &&
                     rig_begin(engine, 0x81, 1, &r, 1, &submit) == TP_PLAN_NONE;
        tp_transport_stop();
        tp_engine_forget(&engine_key);
        _exit(right ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    cr_assert_eq(rig_finish(0x80, NULL), TP_TASK_COMPLETED);
}
