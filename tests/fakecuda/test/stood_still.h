/* SPDX-License-Identifier: Apache-2.0 */
/* For tests that are linked with --wrap=clock_gettime: let the process seem to have stood still. */
#ifndef FAKECUDA_TEST_STOOD_STILL_H
#define FAKECUDA_TEST_STOOD_STILL_H

#include <stdatomic.h>
#include <time.h>

#include "transport/stall.h"

static _Atomic int64_t stood_still_s;

int __real_clock_gettime(clockid_t clock, struct timespec *ret_time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret_time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret_time) {
    int result = __real_clock_gettime(clock, ret_time);
    if (clock == CLOCK_MONOTONIC_COARSE)
        ret_time->tv_sec += atomic_load(&stood_still_s);
    return result;
}

static void stand_still(void) {
    atomic_fetch_add(&stood_still_s, TP_STALL_MS / 1000 + 1);
}

#endif
