/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A few threads that share numbered work, and what people see of it meanwhile.
 *
 * It must not know: what the work is.
 */
#include "segment/crew.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <errno.h>

#include "env/env.h"
#include "segment/placement.h"

#define MAX_THREADS 8
#define QUIET_MS 5000 /* work that takes longer is announced */
#define STEP_MS 2000  /* between progress lines */

struct job {
    const struct tp_crew_work *work;
    _Atomic uint64_t next, done_bytes;
    atomic_int error;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    unsigned running; /* under lock */
};

static void run_numbers(struct job *job) {
    while (atomic_load(&job->error) == 0) {
        uint64_t number = atomic_fetch_add(&job->next, 1);
        if (number >= job->work->count)
            break;
        int64_t result = job->work->run(job->work->arg, number);
        if (result < 0) {
            int none = 0;
            atomic_compare_exchange_strong(&job->error, &none, (int)result);
            break;
        }
        atomic_fetch_add(&job->done_bytes, (uint64_t)result);
    }
}

static void *worker(void *arg) {
    struct job *job = arg;
    run_numbers(job);
    pthread_mutex_lock(&job->lock);
    if (--job->running == 0)
        pthread_cond_signal(&job->ended);
    pthread_mutex_unlock(&job->lock);
    return NULL;
}

/* Wait for the end or for STEP_MS. True when all workers have ended. */
static bool wait_step(struct job *job) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += STEP_MS / 1000;
    pthread_mutex_lock(&job->lock);
    int result = 0;
    while (job->running > 0 && result == 0)
        result = pthread_cond_timedwait(&job->ended, &job->lock, &until);
    bool ended = job->running == 0;
    pthread_mutex_unlock(&job->lock);
    return ended;
}

static void nodes_in_words(const struct tp_placement *placement, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (unsigned i = 0; i < placement->count && used + 8 < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", i > 0 ? "," : "",
                                 placement->nodes[i]);
}

/*
 * One line at the warning level announces a long piece of work, with an estimate from what is done,
 * and one says that it is over: both are seen without any setting. Lines between them are for
 * TIDEPOOL_LOG=info.
 */
static void watch(struct job *job) {
    const struct tp_crew_work *work = job->work;
    uint64_t start = tp_now_ms();
    bool announced = false;
    while (!wait_step(job)) {
        uint64_t elapsed = tp_now_ms() - start;
        uint64_t done = atomic_load(&job->done_bytes);
        if (!announced && elapsed >= QUIET_MS && done > 0) {
            char nodes[128];
            nodes_in_words(work->placement, nodes, sizeof nodes);
            tp_log(TP_LOG_WARN,
                   "%s %" PRIu64 " MiB of segment memory on nodes %s: about %" PRIu64 " s",
                   work->verb[0], work->bytes >> 20, nodes,
                   (uint64_t)((double)elapsed * (double)work->bytes / (double)done / 1000.0));
            announced = true;
        } else {
            tp_log(TP_LOG_INFO, "%s %" PRIu64 " of %" PRIu64 " MiB of segment memory",
                   work->verb[1], done >> 20, work->bytes >> 20);
        }
    }
    if (announced && atomic_load(&job->error) == 0)
        tp_log(TP_LOG_WARN, "%s %" PRIu64 " MiB of segment memory in %" PRIu64 " s", work->verb[1],
               work->bytes >> 20, (tp_now_ms() - start) / 1000);
}

static void init_job(struct job *job, const struct tp_crew_work *work) {
    pthread_condattr_t attributes;
    memset(job, 0, sizeof *job);
    job->work = work;
    pthread_mutex_init(&job->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&job->ended, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* No thread can be started. */
static int run_here(struct job *job, int error) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    struct tp_thread_policy policy;
    if (!tp_placement_keep_thread(job->work->placement, &policy))
        return -EAGAIN;
    tp_log_once(&said, TP_LOG_WARN,
                "no thread can be started to make a segment: %s (ulimit -u, the cgroup's "
                "pids.max); the caller's makes it",
                strerror(-error));
    run_numbers(job);
    tp_placement_put_back_thread(&policy);
    return atomic_load(&job->error);
}

int tp_crew_run(const struct tp_crew_work *work) {
    pthread_t threads[MAX_THREADS];
    struct job job;
    unsigned started = 0;
    int error = 0;
    init_job(&job, work);
    unsigned wanted = tp_host_cpus();
    if (wanted > MAX_THREADS)
        wanted = MAX_THREADS;
    if (wanted > work->count)
        wanted = (unsigned)work->count;
    for (; started < wanted; started++) {
        pthread_mutex_lock(&job.lock);
        job.running++;
        pthread_mutex_unlock(&job.lock);
        error = tp_thread_start("tidepool-fill", worker, &job, &threads[started]);
        if (error < 0) {
            pthread_mutex_lock(&job.lock);
            job.running--;
            pthread_mutex_unlock(&job.lock);
            break;
        }
    }
    watch(&job);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    int result = started > 0 ? atomic_load(&job.error) : run_here(&job, error);
    pthread_cond_destroy(&job.ended);
    pthread_mutex_destroy(&job.lock);
    return result;
}
