/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/double_env.h"

#include "env/env.h"
#include "env/stats.h"

#include <errno.h>

unsigned double_cpus = 2;
unsigned double_threads_left = 1000;
bool double_threads_idle;
unsigned double_lines;
bool double_inert;
_Atomic uint64_t double_counters[128];

unsigned tp_host_cpus(void) {
    return double_cpus;
}

bool tp_inert(void) {
    return double_inert;
}

void tp_count(enum tp_counter counter, uint64_t amount) {
    atomic_fetch_add_explicit(&double_counters[counter], amount, memory_order_relaxed);
}

static void *do_nothing(void *arg) {
    return arg;
}

int tp_thread_start(const char *name, void *(*run)(void *arg), void *arg, pthread_t *ret_thread) {
    (void)name;
    if (double_threads_left == 0)
        return -EAGAIN;
    double_threads_left--;
    return -pthread_create(ret_thread, NULL, double_threads_idle ? do_nothing : run, arg);
}

void tp_log_once(atomic_flag *flag, enum tp_log_level level, const char *format, ...) {
    (void)level;
    (void)format;
    if (!atomic_flag_test_and_set(flag))
        double_lines++;
}
