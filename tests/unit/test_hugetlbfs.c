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
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "env/stats.h"
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

/* Takes all memory out of the store's segment, and all free huge pages. Returns 0, or which step
 * failed. */
static int take_pages(const struct tp_config *store) {
    struct tp_msg message;
    int piece = -1;
    unsigned count = 0;
    int fd = bench_attach(store);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    struct tp_msg_segment segment = message.body.segment;
    for (uint32_t i = 0; i < segment.piece_count; i++) {
        message = (struct tp_msg){.type = TP_MSG_WANT};
        message.body.pieces = (struct tp_msg_pieces){segment.segment_id, i, 1};
        if (tp_wire_send(fd, &message, NULL, 0) < 0 ||
            bench_receive(fd, &message, &piece, &count, 5000) < 0 || count != 1)
            return 2;
        if (fallocate(piece, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                      (off_t)tp_wire_piece_bytes(&segment, i)) < 0)
            return 3;
    }
    size_t bytes = free_pages() * 2 * MIB;
    void *taken = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);
    return taken == MAP_FAILED ? 4 : 0;
}

Test(files, a_listed_user_cannot_take_the_pages_of_a_memfd) {
    int done[2];
    int result = -1;
    pid_t test = getpid();
    if (geteuid() != 0)
        cr_skip("CONFIG: needs root");
    use_pool();
    config = bench_config(4 * MIB);
    config->store.hugepages = true;
    config->allow_uid_count = 1;
    config->allow_uids[0] = 23456;
    cr_assert_eq(chmod(config->store.socket_dir, 0755), 0);
    range = bench_allocate(BYTES);
    cr_assert_eq(tp_segment_overlay(range, BYTES, true, config), 0);
    cr_assert_eq(tp_segment_publish(range, config), 0);
    cr_assert_eq(pipe2(done, O_CLOEXEC), 0);
    pid_t thief = bench_fork();
    if (thief == 0) {
        close(lock_fd);
        result = seteuid(23456) < 0 ? 1 : take_pages(config);
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* seteuid has cleared it (prctl(2)) */
        (void)!write(done[1], &result, sizeof result);
        /* It keeps what it has taken until it is killed or, since a change of user drops what
         * bench_fork asked for, this test is dead. */
        while (getppid() == test)
            nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        _exit(0);
    }
    cr_assert_eq(read(done[0], &result, sizeof result), sizeof result);
    cr_assert_eq(result, 0, "step %d of the attack failed", result);
    bench_fill(range, BYTES, 3); /* SIGBUS on huge pages */
    cr_assert(bench_same(range, BYTES, 3));
    kill(thief, SIGKILL);
    cr_assert_eq(waitpid(thief, NULL, 0), thief);
    cr_assert(bench_logged("TIDEPOOL_ALLOW_UIDS lists other users"));
    tp_server_stop();
    cr_assert_eq(tp_segment_restore(range), 0);
}

Test(files, files_that_listed_users_could_cut_off_are_warned_of) {
    use_mount("tmpfs", "size=64m,mode=0700");
    config->allow_uid_count = 1;
    config->allow_uids[0] = 23456;
    cr_assert_eq(tp_segment_overlay(range, BYTES, false, config), 0);
    cr_assert(bench_logged("cannot be sealed"));
    cr_assert_eq(tp_segment_restore(range), 0);
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
