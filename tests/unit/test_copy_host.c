/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: every byte of every job arrives exactly once, whoever copies it (the submitter, the pool,
 * the pollers, with or without threads), and a job may be reused as soon as it is idle.
 */
#include "tests/unit/double_env.h"
#include "transport/copy_host.h"

#include "env/stats.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static void fill(unsigned char *p, size_t bytes, unsigned seed) {
    uint32_t x = seed * 2654435761u + 1;
    for (size_t i = 0; i < bytes; i++) {
        x = x * 1664525u + 1013904223u;
        p[i] = (unsigned char)(x >> 24);
    }
}

static void *must_alloc(size_t bytes) {
    void *p = malloc(bytes);
    cr_assert_not_null(p);
    return p;
}

/* Stands before libc's: the call after `grows_left` more fails; -1: none does. */
static int grows_left = -1;

void *reallocarray(void *array, size_t count, size_t bytes) {
    if (grows_left == 0) {
        errno = ENOMEM;
        return NULL;
    }
    if (grows_left > 0)
        grows_left--;
    return realloc(array, count * bytes);
}

static void finish(struct tp_copy_job *job, bool help) {
    while (!tp_copy_done(job)) {
        if (!help || !tp_copy_help(job))
            sched_yield();
    }
    while (!tp_copy_idle(job))
        sched_yield();
}

/* ---- building ---------------------------------------------------------------------------------
 */

Test(copy_build, neighbours_are_merged_and_large_ops_split) {
    char *base = (char *)0x10000000, *to = (char *)0x90000000;
    struct tp_copy_job job;
    uint32_t first, last;
    tp_copy_init(&job);
    cr_assert_eq(tp_copy_add(&job, to, base, 4 * KIB, &first, &last), 0);
    cr_assert_eq(tp_copy_add(&job, to + 4 * KIB, base + 4 * KIB, 4 * KIB, &first, &last), 0);
    cr_assert_eq(job.op_count, 1u, "continues at both ends");
    cr_assert_eq(tp_copy_add(&job, to + 8 * KIB, base + 64 * KIB, 4 * KIB, &first, &last), 0);
    cr_assert_eq(job.op_count, 2u, "continues at one end only");
    cr_assert_eq(job.grain_count, 1u);

    cr_assert_eq(tp_copy_add(&job, to + MIB, base + MIB, MIB, &first, &last), 0);
    cr_assert_eq(first, 0u);
    cr_assert_eq(last, (uint32_t)((MIB + 12 * KIB - 1) / TP_GRAIN_BYTES));
    uint64_t sum = 0;
    for (uint32_t g = 0; g < job.grain_count; g++) {
        size_t grain_bytes = 0;
        cr_assert_eq(job.grains[g].first, g ? job.grains[g - 1].end : 0);
        for (uint32_t i = job.grains[g].first; i < job.grains[g].end; i++)
            grain_bytes += job.ops[i].bytes;
        cr_assert_leq(grain_bytes, TP_GRAIN_BYTES);
        sum += grain_bytes;
    }
    cr_assert_eq(sum, job.total_bytes);
    cr_assert_eq(sum, MIB + 12 * KIB);
    tp_copy_release(&job);
}

Test(copy_build, a_copy_that_fits_a_grain_lies_in_one) {
    struct tp_copy_job job;
    tp_copy_init(&job);
    for (int i = 0; i < 61; i++) {
        uint32_t first, last;
        size_t step = (size_t)i * 100000;
        cr_assert_eq(tp_copy_add(&job, (char *)0x90000000 + step, (char *)0x10000000 + step * 2,
                                 73728, &first, &last),
                     0);
        cr_assert_eq(first, last);
    }
    tp_copy_release(&job);
}

Test(copy_build, nothing_and_too_much_are_refused_and_change_nothing) {
    struct tp_copy_job job;
    tp_copy_init(&job);
    char byte = 0;
    cr_assert_eq(tp_copy_add(&job, &byte, &byte, 0, NULL, NULL), -EINVAL);
    cr_assert_eq(tp_copy_add(&job, &byte, &byte, SIZE_MAX, NULL, NULL), -ENOMEM);
    cr_assert_eq(job.op_count, 0u);
    cr_assert_eq(job.grain_count, 0u);
    cr_assert_eq(job.total_bytes, 0u);
    cr_assert(tp_copy_done(&job), "an empty job is done");
    cr_assert(tp_copy_idle(&job));
    tp_copy_release(&job);
}

Test(copy_build, each_failed_allocation_leaves_the_job_whole) {
    for (int fail = 0; fail < 3; fail++) {
        struct tp_copy_job job;
        unsigned char from[KIB], to[KIB] = {0};
        uint32_t first = 77, last = 77;
        tp_copy_init(&job);
        fill(from, KIB, 1);
        cr_assert_eq(tp_copy_add(&job, to, from, KIB, NULL, NULL), 0);
        grows_left = fail;
        cr_assert_eq(tp_copy_add(&job, to, from, 100 * MIB, &first, &last), -ENOMEM);
        grows_left = -1;
        cr_assert_eq(job.total_bytes, KIB);
        cr_assert_eq(first, 77u);
        cr_assert_eq(last, 77u);
        cr_assert(tp_copy_start(&job));
        cr_assert_eq(memcmp(to, from, KIB), 0);
        tp_copy_reset(&job);
        cr_assert_eq(tp_copy_add(&job, to, from, 100 * MIB, NULL, NULL), 0, "a later try works");
        tp_copy_release(&job);
    }
}

/* ---- copying ----------------------------------------------------------------------------------
 */

/* `jobs` jobs of `count` blocks of `bytes` with a gap between blocks on one side. */
static void copy_many(size_t jobs, size_t count, size_t bytes, bool help) {
    size_t stride = bytes + 64, span = count * stride;
    unsigned char *from = must_alloc(span), *to = must_alloc(jobs * count * bytes + 1);
    struct tp_copy_job *all = calloc(jobs, sizeof(*all));
    cr_assert_not_null(all);
    fill(from, span, (unsigned)(jobs + bytes));
    memset(to, 0, jobs * count * bytes);
    to[jobs * count * bytes] = 0x5a;
    for (int round = 0; round < 3; round++) {
        for (size_t j = 0; j < jobs; j++) {
            if (round == 0)
                tp_copy_init(&all[j]);
            else
                tp_copy_reset(&all[j]);
            for (size_t i = 0; i < count; i++)
                cr_assert_eq(tp_copy_add(&all[j], to + (j * count + i) * bytes, from + i * stride,
                                         bytes, NULL, NULL),
                             0);
            tp_copy_start(&all[j]);
        }
        for (size_t j = 0; j < jobs; j++) {
            finish(&all[j], help);
            cr_assert(tp_copy_range_done(&all[j], 0, all[j].grain_count - 1));
            for (size_t i = 0; i < count; i++)
                cr_assert_eq(memcmp(to + (j * count + i) * bytes, from + i * stride, bytes), 0);
        }
        memset(to, round, jobs * count * bytes);
        cr_assert_eq(to[jobs * count * bytes], 0x5a);
    }
    for (size_t j = 0; j < jobs; j++)
        tp_copy_release(&all[j]);
    free(all);
    free(from);
    free(to);
}

Test(copy_run, small_jobs_are_copied_by_start) {
    unsigned char from[1000], to[1000] = {0};
    struct tp_copy_job job;
    fill(from, sizeof(from), 3);
    tp_copy_init(&job);
    cr_assert_eq(tp_copy_add(&job, to, from, sizeof(from), NULL, NULL), 0);
    cr_assert(tp_copy_start(&job));
    cr_assert(tp_copy_idle(&job));
    cr_assert_eq(memcmp(to, from, sizeof(from)), 0);
    cr_assert_eq(double_threads_left, 1000u, "no thread is started for small jobs");
    cr_assert_eq(double_counters[TP_INLINE_COPIES], 1u);
    tp_copy_release(&job);
}

Test(copy_run, the_pool_alone_finishes_jobs) {
    copy_many(8, 3, MIB, false);
    cr_assert_gt(double_counters[TP_POOL_GRAINS], 0u);
    cr_assert_eq(double_counters[TP_HELPED_GRAINS], 0u);
    tp_copy_pool_stop();
}

Test(copy_run, pool_and_poller_together) {
    copy_many(64, 1, MIB, true);
    copy_many(16, 61, 64 * KIB, true);
    copy_many(64, 61, 4 * KIB, true);
    copy_many(3, 5, 12345 * 7, true);
    tp_copy_pool_stop();
}

Test(copy_run, many_threads) {
    double_cpus = 16;
    copy_many(64, 3, MIB / 3, true);
    cr_assert_eq(1000u - double_threads_left, 8u);
    tp_copy_pool_stop();
}

Test(copy_run, the_number_of_threads_is_the_one_given) {
    double_cpus = 16;
    tp_copy_pool_size(3);
    cr_assert_eq(double_threads_left, 1000u, "lazily");
    cr_assert_eq(tp_copy_pool_start(0), 0);
    cr_assert_eq(tp_copy_pool_start(5), 0, "idempotent");
    cr_assert_eq(1000u - double_threads_left, 3u);
    tp_copy_pool_stop();
    tp_copy_pool_stop();
}

Test(copy_run, one_cpu_still_has_a_worker) {
    double_cpus = 1;
    copy_many(4, 1, MIB, false);
    tp_copy_pool_stop();
}

Test(copy_run, pollers_can_do_it_all) {
    double_threads_idle = true;
    copy_many(16, 1, MIB, true);
    cr_assert_eq(double_counters[TP_POOL_GRAINS], 0u);
    cr_assert_eq(double_lines, 0u);
}

/* Nobody may poll: Mooncake's own transfers end without. */
Test(copy_run, without_threads_jobs_are_copied_where_they_are_submitted) {
    double_threads_left = 0;
    copy_many(16, 1, MIB, false);
    cr_assert_gt(double_counters[TP_INLINE_COPIES], 0u);
    cr_assert_eq(double_counters[TP_INLINE_COPIES] % 16, 0u);
    cr_assert_eq(double_counters[TP_HELPED_GRAINS], 0u);
    cr_assert_eq(double_lines, 1u, "and that is said once");
}

Test(copy_run, threads_that_cannot_be_started_are_tried_again) {
    double_cpus = 4;
    double_threads_left = 0;
    copy_many(1, 1, MIB, false);
    cr_assert_eq(double_counters[TP_POOL_GRAINS], 0u);
    double_threads_left = 1;
    usleep(1100000);
    copy_many(1, 1, MIB, false);
    cr_assert_gt(double_counters[TP_POOL_GRAINS], 0u);
    double_threads_left = 10;
    usleep(1100000);
    copy_many(1, 1, MIB, false);
    cr_assert_eq(double_threads_left, 8u, "the two that were missing");
    cr_assert_eq(double_lines, 1u, "and that is said once");
    tp_copy_pool_stop();
}

Test(copy_run, one_thread_of_many_is_enough) {
    double_cpus = 16;
    double_threads_left = 1;
    copy_many(8, 3, MIB, false);
    cr_assert_gt(double_counters[TP_POOL_GRAINS], 0u);
    cr_assert_eq(double_lines, 1u);
    tp_copy_pool_stop();
}

Test(copy_run, a_poller_helps_other_jobs_when_its_own_has_nothing_left) {
    double_threads_idle = true;
    unsigned char *from = must_alloc(MIB), *to = must_alloc(MIB), *to2 = must_alloc(MIB);
    struct tp_copy_job a, b;
    fill(from, MIB, 9);
    tp_copy_init(&a);
    tp_copy_init(&b);
    cr_assert_eq(tp_copy_add(&a, to, from, MIB, NULL, NULL), 0);
    cr_assert_eq(tp_copy_add(&b, to2, from, MIB, NULL, NULL), 0);
    cr_assert_not(tp_copy_start(&a));
    cr_assert_not(tp_copy_start(&b));
    while (!tp_copy_done(&b))
        cr_assert(tp_copy_help(&b));
    cr_assert_not(tp_copy_range_done(&a, 0, 0), "its own job goes first");
    while (!tp_copy_done(&a))
        cr_assert(tp_copy_help(&b));
    cr_assert_not(tp_copy_help(NULL));
    cr_assert(tp_copy_idle(&a));
    cr_assert(tp_copy_idle(&b));
    cr_assert_eq(memcmp(to, from, MIB), 0);
    cr_assert_eq(memcmp(to2, from, MIB), 0);
    tp_copy_release(&a);
    tp_copy_release(&b);
    free(from);
    free(to);
    free(to2);
}

Test(copy_run, more_jobs_than_the_queue_holds) {
    double_threads_idle = true;
    enum { JOBS = 5000 };
    unsigned char *from = calloc(1, 129 * KIB), *to = must_alloc(129 * KIB);
    cr_assert_not_null(from);
    struct tp_copy_job *jobs = calloc(JOBS, sizeof(*jobs));
    cr_assert_not_null(jobs);
    unsigned at_once = 0;
    for (int i = 0; i < JOBS; i++) {
        tp_copy_init(&jobs[i]);
        cr_assert_eq(tp_copy_add(&jobs[i], to, from, 129 * KIB, NULL, NULL), 0);
        at_once += tp_copy_start(&jobs[i]);
    }
    cr_assert_eq(at_once, (unsigned)JOBS - 4096);
    for (int i = 0; i < JOBS; i++) {
        finish(&jobs[i], true);
        tp_copy_release(&jobs[i]);
    }
    cr_assert_not(tp_copy_help(NULL));
    free(jobs);
    free(from);
    free(to);
}

Test(copy_run, a_forked_child_and_a_stopped_pool_copy_at_once) {
    unsigned char *from = must_alloc(4 * MIB), *to = must_alloc(4 * MIB);
    struct tp_copy_job job;
    fill(from, 4 * MIB, 5);
    tp_copy_init(&job);
    cr_assert_eq(tp_copy_add(&job, to, from, 4 * MIB, NULL, NULL), 0);
    double_inert = true;
    cr_assert(tp_copy_start(&job));
    cr_assert_eq(memcmp(to, from, 4 * MIB), 0);
    cr_assert_eq(double_threads_left, 1000u);

    double_inert = false;
    cr_assert_eq(tp_copy_pool_start(1), 0);
    tp_copy_pool_stop();
    memset(to, 0, 4 * MIB);
    tp_copy_reset(&job);
    cr_assert_eq(tp_copy_add(&job, to, from, 4 * MIB, NULL, NULL), 0);
    cr_assert(tp_copy_start(&job));
    cr_assert_eq(memcmp(to, from, 4 * MIB), 0);
    tp_copy_release(&job);
    free(from);
    free(to);
}
