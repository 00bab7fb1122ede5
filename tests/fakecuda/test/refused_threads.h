/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that cannot be started: for a program that is linked with --wrap=tp_thread_start. */
#ifndef FAKECUDA_TEST_REFUSED_THREADS_H
#define FAKECUDA_TEST_REFUSED_THREADS_H

#include <errno.h>
#include <pthread.h>
#include <string.h>

static const char *refused_name;    /* of threads; set before the count */
static _Atomic int refused_threads; /* so many, from now on */

int __real_tp_thread_start(const char *name, void *(*run)(void *arg), void *arg,
                           pthread_t *ret_thread);
int __wrap_tp_thread_start(const char *name, void *(*run)(void *arg), void *arg,
                           pthread_t *ret_thread);

int __wrap_tp_thread_start(const char *name, void *(*run)(void *arg), void *arg,
                           pthread_t *ret_thread) {
    if (atomic_load(&refused_threads) > 0 && strcmp(name, refused_name) == 0) {
        atomic_fetch_sub(&refused_threads, 1);
        return -EAGAIN;
    }
    return __real_tp_thread_start(name, run, arg, ret_thread);
}

static void refuse_threads(const char *name, int count) {
    refused_name = name;
    atomic_store(&refused_threads, count);
}

#endif
