/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads that map and open pieces of CUDA memory: a queue in, a list out. Not on any hot
 * path: a lock and a condition variable do.
 *
 * It must not know: segments, connections, what is asked for next.
 */
#include "transport/importer.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "env/env.h"
#include "transport/peer.h"
#include "transport/vmm.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct tp_import_job *first, **last; /* waiting */
    struct tp_import_job *ended;
    pthread_t threads[TP_IMPORT_THREADS];
    unsigned thread_count;
    bool stop;
} importer = {.lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};

static void close_fd(struct tp_import_job *job) {
    if (job->fd < 0)
        return;
    tp_fork_close_remove(job->fd);
    close(job->fd);
}

static void run_job(struct tp_import_job *job) {
    if (job->fd >= 0)
        job->error = tp_vmm_map(job->address, job->bytes, job->fd, job->devices, &job->opened);
    else
        job->opened = tp_vmm_open(job->address, job->bytes, job->devices);
    close_fd(job);
}

/* Under the lock, which is let go of while waiting. NULL: stop. */
static struct tp_import_job *next_job(void) {
    while (!importer.first && !importer.stop)
        pthread_cond_wait(&importer.news, &importer.lock);
    struct tp_import_job *job = importer.stop ? NULL : importer.first;
    if (job) {
        importer.first = job->next;
        if (!importer.first)
            importer.last = &importer.first;
    }
    return job;
}

static void *run(void *arg) {
    pthread_mutex_lock(&importer.lock);
    for (struct tp_import_job *job = next_job(); job; job = next_job()) {
        pthread_mutex_unlock(&importer.lock);
        run_job(job);
        pthread_mutex_lock(&importer.lock);
        job->next = importer.ended;
        importer.ended = job;
        tp_peer_wake();
    }
    pthread_mutex_unlock(&importer.lock);
    return arg;
}

/* One is enough to go on; none is an error. */
static int start_threads(void) {
    int error = 0;
    while (importer.thread_count < TP_IMPORT_THREADS && !error) {
        error =
            tp_thread_start("tidepool-import", run, NULL, &importer.threads[importer.thread_count]);
        if (!error)
            importer.thread_count++;
    }
    return importer.thread_count ? 0 : error;
}

int tp_importer_put(const struct tp_import_job *job) {
    int error = start_threads();
    struct tp_import_job *copy = error ? NULL : malloc(sizeof(*copy));
    if (!copy)
        return error ? error : -ENOMEM;
    *copy = *job;
    copy->next = NULL;
    if (copy->fd >= 0)
        (void)tp_fork_close_add(copy->fd);
    pthread_mutex_lock(&importer.lock);
    if (!importer.first)
        importer.last = &importer.first;
    *importer.last = copy;
    importer.last = &copy->next;
    pthread_cond_signal(&importer.news);
    pthread_mutex_unlock(&importer.lock);
    return 0;
}

bool tp_importer_take(struct tp_import_job *ret_job) {
    pthread_mutex_lock(&importer.lock);
    struct tp_import_job *job = importer.ended;
    if (job)
        importer.ended = job->next;
    pthread_mutex_unlock(&importer.lock);
    if (!job)
        return false;
    *ret_job = *job;
    free(job);
    return true;
}

void tp_importer_stop(void) {
    pthread_mutex_lock(&importer.lock);
    importer.stop = true;
    pthread_cond_broadcast(&importer.news);
    pthread_mutex_unlock(&importer.lock);
    for (unsigned i = 0; i < importer.thread_count; i++)
        pthread_join(importer.threads[i], NULL);
    importer.thread_count = 0;
    while (importer.first) {
        struct tp_import_job *job = importer.first;
        importer.first = job->next;
        job->error = -ECANCELED;
        close_fd(job);
        job->next = importer.ended;
        importer.ended = job;
    }
    importer.stop = false;
}
