/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Give every page of a mapping its memory, in parallel slices, and copy contents into it.
 *
 * It must not know: where the mapping will go, who will see it.
 *
 * A page that cannot be had must come back as an error, never as SIGBUS: MADV_POPULATE_WRITE
 * (Linux 5.14) reports it; where it is missing, fallocate(2) reserves first and the pages are
 * touched after.
 */
#include "segment/populate.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "env/env.h"
#include "segment/placement.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define SLICE_BYTES (UINT64_C(256) << 20)
#define MAX_THREADS 8
#define QUIET_MS 5000 /* populations longer than this are announced */
#define STEP_MS 2000  /* between progress lines */

struct job {
    const struct tp_populate_work *work;
    uint64_t slices_per_piece, slice_count;
    _Atomic uint64_t next, done_bytes;
    atomic_int error;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    unsigned running; /* under lock */
};

static int reserve(int fd, uint64_t offset, uint64_t bytes) {
    int result;
    do {
        result = fallocate(fd, 0, (off_t)offset, (off_t)bytes) < 0 ? -errno : 0;
    } while (result == -EINTR);
    return result;
}

static int populate_slice(const struct tp_populate_work *work, uint32_t piece, uint64_t offset,
                          uint64_t bytes) {
    char *address = work->address + piece * work->piece_bytes + offset;
    int result = work->reserve_first ? reserve(work->fds[piece], offset, bytes) : 0;
    if (result < 0)
        return result;
    do {
        result = madvise(address, bytes, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
    } while (result == -EINTR || result == -EAGAIN);
    if (result == -EFAULT) /* what a touch would have answered with SIGBUS */
        return -ENOMEM;
    if (result != -EINVAL)
        return result;
    if (!work->reserve_first)
        result = reserve(work->fds[piece], offset, bytes);
    if (result < 0 && result != -EINVAL)
        return result;
    for (uint64_t i = 0; i < bytes; i += work->page_bytes)
        *(volatile char *)(address + i) = 0;
    return 0;
}

/* Neighbouring numbers are slices of different pieces, so that the threads work on different files
 * and nodes. */
static void run_slice(struct job *job, uint64_t number) {
    const struct tp_populate_work *work = job->work;
    uint32_t piece = (uint32_t)(number % work->piece_count);
    uint64_t offset = number / work->piece_count * SLICE_BYTES;
    uint64_t start = piece * work->piece_bytes;
    uint64_t piece_bytes =
        work->bytes - start < work->piece_bytes ? work->bytes - start : work->piece_bytes;
    if (offset >= piece_bytes)
        return;
    uint64_t bytes = piece_bytes - offset < SLICE_BYTES ? piece_bytes - offset : SLICE_BYTES;
    if (work->reserve_first)
        tp_placement_bind_thread(work->placement, piece);
    int result = populate_slice(work, piece, offset, bytes);
    if (result < 0) {
        int none = 0;
        atomic_compare_exchange_strong(&job->error, &none, result);
        return;
    }
    if (work->copy_from != NULL)
        memcpy(work->address + start + offset, work->copy_from + start + offset, bytes);
    atomic_fetch_add(&job->done_bytes, bytes);
}

static void run_slices(struct job *job) {
    while (atomic_load(&job->error) == 0) {
        uint64_t number = atomic_fetch_add(&job->next, 1);
        if (number >= job->slice_count)
            break;
        run_slice(job, number);
    }
}

static void *worker(void *arg) {
    struct job *job = arg;
    run_slices(job);
    pthread_mutex_lock(&job->lock);
    if (--job->running == 0)
        pthread_cond_signal(&job->ended);
    pthread_mutex_unlock(&job->lock);
    return NULL;
}

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
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
 * One line at the warning level announces a long population, with an estimate from what is done,
 * and one says that it is over: both are seen without any setting. Lines between them are for
 * TIDEPOOL_LOG=info.
 */
static void watch(struct job *job) {
    const struct tp_populate_work *work = job->work;
    uint64_t start = now_ms();
    bool announced = false;
    while (!wait_step(job)) {
        uint64_t elapsed = now_ms() - start;
        uint64_t done = atomic_load(&job->done_bytes);
        if (!announced && elapsed >= QUIET_MS && done > 0) {
            char nodes[128];
            nodes_in_words(work->placement, nodes, sizeof nodes);
            tp_log(TP_LOG_WARN,
                   "populating %" PRIu64 " MiB of segment memory on nodes %s: about %" PRIu64 " s",
                   work->bytes >> 20, nodes,
                   (uint64_t)((double)elapsed * (double)work->bytes / (double)done / 1000.0));
            announced = true;
        } else {
            tp_log(TP_LOG_INFO, "populated %" PRIu64 " of %" PRIu64 " MiB of segment memory",
                   done >> 20, work->bytes >> 20);
        }
    }
    if (announced && atomic_load(&job->error) == 0)
        tp_log(TP_LOG_WARN, "populated %" PRIu64 " MiB of segment memory in %" PRIu64 " s",
               work->bytes >> 20, (now_ms() - start) / 1000);
}

static void init_job(struct job *job, const struct tp_populate_work *work) {
    pthread_condattr_t attributes;
    memset(job, 0, sizeof *job);
    job->work = work;
    job->slices_per_piece = (work->piece_bytes - 1) / SLICE_BYTES + 1;
    job->slice_count = job->slices_per_piece * work->piece_count;
    pthread_mutex_init(&job->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&job->ended, &attributes);
    pthread_condattr_destroy(&attributes);
}

int tp_populate(const struct tp_populate_work *work) {
    pthread_t threads[MAX_THREADS];
    struct job job;
    unsigned started = 0;
    init_job(&job, work);
    unsigned wanted = tp_host_cpus();
    if (wanted > MAX_THREADS)
        wanted = MAX_THREADS;
    if (wanted > job.slice_count)
        wanted = (unsigned)job.slice_count;
    for (; started < wanted; started++) {
        pthread_mutex_lock(&job.lock);
        job.running++;
        pthread_mutex_unlock(&job.lock);
        if (tp_thread_start("tidepool-fill", worker, &job, &threads[started]) < 0) {
            pthread_mutex_lock(&job.lock);
            job.running--;
            pthread_mutex_unlock(&job.lock);
            break;
        }
    }
    watch(&job);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    int result = atomic_load(&job.error);
    if (result == 0 && started == 0)
        result = -EAGAIN; /* no thread: a caller's thread must not get another memory policy */
    pthread_cond_destroy(&job.ended);
    pthread_mutex_destroy(&job.lock);
    return result;
}
