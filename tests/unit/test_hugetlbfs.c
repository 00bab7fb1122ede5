/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments in files: on tmpfs everywhere, on hugetlbfs where this user may mount one and the kernel
 * has pages to give. Every page comes back, whoever dies.
 */
#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "segment/segment.h"
#include "segment_bench.h"

#define POOL_FILE "/proc/sys/vm/nr_hugepages"
#define HUGE_POOL "/sys/kernel/mm/hugepages/hugepages-2048kB/"
#define POOL_PAGES 64
#define BYTES (32 * MIB)

static int lock_fd = -1;
static unsigned long pages_before;
static char mounted[64];
static struct tp_config *config;
static char *range;

static unsigned long read_count(const char *path) {
    unsigned long value = 0;
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        if (fscanf(file, "%lu", &value) != 1)
            value = 0;
        fclose(file);
    }
    return value;
}

static void write_count(unsigned long value) {
    FILE *file = fopen(POOL_FILE, "we");
    if (file != NULL) {
        fprintf(file, "%lu", value);
        fclose(file);
    }
}

static unsigned long free_pages(void) {
    return read_count(HUGE_POOL "free_hugepages");
}

static void use_mount(const char *type, const char *options) {
    snprintf(mounted, sizeof mounted, "/tmp/tidepool-mount-XXXXXX");
    cr_assert_not_null(mkdtemp(mounted));
    if (mount("none", mounted, type, 0, options) < 0) {
        rmdir(mounted);
        mounted[0] = 0;
        cr_skip("CONFIG: cannot mount %s: %s", type, strerror(errno));
    }
    config = bench_config(4 * MIB);
    config->store.kind = TP_SEGMENT_FILES;
    config->store.wait_s = 1;
    snprintf(config->store.segment_dir, sizeof config->store.segment_dir, "%s", mounted);
    range = bench_allocate(BYTES);
}

/* The pool belongs to the machine: one test at a time, and as it was afterwards. */
static void use_pool(void) {
    lock_fd = open("/tmp/hugepages.lock", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    cr_assert_geq(lock_fd, 0);
    cr_assert_eq(flock(lock_fd, LOCK_EX), 0);
    pages_before = read_count(POOL_FILE);
    write_count(pages_before + POOL_PAGES);
    if (free_pages() < POOL_PAGES)
        cr_skip("CONFIG: the kernel gives no %d huge pages", POOL_PAGES);
}

static void use_hugetlbfs(void) {
    use_pool();
    use_mount("hugetlbfs", "pagesize=2M,mode=0700");
}

static void clean(void) {
    tp_server_stop();
    if (range != NULL) {
        tp_segment_restore(range);
        free(range);
    }
    if (mounted[0] != 0) {
        umount2(mounted, MNT_DETACH);
        rmdir(mounted);
    }
    if (lock_fd >= 0) {
        write_count(pages_before);
        close(lock_fd);
    }
    if (config != NULL)
        bench_config_free(config);
}

TestSuite(files, .timeout = 40, .fini = clean);

static void expect_empty_mount(void) {
    char command[128];
    snprintf(command, sizeof command, "test -z \"$(ls -A %s)\"", mounted);
    cr_assert_eq(system(command), 0);
}

static void round_trip(void) {
    bench_fill(range, BYTES, 1);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), 0);
    cr_assert(bench_same(range, BYTES, 1));
    expect_empty_mount();
    cr_assert_eq(tp_segment_publish(range, config), 0);
    pid_t child = bench_fork();
    if (child == 0) {
        struct tp_msg message;
        int fd = bench_attach(config);
        bench_expect(fd, TP_MSG_SEGMENT, &message);
        char *map = bench_map(fd, &message.body.segment);
        bool good = map != NULL && bench_same(map, BYTES, 1);
        if (good)
            bench_fill(map, BYTES, 2);
        _exit(good ? 0 : 1);
    }
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    cr_assert(bench_same(range, BYTES, 2));
}

Test(files, tmpfs_round_trip) {
    use_mount("tmpfs", "size=64M,mode=0700");
    round_trip();
}

Test(files, a_full_tmpfs_is_an_error) {
    use_mount("tmpfs", "size=16M,mode=0700");
    range[0] = 7;
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), -ENOSPC);
    cr_assert_eq(range[0], 7);
    cr_assert_eq(tp_segment_overlay(range, 8 * MIB, false, config), 0);
}

Test(files, other_file_systems_are_refused) {
    use_mount("tmpfs", "size=16M,mode=0700");
    snprintf(config->store.segment_dir, sizeof config->store.segment_dir, "/proc/self");
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), -EINVAL);
}

Test(files, hugetlbfs_round_trip_and_pages_come_back) {
    use_hugetlbfs();
    unsigned long before = free_pages();
    round_trip();
    cr_assert_eq(free_pages(), before - BYTES / (2 * MIB));
    cr_assert_eq(tp_segment_restore(range), 0);
    cr_assert_eq(free_pages(), before);
}

Test(files, hugetlbfs_takes_whole_pages_only) {
    use_hugetlbfs();
    range[4 * MIB] = 7;
    cr_assert_eq(tp_segment_overlay(range + 4096, BYTES / 2, false, config), -EINVAL);
    cr_assert_eq(tp_segment_overlay(range, 5 * MIB, false, config), 0);
    cr_assert_eq(range[4 * MIB], 7);
    cr_assert_not(tp_segment_contains(range + 4 * MIB));
    cr_assert(tp_segment_contains(range + 4 * MIB - 1));
}

Test(files, too_few_huge_pages_is_an_error_at_once) {
    use_hugetlbfs();
    uint64_t bytes = (pages_before + POOL_PAGES + 8) * 2 * MIB;
    char *large = bench_allocate(bytes);
    large[0] = 7;
    config->store.wait_s = 300;
    cr_assert_eq(tp_segment_overlay(large, bytes, false, config), -ENOMEM);
    cr_assert_eq(large[0], 7);
    free(large);
}

Test(files, pages_that_others_hold_are_waited_for) {
    use_hugetlbfs();
    uint64_t bytes = POOL_PAGES * 2 * MIB;
    char *large = bench_allocate(bytes);
    void *held = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);
    cr_assert_neq(held, MAP_FAILED);
    cr_assert_eq(tp_segment_overlay(large, bytes, false, config), -ENOMEM);
    pid_t child = bench_fork();
    if (child == 0) {
        sleep(1);
        _exit(0); /* the child's share of the private pages goes with it */
    }
    munmap(held, 8 * MIB);
    config->store.wait_s = 20;
    cr_assert_eq(tp_segment_overlay(large, bytes, false, config), 0);
    waitpid(child, NULL, 0);
    cr_assert_eq(tp_segment_restore(large), 0);
    free(large);
}

Test(files, a_killed_store_gives_its_pages_back) {
    use_hugetlbfs();
    unsigned long before = free_pages();
    int ready[2];
    cr_assert_eq(pipe(ready), 0);
    pid_t child = bench_process();
    if (child == 0) {
        char c = tp_segment_overlay(range, BYTES, false, config) == 0 ? 'y' : 'n';
        if (write(ready[1], &c, 1) == 1)
            pause();
        _exit(1);
    }
    char c = 0;
    cr_assert_eq(read(ready[0], &c, 1), 1);
    cr_assert_eq(c, 'y');
    cr_assert_lt(free_pages(), before);
    kill(child, SIGKILL);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    cr_assert_eq(free_pages(), before);
    expect_empty_mount();
}

Test(files, memfd_on_huge_pages_and_without_enough_of_them) {
    use_pool();
    config = bench_config(4 * MIB);
    config->store.hugepages = true;
    range = bench_allocate(BYTES);
    unsigned long before = free_pages();
    bench_fill(range, BYTES, 1);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), 0);
    cr_assert(bench_same(range, BYTES, 1));
    cr_assert_eq(free_pages(), before - BYTES / (2 * MIB));
    cr_assert_eq(tp_segment_restore(range), 0);
    cr_assert_eq(free_pages(), before);
    write_count(pages_before);
    before = free_pages();
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    cr_assert_eq(free_pages(), before);
}

Test(files, huge_pages_put_no_socket_in_the_way) {
    use_hugetlbfs();
    snprintf(config->store.socket_dir, sizeof config->store.socket_dir, "%s", mounted);
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    int result = tp_segment_publish(range, config);
    cr_assert(result == 0 || result == -EOPNOTSUPP || result == -EPERM, "%s", strerror(-result));
    tp_server_stop();
    expect_empty_mount();
}
