/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Old kernels, seccomp profiles and full machines: each system call that may fail is made to fail,
 * by a seccomp filter, and the segment is either made all the same or nothing has changed.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/memfd.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "env/host_files.h"
#include "env/stats.h"
#include "scratch.h"
#include "segment/segment.h"
#include "segment_bench.h"

#define BYTES (16 * MIB)
#define POPULATE_WRITE 23 /* MADV_POPULATE_WRITE */

TestSuite(segment_faults, .timeout = 30);

/* From now on this system call fails with `error`, when (low half of its argument & mask) == value.
 */
static void break_call(long number, unsigned argument, uint32_t mask, uint32_t value, int error) {
    unsigned offset = (unsigned)(offsetof(struct seccomp_data, args) + 8 * (size_t)argument);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, mask),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    cr_assert_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        cr_skip("CONFIG: no seccomp filters here");
}

static void break_always(long number, int error) {
    break_call(number, 0, 0, 0, error);
}

static void expect_made(struct tp_config *config) {
    char *range = bench_allocate(BYTES);
    bench_fill(range, BYTES, 1);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), 0);
    cr_assert(bench_same(range, BYTES, 1));
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

static void expect_untouched(struct tp_config *config, int error) {
    char *range = bench_allocate(BYTES);
    bench_fill(range, BYTES, 1);
    unsigned fds = bench_fds();
    unsigned maps = bench_maps();
    int result = tp_segment_overlay(range, BYTES, true, config);
    cr_assert_eq(result, error, "%s", strerror(-result));
    cr_assert(bench_same(range, BYTES, 1));
    cr_assert_not(tp_segment_contains(range));
    cr_assert_eq(bench_fds(), fds);
    cr_assert_leq(bench_maps(), maps + 2); /* an arena more or less */
    cr_assert_eq(atomic_load(&tp_stats_page()->counters[TP_SEGMENT_FAILURES]), 1);
    free(range);
    cr_assert(bench_config_free(config));
}

/* Before anything is broken: the counters' page and the stacks of threads are there. */
static struct tp_config *warm(void) {
    struct tp_config *config = bench_config(2 * MIB);
    char *range = bench_allocate(BYTES);
    (void)bench_fds();
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    return config;
}

static struct tp_config *on_node_0(void) {
    struct tp_config *config = bench_config(2 * MIB);
    config->store.node_count = 1;
    config->store.nodes[0] = 0;
    return config;
}

Test(segment_faults, a_chosen_node_is_seen_in_numa_maps) {
    struct tp_config *config = on_node_0();
    char *range = bench_allocate(BYTES);
    char line[512];
    bool bound = false;
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    FILE *file = fopen("/proc/self/numa_maps", "re");
    if (file == NULL)
        cr_skip("CONFIG: no NUMA in this kernel");
    while (fgets(line, sizeof line, file) != NULL)
        bound = bound || (strtoull(line, NULL, 16) == (uintptr_t)range && strstr(line, "bind:0"));
    fclose(file);
    cr_assert(bound);
    cr_assert_eq(tp_segment_restore(range), 0);
    free(range);
    cr_assert(bench_config_free(config));
}

Test(segment_faults, a_node_that_is_not_there_is_an_error) {
    struct tp_config *config = on_node_0();
    config->store.nodes[0] = 63;
    expect_untouched(config, -EINVAL);
}

Test(segment_faults, mbind_refused_by_seccomp) {
    break_always(SYS_mbind, EPERM);
    break_always(SYS_set_mempolicy, EPERM);
    expect_made(on_node_0());
}

Test(segment_faults, mbind_missing) {
    break_always(SYS_mbind, ENOSYS);
    expect_made(on_node_0());
}

Test(segment_faults, kernel_without_populate) {
    break_call(SYS_madvise, 2, UINT32_MAX, POPULATE_WRITE, EINVAL);
    expect_made(bench_config(2 * MIB));
}

Test(segment_faults, kernel_without_noexec_seal) {
    break_call(SYS_memfd_create, 1, 8, 8, EINVAL);
    expect_made(bench_config(2 * MIB));
}

Test(segment_faults, mappings_that_cannot_move) {
    break_always(SYS_mremap, EINVAL);
    expect_made(bench_config(2 * MIB));
}

Test(segment_faults, no_memfds) {
    struct tp_config *config = warm();
    break_always(SYS_memfd_create, EPERM);
    expect_untouched(config, -EPERM);
    cr_assert(bench_logged("MC_STORE_SHM_SEGMENT_DIR to a directory on tmpfs"));
}

Test(segment_faults, counters_that_cannot_be_shared_are_warned_of) {
    struct tp_config *config = bench_config(0);
    break_always(SYS_memfd_create, EPERM);
    cr_assert_eq(tp_server_start(false, config), 0);
    cr_assert(bench_logged("counters of this process cannot be shared"));
    tp_server_stop();
    cr_assert(bench_config_free(config));
}

static void expect_no_lock(int error) {
    struct tp_config *config = bench_config(0);
    break_always(SYS_flock, error);
    for (int store = 0; store < 2; store++) {
        cr_assert_eq(tp_server_start(store, config), -error);
        /* A lock file without a lock would be that of a dead process. */
        cr_assert_eq(bench_names(config), 0);
    }
    cr_assert(bench_logged("flock(2) is refused"));
    cr_assert(bench_logged("TIDEPOOL_SOCKET_DIR"));
    tp_server_stop();
    cr_assert(bench_config_free(config));
}

Test(segment_faults, flock_refused_by_seccomp) {
    expect_no_lock(EPERM);
}

Test(segment_faults, flock_missing) {
    expect_no_lock(ENOSYS);
}

Test(segment_faults, flock_without_lock_records) {
    expect_no_lock(ENOLCK);
}

Test(segment_faults, no_seals) {
    break_call(SYS_fcntl, 1, UINT32_MAX, F_ADD_SEALS, EPERM);
    /* The counters' page cannot be sealed either and stays private. */
    char *range = bench_allocate(BYTES);
    struct tp_config *config = bench_config(2 * MIB);
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), -EPERM);
    free(range);
    cr_assert(bench_config_free(config));
}

/* From now on this machine says that 8 MiB are available. */
static void leave_little_memory(void) {
    static char root[] = "/tmp/tidepool-test-XXXXXX";
    char path[64];
    cr_assert(scratch_directory(root));
    snprintf(path, sizeof path, "%s/proc", root);
    cr_assert_eq(mkdir(path, 0755), 0);
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    FILE *file = fopen(path, "we");
    cr_assert(file);
    cr_assert_gt(fputs("MemAvailable: 8192 kB\n", file), 0);
    cr_assert_eq(fclose(file), 0);
    tp_host_root = root;
}

Test(segment_faults, too_little_memory_is_an_error_that_names_the_setting) {
    struct tp_config *config = warm();
    leave_little_memory();
    expect_untouched(config, -ENOMEM);
    cr_assert(bench_logged("TIDEPOOL_OVERCOMMIT=1"));
}

Test(segment_faults, too_little_memory_is_a_warning_for_those_who_overcommit) {
    struct tp_config *config = warm();
    leave_little_memory();
    config->store.overcommit = true;
    expect_made(config);
    cr_assert(bench_logged("TIDEPOOL_OVERCOMMIT=1"));
}

Test(segment_faults, memory_that_cannot_be_populated) {
    struct tp_config *config = warm();
    break_call(SYS_madvise, 2, UINT32_MAX, POPULATE_WRITE, EFAULT);
    expect_untouched(config, -ENOMEM);
}

Test(segment_faults, populate_refused_by_seccomp) {
    struct tp_config *config = warm();
    break_call(SYS_madvise, 2, UINT32_MAX, POPULATE_WRITE, EPERM);
    expect_made(config);
}

Test(segment_faults, populate_and_fallocate_refused_by_seccomp) {
    struct tp_config *config = warm();
    break_call(SYS_madvise, 2, UINT32_MAX, POPULATE_WRITE, ENOSYS);
    break_always(SYS_fallocate, EPERM);
    expect_untouched(config, -EPERM);
    cr_assert(bench_logged("fallocate(2) is refused"));
}

Test(segment_faults, memory_that_cannot_be_reserved) {
    struct tp_config *config = warm();
    break_call(SYS_madvise, 2, UINT32_MAX, POPULATE_WRITE, EINVAL);
    break_always(SYS_fallocate, ENOSPC);
    expect_untouched(config, -ENOSPC);
}

/* The kernel sends SIGXFSZ where a file, also a memfd, would grow beyond it. */
Test(segment_faults, pieces_beyond_the_limit_of_file_sizes) {
    struct tp_config *config = warm();
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){MIB, MIB}), 0);
    expect_untouched(config, -EFBIG);
}

Test(segment_faults, the_last_move_fails) {
    struct tp_config *config = bench_config(2 * MIB);
    char *range = bench_allocate(BYTES);
    bench_fill(range, BYTES, 1);
    unsigned fds = bench_fds();
    /* mremap(old, bytes, bytes, flags, to): only the last piece's goes there. */
    break_call(SYS_mremap, 4, UINT32_MAX, (uint32_t)(uintptr_t)(range + BYTES - 2 * MIB), ENOMEM);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), -ENOMEM);
    cr_assert(bench_same(range, BYTES, 1));
    cr_assert_eq(bench_fds(), fds);
    /* Private again: a child's writes stay its own. */
    if (bench_fork() == 0) {
        range[0] ^= 1;
        _exit(0);
    }
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    cr_assert(bench_same(range, BYTES, 1));
    free(range);
    cr_assert(bench_config_free(config));
}
