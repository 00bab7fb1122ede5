/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: segments get addresses that none had before them, in this process or in another of the
 * directory, whatever is in the record of addresses, and whoever dies while writing it. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "segment/addresses.h"
#include "segment/segment.h"
#include "segment_bench.h"

#define GIB (UINT64_C(1) << 30)
#define TIB (UINT64_C(1) << 40)
#define SPACE (UINT64_C(1) << 47)
#define UNIT (2 * MIB)
#define RECORDS 4096U
#define MOST 8192U

static struct tp_config *config;
static char path[sizeof config->store.socket_dir + 16];
static uint64_t *bases; /* shared with children */
static int log_fd;

/* Standard error goes to a file. The test's own process never draws: its children, which stand for
 * stores, would take themselves for it. */
static void set_up(void) {
    config = bench_config(0);
    snprintf(path, sizeof path, "%s/addresses", config->store.socket_dir);
    bases =
        mmap(NULL, MOST * sizeof *bases, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(bases, MAP_FAILED);
    setenv("TIDEPOOL_LOG", "info", 1);
    log_fd = memfd_create("stderr", MFD_CLOEXEC);
    cr_assert_geq(dup2(log_fd, 2), 0);
}

static void tear_down(void) {
    cr_assert(bench_config_free(config));
}

/* With a sanitizer the kernel chooses. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DISABLED true
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define DISABLED true
#endif
#endif
#ifndef DISABLED
#define DISABLED false
#endif

TestSuite(addresses, .timeout = 30, .init = set_up, .fini = tear_down, .disabled = DISABLED);

static unsigned said(const char *words) {
    static char text[65536];
    ssize_t bytes = pread(log_fd, text, sizeof text - 1, 0);
    unsigned count = 0;
    text[bytes < 0 ? 0 : bytes] = 0;
    for (const char *at = text; (at = strstr(at, words)) != NULL; at++)
        count++;
    return count;
}

/* A process that draws so often and puts what it gets at bases[first]. */
static pid_t drawing(unsigned first, unsigned count, uint64_t bytes) {
    pid_t child = bench_process();
    if (child == 0) {
        for (unsigned i = 0; i < count; i++) {
            uint64_t base = 0;
            if (tp_addresses_draw(config, bytes, UNIT, &base) != 0 || base % UNIT != 0 ||
                base < TIB || base + bytes > SPACE - TIB)
                _exit(1);
            bases[first + i] = base;
        }
        _exit(0);
    }
    return child;
}

static void await_good(pid_t child) {
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
}

/* Another store. */
static uint64_t draw(uint64_t bytes) {
    await_good(drawing(MOST - 1, 1, bytes));
    return bases[MOST - 1];
}

static int ascending(const void *a, const void *b) {
    const uint64_t *left = a;
    const uint64_t *right = b;
    return (*left > *right) - (*left < *right);
}

static void expect_apart(unsigned count, uint64_t bytes) {
    qsort(bases, count, sizeof *bases, ascending);
    for (unsigned i = 1; i < count; i++)
        cr_assert(bases[i] - bases[i - 1] >= bytes, "%#lx and %#lx overlap",
                  (unsigned long)bases[i - 1], (unsigned long)bases[i]);
}

/* Does another process know of a segment there? */
static bool known(uint64_t base) {
    int status;
    pid_t child = bench_process();
    if (child == 0)
        _exit(tp_addresses_take(config, (void *)(uintptr_t)base, UNIT, false) ? 0 : 1);
    cr_assert_eq(waitpid(child, &status, 0), child);
    return status != 0;
}

Test(addresses, of_one_process_after_another) {
    for (unsigned i = 0; i < 24; i++)
        await_good(drawing(i, 1, TIB));
    expect_apart(24, TIB);
    cr_assert_eq(said("addresses"), 0);
}

Test(addresses, of_one_process_without_a_record) {
    config->store.socket_dir[0] = 0;
    await_good(drawing(0, 24, TIB));
    expect_apart(24, TIB);
    memcpy(config->store.socket_dir, config->engine.socket_dir, sizeof config->store.socket_dir);
    cr_assert_neq(access(path, F_OK), 0);
}

Test(addresses, of_processes_that_write_at_once) {
    pid_t children[4];
    for (unsigned i = 0; i < 4; i++)
        children[i] = drawing(i * 200, 200, 16 * GIB);
    for (unsigned i = 0; i < 4; i++)
        await_good(children[i]);
    expect_apart(800, 16 * GIB);
    struct stat status;
    cr_assert_eq(stat(path, &status), 0);
    cr_assert_eq(status.st_mode & 0777, 0600);
    cr_assert_eq(status.st_size, 64 + 64 * (1 + 800), "%ld", (long)status.st_size);
    cr_assert_eq(said("addresses"), 0);
}

Test(addresses, the_oldest_go_when_it_is_full) {
    await_good(drawing(0, RECORDS + 100, UNIT));
    struct stat status;
    cr_assert_eq(stat(path, &status), 0);
    cr_assert_eq(status.st_size, 64 + 64 * RECORDS);
    cr_assert(known(bases[RECORDS + 99]) && known(bases[110]));
    cr_assert(!known(bases[0]) && !known(bases[90]));
}

/* What is kept covers a quarter of all addresses at most. */
Test(addresses, the_oldest_go_when_they_cover_too_much) {
    await_good(drawing(0, 40, TIB));
    cr_assert(known(bases[39]) && known(bases[9]));
    unsigned forgotten = 0; /* some may have been drawn again since */
    for (unsigned i = 0; i < 8; i++)
        forgotten += !known(bases[i]);
    cr_assert_gt(forgotten, 0);
}

Test(addresses, many_small_ones_leave_room_for_a_large_one) {
    pid_t child = bench_process();
    if (child == 0) {
        for (unsigned i = 1; i < RECORDS; i++)
            if (!tp_addresses_take(config, (void *)(i * (SPACE / RECORDS)), UNIT, true))
                _exit(1);
        _exit(0);
    }
    await_good(child);
    bases[0] = draw(8 * TIB);
    bases[1] = draw(8 * TIB);
    expect_apart(2, 8 * TIB);
    uint64_t base = 0;
    cr_assert_eq(tp_addresses_draw(config, SPACE, UNIT, &base), -ENOMEM);
}

static void write_file(const void *bytes, size_t size) {
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, bytes, size), (ssize_t)size);
    close(fd);
}

/* A word of a good file of three records becomes another. */
static void damage(size_t offset, uint64_t value) {
    unsigned char file[64 * 5];
    int fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_eq(pread(fd, file, sizeof file, 0), (ssize_t)sizeof file);
    memcpy(file + offset, &value, sizeof value);
    cr_assert_eq(pwrite(fd, file, sizeof file, 0), (ssize_t)sizeof file);
    close(fd);
}

Test(addresses, garbage_is_no_record) {
    static unsigned char large[64 * (RECORDS + 2)];
    static const struct {
        size_t offset;
        uint64_t value;
    } words[] = {
        {0, 1},                        /* magic */
        {8, 2 | (uint64_t)4096 << 32}, /* version */
        {8, 1 | (uint64_t)4095 << 32}, /* records */
        {128, 2},                      /* a number that belongs elsewhere */
        {128, UINT64_MAX - 4094},      /* no number is left after it */
        {128, 0},                      /* none, and yet something */
        {136, 0},
        {136, 4097},
        {136, SPACE}, /* base */
        {144, 0},
        {144, SPACE}, /* bytes */
    };
    memset(large, 0x5a, sizeof large);
    write_file("hello", 5);
    (void)draw(TIB);
    write_file(large, sizeof large);
    (void)draw(TIB);
    write_file(large, 640);
    (void)draw(TIB);
    cr_assert_eq(said("begun anew"), 3);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        cr_assert_eq(unlink(path), 0);
        await_good(drawing(0, 3, UNIT));
        damage(words[i].offset, words[i].value);
        (void)draw(GIB);
        cr_assert_eq(said("begun anew"), 4 + (unsigned)i);
        cr_assert(known(draw(UNIT)), "word %zu", i);
    }
    for (unsigned i = 0; i < 6; i++) /* it is one again */
        await_good(drawing(i, 1, TIB));
    expect_apart(6, TIB);
}

Test(addresses, what_a_killed_process_leaves_is_right) {
    for (unsigned i = 0; i < 20; i++) {
        memset(bases, 0, MOST * sizeof *bases);
        pid_t child = drawing(0, MOST, UNIT);
        usleep(5000 + 1000 * i);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        cr_assert(bases[0] == 0 || known(bases[0]) || bases[RECORDS / 2] != 0);
        cr_assert(known(draw(UNIT)));
    }
    cr_assert_eq(said("addresses"), 0);
}

Test(addresses, a_process_that_holds_the_lock_is_not_waited_for_long) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_eq(flock(fd, LOCK_EX), 0);
    await_good(drawing(0, 3, 16 * TIB)); /* a second each */
    cr_assert_eq(said("cannot be used"), 1);
    expect_apart(3, 16 * TIB);
    cr_assert_eq(flock(fd, LOCK_UN), 0);
    close(fd);
    cr_assert(known(draw(UNIT)));
}

Test(addresses, what_is_no_file_of_ours_is_left_alone) {
    char other[sizeof path + 8];
    struct stat status;
    snprintf(other, sizeof other, "%s-other", path);
    write_file("precious", 8);
    cr_assert_eq(rename(path, other), 0);
    for (unsigned i = 0; i < 4; i++) {
        int made = i == 0   ? symlink(other, path)
                   : i == 1 ? link(other, path)
                   : i == 2 ? mkfifo(path, 0600)
                            : mkdir(path, 0700);
        cr_assert_eq(made, 0);
        await_good(drawing(0, 4, 8 * TIB));
        expect_apart(4, 8 * TIB);
        cr_assert_eq(said("cannot be used"), i + 1);
        cr_assert_eq(remove(path), 0);
    }
    cr_assert_eq(stat(other, &status), 0);
    cr_assert_eq(status.st_size, 8);
    cr_assert_eq(unlink(other), 0);
}

/* An overlay's addresses are somebody else's choice. */
Test(addresses, an_overlay_does_not_come_where_an_earlier_store_was) {
    char *range = bench_allocate(16 * MIB);
    pid_t child = bench_process();
    if (child == 0)
        _exit(tp_segment_overlay(range + 2 * MIB, 2 * MIB, false, config) == 0 ? 0 : 1);
    await_good(child);
    range[0] = 7;
    cr_assert_eq(tp_segment_overlay(range, 16 * MIB, false, config), -EADDRINUSE);
    cr_assert_eq(tp_segment_publish(range, config), -ENOENT);
    cr_assert_eq(range[0], 7);
    cr_assert_eq(tp_segment_overlay(range + 4 * MIB, MIB, false, config), 0);
    cr_assert_eq(tp_segment_restore(range + 4 * MIB), 0);
    cr_assert_eq(tp_segment_overlay(range + 4 * MIB, MIB, false, config), 0, "it was its own");
    cr_assert_eq(tp_segment_restore(range + 4 * MIB), 0);
    free(range);
}
