/* SPDX-License-Identifier: Apache-2.0 */
/* No count is lost while the page moves, a child counts apart from its parent, and a reader
 * survives hostile pages. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"

TestSuite(stats, .timeout = 60);

static struct tp_stats_page view, copy;

static uint64_t viewed(int fd, enum tp_counter counter) {
    cr_assert_eq(tp_stats_view(fd, &view), 0);
    return view.counters[counter];
}

Test(stats, counts_are_there_before_and_after_the_move) {
    struct tp_stats_page *page = tp_stats_page();
    int fd = -1, again = -1;
    tp_count(TP_LOCAL_BATCHES, 3);
    cr_assert_eq(page->counters[TP_LOCAL_BATCHES], 3);
    strcpy(page->name, "127.0.0.1:1");
    tp_stats_event("first");
    cr_assert_eq(tp_stats_open(&fd), 0);
    cr_assert_eq(tp_stats_open(&again), 0);
    cr_assert_eq(fd, again);
    cr_assert_eq(tp_stats_page(), page, "pointers into the page stay right");
    tp_count(TP_LOCAL_BATCHES, 4);
    page->segments[5].bytes = 77; /* through a pointer from before the move */
    cr_assert_eq(viewed(fd, TP_LOCAL_BATCHES), 7);
    cr_assert_eq(view.segments[5].bytes, 77);
    cr_assert_str_eq(view.name, "127.0.0.1:1");
    cr_assert_str_eq(view.events[0].text, "first");
}

Test(stats, the_header_describes_the_process) {
    int fd;
    static const uint8_t zeros[16];
    cr_assert_eq(tp_stats_open(&fd), 0);
    cr_assert_eq(tp_stats_view(fd, &view), 0);
    cr_assert_eq(view.pid, getpid());
    cr_assert_eq(view.uid, geteuid());
    cr_assert_eq(view.counter_count, TP_COUNTER_COUNT);
    cr_assert_str_eq(view.library_version, TP_VERSION);
    cr_assert_str_neq(view.program, "");
    cr_assert_gt(view.start_s, 1000000000U);
    cr_assert_neq(memcmp(view.instance, zeros, sizeof zeros), 0);
}

#define THREADS 3
#define MOVES 40

static _Atomic unsigned running;
static _Atomic bool stop;

static void *add_until_stopped(void *arg) {
    uint64_t *added = arg;
    atomic_fetch_add(&running, 1);
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        tp_count(TP_LOCAL_REQUESTS, 1);
        ++*added;
    }
    return NULL;
}

/* A page moves once in a process, so each move is made in a child. */
static bool no_count_is_lost(void) {
    pthread_t threads[THREADS];
    uint64_t added[THREADS] = {0}, sum = 0;
    int fd;
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, add_until_stopped, &added[i]) != 0)
            return false;
    while (atomic_load(&running) < THREADS)
        usleep(100);
    if (tp_stats_open(&fd) != 0)
        return false;
    usleep(1000);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        sum += added[i];
    }
    return tp_stats_view(fd, &view) == 0 && view.counters[TP_LOCAL_REQUESTS] == sum;
}

Test(stats, no_count_is_lost_while_the_page_moves) {
    for (int i = 0; i < MOVES; i++) {
        int status = -1;
        pid_t child = fork();
        if (child == 0)
            _exit(no_count_is_lost() ? 0 : 1);
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert_eq(status, 0, "move %d", i);
    }
}

static _Thread_local _Atomic bool *held_until; /* where a signal makes this thread stand still */

static void stand_still(int number) {
    (void)number;
    while (held_until != NULL && !atomic_load(held_until))
        usleep(1000);
}

struct slow {
    pthread_t thread;
    _Atomic bool go_on;
    uint64_t added;
};

static void *add_slowly(void *arg) {
    struct slow *slow = arg;
    held_until = &slow->go_on;
    return add_until_stopped(&slow->added);
}

static void *open_page(void *arg) {
    (void)tp_stats_open(arg);
    return NULL;
}

/* The first thread holds the move up, mostly in its add, the second then stands in a parked one
 * until the move has given up waiting for it. */
static bool no_count_of_a_slow_thread_is_lost(void) {
    static struct slow slow[2];
    pthread_t mover;
    int fd = -1;
    (void)signal(SIGUSR1, stand_still);
    for (int i = 0; i < 2; i++)
        if (pthread_create(&slow[i].thread, NULL, add_slowly, &slow[i]) != 0)
            return false;
    while (atomic_load(&running) < 2)
        usleep(100);
    pthread_kill(slow[0].thread, SIGUSR1);
    usleep(100000);
    if (pthread_create(&mover, NULL, open_page, &fd) != 0)
        return false;
    usleep(200000);
    pthread_kill(slow[1].thread, SIGUSR1);
    usleep(100000);
    atomic_store(&slow[0].go_on, true);
    pthread_join(mover, NULL);
    atomic_store(&slow[1].go_on, true);
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(slow[i].thread, NULL);
    return tp_stats_open(&fd) == 0 &&
           viewed(fd, TP_LOCAL_REQUESTS) == slow[0].added + slow[1].added;
}

Test(stats, no_count_of_a_thread_that_stands_still_is_lost) {
    pid_t children[12];
    for (int i = 0; i < 12; i++) {
        children[i] = fork();
        if (children[i] == 0)
            _exit(no_count_of_a_slow_thread_is_lost() ? 0 : 1);
    }
    for (int i = 0; i < 12; i++) {
        int status = -1;
        cr_assert_eq(waitpid(children[i], &status, 0), children[i]);
        cr_assert_eq(status, 0, "try %d", i);
    }
}

Test(stats, a_failed_move_goes_on_privately_and_can_be_tried_again) {
    static int held[4096];
    const struct rlimit limit = {.rlim_cur = 256, .rlim_max = 256};
    int count = 0, fd = -7;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    tp_stats_page();
    tp_count(TP_LOCAL_BATCHES, 1);
    while (count < 4096 && (held[count] = dup(0)) >= 0)
        count++;
    cr_assert_lt(count, 4096);
    cr_assert_eq(tp_stats_open(&fd), -EMFILE);
    cr_assert_eq(fd, -7);
    tp_count(TP_LOCAL_BATCHES, 1);
    cr_assert_eq(tp_stats_page()->counters[TP_LOCAL_BATCHES], 2);
    while (count > 0)
        close(held[--count]);
    cr_assert_eq(tp_stats_open(&fd), 0);
    cr_assert_eq(viewed(fd, TP_LOCAL_BATCHES), 2);
}

Test(stats, a_page_beyond_the_limit_of_file_sizes_stays_private) {
    int fd = -1;
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){4096, RLIM_INFINITY}), 0);
    tp_count(TP_LOCAL_BATCHES, 1);
    cr_assert_eq(tp_stats_open(&fd), -EFBIG);
    cr_assert_eq(tp_stats_page()->counters[TP_LOCAL_BATCHES], 1);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY}), 0);
    cr_assert_eq(tp_stats_open(&fd), 0);
    cr_assert_eq(viewed(fd, TP_LOCAL_BATCHES), 1);
}

Test(stats, readers_can_neither_resize_nor_write_the_page) {
    int fd;
    cr_assert_eq(tp_stats_open(&fd), 0);
    cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    cr_assert_eq(ftruncate(fd, 0), -1);
    cr_assert_eq(ftruncate(fd, 1 << 20), -1);
    cr_assert_eq(pwrite(fd, "x", 1, 0), -1);
    cr_assert_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    tp_count(TP_LOCAL_BATCHES, 1); /* and this process still may */
    cr_assert_eq(viewed(fd, TP_LOCAL_BATCHES), 1);
}

Test(stats, a_child_counts_apart) {
    int fd, status;
    cr_assert_eq(tp_stats_open(&fd), 0);
    tp_count(TP_LOCAL_BATCHES, 1);
    pid_t child = fork();
    if (child == 0) {
        int none = -1;
        tp_count(TP_LOCAL_BATCHES, 100);
        tp_stats_page()->counters[TP_LOCAL_BATCHES] += 100;
        tp_stats_event("from the child");
        _exit(tp_stats_open(&none) == -ECHILD && none == -1 ? 0 : 1);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    cr_assert_eq(viewed(fd, TP_LOCAL_BATCHES), 1);
    cr_assert_eq(view.events[0].time_s, 0);
}

Test(stats, counters_out_of_range_are_ignored) {
    tp_count((enum tp_counter)TP_COUNTER_COUNT, 1);
    tp_count((enum tp_counter) - 1, 1);
    for (unsigned i = 0; i < 128; i++)
        cr_assert_eq(tp_stats_page()->counters[i], 0);
}

Test(stats, the_last_16_events_are_kept) {
    char text[400];
    int fd;
    cr_assert_eq(tp_stats_open(&fd), 0);
    for (int i = 0; i < 20; i++) {
        snprintf(text, sizeof text, "event %d", i);
        tp_stats_event(text);
    }
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    tp_stats_event(text);
    cr_assert_eq(tp_stats_view(fd, &view), 0);
    cr_assert_str_eq(view.events[3].text, "event 19");
    cr_assert_eq(strlen(view.events[4].text), sizeof view.events[4].text - 1);
    cr_assert_str_eq(view.events[5].text, "event 5");
}

Test(stats, every_counter_is_described_once) {
    for (unsigned i = 0; i < TP_COUNTER_COUNT; i++) {
        cr_assert(tp_counter_infos[i].name && tp_counter_infos[i].unit &&
                  tp_counter_infos[i].meaning);
        for (unsigned j = 0; j < i; j++)
            cr_assert_str_neq(tp_counter_infos[i].name, tp_counter_infos[j].name);
    }
}

/* ---- hostile pages ---- */

static int memfd_of(const void *content, size_t bytes) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, content, bytes), (ssize_t)bytes);
    return fd;
}

static int view_of(const void *content, size_t bytes) {
    int fd = memfd_of(content, bytes);
    int rc;
    memset(&view, 0x5a, sizeof view);
    rc = tp_stats_view(fd, &view);
    if (rc < 0)
        cr_assert_eq(view.magic, UINT64_C(0x5a5a5a5a5a5a5a5a), "untouched on failure");
    close(fd);
    return rc;
}

static void take_copy(void) {
    int fd;
    cr_assert_eq(tp_stats_open(&fd), 0);
    cr_assert_eq(tp_stats_view(fd, &copy), 0);
}

Test(stats, other_pages_are_refused) {
    take_copy();
    cr_assert_eq(view_of(&copy, sizeof copy), 0);
    cr_assert_eq(view_of(&copy, sizeof copy - 1), -EPROTO);
    cr_assert_eq(view_of(&copy, 8), -EPROTO);
    cr_assert_eq(view_of("", 0), -EPROTO);
    copy.version++;
    cr_assert_eq(view_of(&copy, sizeof copy), -EPROTONOSUPPORT);
    copy.version--;
    copy.size_bytes++;
    cr_assert_eq(view_of(&copy, sizeof copy), -EPROTO);
    copy.size_bytes--;
    copy.magic ^= 1;
    cr_assert_eq(view_of(&copy, sizeof copy), -EPROTO);
}

Test(stats, texts_and_counts_of_a_hostile_page_are_bounded) {
    struct tp_stats_page hostile;
    take_copy();
    memset(&hostile, 0xff, sizeof hostile);
    hostile.magic = copy.magic;
    hostile.version = copy.version;
    hostile.size_bytes = copy.size_bytes;
    cr_assert_eq(view_of(&hostile, sizeof hostile), 0);
    cr_assert_eq(view.counter_count, TP_COUNTER_COUNT);
    cr_assert_eq(strlen(view.library_version), sizeof view.library_version - 1);
    cr_assert_eq(strlen(view.program), sizeof view.program - 1);
    cr_assert_eq(strlen(view.hostname), sizeof view.hostname - 1);
    cr_assert_eq(strlen(view.name), sizeof view.name - 1);
    for (unsigned i = 0; i < TP_STATS_SEGMENTS; i++) {
        cr_assert_eq(view.segments[i].state, TP_SLOT_EMPTY);
        cr_assert_eq(strlen(view.segments[i].detail), sizeof view.segments[i].detail - 1);
    }
    for (unsigned i = 0; i < TP_STATS_CLIENTS; i++)
        cr_assert_eq(view.clients[i].state, TP_SLOT_EMPTY);
    for (unsigned i = 0; i < TP_STATS_PEERS; i++) {
        cr_assert_eq(view.peers[i].state, TP_SLOT_EMPTY);
        cr_assert_eq(strlen(view.peers[i].name), sizeof view.peers[i].name - 1);
        cr_assert_eq(strlen(view.peers[i].path), sizeof view.peers[i].path - 1);
    }
    for (unsigned i = 0; i < TP_STATS_EVENTS; i++)
        cr_assert_eq(strlen(view.events[i].text), sizeof view.events[i].text - 1);
    for (unsigned i = 0; i < TP_STATS_MISSES; i++) {
        cr_assert_eq(view.misses[i].state, TP_SLOT_EMPTY);
        cr_assert_eq(strlen(view.misses[i].name), sizeof view.misses[i].name - 1);
    }
}

Test(stats, fds_that_are_no_memfds_are_refused_without_reading) {
    int ends[2], fd;
    char path[] = "/tmp/tidepool-stats-XXXXXX";
    take_copy();
    cr_assert_eq(tp_stats_view(-1, &view), -EBADF);
    cr_assert_eq(pipe2(ends, O_CLOEXEC), 0);
    cr_assert_eq(tp_stats_view(ends[0], &view),
                 -EPROTO); /* reading would run into the time limit */
    fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    cr_assert_eq(tp_stats_view(fd, &view), -EPROTO);
    fd = mkstemp(path);
    cr_assert_eq(write(fd, &copy, sizeof copy), (ssize_t)sizeof copy);
    struct statfs status;
    cr_assert_eq(fstatfs(fd, &status), 0);
    unlink(path);
    if (status.f_type != TMPFS_MAGIC) /* whose files know seals */
        cr_assert_eq(tp_stats_view(fd, &view), -EPROTO);
    fd = memfd_of(&copy, sizeof copy);
    cr_assert_eq(ftruncate(fd, (off_t)1 << 40), 0);
    cr_assert_eq(tp_stats_view(fd, &view), -EPROTO);
}
