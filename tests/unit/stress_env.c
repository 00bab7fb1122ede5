/* SPDX-License-Identifier: Apache-2.0 */
/* Everything in env/ that any thread may call, called by many at once while the page moves: for
 * ThreadSanitizer. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"

#define THREADS 4
#define ROUNDS 20000

static const struct tp_config *configs[THREADS];

static void *use_everything(void *arg) {
    static atomic_flag once = ATOMIC_FLAG_INIT;
    size_t number = (size_t)(const struct tp_config **)arg - (size_t)configs;
    int fd = -1;

    *(const struct tp_config **)arg = tp_config();
    for (int i = 0; i < ROUNDS; i++) {
        tp_count(TP_LOCAL_REQUESTS, 1);
        if (i % 100 == 0) {
            tp_log(TP_LOG_WARN, "round %d of thread %zu", i, number);
            tp_log_once(&once, TP_LOG_ERROR, "once");
        }
        if (i == ROUNDS / 4 && tp_stats_open(&fd) != 0)
            abort();
        if (i % 10 == 0 && tp_fork_close_add(50000 + i) == 0)
            tp_fork_close_remove(50000 + i);
        if (i % 1000 == 0)
            tp_fork_guard();
    }
    return NULL;
}

static bool check(int fd) {
    static struct tp_stats_page view;
    bool right = tp_stats_view(fd, &view) == 0;

    right = right && view.counters[TP_LOCAL_REQUESTS] == (uint64_t)THREADS * ROUNDS;
    for (int i = 1; i < THREADS; i++)
        right = right && configs[i] == configs[0];
    return right;
}

int main(void) {
    pthread_t threads[THREADS];
    int fd = open("/dev/null", O_WRONLY | O_CLOEXEC);

    if (fd < 0 || dup2(fd, STDERR_FILENO) < 0)
        return 1;
    for (int i = 0; i < THREADS; i++) {
        if (tp_thread_start("stress", use_everything, &configs[i], &threads[i]) != 0)
            return 1;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (tp_stats_open(&fd) != 0 || !check(fd)) {
        puts("stress_env: a count was lost");
        return 1;
    }
    return 0;
}
