/* SPDX-License-Identifier: Apache-2.0 */
/* A forked child is inert, keeps none of the listed fds and takes no lock; library threads stay out
 * of the host's way. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"

TestSuite(fork, .timeout = 60);

/* Run `check` in a forked child; it returns true when all is right. */
static bool in_child(bool (*check)(void)) {
    int status = -1;
    pid_t child = fork();
    if (child == 0)
        _exit(check() ? 0 : 1);
    cr_assert_gt(child, 0);
    cr_assert_eq(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool grandchild_is_inert(void) {
    int status = -1;
    pid_t child;
    if (!tp_inert())
        return false;
    child = fork();
    if (child == 0)
        _exit(tp_inert() ? 0 : 1);
    return waitpid(child, &status, 0) == child && status == 0;
}

Test(fork, children_of_any_depth_are_inert_and_the_parent_is_not) {
    tp_fork_guard();
    tp_fork_guard();
    cr_assert(in_child(grandchild_is_inert));
    cr_assert_not(tp_inert());
}

static int pair[2];

static bool fds_are_closed(void) {
    return fcntl(pair[0], F_GETFD) < 0 && fcntl(pair[1], F_GETFD) >= 0;
}

Test(fork, listed_fds_are_closed_in_the_child_only) {
    tp_fork_guard();
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    cr_assert_eq(tp_fork_close_add(pair[0]), 0);
    cr_assert_eq(tp_fork_close_add(pair[1]), 0);
    tp_fork_close_remove(pair[1]);
    tp_fork_close_remove(pair[1]);
    tp_fork_close_remove(-1);
    cr_assert(in_child(fds_are_closed));
    cr_assert_geq(fcntl(pair[0], F_GETFD), 0);
}

Test(fork, a_child_does_not_hold_the_lease) {
    char byte;
    tp_fork_guard();
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    cr_assert_eq(tp_fork_close_add(pair[0]), 0);
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    tp_fork_close_remove(pair[0]);
    close(pair[0]);
    cr_assert_eq(recv(pair[1], &byte, 1, 0), 0); /* end of file, although the child lives */
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

Test(fork, the_table_has_a_bound) {
    cr_assert_eq(tp_fork_close_add(-1), -EBADF);
    for (int i = 0; i < 1024; i++)
        cr_assert_eq(tp_fork_close_add(100000 + i), 0);
    cr_assert_eq(tp_fork_close_add(7), -ENOSPC);
    tp_fork_close_remove(100500);
    cr_assert_eq(tp_fork_close_add(7), 0);
    cr_assert_eq(tp_fork_close_add(8), -ENOSPC);
}

static _Atomic bool stop;

static void *use_everything(void *arg) {
    while (!atomic_load(&stop)) {
        tp_stats_event("busy");
        tp_log(TP_LOG_DEBUG, "busy");
        tp_count(TP_LOCAL_BATCHES, 1);
        if (tp_fork_close_add(99999) == 0)
            tp_fork_close_remove(99999);
    }
    return NULL;
}

static bool uses_everything_itself(void) {
    int fd;
    tp_stats_event("child");
    tp_log(TP_LOG_ERROR, "child");
    tp_count(TP_LOCAL_BATCHES, 1);
    tp_stats_page();
    (void)tp_stats_open(&fd);
    tp_fork_close_remove(5);
    return tp_inert();
}

Test(fork, forks_beside_threads_that_hold_our_locks_do_not_hang) {
    pthread_t threads[3];
    tp_fork_guard();
    for (int i = 0; i < 3; i++)
        cr_assert_eq(tp_thread_start("busy", use_everything, NULL, &threads[i]), 0);
    for (int i = 0; i < 200; i++)
        cr_assert(in_child(uses_everything_itself)); /* a hang runs into the time limit */
    atomic_store(&stop, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}

/* ---- threads ---- */

struct seen {
    sigset_t mask;
    size_t stack_bytes;
};

static void *look(void *arg) {
    struct seen *seen = arg;
    pthread_attr_t attr;
    pthread_sigmask(SIG_SETMASK, NULL, &seen->mask);
    if (pthread_getattr_np(pthread_self(), &attr) == 0) {
        pthread_attr_getstacksize(&attr, &seen->stack_bytes);
        pthread_attr_destroy(&attr);
    }
    return arg;
}

Test(fork, a_library_thread_gets_no_signal_but_its_own_faults) {
    struct seen seen = {0};
    sigset_t before = {0}, after = {0};
    pthread_t thread;
    void *result = NULL;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    cr_assert_eq(tp_thread_start("tp-look", look, &seen, &thread), 0);
    cr_assert_eq(pthread_join(thread, &result), 0);
    cr_assert_eq(result, &seen);
    for (int signal = 1; signal < 32; signal++) {
        bool fault = signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE ||
                     signal == SIGILL || signal == SIGTRAP || signal == SIGSYS;
        if (signal != SIGKILL && signal != SIGSTOP)
            cr_assert_eq(sigismember(&seen.mask, signal) != 0, !fault, "signal %d", signal);
    }
    cr_assert(sigismember(&seen.mask, SIGRTMIN));
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    cr_assert_eq(memcmp(&before, &after, sizeof before), 0);
    cr_assert_geq(seen.stack_bytes, 256 << 10);
    cr_assert_leq(seen.stack_bytes, 8 << 20);
}

static pthread_barrier_t barrier;

static void *wait_for_name(void *arg) {
    pthread_barrier_wait(&barrier);
    pthread_getname_np(pthread_self(), arg, 32);
    return NULL;
}

Test(fork, names_are_cut_to_what_the_kernel_takes) {
    char name[32] = "";
    pthread_t thread;
    pthread_barrier_init(&barrier, NULL, 2);
    cr_assert_eq(tp_thread_start("tidepool-registrar", wait_for_name, name, &thread), 0);
    pthread_barrier_wait(&barrier);
    pthread_join(thread, NULL);
    cr_assert_str_eq(name, "tidepool-regist");
}

/* As in programs whose modules bring more TLS than our stack: it must not come out of our 256 KiB.
 */
static _Thread_local volatile char large_tls[1 << 20];

static void *use_stack(void *arg) {
    volatile char frame[200 << 10];
    pthread_attr_t attr;
    memset((char *)frame, 1, sizeof frame);
    large_tls[sizeof large_tls - 1] = frame[0];
    if (pthread_getattr_np(pthread_self(), &attr) == 0) {
        pthread_attr_getstacksize(&attr, arg);
        pthread_attr_destroy(&attr);
    }
    return (void *)(uintptr_t)large_tls[sizeof large_tls - 1];
}

Test(fork, the_hosts_tls_does_not_eat_the_stack) {
    pthread_t thread;
    void *result = NULL;
    size_t stack_bytes = 0;
    cr_assert_eq(tp_thread_start("tp-tls", use_stack, &stack_bytes, &thread), 0);
    pthread_join(thread, &result);
    cr_assert_eq((uintptr_t)result, 1);
    cr_assert_gt(stack_bytes, 1 << 20);
    cr_assert_lt(stack_bytes, 4 << 20, "the default size was needed: %zu", stack_bytes);
}
