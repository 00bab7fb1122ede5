/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A forked child starts inert, and the library's own threads.
 *
 * The child handler runs in a process whose other threads are gone, possibly while one of them held
 * a lock of ours or of malloc: it takes no lock and calls only async-signal-safe functions. It must
 * not know: what the fds are, what the threads do.
 */
#include "env/env.h"

#include <errno.h>
#include <link.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define MAX_CLOSE_FDS 1024
#define STACK_BYTES ((size_t)256 << 10)

static _Atomic bool inert;
static atomic_flag guard_armed = ATOMIC_FLAG_INIT;
static _Atomic int close_fds[MAX_CLOSE_FDS]; /* fd + 1; 0 is a free slot */

bool tp_inert(void) {
    return atomic_load_explicit(&inert, memory_order_relaxed);
}

static void after_fork_in_child(void) {
    atomic_store_explicit(&inert, true, memory_order_relaxed);
    for (size_t i = 0; i < MAX_CLOSE_FDS; i++) {
        int entry = atomic_exchange_explicit(&close_fds[i], 0, memory_order_relaxed);

        if (entry > 0)
            close(entry - 1);
    }
}

void tp_fork_guard(void) {
    if (atomic_flag_test_and_set(&guard_armed))
        return;
    if (pthread_atfork(NULL, NULL, after_fork_in_child) != 0)
        atomic_flag_clear(&guard_armed); /* ENOMEM: the next caller tries again */
}

int tp_fork_close_add(int fd) {
    if (fd < 0)
        return -EBADF;
    for (size_t i = 0; i < MAX_CLOSE_FDS; i++) {
        int empty = 0;

        if (atomic_compare_exchange_strong(&close_fds[i], &empty, fd + 1))
            return 0;
    }
    return -ENOSPC;
}

void tp_fork_close_remove(int fd) {
    if (fd < 0)
        return;
    for (size_t i = 0; i < MAX_CLOSE_FDS; i++) {
        int entry = fd + 1;

        if (atomic_compare_exchange_strong(&close_fds[i], &entry, 0))
            return;
    }
}

static int add_tls_bytes(struct dl_phdr_info *info, size_t info_bytes, void *arg) {
    size_t *total = arg;

    (void)info_bytes;
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_TLS)
            *total += info->dlpi_phdr[i].p_memsz + info->dlpi_phdr[i].p_align;
    }
    return 0;
}

/*
 * glibc places the static TLS of every loaded module on the thread's stack (allocate_stack in
 * nptl), and programs with hundreds of KiB of it exist; so it is added to what our code needs.
 */
static size_t whole_stack_bytes(size_t own_bytes) {
    size_t tls_bytes = 0;
    size_t bytes;

    dl_iterate_phdr(add_tls_bytes, &tls_bytes);
    bytes = own_bytes + (size_t)PTHREAD_STACK_MIN + tls_bytes;
    return (bytes + 4095) & ~(size_t)4095;
}

/* Faults that a thread causes itself stay open: a blocked one kills the process past every handler
 * of the host. */
static void library_signal_mask(sigset_t *ret_mask) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};

    sigfillset(ret_mask);
    for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++)
        sigdelset(ret_mask, faults[i]);
}

int tp_thread_start_deep(const char *name, size_t stack_bytes, void *(*run)(void *arg), void *arg,
                         pthread_t *ret_thread) {
    char short_name[16];
    sigset_t blocked, old_mask;
    pthread_attr_t attr;
    pthread_t thread;
    int rc;

    rc = pthread_attr_init(&attr);
    if (rc != 0)
        return -rc;
    library_signal_mask(&blocked);
    rc = pthread_sigmask(SIG_SETMASK, &blocked, &old_mask);
    if (rc != 0)
        goto out;
    rc = pthread_attr_setstacksize(&attr, whole_stack_bytes(stack_bytes));
    if (rc == 0)
        rc = pthread_create(&thread, &attr, run, arg);
    if (rc == EINVAL)
        rc = pthread_create(&thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    if (rc != 0)
        goto out;
    strncpy(short_name, name, sizeof(short_name) - 1);
    short_name[sizeof(short_name) - 1] = '\0';
    pthread_setname_np(thread, short_name);
    *ret_thread = thread;
out:
    pthread_attr_destroy(&attr);
    return -rc;
}

int tp_thread_start(const char *name, void *(*run)(void *arg), void *arg, pthread_t *ret_thread) {
    return tp_thread_start_deep(name, STACK_BYTES, run, arg, ret_thread);
}
