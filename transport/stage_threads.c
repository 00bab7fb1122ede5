/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads that stage copies: as many as the pool of host copies has (copy_host.c), but apart
 * from it, since they call the driver, which may keep them.
 *
 * Out of work a thread looks on for a while. After that one of them looks at what the GPU still has
 * to do, from time to time, and the others sleep.
 *
 * It must not know: slots, jobs, GPUs.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "transport/copy_host.h"
#include "transport/stage.h"

#define SPIN_NS 50000
#define START_AGAIN_NS UINT64_C(1000000000) /* threads run out and come back */
#define WATCH_NS 20000 /* between looks at a GPU that takes its time; the kernel adds 50 us */

static struct {
    pthread_t threads[TP_COPY_THREADS_MAX];
    pthread_mutex_t lock; /* for starting and ending them */
    _Atomic uint32_t count, wanted;
    _Atomic bool started, stop, watched; /* started: all that there are to be */
    _Atomic uint64_t next_start_ns;      /* after one that could not be started */
    _Atomic uint32_t news;               /* futex: grows when there is something to do */
    _Atomic uint32_t sleeping;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void wake(uint32_t count) {
    syscall(SYS_futex, &team.news, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void sleep_until_news(uint32_t news) {
    /* seq_cst on both sides: either the news see this sleeper, or the futex sees the news. */
    atomic_fetch_add(&team.sleeping, 1);
    syscall(SYS_futex, &team.news, FUTEX_WAIT_PRIVATE, news, NULL, NULL, 0);
    atomic_fetch_sub(&team.sleeping, 1);
}

/* Pause before the next look at slots in flight. False: there are none, or another thread does. */
static bool watch(void) {
    const struct timespec pause = {0, WATCH_NS};
    if (!tp_stage_in_flight() || atomic_exchange(&team.watched, true))
        return false;
    nanosleep(&pause, NULL);
    atomic_store(&team.watched, false);
    return true;
}

static void *work(void *arg) {
    uint64_t idle_ns = 0;
    uint32_t turn = 0;
    bool may_spin = tp_host_cpus() > 1;
    while (!atomic_load(&team.stop)) {
        uint32_t news = atomic_load(&team.news);
        if (tp_stage_step_any(turn++)) {
            idle_ns = 0;
            uint32_t more = atomic_load(&team.sleeping) > 0 ? tp_stage_work_left() : 0;
            if (more > 0)
                wake(more);
            continue;
        }
        uint64_t now = tp_now_ns();
        idle_ns = idle_ns ? idle_ns : now;
        if (may_spin && now - idle_ns < SPIN_NS) {
            for (int i = 0; i < 16; i++)
                __builtin_ia32_pause();
        } else if (!watch()) {
            sleep_until_news(news);
            idle_ns = 0;
        }
    }
    return arg;
}

/* With the lock held. A thread that cannot be started is no error: whoever polls does its part. */
static void start_threads(uint64_t now_ns) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    unsigned wanted = tp_copy_threads(tp_config()->engine.copy_threads, tp_host_cpus());
    int error = 0;
    while (team.count < wanted && !error) {
        error = tp_thread_start("tidepool-stage", work, NULL, &team.threads[team.count]);
        team.count += !error;
    }
    atomic_store(&team.wanted, wanted);
    atomic_store(&team.started, !error);
    if (!error)
        return;
    atomic_store(&team.next_start_ns, now_ns + START_AGAIN_NS);
    tp_log_once(&said, TP_LOG_WARN,
                "%u of %u threads that stage copies could be started: %s (ulimit -u, the cgroup's "
                "pids.max); copies take longer, and it is tried again",
                team.count, wanted, strerror(-error));
}

static void start(void) {
    uint64_t now_ns = tp_now_ns();
    if (now_ns < atomic_load_explicit(&team.next_start_ns, memory_order_relaxed))
        return;
    pthread_mutex_lock(&team.lock);
    /* Not while tp_stage_stop waits for those that it has counted: it would forget these. */
    if (!atomic_load(&team.started) && !atomic_load(&team.stop))
        start_threads(now_ns);
    pthread_mutex_unlock(&team.lock);
}

uint32_t tp_stage_threads(void) {
    uint32_t wanted = atomic_load_explicit(&team.wanted, memory_order_relaxed);
    return wanted ? wanted : 1;
}

void tp_stage_news(uint64_t bytes) {
    uint64_t share = 1 + bytes / TP_SLOT_BYTES;
    if (!atomic_load_explicit(&team.started, memory_order_acquire))
        start();
    atomic_fetch_add(&team.news, 1);
    if (atomic_load(&team.sleeping) > 0)
        wake(share < TP_COPY_THREADS_MAX ? (uint32_t)share : TP_COPY_THREADS_MAX);
}

void tp_stage_rouse(void) {
    atomic_fetch_add(&team.news, 1); /* also for those that are about to sleep */
    uint32_t sleeping = atomic_load(&team.sleeping);
    if (sleeping > 0 && sleeping >= atomic_load(&team.count))
        wake(1);
}

void tp_stage_stop(void) {
    pthread_mutex_lock(&team.lock);
    unsigned count = team.count;
    atomic_store(&team.stop, true);
    atomic_fetch_add(&team.news, 1);
    pthread_mutex_unlock(&team.lock);
    wake(TP_COPY_THREADS_MAX);
    for (unsigned i = 0; i < count; i++)
        pthread_join(team.threads[i], NULL);
    pthread_mutex_lock(&team.lock);
    team.count = 0;
    atomic_store(&team.started, false);
    atomic_store(&team.stop, false);
    pthread_mutex_unlock(&team.lock);
}
