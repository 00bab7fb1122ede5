/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time of `copy_limits`: shares of it, medians, progress. It must not know what is measured.
 */
#include "tests/bench/limits/limits.h"

#include "env/env.h"

#include <stdlib.h>
#include <string.h>

#define ROUNDS_MAX 4096

void bench_progress(const struct bench_time *time, const char *text) {
    if (time->progress) {
        (void)fprintf(stderr, "\r\033[K%s", text ? text : "");
        (void)fflush(stderr);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

/* An equal part of what is left for the measurements that are left. */
static uint64_t take_share(struct bench_time *time, uint64_t now) {
    uint64_t left = time->end_ns > now ? time->end_ns - now : 0;
    uint64_t share = left / (time->left ? time->left : 1);

    if (time->left) {
        time->left--;
    }
    return share < time->most_ns ? share : time->most_ns;
}

double bench_rate(struct bench_time *time, double (*round)(void *arg), void *arg, uint64_t bytes) {
    static double seconds[ROUNDS_MAX]; /* one measurement at a time */
    unsigned count = 0;
    uint64_t now = tp_now_ns();
    uint64_t end = now + take_share(time, now);

    do {
        seconds[count] = round(arg);
        if (seconds[count] <= 0) {
            return 0;
        }
        count++;
    } while (count < ROUNDS_MAX && tp_now_ns() < end);
    qsort(seconds, count, sizeof(*seconds), by_value);
    return (double)bytes / seconds[count / 2] * 1e-9;
}

void bench_skip(struct bench_time *time, unsigned count) {
    time->left -= time->left < count ? time->left : count;
}

struct bench_pair bench_pair(size_t i, size_t count) {
    size_t one = i * 5 % count; /* 5 and a power of two have no divisor in common */

    return (struct bench_pair){one, count - 1 - one};
}

size_t bench_block(unsigned index) {
    return BENCH_BLOCK_MIN << index;
}

size_t bench_store_block(unsigned index) {
    return BENCH_BLOCK_MIN << 2 * index;
}
