/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A double of the few functions of env/ that transport's copying calls, which tests can steer: how
 * many CPUs there are, whether threads can be started, whether this is a forked child.
 */
#ifndef TIDEPOOL_DOUBLE_ENV_H
#define TIDEPOOL_DOUBLE_ENV_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

extern unsigned double_cpus;         /* default 2 */
extern unsigned double_threads_left; /* how many tp_thread_start calls succeed; default many */
extern bool double_threads_idle;     /* they are started and do nothing; default false */
extern unsigned double_lines;        /* logged */
extern bool double_inert;            /* default false */
extern _Atomic uint64_t double_counters[128];

#endif
