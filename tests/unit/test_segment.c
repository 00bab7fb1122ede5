/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that others can map is laid over a range in place, keeps contents when asked, and goes
 * without a trace. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "segment/segment.h"
#include "segment_bench.h"

#define BYTES (32 * MIB)

TestSuite(segment, .timeout = 30);

Test(segment, overlay_is_shared_memory_and_free_still_works) {
    struct tp_config *config = bench_config(8 * MIB);
    char *range = bench_allocate(BYTES);
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    cr_assert(tp_segment_contains(range));
    cr_assert(tp_segment_contains(range + BYTES - 1));
    cr_assert_not(tp_segment_contains(range - 1));
    cr_assert_not(tp_segment_contains(range + BYTES));
    bench_fill(range, BYTES, 1);
    cr_assert(bench_same(range, BYTES, 1));
    cr_assert_eq(tp_segment_restore(range), 0);
    cr_assert_not(tp_segment_contains(range));
    cr_assert_eq(range[5], 0);
    cr_assert_eq(tp_segment_restore(range), -ENOENT);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment, free_without_restore_works_too) {
    struct tp_config *config = bench_config(8 * MIB);
    char *range = bench_allocate(BYTES);
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment, memory_freed_unseen_can_be_a_segment_again) {
    struct tp_config *config = bench_config(8 * MIB);
    char *range = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert_neq(range, MAP_FAILED);
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    munmap(range, BYTES);
    char *again = mmap(range + MIB, BYTES - MIB, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    cr_assert_eq(again, range + MIB);
    bench_fill(again, BYTES - MIB, 3);
    cr_assert_lt(tp_segment_overlay(again, BYTES - MIB, false, config), 0);
    tp_segment_forget(again, BYTES - MIB);
    cr_assert_not(tp_segment_contains(range));
    cr_assert(bench_same(again, BYTES - MIB, 3), "the addresses are left alone");
    cr_assert_eq(tp_segment_overlay(again, BYTES - MIB, true, config), 0);
    cr_assert(bench_same(again, BYTES - MIB, 3));
    cr_assert_eq(tp_segment_restore(again), 0);
    munmap(again, BYTES - MIB);
    cr_assert(bench_config_free(config));
}

Test(segment, contents_are_kept_when_asked) {
    struct tp_config *config = bench_config(4 * MIB + 4096);
    char *range = bench_allocate(BYTES);
    bench_fill(range, BYTES, 2);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), 0);
    cr_assert(bench_same(range, BYTES, 2));
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment, a_partial_last_page_stays_what_it_was) {
    struct tp_config *config = bench_config(0);
    char *range = bench_allocate(BYTES);
    memset(range, 7, BYTES);
    cr_assert_eq(tp_segment_overlay(range, 3 * MIB + 100, false, config), 0);
    cr_assert_eq(range[0], 0);
    cr_assert_eq(range[3 * MIB - 1], 0);
    cr_assert_eq(range[3 * MIB], 7);
    cr_assert_not(tp_segment_contains(range + 3 * MIB));
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment, wrong_ranges_are_refused_and_left_alone) {
    struct tp_config *config = bench_config(0);
    char *range = bench_allocate(BYTES);
    memset(range, 7, BYTES);
    cr_assert_eq(tp_segment_overlay(range + 16, MIB, false, config), -EINVAL);
    cr_assert_eq(tp_segment_overlay(range, 4095, false, config), -EINVAL);
    cr_assert_eq(tp_segment_overlay(range, 0, false, config), -EINVAL);
    cr_assert_eq(tp_segment_overlay(range, UINTPTR_MAX, false, config), -EINVAL);
    cr_assert_eq(tp_segment_overlay(range, 4 * MIB, false, config), 0);
    cr_assert_eq(tp_segment_overlay(range + MIB, MIB, false, config), -EEXIST);
    cr_assert_eq(range[4 * MIB], 7);
    config->store.kind = TP_SEGMENT_NONE;
    cr_assert_eq(tp_segment_overlay(range + 8 * MIB, MIB, false, config), -EINVAL);
    cr_assert_eq(tp_segment_publish(range + MIB, config), -ENOENT);
    cr_assert_eq(tp_segment_withdraw(range + MIB), -ENOENT);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment, more_than_the_machine_has_is_an_error) {
    struct tp_config *config = bench_config(0);
    uint64_t bytes = UINT64_C(1) << 42; /* 4 TiB */
    char *range = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert_neq(range, MAP_FAILED);
    range[0] = 7;
    cr_assert_eq(tp_segment_overlay(range, bytes, false, config), -ENOMEM);
    cr_assert_eq(range[0], 7);
    cr_assert(bench_config_free(config));
}

Test(segment, too_many_pieces_for_the_fd_limit_is_an_error) {
    struct tp_config *config = bench_config(MIB);
    struct rlimit limit;
    char *range = bench_allocate(BYTES);
    unsigned fds = bench_fds();
    range[0] = 7;
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 64; /* a quarter: 16 of the 32 pieces */
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), -EMFILE);
    cr_assert_eq(range[0], 7);
    config->store.piece_bytes = 2 * MIB;
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    cr_assert_eq(bench_fds(), fds + 16);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment, a_failure_half_way_leaves_the_range_as_it_was) {
    struct tp_config *config = bench_config(2 * MIB);
    struct rlimit limit;
    char *range = bench_allocate(BYTES);
    bench_fill(range, BYTES, 3);
    unsigned fds = bench_fds();
    unsigned maps = bench_maps();
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 64; /* 16 pieces are allowed, but other fds have taken the numbers */
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    int taken[64];
    unsigned count = 0;
    while (count < 64 && (taken[count] = dup(0)) >= 0)
        count++;
    for (unsigned i = 0; i < 6; i++)
        close(taken[--count]);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), -EMFILE);
    cr_assert(bench_same(range, BYTES, 3));
    cr_assert_not(tp_segment_contains(range));
    while (count > 0)
        close(taken[--count]);
    cr_assert_eq(bench_fds(), fds);
    cr_assert_leq(bench_maps(), maps + 1); /* a thread's stack may stay cached */
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), 0);
    cr_assert(bench_same(range, BYTES, 3));
    cr_assert(bench_config_free(config));
}

Test(segment, a_hundred_cycles_leave_nothing) {
    struct tp_config *config = bench_config(MIB);
    char *range = bench_allocate(BYTES);
    unsigned fds = 0;
    unsigned maps = 0;
    for (unsigned i = 0; i < 102; i++) {
        if (i == 2) { /* the first rounds make thread stacks and the server */
            fds = bench_fds();
            maps = bench_maps();
        }
        cr_assert_eq(tp_segment_overlay(range, 8 * MIB, i % 2 == 0, config), 0);
        cr_assert_eq(tp_segment_publish(range, config), 0);
        cr_assert_eq(tp_segment_restore(range), 0);
    }
    cr_assert_eq(bench_fds(), fds);
#ifndef __SANITIZE_ADDRESS__ /* which maps memory of its own as it goes */
    cr_assert_leq(bench_maps(), maps + 2);
#endif
    tp_server_stop();
    free(range);
    cr_assert(bench_config_free(config));
}

static uint64_t shmem_kib(void) {
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, "RssShmem: %llu", &kib);
    fclose(file);
    return kib;
}

Test(segment, a_forked_child_has_zeros_instead_and_no_fds) {
    struct tp_config *config = bench_config(MIB);
    char *range = bench_allocate(BYTES);
    unsigned fds = bench_fds();
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    memset(range, 7, BYTES);
    pid_t child = bench_fork();
    if (child == 0) {
        bool good = range[0] == 0 && range[BYTES - 1] == 0 && bench_fds() == fds;
        good = good && shmem_kib() < 1024 && !tp_segment_contains(range);
        good = good && tp_segment_restore(range) == -ENOENT;
        range[0] = 9;
        free(range);
        _exit(good ? 0 : 1);
    }
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    cr_assert_eq(range[0], 7);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

/* ---- memory at addresses of its own ---- */

#define ALIGNMENT (16 * MIB)

Test(segment, allocated_memory_is_aligned_whole_and_freed) {
    struct tp_config *config = bench_config(4 * MIB);
    void *address = NULL;
    unsigned fds = bench_fds();
    cr_assert_eq(tp_segment_allocate(11 * MIB + 5, ALIGNMENT, false, config, &address), 0);
    cr_assert_eq((uintptr_t)address % ALIGNMENT, 0);
    cr_assert_eq(((char *)address)[11 * MIB + 4095], 0, "whole pages");
    bench_fill(address, 11 * MIB, 1);
    cr_assert(tp_segment_contains((char *)address + 11 * MIB + 4095));
    cr_assert_eq(tp_segment_publish(address, config), 0);
    cr_assert_eq(tp_segment_restore(address), 0, "withdrawn only");
    cr_assert(bench_same(address, 11 * MIB, 1));
    cr_assert_not(tp_segment_free((char *)address + 4096));
    errno = 5;
    cr_assert(tp_segment_free(address));
    cr_assert_eq(errno, 5);
    cr_assert_not(tp_segment_free(address));
    cr_assert_not(tp_segment_contains(address));
    cr_assert_eq(msync(address, 4096, MS_ASYNC), -1, "nothing is mapped there");
    tp_server_stop();
    cr_assert_eq(bench_fds(), fds);
    cr_assert(bench_config_free(config));
}

Test(segment, allocated_memory_never_has_addresses_of_earlier) {
    struct tp_config *config = bench_config(0);
    char *earlier[16];
    for (unsigned i = 0; i < 16; i++) {
        void *address = NULL;
        cr_assert_eq(tp_segment_allocate(4 * MIB, ALIGNMENT, false, config, &address), 0);
        earlier[i] = address;
        for (unsigned k = 0; k < i; k++)
            cr_assert(earlier[k] + 4 * MIB <= earlier[i] || earlier[i] + 4 * MIB <= earlier[k]);
        cr_assert(tp_segment_free(address));
    }
    cr_assert(bench_config_free(config));
}

Test(segment, an_allocation_that_fails_leaves_nothing) {
    struct tp_config *config = bench_config(0);
    void *address = NULL;
    unsigned fds = bench_fds();
    cr_assert_eq(tp_segment_allocate(UINT64_C(1) << 42, ALIGNMENT, false, config, &address),
                 -ENOMEM);
    unsigned maps = bench_maps();
    cr_assert_lt(tp_segment_allocate(SIZE_MAX - 5, ALIGNMENT, false, config, &address), 0);
    cr_assert_eq(tp_segment_allocate(UINT64_C(1) << 42, ALIGNMENT, false, config, &address),
                 -ENOMEM);
    cr_assert_null(address);
    cr_assert_eq(bench_fds(), fds);
    cr_assert_eq(bench_maps(), maps);
    cr_assert(bench_config_free(config));
}

Test(segment, a_forked_child_may_free_what_was_allocated) {
    struct tp_config *config = bench_config(2 * MIB);
    void *address = NULL;
    unsigned fds = bench_fds();
    cr_assert_eq(tp_segment_allocate(8 * MIB, ALIGNMENT, false, config, &address), 0);
    memset(address, 7, 8 * MIB);
    pid_t child = bench_fork();
    if (child == 0) {
        bool good = *(char *)address == 0 && bench_fds() == fds;
        *(char *)address = 1;
        _exit(good && tp_segment_free(address) ? 0 : 1);
    }
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    cr_assert_eq(*(char *)address, 7);
    cr_assert(tp_segment_free(address));
    cr_assert(bench_config_free(config));
}
