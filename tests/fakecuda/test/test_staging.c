/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: copies of a store's memory that is not registered go by way of pinned slots, each byte to
 * its place; several slots are under way at once, to a busy GPU in one call; what cannot be staged
 * is copied as it is, and what fails is told as failed.
 */
#include "chunks_rig.h"
#include "refused_threads.h"
#include "stood_still.h"
#include "transport/stage_slot.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <sys/wait.h>

#define CHUNK (4 * MIB)
#define REGISTER "\"register_peer_memory\": true, \"register_ahead_chunks\": 0"
#define NONE_REGISTERED "cuMemHostRegister:*=2"

static CUdeviceptr gpu;

static void fail_calls(const char *rules) {
    cr_assert_eq(DRIVER(fakecuda_set_failures)(rules), 0);
}

static void begin(const char *settings, size_t gpu_bytes, const char *failures) {
    load_driver(settings);
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    while (!tp_gpu_calibrated(tp_gpu_get(0)))
        usleep(1000);
    gpu = device_memory(gpu_bytes);
    fail_calls(failures);
}

static void no_violation(void) {
    cr_assert_eq(DRIVER(fakecuda_violations)(), 0, "%s", DRIVER(fakecuda_last_violation)());
}

static void end(struct mapped *mapped) {
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    tp_stage_stop();
    no_violation();
}

/* Where the parts of a job lie: here in the GPU's memory, there in the store's. */
struct part {
    uint64_t here, there, bytes;
};

static void submit(struct tp_device_job *job, const struct mapped *mapped, bool to_device,
                   const struct part *parts, unsigned count) {
    struct tp_chunk_cursor cursor = {0};
    uint8_t group = 0;
    for (unsigned i = 0; i < count; i++) {
        struct tp_chunk_copy copy = {.to_device = to_device,
                                     .there = mapped->address + parts[i].there,
                                     .here = (char *)(uintptr_t)(gpu + parts[i].here),
                                     .bytes = parts[i].bytes,
                                     .run_bytes = parts[i].bytes};
        cr_assert_eq(tp_chunks_add(job, mapped->chunks, &cursor, &copy, &group), 0);
    }
    tp_device_start(job);
}

static enum tp_device_state run_parts(const struct mapped *mapped, bool to_device,
                                      const struct part *parts, unsigned count) {
    struct tp_device_job job = {0};
    submit(&job, mapped, to_device, parts, count);
    enum tp_device_state state = finish(&job);
    tp_device_reset(&job);
    tp_device_release(&job);
    return state;
}

/* Put, then get elsewhere: all bytes, also those around. `parts` do not overlap. */
static void check_parts(const struct mapped *mapped, uint64_t gpu_bytes, const struct part *parts,
                        unsigned count, uint64_t seed) {
    unsigned char *sent = malloc(gpu_bytes);
    unsigned char *got = malloc(gpu_bytes);
    unsigned char *want = malloc(mapped->message.map_bytes);
    fill_random(sent, gpu_bytes, &seed);
    memcpy(want, mapped->address, mapped->message.map_bytes);
    cr_assert_eq(DRIVER(fakecuda_poke)(gpu, sent, gpu_bytes), 0);
    cr_assert_eq(run_parts(mapped, false, parts, count), TP_DEVICE_DONE);
    for (unsigned i = 0; i < count; i++)
        memcpy(want + parts[i].there, sent + parts[i].here, parts[i].bytes);
    cr_assert_eq(memcmp(mapped->address, want, mapped->message.map_bytes), 0, "put");
    memset(sent, 0x5a, gpu_bytes);
    cr_assert_eq(DRIVER(fakecuda_poke)(gpu, sent, gpu_bytes), 0);
    cr_assert_eq(run_parts(mapped, true, parts, count), TP_DEVICE_DONE);
    for (unsigned i = 0; i < count; i++)
        memcpy(sent + parts[i].here, want + parts[i].there, parts[i].bytes);
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, gpu_bytes), 0);
    cr_assert_eq(memcmp(got, sent, gpu_bytes), 0, "get");
    free(sent);
    free(got);
    free(want);
}

/* One object in blocks that lie the other way round in the GPU's memory. */
static void check_blocks(const struct mapped *mapped, uint64_t start, uint64_t block,
                         unsigned count) {
    struct part *parts = calloc(count, sizeof(*parts));
    for (unsigned i = 0; i < count; i++)
        parts[i] = (struct part){(count - 1 - i) * block, start + i * block, block};
    check_parts(mapped, count * block, parts, count, block + count);
    free(parts);
}

/* ---- bytes ---- */

static void check_all_kinds(struct mapped *mapped) {
    check_blocks(mapped, 0, 3 * CHUNK, 1);
    check_blocks(mapped, 4096, 16384, 700);
    check_blocks(mapped, 12345, 1000003, 11);
    check_blocks(mapped, 77, 999, 3000);
    check_blocks(mapped, CHUNK - 1, 2, 2);
    check_blocks(mapped, 5, 73728, 61);
    check_blocks(mapped, 3, 1, 1);
    check_blocks(mapped, MIB - 1, 1 * MIB + 1, 9);
}

Test(staging, blocks_of_all_kinds_by_kernel, .timeout = 60) {
    begin(REGISTER ", \"copy_engine\": \"kernel\"", 3 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    cr_assert_eq(counted(TP_DMA_BYTES), 0);
    cr_assert_eq(counted(TP_STAGED_BYTES), counted(TP_KERNEL_BYTES));
    cr_assert_eq(counted(TP_REGISTER_HITS), 0);
    end(mapped);
}

Test(staging, blocks_of_all_kinds_by_copy_engine, .timeout = 60) {
    begin(REGISTER ", \"copy_engine\": \"dma\"", 3 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    cr_assert_eq(counted(TP_KERNEL_BYTES), 0);
    cr_assert_eq(counted(TP_STAGED_BYTES), counted(TP_DMA_BYTES));
    end(mapped);
}

/* Some chunks are registered, some not: a request may lie in both. */
Test(staging, at_a_quarter_of_the_working_set, .timeout = 60) {
    begin(REGISTER ", \"register_max_bytes\": \"12M\", \"kernel_max_bytes\": 65536", 12 * CHUNK,
          "");
    struct mapped *mapped = map_segment(12 * CHUNK, 18 * MIB, 4096);
    for (unsigned pass = 0; pass < 2; pass++) {
        check_blocks(mapped, 0, 12 * MIB, 4);
        check_blocks(mapped, pass * 111, 3 * MIB + 5, 15);
        check_blocks(mapped, 16384, 16384, 3000);
        cr_assert_leq(counted(TP_REGISTERED_BYTES) + counted(TP_STAGING_BYTES), 12 * MIB);
    }
    cr_assert_gt(counted(TP_REGISTER_HITS), 0);
    cr_assert_gt(counted(TP_STAGED_BYTES), 300 * MIB);
    cr_assert_lt(counted(TP_STAGED_BYTES), counted(TP_DMA_BYTES) + counted(TP_KERNEL_BYTES));
    end(mapped);
}

static void check_limit(const char *limit, uint64_t bytes, bool staged) {
    char settings[200];
    snprintf(settings, sizeof(settings), REGISTER ", \"register_max_bytes\": %s", limit);
    begin(settings, 3 * CHUNK, "");
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    cr_assert_leq(counted(TP_REGISTERED_BYTES) + counted(TP_STAGING_BYTES), bytes);
    cr_assert_eq(counted(TP_STAGED_BYTES) > 0, staged, "%zu %zu %zu",
                 (size_t)counted(TP_STAGED_BYTES), (size_t)counted(TP_STAGING_BYTES),
                 (size_t)counted(TP_DMA_BYTES));
    end(mapped);
}

Test(staging, a_limit_below_a_chunk, .timeout = 60) {
    check_limit("\"3M\"", 3 * MIB, true);
}

Test(staging, a_limit_of_a_chunk, .timeout = 60) {
    check_limit("\"4M\"", 4 * MIB, true);
}

Test(staging, a_limit_that_is_no_multiple_of_anything, .timeout = 60) {
    check_limit("5242887", 5242887, true);
}

Test(staging, a_limit_below_a_slot, .timeout = 60) {
    check_limit("65537", 65537, false);
}

Test(staging, nothing_is_staged_when_all_is_registered, .timeout = 60) {
    begin(REGISTER, 5 * CHUNK, "");
    struct mapped *mapped = map_segment(5 * CHUNK, 5 * CHUNK, 4096);
    check_blocks(mapped, 0, 5 * CHUNK, 1);
    for (uint64_t end_ms = tp_now_ms() + 5000;
         counted(TP_REGISTERED_BYTES) < 5 * CHUNK && tp_now_ms() < end_ms;)
        usleep(1000);
    uint64_t staged = counted(TP_STAGED_BYTES);
    check_blocks(mapped, 0, 5 * CHUNK, 1);
    check_blocks(mapped, 77, 16384, 1000);
    cr_assert_eq(counted(TP_STAGED_BYTES), staged);
    end(mapped);
}

/* ---- the pipeline ---- */

/* Once in five tries it takes no longer: a machine may stand still or be busy with something else.
 */
static bool one_way_within(const struct mapped *mapped, bool to_device, uint64_t limit_ms) {
    struct part all = {0, 0, 4 * CHUNK};
    uint64_t took_ms = UINT64_MAX;
    for (int i = 0; i < 5 && took_ms > limit_ms; i++) {
        uint64_t start = tp_now_ms();
        uint64_t staged = counted(TP_STAGED_BYTES);
        cr_assert_eq(run_parts(mapped, to_device, &all, 1), TP_DEVICE_DONE);
        cr_assert_eq(counted(TP_STAGED_BYTES), staged + 4 * CHUNK);
        took_ms = tp_now_ms() - start;
    }
    return took_ms <= limit_ms;
}

/* 16 slots; the GPU begins each only after 200 ms. */
Test(staging, slots_are_under_way_at_once, .timeout = 60) {
    setenv("FAKECUDA_DELAY_US", "200000", 1);
    begin(REGISTER ", \"copy_engine\": \"dma\"", 4 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(4 * CHUNK, 4 * CHUNK, 4096);
    cr_assert(one_way_within(mapped, true, 16 * 200 / 2));
    cr_assert(one_way_within(mapped, false, 16 * 200 / 2));
    end(mapped);
}

/* What the calls are given, and does the process stand still during one? */
static _Atomic bool still_at_call;
static _Atomic uint32_t sent_calls, ended_calls, most_at_once, most_ops, most_bytes;
tp_cu_result __real_tp_gpu_send_staged(struct tp_gpu *to, enum tp_gpu_method *method,
                                       bool to_device, const struct tp_copy_op *ops, uint32_t count,
                                       uint64_t *scratch, tp_cu_event event);
tp_cu_result __wrap_tp_gpu_send_staged(struct tp_gpu *to, enum tp_gpu_method *method,
                                       bool to_device, const struct tp_copy_op *ops, uint32_t count,
                                       uint64_t *scratch, tp_cu_event event);
tp_cu_result __real_tp_gpu_query(struct tp_gpu *of, tp_cu_event event);
tp_cu_result __wrap_tp_gpu_query(struct tp_gpu *of, tp_cu_event event);

static void raise_to(_Atomic uint32_t *most, uint32_t value) {
    for (uint32_t seen = atomic_load(most);
         seen < value && !atomic_compare_exchange_weak(most, &seen, value);)
        continue;
}

tp_cu_result __wrap_tp_gpu_send_staged(struct tp_gpu *to, enum tp_gpu_method *method,
                                       bool to_device, const struct tp_copy_op *ops, uint32_t count,
                                       uint64_t *scratch, tp_cu_event event) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += ops[i].bytes;
    raise_to(&most_at_once, atomic_fetch_add(&sent_calls, 1) + 1 - atomic_load(&ended_calls));
    raise_to(&most_ops, count);
    raise_to(&most_bytes, (uint32_t)bytes);
    if (atomic_exchange(&still_at_call, false))
        stand_still();
    return __real_tp_gpu_send_staged(to, method, to_device, ops, count, scratch, event);
}

tp_cu_result __wrap_tp_gpu_query(struct tp_gpu *of, tp_cu_event event) {
    tp_cu_result result = __real_tp_gpu_query(of, event);
    if (result == TP_CUDA_SUCCESS)
        atomic_fetch_add(&ended_calls, 1);
    return result;
}

/* It is in a slot, and the place in the store's memory may be another object's by now. */
Test(staging, a_write_fails_that_the_process_stood_still_before, .timeout = 60) {
    struct tp_device_job job = {0};
    struct part some = {0, 0, 65536};
    begin(REGISTER, CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    unsigned char *there = (unsigned char *)mapped->address;
    unsigned char before[65536];
    memset(there, 0x5a, sizeof(before));
    memset(before, 0x5a, sizeof(before));
    atomic_store(&still_at_call, true);
    job.submitted_ms = tp_stall_look();
    submit(&job, mapped, false, &some, 1);
    cr_assert_eq(finish(&job), TP_DEVICE_FAILED);
    cr_assert_not(atomic_load(&still_at_call));
    cr_assert_eq(memcmp(there, before, sizeof(before)), 0, "nothing is copied");
    cr_assert_eq(counted(TP_LATE_WRITES), 1);
    tp_device_reset(&job);
    job.submitted_ms = tp_stall_look();
    submit(&job, mapped, false, &some, 1);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE, "what is submitted afterwards is not affected");
    cr_assert_neq(memcmp(there, before, sizeof(before)), 0);
    tp_device_reset(&job);
    tp_device_release(&job);
    end(mapped);
}

/* To a GPU that takes its time: slots gather, up to eight a call. Once in five tries, as above. */
Test(staging, what_is_filled_while_the_gpu_is_busy_goes_in_one_call, .timeout = 60) {
    struct part all = {0, 0, 16 * CHUNK};
    uint32_t calls = UINT32_MAX;
    setenv("FAKECUDA_DELAY_US", "50000", 1);
    begin(REGISTER ", \"copy_engine\": \"kernel\"", 16 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(16 * CHUNK, 16 * CHUNK, 4096);
    for (int i = 0; i < 5 && calls > 64 / 2; i++) {
        atomic_store(&sent_calls, 0);
        cr_assert_eq(run_parts(mapped, true, &all, 1), TP_DEVICE_DONE);
        calls = atomic_load(&sent_calls);
    }
    cr_assert_leq(calls, 64 / 2);
    cr_assert_gt(atomic_load(&most_bytes), 2 * MIB);
    cr_assert_leq(atomic_load(&most_bytes), 8 * MIB);
    end(mapped);
}

/* Blocks of 1 to 16 KiB: a call's list has an end, whatever fits into its slots. */
Test(staging, small_blocks_to_a_busy_gpu, .timeout = 60) {
    setenv("FAKECUDA_DELAY_US", "5000", 1);
    begin(REGISTER ", \"copy_engine\": \"kernel\"", 3 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    for (uint64_t block = 1024; block <= 16384; block *= 2)
        check_blocks(mapped, block, block, (unsigned)(12 * MIB / block));
    check_all_kinds(mapped);
    cr_assert_gt(atomic_load(&most_ops), 1024 + 64); /* more than one slot's */
    cr_assert_leq(atomic_load(&most_ops), TP_SEND_OPS);
    end(mapped);
}

/* Whose lists fill a call long before its slots do. */
Test(staging, many_calls_of_tiny_blocks_are_under_way, .timeout = 60) {
    enum { BLOCKS = 6 * 1024 };
    struct part *parts = calloc(BLOCKS, sizeof(*parts));
    for (unsigned i = 0; i < BLOCKS; i++)
        parts[i] = (struct part){(uint64_t)(BLOCKS - 1 - i) * 1024, (uint64_t)i * 1024, 1024};
    setenv("FAKECUDA_DELAY_US", "50000", 1);
    begin(REGISTER ", \"copy_engine\": \"kernel\"", 2 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    for (int i = 0; i < 5 && atomic_load(&most_at_once) < 4; i++)
        cr_assert_eq(run_parts(mapped, true, parts, BLOCKS), TP_DEVICE_DONE);
    cr_assert_eq(atomic_load(&most_at_once), 4);
    free(parts);
    end(mapped);
}

/* Without any thread of the library's: whoever polls does it all. */
Test(staging, pollers_do_without_threads, .timeout = 60) {
    struct tp_device_job jobs[2] = {0};
    struct part parts[2] = {{0, 0, 2 * CHUNK}, {2 * CHUNK, 2 * CHUNK, 2 * CHUNK}};
    unsigned char *got = malloc(4 * CHUNK);
    uint64_t seed = 3;
    setenv("FAKECUDA_DELAY_US", "20000", 1);
    begin(REGISTER, 4 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(4 * CHUNK, 4 * CHUNK, 4096);
    fill_random((unsigned char *)mapped->address, 4 * CHUNK, &seed);
    submit(&jobs[0], mapped, true, &parts[0], 1);
    submit(&jobs[1], mapped, true, &parts[1], 1);
    tp_stage_stop();
    cr_assert_eq(finish(&jobs[1]), TP_DEVICE_DONE);
    cr_assert_eq(finish(&jobs[0]), TP_DEVICE_DONE);
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, 4 * CHUNK), 0);
    cr_assert_eq(memcmp(got, mapped->address, 4 * CHUNK), 0);
    for (unsigned i = 0; i < 2; i++) {
        tp_device_reset(&jobs[i]);
        tp_device_release(&jobs[i]);
    }
    free(got);
    end(mapped);
}

/* The first slot is there, and whoever made it has not gone on yet: to give it back, or after. */
static _Atomic bool hold_up_before, hold_up, held_up;
void __real_tp_slot_give(struct tp_gpu *by, struct tp_slot *slot);
void __wrap_tp_slot_give(struct tp_gpu *by, struct tp_slot *slot);

static void hold(_Atomic bool *asked, unsigned ms) {
    if (!atomic_exchange(asked, false))
        return;
    atomic_store(&held_up, true);
    usleep(ms * 1000);
}

void __wrap_tp_slot_give(struct tp_gpu *by, struct tp_slot *slot) {
    hold(&hold_up_before, 500);
    __real_tp_slot_give(by, slot);
    hold(&hold_up, 2000);
}

static void *make_ready(void *arg) {
    (void)tp_stage_ready(tp_gpu_get(0));
    return arg;
}

static bool ends_by_itself(const struct tp_device_job *job, uint64_t limit_ms) {
    uint64_t end_ms = tp_now_ms() + limit_ms;
    while (tp_device_look(job, TP_DEVICE_GROUPS) == TP_DEVICE_RUNNING && tp_now_ms() < end_ms)
        usleep(100);
    return tp_device_look(job, TP_DEVICE_GROUPS) == TP_DEVICE_DONE;
}

Test(staging, the_second_user_of_a_gpu_need_not_wait_for_the_first, .timeout = 60) {
    struct tp_device_job job = {0};
    struct part all = {0, 0, CHUNK};
    pthread_t first;
    begin(REGISTER, CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    atomic_store(&hold_up, true);
    cr_assert_eq(pthread_create(&first, NULL, make_ready, NULL), 0);
    while (!atomic_load(&held_up))
        usleep(1000);
    submit(&job, mapped, true, &all, 1);
    cr_assert(ends_by_itself(&job, 1000));
    pthread_join(first, NULL);
    tp_device_reset(&job);
    tp_device_release(&job);
    end(mapped);
}

/* The only one: the threads found none free, and sleep by then. */
Test(staging, a_slot_that_is_given_back_by_its_maker_is_seen, .timeout = 60) {
    struct tp_device_job job = {0};
    struct part all = {0, 0, CHUNK};
    pthread_t first;
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    atomic_store(&hold_up_before, true);
    cr_assert_eq(pthread_create(&first, NULL, make_ready, NULL), 0);
    while (!atomic_load(&held_up))
        usleep(1000);
    submit(&job, mapped, true, &all, 1);
    pthread_join(first, NULL);
    cr_assert(ends_by_itself(&job, 5000));
    tp_device_reset(&job);
    tp_device_release(&job);
    end(mapped);
}

/* Without threads, the other direction has the only slot, and nobody polls that. */
static void check_polling_one(bool to_device) {
    struct tp_device_job jobs[2] = {0};
    struct part parts[2] = {{0, 0, CHUNK}, {CHUNK, CHUNK, CHUNK}};
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", 2 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    refuse_threads("tidepool-stage", 1000);
    submit(&jobs[0], mapped, !to_device, &parts[0], 1);
    submit(&jobs[1], mapped, to_device, &parts[1], 1);
    tp_device_poll(&jobs[0]);
    cr_assert_eq(finish(&jobs[1]), TP_DEVICE_DONE);
    cr_assert_eq(finish(&jobs[0]), TP_DEVICE_DONE);
    cr_assert_gt(atomic_load(&refused_threads), 0);
    cr_assert_eq(counted(TP_STAGED_BYTES), 2 * CHUNK);
    for (unsigned i = 0; i < 2; i++) {
        tp_device_reset(&jobs[i]);
        tp_device_release(&jobs[i]);
    }
    end(mapped);
}

Test(staging_faults, polling_a_put_ends_it_without_threads, .timeout = 60) {
    check_polling_one(false);
}

Test(staging_faults, polling_a_get_ends_it_without_threads, .timeout = 60) {
    check_polling_one(true);
}

/* Whoever polls does it all, until there are some. */
Test(staging_faults, a_thread_that_cannot_be_started_is_tried_again, .timeout = 60) {
    struct tp_device_job job = {0};
    struct part all = {0, 0, CHUNK};
    begin(REGISTER, CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    refuse_threads("tidepool-stage", 1);
    submit(&job, mapped, false, &all, 1);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    tp_device_reset(&job);
    cr_assert_eq(atomic_load(&refused_threads), 0);
    usleep(1100000);
    submit(&job, mapped, false, &all, 1);
    cr_assert(ends_by_itself(&job, 5000));
    tp_device_reset(&job);
    tp_device_release(&job);
    end(mapped);
}

Test(staging, nobody_need_poll_for_the_bytes_to_come, .timeout = 60) {
    struct tp_device_job job = {0};
    struct part all = {0, 0, CHUNK};
    begin(REGISTER, CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    submit(&job, mapped, false, &all, 1);
    cr_assert(ends_by_itself(&job, 5000));
    tp_device_reset(&job);
    tp_device_release(&job);
    end(mapped);
}

/* Whoever polls takes steps for others too, and leaves once its own copies have ended. */
static void check_left_alone(bool to_device) {
    struct tp_device_job jobs[2] = {0};
    struct part parts[2] = {{0, 0, CHUNK}, {CHUNK, CHUNK, CHUNK}};
    begin(REGISTER ", \"register_max_bytes\": \"2M\"", 2 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    for (unsigned round = 0; round < 50; round++) {
        submit(&jobs[0], mapped, to_device, &parts[0], 1);
        submit(&jobs[1], mapped, to_device, &parts[1], 1);
        cr_assert_eq(finish(&jobs[0]), TP_DEVICE_DONE);
        cr_assert(ends_by_itself(&jobs[1], 5000), "round %u", round);
        tp_device_reset(&jobs[0]);
        tp_device_reset(&jobs[1]);
    }
    cr_assert_eq(counted(TP_STAGED_BYTES), UINT64_C(100) * CHUNK);
    tp_device_release(&jobs[0]);
    tp_device_release(&jobs[1]);
    end(mapped);
}

Test(staging, what_a_poller_leaves_is_seen_to_from_the_gpu, .timeout = 60) {
    check_left_alone(false);
}

Test(staging, what_a_poller_leaves_is_seen_to_to_the_gpu, .timeout = 60) {
    check_left_alone(true);
}

/* A long queue one way, and a little the other way behind it: they take turns at the only slot. */
static void check_turns(bool long_to_device) {
    struct tp_device_job jobs[2] = {0};
    struct part parts[2] = {{0, 0, 24 * CHUNK}, {24 * CHUNK, 24 * CHUNK, CHUNK}};
    setenv("FAKECUDA_DELAY_US", "5000", 1);
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", 25 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(25 * CHUNK, 25 * CHUNK, 4096);
    submit(&jobs[0], mapped, long_to_device, &parts[0], 1);
    submit(&jobs[1], mapped, !long_to_device, &parts[1], 1);
    cr_assert(ends_by_itself(&jobs[1], 20000));
    cr_assert_eq(tp_device_look(&jobs[0], TP_DEVICE_GROUPS), TP_DEVICE_RUNNING);
    cr_assert_eq(finish(&jobs[0]), TP_DEVICE_DONE);
    for (unsigned i = 0; i < 2; i++) {
        tp_device_reset(&jobs[i]);
        tp_device_release(&jobs[i]);
    }
    end(mapped);
}

Test(staging, a_put_has_its_turn_among_many_gets, .timeout = 60) {
    check_turns(true);
}

Test(staging, a_get_has_its_turn_among_many_puts, .timeout = 60) {
    check_turns(false);
}

Test(staging, a_child_of_a_fork_leaves_it_alone, .timeout = 60) {
    struct tp_device_job job = {0};
    struct part all = {0, 0, CHUNK};
    setenv("FAKECUDA_DELAY_US", "50000", 1);
    begin(REGISTER, CHUNK, NONE_REGISTERED);
    tp_fork_guard();
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    submit(&job, mapped, false, &all, 1);
    pid_t child = fork();
    if (child == 0)
        _exit(tp_gpu_get(0) ? 1 : 0);
    int status = 1;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    tp_device_reset(&job);
    tp_device_release(&job);
    end(mapped);
}

/* ---- a driver that refuses ---- */

/* No pinned memory at all: as without staging. */
Test(staging_faults, no_pinned_memory, .timeout = 60) {
    begin(REGISTER, 3 * CHUNK, NONE_REGISTERED ",cuMemHostAlloc:*=2");
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    cr_assert_eq(counted(TP_STAGED_BYTES) + counted(TP_STAGING_BYTES), 0);
    end(mapped);
}

Test(staging_faults, pinned_memory_for_one_slot_each_way, .timeout = 60) {
    begin(REGISTER, 3 * CHUNK,
          NONE_REGISTERED ",cuMemHostAlloc:3=2,cuMemHostAlloc:4=2,cuMemHostAlloc:5=2,"
                          "cuMemHostAlloc:6=2");
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    cr_assert_gt(counted(TP_STAGED_BYTES), 0);
    end(mapped);
}

Test(staging_faults, no_event, .timeout = 60) {
    begin(REGISTER, 3 * CHUNK, NONE_REGISTERED ",cuEventCreate:1=2,cuEventCreate:2=2");
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    end(mapped);
}

/* Each call in turn fails once, or always: success means the bytes, and there is an end. */
static void check_fault(const char *engine, const char *rule, bool to_device,
                        enum tp_device_state expected) {
    char rules[200];
    char settings[200];
    struct part all = {0, 0, 4 * CHUNK};
    unsigned char *got = malloc(4 * CHUNK);
    uint64_t seed = 8;
    snprintf(settings, sizeof(settings), REGISTER ", \"copy_engine\": \"%s\"", engine);
    begin(settings, 4 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(4 * CHUNK, 4 * CHUNK, 4096);
    cr_assert_eq(run_parts(mapped, to_device, &all, 1), TP_DEVICE_DONE);
    fill_random((unsigned char *)mapped->address, 4 * CHUNK, &seed);
    snprintf(rules, sizeof(rules), NONE_REGISTERED ",%s", rule);
    fail_calls(rules);
    enum tp_device_state state = run_parts(mapped, to_device, &all, 1);
    cr_assert_eq(state, expected, "%s: %d", rule, (int)state);
    if (state == TP_DEVICE_DONE) {
        cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, 4 * CHUNK), 0);
        cr_assert_eq(memcmp(got, mapped->address, 4 * CHUNK), 0);
    }
    free(got);
    fail_calls("");
    end(mapped);
}

Test(staging_faults, a_copy_that_is_refused_to_the_gpu, .timeout = 60) {
    check_fault("dma", "cuMemcpyBatchAsync:*=1,cuMemcpyAsync:5=1", true, TP_DEVICE_FAILED);
}

Test(staging_faults, a_copy_that_is_refused_from_the_gpu, .timeout = 60) {
    check_fault("dma", "cuMemcpyAsync:5=1", false, TP_DEVICE_FAILED);
}

/* Which is done again, copy by copy. */
Test(staging_faults, a_batch_that_is_refused_to_the_gpu, .timeout = 60) {
    check_fault("dma", "cuMemcpyBatchAsync:*=1", true, TP_DEVICE_DONE);
}

Test(staging_faults, all_copies_are_refused, .timeout = 60) {
    check_fault("dma", "cuMemcpyAsync:*=1", false, TP_DEVICE_FAILED);
}

/* Several slots in a call that fails: all their copies fail, and all of them are used again. */
Test(staging_faults, a_call_with_several_slots_that_fails, .timeout = 60) {
    struct part all = {0, 0, 16 * CHUNK};
    setenv("FAKECUDA_DELAY_US", "20000", 1);
    begin(REGISTER ", \"copy_engine\": \"dma\"", 16 * CHUNK, NONE_REGISTERED);
    struct mapped *mapped = map_segment(16 * CHUNK, 16 * CHUNK, 4096);
    cr_assert_eq(run_parts(mapped, true, &all, 1), TP_DEVICE_DONE);
    for (unsigned round = 0; round < 3; round++) {
        fail_calls(NONE_REGISTERED ",cuMemcpyBatchAsync:*=1,cuMemcpyAsync:*=1");
        cr_assert_eq(run_parts(mapped, true, &all, 1), TP_DEVICE_FAILED);
        fail_calls(NONE_REGISTERED);
        check_parts(mapped, 16 * CHUNK, &all, 1, round);
    }
    cr_assert_gt(atomic_load(&most_bytes), MIB);
    end(mapped);
}

/* The copies are waited for, and count. */
Test(staging_faults, an_event_that_is_not_recorded, .timeout = 60) {
    check_fault("auto", "cuEventRecord:2=1", true, TP_DEVICE_DONE);
}

Test(staging_faults, a_query_that_fails, .timeout = 60) {
    check_fault("auto", "cuEventQuery:2=1", false, TP_DEVICE_DONE);
}

Test(staging_faults, a_lost_context, .timeout = 60) {
    check_fault("dma", "cuEventQuery:*=700,cuStreamSynchronize:*=700,cuMemcpyAsync:3=700", false,
                TP_DEVICE_FAILED);
}

Test(staging_faults, a_context_that_cannot_be_entered, .timeout = 60) {
    check_fault("auto", "cuCtxPushCurrent:*=201", true, TP_DEVICE_FAILED);
}

/* Another thread finds the context lost while a copy is planned: at one of the plan's looks. */
static _Atomic int looks_left = -1;
struct tp_gpu *__real_tp_gpu_get(int device);
struct tp_gpu *__wrap_tp_gpu_get(int device);

struct tp_gpu *__wrap_tp_gpu_get(int device) {
    if (atomic_fetch_sub(&looks_left, 1) == 0)
        tp_gpu_give_up(__real_tp_gpu_get(device), "a test has said so");
    return __real_tp_gpu_get(device);
}

static void check_lost_at(int look, const char *failures) {
    struct tp_device_job job = {0};
    struct tp_chunk_cursor cursor = {0};
    uint8_t group = 0;
    uint64_t seed = 4;
    unsigned char *got = malloc(2 * CHUNK);
    begin(REGISTER, 2 * CHUNK, failures);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    fill_random((unsigned char *)mapped->address, 2 * CHUNK, &seed);
    struct tp_chunk_copy copy = {.to_device = true,
                                 .there = mapped->address,
                                 .here = (char *)(uintptr_t)gpu,
                                 .bytes = 2 * CHUNK,
                                 .run_bytes = 2 * CHUNK};
    atomic_store(&looks_left, look);
    int error = tp_chunks_add(&job, mapped->chunks, &cursor, &copy, &group);
    if (error == 0) {
        tp_device_start(&job);
        if (finish(&job) == TP_DEVICE_DONE) {
            cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, 2 * CHUNK), 0);
            cr_assert_eq(memcmp(got, mapped->address, 2 * CHUNK), 0, "success means the bytes");
        }
    } else {
        cr_assert_eq(error, -ENODEV);
    }
    tp_device_reset(&job);
    tp_device_release(&job);
    free(got);
    end(mapped);
}

static int looks[] = {0, 1, 2, 3, 4, 5, 6};

ParameterizedTestParameters(staging_faults, lost_while_planned) {
    return cr_make_param_array(int, looks, 7);
}

ParameterizedTest(int *look, staging_faults, lost_while_planned, .timeout = 60) {
    check_lost_at(*look, NONE_REGISTERED);
}

ParameterizedTestParameters(staging_faults, lost_while_planned_and_registered) {
    return cr_make_param_array(int, looks, 7);
}

ParameterizedTest(int *look, staging_faults, lost_while_planned_and_registered, .timeout = 60) {
    check_lost_at(*look, "");
}

Test(staging_faults, a_kernel_that_cannot_be_started, .timeout = 60) {
    begin(REGISTER ", \"copy_engine\": \"kernel\"", 3 * CHUNK,
          NONE_REGISTERED ",cuLaunchKernel:*=1");
    struct mapped *mapped = map_segment(5 * CHUNK, 10 * MIB, 4096);
    check_all_kinds(mapped);
    cr_assert_eq(counted(TP_KERNEL_BYTES), 0);
    cr_assert_gt(counted(TP_STAGED_BYTES), 0);
    end(mapped);
}
