/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: a store's memory is registered in chunks, within the limit; beyond it a chunk that has not
 * been used for a while gives way to one that is used more often, and no other; what a copy refers
 * to stays registered; what the driver refuses is counted, and the copy goes on without.
 */
#include "chunks_rig.h"
#include "refused_threads.h"
#include "transport/chunk.h"

#include <criterion/criterion.h>

#define CHUNK (4 * MIB)
#define REGISTER "\"register_peer_memory\": true, \"register_ahead_chunks\": 0"

static CUdeviceptr gpu;
static uint64_t by_kernel; /* of the copies that check_whole counts */

static void begin(const char *settings, size_t gpu_bytes) {
    load_driver(settings);
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    gpu = device_memory(gpu_bytes);
}

static void no_violation(void) {
    cr_assert_eq(DRIVER(fakecuda_violations)(), 0, "%s", DRIVER(fakecuda_last_violation)());
}

static void fail_calls(const char *rules) {
    cr_assert_eq(DRIVER(fakecuda_set_failures)(rules), 0);
}

static bool touch(const struct mapped *mapped, unsigned chunk) {
    uint64_t before = counted(TP_REGISTER_HITS);
    cr_assert(copy_chunks(mapped, true, chunk * CHUNK, gpu, CHUNK));
    return counted(TP_REGISTER_HITS) == before + 1;
}

static bool hold_once(const struct mapped *mapped, unsigned chunk) {
    uint64_t left;
    struct tp_chunk *held = tp_chunk_at(mapped->chunks, mapped->address + chunk * CHUNK, &left);
    bool registered = tp_chunk_hold(held, tp_gpu_get(0), CHUNK);
    tp_chunk_release(held);
    return registered;
}

/* Used for so long: is it registered in the end? */
static bool comes(const struct mapped *mapped, unsigned chunk, uint64_t limit_ms) {
    for (uint64_t end = tp_now_ms() + limit_ms; tp_now_ms() < end; usleep(1000)) {
        if (hold_once(mapped, chunk))
            return true;
    }
    return false;
}

/* Touched until it is a hit: one that is just being registered ahead is copied as it is. */
static bool touch_soon(const struct mapped *mapped, unsigned chunk) {
    for (uint64_t end = tp_now_ms() + 5000; tp_now_ms() < end;) {
        if (touch(mapped, chunk))
            return true;
    }
    return false;
}

/* ---- edges ---- */

/* Lengths of the chunks from the start on. */
static void check_grid(const struct mapped *mapped, const uint64_t *lengths, unsigned count) {
    uint64_t at = 0;
    for (unsigned i = 0; i < count; i++) {
        uint64_t left = 0;
        struct tp_chunk *chunk = tp_chunk_at(mapped->chunks, mapped->address + at, &left);
        cr_assert_eq(left, lengths[i], "chunk %u: %zu", i, (size_t)left);
        cr_assert_eq(tp_chunk_at(mapped->chunks, mapped->address + at + left - 1, &left), chunk);
        cr_assert_eq(left, 1);
        at += lengths[i];
    }
    cr_assert_eq(at, mapped->message.map_bytes);
}

Test(registrar, pieces_and_segments_end_chunks, .timeout = 60) {
    begin(REGISTER, MIB);
    const uint64_t two[] = {CHUNK, 2 * MIB, CHUNK, MIB};
    check_grid(map_segment(11 * MIB, 6 * MIB, 4096), two, 4);
    const uint64_t large_pages[] = {8 * MIB, 8 * MIB};
    check_grid(map_segment(16 * MIB, 16 * MIB, 8 * MIB), large_pages, 2);
    const uint64_t small[] = {4096};
    check_grid(map_segment(4096, 1 << 30, 4096), small, 1);
}

static bool becomes(enum tp_counter counter, uint64_t value) {
    for (uint64_t end = tp_now_ms() + 5000; tp_now_ms() < end; usleep(500)) {
        if (counted(counter) == value)
            return true;
    }
    return false;
}

/* Twice all of a segment of four chunks, after it has been touched. */
static void check_whole(const char *settings, unsigned registrations) {
    uint64_t seed = 5;
    size_t bytes = 11 * MIB - 4096 - 77;
    unsigned char *sent = malloc(bytes);
    unsigned char *got = malloc(bytes);
    begin(settings, bytes);
    struct mapped *mapped = map_segment(11 * MIB, 6 * MIB, 4096);
    fill_random(sent, bytes, &seed);
    cr_assert(copy_chunks(mapped, true, 0, gpu, bytes));
    cr_assert(becomes(TP_REGISTRATIONS, registrations));
    uint64_t kernel = counted(TP_KERNEL_BYTES);
    uint64_t hits = counted(TP_REGISTER_HITS);
    cr_assert_eq(DRIVER(fakecuda_poke)(gpu, sent, bytes), 0);
    cr_assert(copy_chunks(mapped, false, 4096, gpu, bytes));
    cr_assert_eq(memcmp(mapped->address + 4096, sent, bytes), 0);
    memset(got, 0, bytes);
    cr_assert_eq(DRIVER(fakecuda_poke)(gpu, got, bytes), 0);
    cr_assert(copy_chunks(mapped, true, 4096, gpu, bytes));
    cr_assert_eq(DRIVER(fakecuda_peek)(got, gpu, bytes), 0);
    cr_assert_eq(memcmp(got, sent, bytes), 0);
    cr_assert_eq(counted(TP_REGISTER_HITS) - hits, registrations ? 2 : 0);
    by_kernel = counted(TP_KERNEL_BYTES) - kernel;
    no_violation();
    cr_assert_not(unmap_segment(mapped));
    free(sent);
    free(got);
    no_violation();
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
}

Test(registrar, copies_over_all_edges_by_copy_engine, .timeout = 60) {
    check_whole(REGISTER ", \"copy_engine\": \"dma\"", 4);
    cr_assert_eq(by_kernel, 0);
}

Test(registrar, copies_over_all_edges_by_kernel, .timeout = 60) {
    check_whole(REGISTER ", \"copy_engine\": \"kernel\"", 4);
    cr_assert_eq(by_kernel, 2 * (11 * MIB - 4096 - 77));
}

Test(registrar, kernels_keep_off_where_registered_memory_has_another_address, .timeout = 60) {
    setenv("FAKECUDA_HOST_POINTERS", "0", 1);
    check_whole(REGISTER ", \"copy_engine\": \"kernel\"", 4);
    cr_assert_eq(by_kernel, 0);
}

Test(registrar, a_gpu_that_reads_any_memory_registers_nothing, .timeout = 60) {
    setenv("FAKECUDA_HMM", "1", 1);
    check_whole(REGISTER, 0);
    cr_assert_eq(counted(TP_REGISTRATIONS), 0);
    cr_assert_eq(counted(TP_REGISTER_MISSES), 3);
}

Test(registrar, another_gpu_uses_the_same_registration, .timeout = 60) {
    struct tp_device_job job = {0};
    struct tp_chunk_cursor cursor = {0};
    uint8_t group;
    begin(REGISTER ", \"copy_engine\": \"kernel\"", CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    cr_assert(touch(mapped, 0));
    (void)use_device(1);
    cr_assert_not_null(wait_gpu(1, 5000));
    struct tp_chunk_copy copy = {.device = 1,
                                 .to_device = true,
                                 .there = mapped->address,
                                 .here = (char *)(uintptr_t)device_memory(CHUNK),
                                 .bytes = CHUNK,
                                 .run_bytes = CHUNK};
    cr_assert_eq(tp_chunks_add(&job, mapped->chunks, &cursor, &copy, &group), 0);
    tp_device_start(&job);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    tp_device_reset(&job);
    tp_device_release(&job);
    cr_assert_eq(counted(TP_REGISTRATIONS), 1);
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* ---- the limit ---- */

Test(registrar, the_chunk_that_was_not_used_for_longest_gives_way, .timeout = 60) {
    begin(REGISTER ", \"register_max_bytes\": \"17M\"", CHUNK);
    tp_registrar_set_idle_ms(100);
    struct mapped *mapped = map_segment(6 * CHUNK, 6 * CHUNK, 4096);
    cr_assert(touch(mapped, 0) && touch(mapped, 1) && touch(mapped, 2));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 3 * CHUNK);
    bool registered = false;
    for (uint64_t end = tp_now_ms() + 5000; !registered && tp_now_ms() < end; usleep(1000)) {
        cr_assert(hold_once(mapped, 0) && hold_once(mapped, 1));
        registered = hold_once(mapped, 3);
    }
    cr_assert(registered && touch(mapped, 3));
    cr_assert_not(is_registered(mapped, 2 * CHUNK));
    cr_assert(is_registered(mapped, 0) && is_registered(mapped, CHUNK));
    cr_assert_eq(counted(TP_REGISTER_EVICTIONS), 1);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 3 * CHUNK);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    cr_assert_eq(counted(TP_REGISTER_EVICTIONS), 1, "the end of a segment is none");
    no_violation();
}

enum { N = 7 };

/* One after the other, in this order: that of their registration, or of their last use after it. */
static void check_order(const unsigned *order, bool used_again) {
    begin(REGISTER ", \"register_max_bytes\": \"40M\"", CHUNK);
    tp_registrar_set_idle_ms(100);
    struct mapped *mapped = map_segment(2 * N * CHUNK, 2 * N * CHUNK, 4096);
    for (unsigned i = 0; i < N; i++)
        cr_assert(touch(mapped, i));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), N * CHUNK);
    for (unsigned i = 0; i < N && used_again; i++)
        cr_assert(hold_once(mapped, order[i]));
    for (unsigned i = 0; i < N; i++) {
        cr_assert(comes(mapped, N + i, 5000));
        for (unsigned k = 0; k < N; k++)
            cr_assert_eq(is_registered(mapped, order[k] * CHUNK), k > i, "%u after %u", k, i);
    }
    cr_assert_eq(counted(TP_REGISTER_EVICTIONS), N);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, chunks_give_way_in_the_order_of_their_last_use, .timeout = 60) {
    check_order((const unsigned[N]){4, 1, 6, 0, 3, 5, 2}, true);
}

Test(registrar, chunks_that_were_used_once_give_way_in_order, .timeout = 60) {
    check_order((const unsigned[N]){0, 1, 2, 3, 4, 5, 6}, false);
}

Test(registrar, one_use_is_no_reason, .timeout = 60) {
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", CHUNK);
    tp_registrar_set_idle_ms(20);
    struct mapped *mapped = map_segment(8 * CHUNK, 8 * CHUNK, 4096);
    cr_assert(touch(mapped, 0));
    for (unsigned i = 1; i < 8; i++) {
        usleep(30000);
        cr_assert_not(touch(mapped, i));
    }
    usleep(50000);
    cr_assert(is_registered(mapped, 0));
    cr_assert_eq(counted(TP_REGISTER_EVICTIONS), 0);
    cr_assert_eq(counted(TP_STAGED_BYTES), 7 * CHUNK);
    cr_assert_leq(counted(TP_REGISTERED_BYTES) + counted(TP_STAGING_BYTES), 6 * MIB);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* Read in turn, sooner and later than chunks may give way at all. */
static void check_in_turn(unsigned pause_us) {
    begin(REGISTER ", \"register_max_bytes\": \"16M\"", CHUNK);
    tp_registrar_set_idle_ms(30);
    struct mapped *mapped = map_segment(16 * CHUNK, 16 * CHUNK, 4096);
    uint64_t registrations = 0;
    for (unsigned pass = 0; pass < 6; pass++) {
        for (unsigned i = 0; i < 16; i++) {
            (void)touch(mapped, i);
            usleep(pause_us);
        }
        if (pass == 1)
            registrations = counted(TP_REGISTRATIONS);
    }
    cr_assert_eq(counted(TP_REGISTRATIONS), registrations);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 3 * CHUNK);
    cr_assert_geq(counted(TP_STAGED_BYTES), 5 * 13 * CHUNK);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, a_set_read_in_turn_does_not_push_itself_out, .timeout = 60) {
    check_in_turn(0);
}

Test(registrar, nor_does_a_larger_one, .timeout = 60) {
    check_in_turn(10000);
}

Test(registrar, what_is_planned_stays, .timeout = 60) {
    uint64_t left;
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", CHUNK);
    tp_registrar_set_idle_ms(20);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    struct tp_chunk *first = tp_chunk_at(mapped->chunks, mapped->address, &left);
    cr_assert(tp_chunk_hold(first, tp_gpu_get(0), CHUNK));
    cr_assert_not(touch(mapped, 1));
    cr_assert_eq(counted(TP_REGISTER_MISSES), 1);
    cr_assert_not(comes(mapped, 1, 200));
    cr_assert_geq(counted(TP_REGISTER_FULL), 1);
    cr_assert(is_registered(mapped, 0));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), CHUNK);
    tp_chunk_release(first);
    cr_assert(comes(mapped, 1, 5000));
    cr_assert_not(is_registered(mapped, 0));
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, what_is_in_flight_stays, .timeout = 60) {
    struct tp_device_job job = {0};
    setenv("FAKECUDA_DELAY_US", "400000", 1);
    begin(REGISTER ", \"register_max_bytes\": \"6M\", \"copy_engine\": \"dma\"", 2 * CHUNK);
    tp_registrar_set_idle_ms(20);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    start_chunks(&job, mapped, true, 0, gpu, CHUNK);
    cr_assert(is_registered(mapped, 0));
    cr_assert_not(comes(mapped, 1, 200));
    cr_assert_geq(counted(TP_REGISTER_FULL), 1);
    cr_assert(is_registered(mapped, 0));
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    cr_assert(comes(mapped, 1, 5000));
    tp_device_reset(&job);
    tp_device_release(&job);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, what_has_ended_gives_way_though_nobody_polls, .timeout = 60) {
    struct tp_device_job job = {0};
    setenv("FAKECUDA_DELAY_US", "1000", 1);
    begin(REGISTER ", \"register_max_bytes\": \"6M\", \"copy_engine\": \"dma\"", 2 * CHUNK);
    tp_registrar_set_idle_ms(20);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    start_chunks(&job, mapped, true, 0, gpu, CHUNK);
    usleep(100000);
    cr_assert(comes(mapped, 1, 5000));
    cr_assert_eq(counted(TP_REGISTER_EVICTIONS), 1);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    tp_device_reset(&job);
    tp_device_release(&job);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, a_chunk_beyond_the_limit_is_left, .timeout = 60) {
    begin(REGISTER ", \"register_max_bytes\": \"3M\"", CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    cr_assert_not(touch(mapped, 0));
    cr_assert_eq(counted(TP_REGISTRATIONS), 0);
    cr_assert_eq(counted(TP_REGISTER_FAILURES), 0);
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, an_aborted_plan_lets_go, .timeout = 60) {
    struct tp_device_job job = {0};
    struct tp_chunk_cursor cursor = {0};
    uint8_t group;
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", CHUNK);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    struct tp_chunk_copy copy = {.to_device = true,
                                 .there = mapped->address,
                                 .here = (char *)(uintptr_t)gpu,
                                 .bytes = CHUNK,
                                 .run_bytes = CHUNK};
    cr_assert_eq(tp_chunks_add(&job, mapped->chunks, &cursor, &copy, &group), 0);
    tp_device_reset(&job);
    tp_registrar_set_idle_ms(20);
    cr_assert(comes(mapped, 1, 5000));
    cr_assert_not(is_registered(mapped, 0));
    tp_device_release(&job);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* Another processor's clock, or its hold that came between, may be ahead. */
Test(registrar, a_hold_from_the_future_is_no_visit_long_ago, .timeout = 60) {
    uint64_t left;
    begin(REGISTER ", \"register_max_bytes\": \"3M\"", CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    struct tp_chunk *chunk = tp_chunk_at(mapped->chunks, mapped->address, &left);
    cr_assert_not(hold_once(mapped, 0));
    atomic_fetch_add(&chunk->visit, UINT64_C(3000000000));
    cr_assert_not(hold_once(mapped, 0));
    cr_assert_eq(atomic_load(&chunk->gap), 0, "%zx", (size_t)atomic_load(&chunk->gap));
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* Nothing may give way for what came back after an hour; for what comes back in no time, it may. */
Test(registrar, one_that_comes_back_late_is_in_nobodys_way, .timeout = 60) {
    uint64_t left;
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", CHUNK);
    tp_registrar_set_idle_ms(20);
    struct mapped *mapped = map_segment(3 * CHUNK, 3 * CHUNK, 4096);
    struct tp_chunk *late = tp_chunk_at(mapped->chunks, mapped->address + CHUNK, &left);
    cr_assert(touch(mapped, 0));
    cr_assert_not(hold_once(mapped, 1));
    atomic_store(&late->gap, UINT64_C(3000000000) * 3600);
    atomic_store(&late->visit, UINT64_MAX); /* and this visit lasts */
    for (uint64_t end = tp_now_ms() + 5000; !counted(TP_REGISTER_FULL) && tp_now_ms() < end;)
        cr_assert_not(hold_once(mapped, 1));
    cr_assert_geq(counted(TP_REGISTER_FULL), 1);
    cr_assert(comes(mapped, 2, 5000));
    cr_assert_not(is_registered(mapped, 0));
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* ---- pinned memory ---- */

static _Atomic bool ended;

/* As the pools of so many GPUs that the limit is in their way. */
static void *ask_for_more(void *arg) {
    while (!atomic_load(&ended))
        must(!tp_registrar_take_pinned(MIB), "there is no room");
    return arg;
}

Test(registrar, what_is_asked_for_and_refused_makes_no_room, .timeout = 60) {
    pthread_t threads[3];
    unsigned pinned = 0;
    begin(REGISTER ", \"register_max_bytes\": \"12M\"", CHUNK);
    struct mapped *mapped = map_segment(64 * CHUNK, 64 * CHUNK, 4096);
    while (tp_registrar_take_pinned(MIB))
        pinned++;
    cr_assert_eq(pinned, 12);
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, ask_for_more, NULL), 0);
    for (uint64_t end = tp_now_ms() + 1000; tp_now_ms() < end;) {
        for (unsigned i = 0; i < 64; i++)
            (void)hold_once(mapped, i);
    }
    cr_assert_eq(counted(TP_REGISTRATIONS), 0);
    atomic_store(&ended, true);
    for (unsigned i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    tp_registrar_give_pinned(12 * MIB);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* ---- in the background ---- */

Test(registrar, a_chunk_touched_a_little_is_registered_meanwhile, .timeout = 60) {
    begin(REGISTER, CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    cr_assert(copy_chunks(mapped, true, 5, gpu, 100));
    cr_assert_eq(counted(TP_REGISTER_MISSES), 1);
    cr_assert(becomes_registered(mapped, 0, 5000));
    for (uint64_t end = tp_now_ms() + 5000; !counted(TP_REGISTER_HITS) && tp_now_ms() < end;)
        cr_assert(copy_chunks(mapped, true, 5, gpu, 100));
    cr_assert_eq(counted(TP_REGISTER_HITS), 1);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, chunks_ahead_are_registered_both_ways, .timeout = 60) {
    begin("\"register_peer_memory\": true, \"register_ahead_chunks\": 2", CHUNK);
    struct mapped *mapped = map_segment(16 * CHUNK, 8 * CHUNK, 4096);
    atomic_store(&mapped->pieces[1], 0);
    cr_assert(touch(mapped, 3) && touch_soon(mapped, 4));
    cr_assert(becomes_registered(mapped, 5 * CHUNK, 5000));
    cr_assert(becomes_registered(mapped, 6 * CHUNK, 5000));
    cr_assert_not(is_registered(mapped, 7 * CHUNK));
    cr_assert(touch_soon(mapped, 7));
    usleep(50000);
    cr_assert_not(is_registered(mapped, 8 * CHUNK), "a piece that is not mapped");
    cr_assert(touch_soon(mapped, 3) && touch_soon(mapped, 2));
    cr_assert(becomes_registered(mapped, CHUNK, 5000), "downwards, after the chunk above");
    cr_assert(becomes_registered(mapped, 0, 5000));
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    cr_assert_eq(counted(TP_REGISTER_FAILURES), 0);
    no_violation();
}

Test(registrar, a_scan_four_times_the_limit_stays_within_it, .timeout = 60) {
    struct tp_device_job jobs[32] = {0};
    begin("\"register_peer_memory\": true, \"register_max_bytes\": \"32M\"", 32 * CHUNK);
    struct mapped *mapped = map_segment(32 * CHUNK, 32 * CHUNK, 4096);
    for (unsigned pass = 0; pass < 3; pass++) {
        for (unsigned i = 0; i < 32; i++) {
            start_chunks(&jobs[i], mapped, pass & 1, i * CHUNK, gpu + i * CHUNK, CHUNK);
            cr_assert_leq(counted(TP_REGISTERED_BYTES) + counted(TP_STAGING_BYTES), 32 * MIB);
        }
        for (unsigned i = 0; i < 32; i++) {
            cr_assert_eq(finish(&jobs[i]), TP_DEVICE_DONE);
            tp_device_reset(&jobs[i]);
        }
    }
    cr_assert_eq(counted(TP_REGISTER_HITS) + counted(TP_REGISTER_MISSES), 96);
    for (unsigned i = 0; i < 32; i++)
        tp_device_release(&jobs[i]);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar, scattered_small_copies_do_not_churn, .timeout = 60) {
    uint64_t seed = 9;
    begin(REGISTER ", \"register_max_bytes\": \"11M\"", CHUNK);
    struct mapped *mapped = map_segment(16 * CHUNK, 16 * CHUNK, 4096);
    const unsigned copies = 3000;
    for (unsigned i = 0; i < copies; i++) {
        uint64_t offset = rig_random(&seed) % (16 * CHUNK - 65536);
        cr_assert(copy_chunks(mapped, true, offset, gpu, 65536));
    }
    tp_registrar_stop();
    cr_assert_leq(counted(TP_REGISTRATIONS), 2);
    cr_assert_leq(counted(TP_REGISTERED_BYTES), 8 * MIB);
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

/* ---- a driver that refuses ---- */

Test(registrar_faults, a_refused_registration_rolls_back, .timeout = 60) {
    begin(REGISTER ", \"register_max_bytes\": \"11M\"", CHUNK);
    struct mapped *mapped = map_segment(4 * CHUNK, 4 * CHUNK, 4096);
    fail_calls("cuMemHostRegister:1=2");
    cr_assert_not(touch(mapped, 0));
    cr_assert_eq(counted(TP_REGISTER_FAILURES), 1);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    usleep(20000);
    cr_assert(touch(mapped, 0) && touch(mapped, 1));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 8 * MIB);
    cr_assert_eq(counted(TP_REGISTER_EVICTIONS), 0, "nothing of the refused one counts any more");
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar_faults, a_driver_that_always_refuses_is_not_asked_again_and_again, .timeout = 60) {
    begin(REGISTER, CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    fail_calls("cuMemHostRegister:*=2");
    for (uint64_t end = tp_now_ms() + 300; tp_now_ms() < end;)
        cr_assert(copy_chunks(mapped, true, 0, gpu, CHUNK));
    cr_assert_leq(counted(TP_REGISTER_FAILURES), 6);
    cr_assert_geq(counted(TP_REGISTER_FAILURES), 3);
    cr_assert_eq(counted(TP_REGISTER_HITS), 0);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar_faults, a_context_that_cannot_be_entered, .timeout = 60) {
    begin(REGISTER ", \"copy_engine\": \"dma\"", CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    fail_calls("cuCtxPushCurrent:1=201");
    cr_assert_not(touch(mapped, 0));
    cr_assert_eq(counted(TP_REGISTER_FAILURES), 1);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar_faults, a_refused_end_leaves_the_chunk_as_it_was, .timeout = 60) {
    begin(REGISTER ", \"register_max_bytes\": \"6M\"", CHUNK);
    tp_registrar_set_idle_ms(20);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    cr_assert(touch(mapped, 0));
    fail_calls("cuMemHostUnregister:1=999");
    for (uint64_t end = tp_now_ms() + 5000; !counted(TP_REGISTER_FAILURES) && tp_now_ms() < end;)
        (void)comes(mapped, 1, 1);
    cr_assert_eq(counted(TP_REGISTER_FAILURES), 1);
    cr_assert_eq(counted(TP_REGISTERED_BYTES), CHUNK);
    cr_assert(touch(mapped, 0), "it is registered still");
    cr_assert(comes(mapped, 1, 5000));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), CHUNK);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    no_violation();
}

Test(registrar_faults, what_the_driver_keeps_keeps_its_addresses, .timeout = 60) {
    begin(REGISTER, CHUNK);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    cr_assert(touch(mapped, 0) && touch(mapped, 1));
    fail_calls("cuMemHostUnregister:*=999");
    cr_assert(unmap_segment(mapped), "told to the caller");
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    cr_assert_geq(counted(TP_REGISTER_FAILURES), 2);
    /* The rest goes on. */
    fail_calls("");
    struct mapped *other = map_segment(CHUNK, CHUNK, 4096);
    cr_assert(comes(other, 0, 20000));
    cr_assert_not(unmap_segment(other));
    no_violation();
}

Test(registrar_faults, an_end_that_is_refused_once_comes_later, .timeout = 60) {
    begin(REGISTER, CHUNK);
    struct mapped *mapped = map_segment(2 * CHUNK, 2 * CHUNK, 4096);
    cr_assert(touch(mapped, 0) && touch(mapped, 1));
    fail_calls("cuMemHostUnregister:1=2");
    cr_assert_not(unmap_segment(mapped));
    cr_assert_eq(counted(TP_REGISTERED_BYTES), 0);
    cr_assert_eq(counted(TP_REGISTER_FAILURES), 1);
    no_violation();
}

Test(registrar_faults, a_thread_that_cannot_be_started_is_tried_again, .timeout = 60) {
    begin(REGISTER, CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    refuse_threads("tidepool-reg", 1);
    bool registered = false;
    for (uint64_t end = tp_now_ms() + 20000; !registered && tp_now_ms() < end; usleep(1000)) {
        cr_assert(copy_chunks(mapped, true, 5, gpu, 100));
        registered = is_registered(mapped, 0);
    }
    cr_assert(registered);
    cr_assert_eq(atomic_load(&refused_threads), 0);
    tp_registrar_stop();
    cr_assert_not(unmap_segment(mapped));
    no_violation();
}

Test(registrar_faults, registration_during_a_capture_leaves_it_valid, .timeout = 60) {
    CUstream stream;
    CUgraph graph = NULL;
    begin(REGISTER, CHUNK);
    struct mapped *mapped = map_segment(CHUNK, CHUNK, 4096);
    DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
    cr_assert_eq(DRIVER(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL),
                 CUDA_SUCCESS);
    cr_assert(touch(mapped, 0));
    cr_assert_not(unmap_segment(mapped));
    cr_assert_eq(DRIVER(cuStreamEndCapture)(stream, &graph), CUDA_SUCCESS);
    cr_assert_not_null(graph);
    no_violation();
}
