/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that stands still for longer than the master's put_start_release_timeout finds, when it
 * goes on, that the places of its unfinished writes belong to other objects. The threads that see
 * the process running leave a stamp; whoever comes next to start a piece of work and finds the
 * stamp old knows that nobody has run in between. A thread that merely waits long for a CPU does
 * not: others, and the thread that polls for its end, are seen running.
 *
 * It must not know: what is written, and where.
 */
#include "transport/stall.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <time.h>

#include "env/env.h"

static _Atomic uint64_t last_seen_ms; /* 0: never */
static _Atomic uint64_t stood_still_until_ms;

uint64_t tp_stall_look(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    uint64_t now = (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000 + 1;
    uint64_t last = atomic_load_explicit(&last_seen_ms, memory_order_acquire);
    if (last != 0 && now > last && now - last > TP_STALL_MS)
        atomic_store_explicit(&stood_still_until_ms, now, memory_order_relaxed);
    /* After it: who sees the new stamp sees the end of the stall as well. */
    if (now > last)
        atomic_store_explicit(&last_seen_ms, now, memory_order_release);
    return now;
}

bool tp_stall_late(uint64_t submitted_ms) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (submitted_ms == 0)
        return false;
    uint64_t now = tp_stall_look();
    if (submitted_ms >= atomic_load_explicit(&stood_still_until_ms, memory_order_relaxed))
        return false;
    tp_log_once(&said, TP_LOG_WARN,
                "this process stood still (was it stopped, or frozen with its container?): a write "
                "that was submitted %" PRIu64 " ms ago and not carried out fails, since its place "
                "may be another object's by now; writes submitted from now on are not affected",
                now - submitted_ms);
    return true;
}
