/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs of host copies: building them, copying their grains, and the threads and pollers that do it.
 *
 * It must not know: batches, peers, Mooncake, CUDA.
 *
 * The queue is a ring of slots in order of arrival. A slot is one 64-bit word: the job's address
 * below, and above it the number of threads that found the job through this slot (its pins). A
 * thread that wants work pins a slot with one compare-and-swap, so it never holds a job that its
 * owner is about to reuse. Whoever claims a job's last grain retires it: it empties the slot and
 * carries the pins over to job->users, where those threads sign off later. A job is idle when it is
 * done, out of the queue, and nobody is left in users. The lock orders whole jobs only; claiming a
 * grain takes none.
 *
 * NUMA: workers are not bound. A store spreads its pieces round-robin over the nodes, so a worker
 * near one end of a copy is far from the other as often as not, and the kernel's placement keeps
 * the owner's affinity mask.
 */
#include "transport/copy_host.h"

#include "env/env.h"
#include "env/stats.h"
#include "transport/stall.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A power of two. A job that finds it full is copied where it is submitted. */
#define QUEUE_SLOTS 4096u
/* As many as are started unasked. 128 jobs of 1 MiB on 16 cores, GB/s: 4 workers 40, 8 workers 65,
 * 15 workers 85; the cores belong to the engine, so not all of them. */
#define POOL_AUTO_MAX 8u
/* A worker out of work looks on for this long before it sleeps. Without it, batches of 1 to 16 MiB
 * take 5 to 10% longer; Mooncake needs 14 to 23 us from one key's submit to the next. */
#define SPIN_NS 50000
#define START_AGAIN_NS UINT64_C(1000000000) /* threads run out and come back */
/* A smaller lone job is left to the caller's next poll. */
#define WAKE_BYTES ((size_t)128 << 10)
/* One sleeper is woken for each this much: a lone job of 61 x 64 KiB on 16 cores takes 75 us, 130
 * when sleepers only wake one another. */
#define WAKE_SHARE_BYTES ((size_t)512 << 10)
#define MIN_ROOM 16u

/* x86-64 gives user space 47 address bits unless mmap is asked for more by a hint (Linux,
 * Documentation/arch/x86/x86_64/5level-paging.rst), and jobs come from malloc. */
#define PIN_ONE (UINT64_C(1) << 48)
#define JOB_MASK (PIN_ONE - 1)

enum grain_state { GRAIN_OPEN, GRAIN_COPIED, GRAIN_REFUSED };

enum pool_state { POOL_NEW, POOL_ON, POOL_STOPPED };

static struct {
    _Alignas(64) _Atomic uint64_t slots[QUEUE_SLOTS];
    _Alignas(64) _Atomic uint32_t head; /* oldest slot that may hold a job */
    _Atomic uint32_t tail;              /* next slot to fill; equal to head: nothing queued */
    pthread_mutex_t lock; /* guards moving head and tail, and what is not atomic here */
    unsigned thread_count;
    unsigned wanted;   /* tp_copy_pool_size */
    _Atomic int state; /* enum pool_state */
    _Atomic bool stop;
    bool may_spin;
    bool missing;                       /* some could not be started */
    _Alignas(64) _Atomic uint32_t news; /* futex: grows when a job is queued */
    _Atomic uint32_t sleeping, spinning;
    uint64_t next_start_ns; /* of those that are missing */
    pthread_t threads[TP_COPY_THREADS_MAX];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- building a job -----------------------------------------------------------------------------
 */

void tp_copy_init(struct tp_copy_job *job) {
    memset(job, 0, sizeof(*job));
}

void tp_copy_reset(struct tp_copy_job *job) {
    job->op_count = 0;
    job->grain_count = 0;
    job->grain_fill = 0;
    job->total_bytes = 0;
    job->submitted_ms = 0;
    atomic_store_explicit(&job->refused, false, memory_order_relaxed);
    atomic_store_explicit(&job->next, 0, memory_order_relaxed);
    atomic_store_explicit(&job->finished, 0, memory_order_relaxed);
}

void tp_copy_release(struct tp_copy_job *job) {
    free(job->ops);
    free(job->grains);
    free(job->grain_done);
    tp_copy_init(job);
}

/* Grow *array to at least `need` elements; its room is only raised when all arrays have grown. */
static int grow(void **array, size_t element_bytes, uint32_t room) {
    void *grown = reallocarray(*array, room, element_bytes);
    if (!grown)
        return -ENOMEM;
    *array = grown;
    return 0;
}

static uint32_t room_for(uint32_t room, uint64_t need) {
    if (need <= room)
        return room;
    uint64_t doubled = room < MIN_ROOM ? MIN_ROOM : (uint64_t)room * 2;
    uint64_t wanted = need > doubled ? need : doubled;
    return wanted > UINT32_MAX ? 0 : (uint32_t)wanted;
}

static int reserve(struct tp_copy_job *job, uint64_t more_ops, uint64_t more_grains) {
    uint32_t op_room = room_for(job->op_room, job->op_count + more_ops);
    uint32_t grain_room = room_for(job->grain_room, job->grain_count + more_grains);
    if (op_room == 0 || grain_room == 0)
        return -ENOMEM;
    if (op_room != job->op_room) {
        if (grow((void **)&job->ops, sizeof(*job->ops), op_room) < 0)
            return -ENOMEM;
        job->op_room = op_room;
    }
    if (grain_room != job->grain_room) {
        if (grow((void **)&job->grains, sizeof(*job->grains), grain_room) < 0 ||
            grow((void **)&job->grain_done, sizeof(*job->grain_done), grain_room) < 0)
            return -ENOMEM;
        job->grain_room = grain_room;
    }
    return job->ops && job->grains && job->grain_done ? 0 : -ENOMEM;
}

static void open_grain(struct tp_copy_job *job) {
    uint32_t grain = job->grain_count++;
    job->grains[grain] = (struct tp_copy_grain){job->op_count, job->op_count};
    atomic_store_explicit(&job->grain_done[grain], GRAIN_OPEN, memory_order_relaxed);
    job->grain_fill = 0;
}

/* Put at most what is left of the last grain into it, as a longer last op where that continues. */
static size_t fill_grain(struct tp_copy_job *job, char *to, const char *from, size_t bytes) {
    struct tp_copy_grain *grain = &job->grains[job->grain_count - 1];
    size_t room = TP_GRAIN_BYTES - job->grain_fill;
    size_t part = bytes < room ? bytes : room;
    struct tp_copy_op *last = grain->end > grain->first ? &job->ops[grain->end - 1] : NULL;
    if (last && (char *)last->to + last->bytes == to &&
        (const char *)last->from + last->bytes == from) {
        last->bytes += part;
    } else {
        job->ops[job->op_count++] = (struct tp_copy_op){to, from, part};
        grain->end = job->op_count;
    }
    job->grain_fill += part;
    return part;
}

int tp_copy_add(struct tp_copy_job *job, void *to, const void *from, size_t bytes,
                uint32_t *ret_first, uint32_t *ret_last) {
    if (bytes == 0)
        return -EINVAL;
    uint64_t pieces = bytes / TP_GRAIN_BYTES + 2;
    int rc = reserve(job, pieces, pieces);
    if (rc < 0)
        return rc;

    char *t = to;
    const char *f = from;
    size_t left = bytes;
    /* A copy that fits into one grain is not cut: its task's status then hangs on one flag. */
    size_t room = job->grain_count ? TP_GRAIN_BYTES - job->grain_fill : 0;
    if (room == 0 || (room < left && left <= TP_GRAIN_BYTES))
        open_grain(job);
    uint32_t first = job->grain_count - 1;
    for (;;) {
        size_t part = fill_grain(job, t, f, left);
        t += part;
        f += part;
        left -= part;
        if (left == 0)
            break;
        open_grain(job);
    }
    job->total_bytes += bytes;
    if (ret_first)
        *ret_first = first;
    if (ret_last)
        *ret_last = job->grain_count - 1;
    return 0;
}

/* ---- status
 * --------------------------------------------------------------------------------------- */

bool tp_copy_done(const struct tp_copy_job *job) {
    return atomic_load_explicit(&job->finished, memory_order_acquire) == job->grain_count;
}

bool tp_copy_range_done(const struct tp_copy_job *job, uint32_t first, uint32_t last) {
    /* From the end: grains are claimed in order, so an unfinished range shows at its end first. */
    for (uint32_t grain = last + 1; grain-- > first;) {
        if (atomic_load_explicit(&job->grain_done[grain], memory_order_acquire) != GRAIN_COPIED)
            return false;
    }
    return true;
}

bool tp_copy_refused(const struct tp_copy_job *job) {
    return atomic_load_explicit(&job->refused, memory_order_relaxed);
}

bool tp_copy_range_refused(const struct tp_copy_job *job, uint32_t first, uint32_t last) {
    if (!tp_copy_refused(job))
        return false;
    for (uint32_t grain = first; grain <= last; grain++) {
        if (atomic_load_explicit(&job->grain_done[grain], memory_order_relaxed) == GRAIN_REFUSED)
            return true;
    }
    return false;
}

bool tp_copy_idle(const struct tp_copy_job *job) {
    /* In this order: once queued is 0, users has taken over the pins of the slot. */
    return tp_copy_done(job) && atomic_load_explicit(&job->queued, memory_order_acquire) == 0 &&
           atomic_load_explicit(&job->users, memory_order_acquire) == 0;
}

/* ---- one grain
 * ------------------------------------------------------------------------------------ */

static struct tp_copy_job *slot_job(uint64_t word) {
    return (struct tp_copy_job *)(uintptr_t)(word & JOB_MASK);
}

/* Move head past slots that are empty. A busy lock means that somebody else is at it. */
static void advance_head(void) {
    if (pthread_mutex_trylock(&pool.lock) != 0)
        return;
    uint32_t head = atomic_load_explicit(&pool.head, memory_order_relaxed);
    uint32_t tail = atomic_load_explicit(&pool.tail, memory_order_relaxed);
    while (head != tail &&
           atomic_load_explicit(&pool.slots[head % QUEUE_SLOTS], memory_order_relaxed) == 0)
        head++;
    atomic_store_explicit(&pool.head, head, memory_order_release);
    pthread_mutex_unlock(&pool.lock);
}

/* Take a job without unclaimed grains out of the queue, if it is there. The caller keeps it alive.
 */
static void retire(struct tp_copy_job *job) {
    if (!atomic_load_explicit(&job->queued, memory_order_acquire))
        return;
    _Atomic uint64_t *slot = &pool.slots[job->slot % QUEUE_SLOTS];
    uint64_t word = atomic_load_explicit(slot, memory_order_relaxed);
    do {
        if (slot_job(word) != job)
            return;
    } while (!atomic_compare_exchange_weak_explicit(slot, &word, 0, memory_order_acq_rel,
                                                    memory_order_relaxed));
    atomic_fetch_add_explicit(&job->users, (int32_t)(word / PIN_ONE), memory_order_acq_rel);
    atomic_store_explicit(&job->queued, 0, memory_order_release);
    advance_head();
}

/* Before the grain counts as finished: who finds the job done sees it. */
static void refuse_grain(struct tp_copy_job *job, uint32_t grain) {
    atomic_store_explicit(&job->grain_done[grain], GRAIN_REFUSED, memory_order_relaxed);
    atomic_store_explicit(&job->refused, true, memory_order_relaxed);
    tp_count(TP_LATE_WRITES, 1);
    atomic_fetch_add_explicit(&job->finished, 1, memory_order_acq_rel);
}

/*
 * Claim a grain and copy it. The last claim retires the job before it copies, so that the job is
 * idle as soon as it is done. false: all grains are claimed.
 */
static bool copy_grain(struct tp_copy_job *job) {
    uint32_t count = job->grain_count;
    if (atomic_load_explicit(&job->next, memory_order_relaxed) >= count)
        return false;
    uint32_t grain = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (grain >= count)
        return false;
    if (grain + 1 == count)
        retire(job);
    if (tp_stall_late(job->submitted_ms)) {
        refuse_grain(job, grain);
        return true;
    }
    for (uint32_t i = job->grains[grain].first; i < job->grains[grain].end; i++)
        tp_copy_bytes(job->ops[i].to, job->ops[i].from, job->ops[i].bytes);
    tp_copy_fence();
    /* In this order: who saw the flags of all grains finds the job done. */
    atomic_fetch_add_explicit(&job->finished, 1, memory_order_acq_rel);
    atomic_store_explicit(&job->grain_done[grain], GRAIN_COPIED, memory_order_release);
    return true;
}

/* The job in this slot, pinned; NULL when it is empty. */
static struct tp_copy_job *pin(_Atomic uint64_t *slot) {
    uint64_t word = atomic_load_explicit(slot, memory_order_relaxed);
    do {
        if (word == 0)
            return NULL;
    } while (!atomic_compare_exchange_weak_explicit(slot, &word, word + PIN_ONE,
                                                    memory_order_acquire, memory_order_relaxed));
    return slot_job(word);
}

/* The last look at the job: its owner may reuse it from here. */
static void unpin(_Atomic uint64_t *slot, struct tp_copy_job *job) {
    uint64_t word = atomic_load_explicit(slot, memory_order_relaxed);
    while (slot_job(word) == job) {
        if (atomic_compare_exchange_weak_explicit(slot, &word, word - PIN_ONE, memory_order_acq_rel,
                                                  memory_order_relaxed))
            return;
    }
    atomic_fetch_sub_explicit(&job->users, 1, memory_order_release);
}

/* One grain of the oldest job that has any. */
static bool copy_queued_grain(void) {
    uint32_t tail = atomic_load_explicit(&pool.tail, memory_order_acquire);
    uint32_t at = atomic_load_explicit(&pool.head, memory_order_acquire);
    for (; (int32_t)(tail - at) > 0; at++) {
        _Atomic uint64_t *slot = &pool.slots[at % QUEUE_SLOTS];
        struct tp_copy_job *job = pin(slot);
        if (!job)
            continue;
        bool copied = copy_grain(job);
        if (!copied)
            retire(job);
        unpin(slot, job);
        if (copied)
            return true;
    }
    return false;
}

bool tp_copy_help(struct tp_copy_job *job) {
    bool copied = false;
    if (job) {
        atomic_fetch_add_explicit(&job->users, 1, memory_order_relaxed);
        copied = copy_grain(job);
        atomic_fetch_sub_explicit(&job->users, 1, memory_order_release);
    }
    if (!copied && !tp_inert())
        copied = copy_queued_grain();
    if (copied)
        tp_count(TP_HELPED_GRAINS, 1);
    return copied;
}

/* ---- the pool's threads
 * --------------------------------------------------------------------------- */

static bool queue_empty(void) {
    return atomic_load_explicit(&pool.tail, memory_order_acquire) ==
           atomic_load_explicit(&pool.head, memory_order_acquire);
}

static void wake(unsigned count) {
    syscall(SYS_futex, &pool.news, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Look on for a while: a caller that submits many batches comes back within microseconds. */
static bool spin_for_work(uint32_t news) {
    if (!pool.may_spin)
        return false;
    bool found = false;
    atomic_fetch_add(&pool.spinning, 1);
    uint64_t end = tp_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16 && !found; i++) {
            __builtin_ia32_pause();
            found = atomic_load_explicit(&pool.news, memory_order_relaxed) != news;
        }
    } while (!found && tp_now_ns() < end);
    atomic_fetch_sub(&pool.spinning, 1);
    return found;
}

static void sleep_for_work(uint32_t news) {
    /* seq_cst on both sides: either the submitter sees this sleeper, or the futex sees its news. */
    atomic_fetch_add(&pool.sleeping, 1);
    syscall(SYS_futex, &pool.news, FUTEX_WAIT_PRIVATE, news, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleeping, 1);
}

static void *work(void *arg) {
    (void)arg;
    bool woken = false;
    while (!atomic_load_explicit(&pool.stop, memory_order_acquire)) {
        uint32_t news = atomic_load(&pool.news);
        /* Whoever woke wakes one more, so that a submitter need not wake them all. */
        if (woken && !queue_empty() && atomic_load(&pool.sleeping) > 0)
            wake(1);
        woken = false;
        if (copy_queued_grain()) {
            tp_count(TP_POOL_GRAINS, 1);
            continue;
        }
        if (!spin_for_work(news))
            sleep_for_work(news);
        woken = true;
    }
    return NULL;
}

unsigned tp_copy_threads(unsigned asked, unsigned cpus) {
    if (asked)
        return asked < TP_COPY_THREADS_MAX ? asked : TP_COPY_THREADS_MAX;
    /* On one CPU still one worker: a caller that sleeps between its polls must find work done. */
    unsigned spare = cpus > 1 ? cpus - 1 : 1;
    return spare < POOL_AUTO_MAX ? spare : POOL_AUTO_MAX;
}

/* With the lock held. */
static void start_threads(unsigned threads) {
    unsigned cpus = tp_host_cpus();
    unsigned count = tp_copy_threads(threads ? threads : pool.wanted, cpus);
    pool.may_spin = cpus > 1;
    static atomic_flag said = ATOMIC_FLAG_INIT;
    int error = 0;
    atomic_store(&pool.stop, false);
    while (pool.thread_count < count && error == 0) {
        error = tp_thread_start("tp-copy", work, NULL, &pool.threads[pool.thread_count]);
        pool.thread_count += error == 0;
    }
    pool.missing = error != 0;
    if (error) {
        pool.wanted = count;
        pool.next_start_ns = tp_now_ns() + START_AGAIN_NS;
        tp_log_once(
            &said, TP_LOG_WARN,
            "%u of %u threads that copy could be started: %s (ulimit -u, the cgroup's pids.max); "
            "%s, and it is tried again",
            pool.thread_count, count, strerror(-error),
            pool.thread_count ? "copies take longer" : "callers copy by themselves");
    }
    /* Without any, a job in the queue would depend on polls that may not come. */
    atomic_store(&pool.state, pool.thread_count ? POOL_ON : POOL_STOPPED);
}

void tp_copy_pool_size(unsigned threads) {
    if (tp_inert())
        return;
    pthread_mutex_lock(&pool.lock);
    pool.wanted = threads;
    pthread_mutex_unlock(&pool.lock);
}

int tp_copy_pool_start(unsigned threads) {
    if (tp_inert())
        return 0;
    pthread_mutex_lock(&pool.lock);
    if (atomic_load(&pool.state) != POOL_ON)
        start_threads(threads);
    pthread_mutex_unlock(&pool.lock);
    return 0;
}

void tp_copy_pool_stop(void) {
    if (tp_inert())
        return;
    pthread_t threads[TP_COPY_THREADS_MAX];
    pthread_mutex_lock(&pool.lock);
    unsigned count = pool.thread_count;
    memcpy(threads, pool.threads, sizeof(threads));
    pool.thread_count = 0;
    pool.missing = false;
    atomic_store(&pool.state, POOL_STOPPED);
    atomic_store(&pool.stop, true);
    atomic_fetch_add(&pool.news, 1);
    pthread_mutex_unlock(&pool.lock);
    wake(TP_COPY_THREADS_MAX);
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

/* ---- submitting
 * ----------------------------------------------------------------------------------- */

/* What became of a job that was to be queued. */
enum offer { OFFER_REFUSED, OFFER_ALONE, OFFER_BEHIND_OTHERS };

static enum offer enqueue(struct tp_copy_job *job) {
    enum offer offer = OFFER_REFUSED;
    pthread_mutex_lock(&pool.lock);
    if (atomic_load(&pool.state) == POOL_NEW || (pool.missing && tp_now_ns() >= pool.next_start_ns))
        start_threads(0);
    uint32_t tail = atomic_load_explicit(&pool.tail, memory_order_relaxed);
    uint32_t head = atomic_load_explicit(&pool.head, memory_order_relaxed);
    if (atomic_load(&pool.state) == POOL_ON && tail - head < QUEUE_SLOTS) {
        job->slot = tail;
        atomic_store_explicit(&job->queued, 1, memory_order_release);
        atomic_store_explicit(&pool.slots[tail % QUEUE_SLOTS], (uint64_t)(uintptr_t)job,
                              memory_order_release);
        atomic_store_explicit(&pool.tail, tail + 1, memory_order_release);
        offer = head == tail ? OFFER_ALONE : OFFER_BEHIND_OTHERS;
    }
    pthread_mutex_unlock(&pool.lock);
    return offer;
}

bool tp_copy_start(struct tp_copy_job *job) {
    /* Once queued, another thread may finish the job: nothing of it is read after that. */
    bool large = job->total_bytes >= WAKE_BYTES;
    uint64_t share = 1 + job->total_bytes / WAKE_SHARE_BYTES;
    enum offer offer = OFFER_REFUSED;
    if (job->total_bytes > TP_COPY_INLINE_BYTES && !tp_inert())
        offer = enqueue(job);
    if (offer != OFFER_REFUSED) {
        atomic_fetch_add(&pool.news, 1);
        if ((large || offer == OFFER_BEHIND_OTHERS) && atomic_load(&pool.sleeping) > 0 &&
            atomic_load(&pool.spinning) == 0)
            wake(share < TP_COPY_THREADS_MAX ? (unsigned)share : TP_COPY_THREADS_MAX);
        return false;
    }
    while (copy_grain(job))
        ;
    tp_count(TP_INLINE_COPIES, 1);
    return true;
}
