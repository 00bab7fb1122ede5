/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: jobs that are reused as soon as they are idle, while other threads help with them, lose no
 * byte and race with nobody. A program of its own, without Criterion, so that it also runs under
 * ThreadSanitizer.
 *
 * Usage: stress_copy [seconds]
 */
#include "tests/unit/double_env.h"
#include "transport/copy_host.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define OWNERS 4
#define BLOCKS 9

static _Atomic bool stop;
static _Atomic unsigned wrong, rounds;

/* Jobs of one block or many, from a few KiB to 2 MiB: at once, one grain, several. */
static bool one_round(struct tp_copy_job *job, unsigned char *to, unsigned char *from,
                      unsigned round, unsigned seed) {
    size_t bytes = ((size_t)1 << (9 + (round * 5 + seed) % 10)) + round % 67,
           blocks = 1 + round % BLOCKS;
    uint32_t first[BLOCKS], last[BLOCKS];
    memset(from, (int)(round * 7 + seed), bytes * blocks);
    for (size_t i = 0; i < blocks; i++) {
        size_t at = (blocks - 1 - i) * bytes; /* backwards: not merged */
        if (tp_copy_add(job, to + at, from + at, bytes, &first[i], &last[i]) < 0)
            return false;
    }
    tp_copy_start(job);
    bool right = true;
    for (size_t i = 0; i < blocks; i++) {
        while (!tp_copy_range_done(job, first[i], last[i])) {
            /* A small lone job wakes nobody: once the helper has gone, its owner must do it. */
            if ((round % 3 != 2 && !stop) || !tp_copy_help(job))
                sched_yield();
        }
    }
    /* A caller that saw each of its tasks done frees the batch: the whole must be done as well. */
    right &= tp_copy_done(job);
    right &= memcmp(to, from, bytes * blocks) == 0;
    while (!tp_copy_idle(job))
        sched_yield();
    tp_copy_reset(job);
    memset(to, 0, bytes * blocks);
    return right;
}

static void *own_and_reuse(void *arg) {
    unsigned seed = *(unsigned *)arg;
    size_t room = (((size_t)1 << 18) + 67) * BLOCKS;
    unsigned char *from = malloc(room), *to = malloc(room);
    struct tp_copy_job job;
    tp_copy_init(&job);
    for (unsigned round = 0; from && to && !stop; round++) {
        if (!one_round(&job, to, from, round, seed))
            wrong++;
        rounds++;
    }
    if (!from || !to)
        wrong++;
    tp_copy_release(&job);
    free(from);
    free(to);
    return NULL;
}

/* Polls of somebody who has no job of his own. */
static void *help_only(void *arg) {
    (void)arg;
    while (!stop) {
        if (!tp_copy_help(NULL))
            sched_yield();
    }
    return NULL;
}

int main(int argc, char **argv) {
    int seconds = argc > 1 ? atoi(argv[1]) : 3;
    pthread_t threads[OWNERS + 1];
    unsigned seeds[OWNERS];
    double_cpus = 3;
    alarm((unsigned)seconds + 60); /* a job that never ends is a failure, not a hang */
    for (unsigned i = 0; i < OWNERS; i++) {
        seeds[i] = i;
        if (pthread_create(&threads[i], NULL, own_and_reuse, &seeds[i]) != 0)
            return 1;
    }
    if (pthread_create(&threads[OWNERS], NULL, help_only, NULL) != 0)
        return 1;
    struct timespec pause = {seconds, 0};
    do {
        nanosleep(&pause, NULL);
    } while (rounds == 0); /* the machine stood still: the alarm ends this */
    stop = true;
    for (unsigned i = 0; i <= OWNERS; i++)
        pthread_join(threads[i], NULL);
    tp_copy_pool_stop();
    printf("%u rounds, %u wrong\n", rounds, wrong);
    return wrong != 0;
}
