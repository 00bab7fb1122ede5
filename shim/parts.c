/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads that carry out calls in parts. See parts.h, also for what it must not know.
 *
 * A call takes the threads that are idle when it begins, and is not divided when there is none:
 * parts one behind the other would be slower than the whole.
 */
#include "shim/parts.h"

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "shim/catch.h"

#include <pthread.h>
#include <string.h>

#define THREADS_MAX 16u
#define THREADS_AUTO 4u
#define PARTS_MAX 64u
/* Mooncake's own stacks are the system's default. */
#define STACK_BYTES ((size_t)8 << 20)
/* Less than this, twice, is not worth waking a thread for: 8 MiB are 150 us of PCIe, 8 keys some 50
 * us of Mooncake's own work. */
#define PART_KEYS 8u
#define PART_BYTES ((uint64_t)8 << 20)
#define PARTS_PER_THREAD 4u
/* A part that takes longer gains nothing from others beside it: Mooncake waits 0.75 to 1 s for a
 * store that is gone, and once a part would be many times that. */
#define SLOW_NS UINT64_C(250000000)
/* After a thread could not be started, none is tried for so long. */
#define REFUSED_MS UINT64_C(1000)

/* A call that is being carried out, on its caller's stack. */
struct call {
    const struct tp_parts *parts;
    tp_cu_context context; /* current on the caller's thread */
    unsigned threads;      /* that were there when it was divided, the caller's among them */
    unsigned part_count;
    size_t first[PARTS_MAX], end[PARTS_MAX]; /* keys of each part */
    atomic_uint next_part;
    unsigned seats;  /* threads that are to join still; under the lock, as the next two */
    unsigned active; /* threads that have joined and not left */
    struct call *also;
    pthread_cond_t left;
    bool again[PARTS_MAX]; /* its thread ended */
    void *thrown[PARTS_MAX];
    struct cxx_vector results[PARTS_MAX];
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct call *calls; /* those with seats */
    unsigned started;
    unsigned idle;          /* threads that are promised to no call */
    uint64_t next_start_ms; /* 0, or a thread could not be started: none before this */
} crew = {.lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};

static _Thread_local bool in_part;

/* ---- one part ---- */

struct part {
    struct call *call;
    size_t first, count;
    struct cxx_vector *ret;
};

static void run_part(void *arg) {
    const struct part *part = arg;
    const struct tp_parts *parts = part->call->parts;

    parts->run(parts->context, part->first, part->count, part->ret);
}

/*
 * The parts grow over the first round of threads and shrink over the last: the first copies start
 * early, little is left to do after the last ones, and between, the threads do not all wait for
 * their copies at one time and for the master at another.
 */
static size_t weight(const struct call *call, unsigned index) {
    unsigned left = call->part_count - index;
    unsigned least = index + 1 < left ? index + 1 : left;

    return least < call->threads ? least : call->threads;
}

static void divide_keys(struct call *call, unsigned part_count) {
    size_t total = 0;
    size_t before = 0;
    size_t first = 0;

    call->part_count = part_count;
    for (unsigned i = 0; i < part_count; i++)
        total += weight(call, i);
    unsigned used = 0;
    for (unsigned i = 0; i < part_count; i++) {
        before += weight(call, i);
        size_t end = call->parts->keys * before / total;
        if (end == first) /* far more weight than keys */
            continue;
        call->first[used] = first;
        call->end[used++] = first = end;
    }
    call->part_count = used;
}

/* The next part that nobody has taken; `rest`: all of them as one. False: there is none. */
static bool take_part(struct call *call, bool rest, unsigned *ret_index) {
    unsigned count = call->part_count;
    unsigned index =
        rest ? atomic_exchange(&call->next_part, count) : atomic_fetch_add(&call->next_part, 1);

    if (index >= count)
        return false;
    if (rest) {
        call->end[index] = call->parts->keys;
        for (unsigned i = index + 1; i < count; i++)
            call->first[i] = call->end[i] = call->parts->keys;
    }
    *ret_index = index;
    return true;
}

/* NULL, or the end of this thread (catch.h). */
static void *run_one(struct call *call, unsigned index) {
    struct part part = {call, call->first[index], call->end[index] - call->first[index],
                        &call->results[index]};
    void *thrown = tp_catch(run_part, &part);
    bool end = thrown && tp_catch_is_end(thrown);

    if (thrown)
        memset(&call->results[index], 0, sizeof(call->results[index]));
    call->thrown[index] = end ? NULL : thrown;
    call->again[index] = end;
    return end ? thrown : NULL;
}

static void *run_parts(struct call *call) {
    uint64_t began = tp_now_ns();
    bool slow = false;
    void *end = NULL;
    unsigned index;

    in_part = true;
    while (!end && take_part(call, slow, &index)) {
        end = run_one(call, index);
        uint64_t now = tp_now_ns();
        slow = now - began > SLOW_NS;
        began = now;
    }
    in_part = false;
    return end;
}

/* ---- the threads ---- */

/*
 * Mooncake's code may call the CUDA runtime, which takes the context that is current and makes one
 * on device 0 where none is.
 */
static void *run_parts_elsewhere(struct call *call) {
    const struct tp_cuda *cuda = call->context ? tp_cuda(false, NULL) : NULL;
    tp_cu_context popped = NULL;
    bool pushed = cuda && cuda->context_push(call->context) == TP_CUDA_SUCCESS;

    void *end = run_parts(call);
    if (pushed)
        cuda->context_pop(&popped);
    return end;
}

static void take_seat(struct call *call) {
    call->active++;
    if (--call->seats == 0) {
        struct call **link = &crew.calls;
        while (*link != call)
            link = &(*link)->also;
        *link = call->also;
    }
}

/* Detached, for the life of the process: it holds nothing between two calls. */
static void *work(void *arg) {
    void *end = NULL;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    pthread_mutex_lock(&crew.lock);
    while (!end) {
        while (!crew.calls)
            pthread_cond_wait(&crew.news, &crew.lock);
        struct call *call = crew.calls;
        take_seat(call);
        pthread_mutex_unlock(&crew.lock);
        end = run_parts_elsewhere(call);
        pthread_mutex_lock(&crew.lock);
        if (end)
            crew.started--;
        else
            crew.idle++;
        if (--call->active == 0)
            pthread_cond_signal(&call->left);
    }
    pthread_mutex_unlock(&crew.lock);
    (void)arg;
    tp_throw(end); /* a part has ended this thread */
}

/* Half of the CPUs, since the master and the store work as well; with few of them the copies are
 * short of CPUs already. */
static unsigned wanted_threads(unsigned asked) {
    static atomic_uint known_cpus; /* asking reads files */
    unsigned cpus = atomic_load_explicit(&known_cpus, memory_order_relaxed);

    if (asked)
        return asked < THREADS_MAX ? asked : THREADS_MAX;
    if (!cpus) {
        cpus = tp_host_cpus();
        atomic_store_explicit(&known_cpus, cpus, memory_order_relaxed);
    }
    return cpus / 2 < THREADS_AUTO ? cpus / 2 : THREADS_AUTO;
}

/* With the lock held. 0, or why a thread could not be started: no error, calls are divided less
 * until it can. */
static int start_threads(unsigned count) {
    pthread_t thread;

    if (crew.started < count && crew.next_start_ms && tp_now_ms() < crew.next_start_ms)
        return 0;
    while (crew.started < count) {
        int error = tp_thread_start_deep("tp-call", STACK_BYTES, work, NULL, &thread);
        crew.next_start_ms = error ? tp_now_ms() + REFUSED_MS : 0;
        if (error)
            return error;
        pthread_detach(thread);
        crew.started++;
        crew.idle++;
    }
    return 0;
}

static void say_refused(int error) {
    static atomic_flag said = ATOMIC_FLAG_INIT;

    tp_log_once(&said, TP_LOG_WARN,
                "no thread can be started for calls in parts: %s (ulimit -u, the cgroup's "
                "pids.max); calls are divided less until one can",
                strerror(-error));
}

/* ---- a call ---- */

size_t tp_parts_allowed(const struct tp_parts *parts) {
    size_t count = parts->keys / PART_KEYS;

    if (count > parts->bytes / PART_BYTES)
        count = parts->bytes / PART_BYTES;
    if (count > PARTS_MAX)
        count = PARTS_MAX;
    return count ? count : 1;
}

/* Promise idle threads to the call. False: there is none. */
static bool seat(struct call *call, unsigned threads, size_t allowed) {
    pthread_mutex_lock(&crew.lock);
    int error = start_threads(threads - 1);
    unsigned seats = threads - 1 < crew.idle ? threads - 1 : crew.idle;
    if (seats > allowed - 1)
        seats = (unsigned)allowed - 1;
    if (seats) {
        unsigned count = (seats + 1) * PARTS_PER_THREAD;
        call->threads = seats + 1;
        divide_keys(call, count < allowed ? count : (unsigned)allowed);
        call->seats = seats;
        crew.idle -= seats;
        call->also = crew.calls;
        crew.calls = call;
        for (unsigned i = 0; i < seats; i++)
            pthread_cond_signal(&crew.news);
    }
    pthread_mutex_unlock(&crew.lock);
    if (error)
        say_refused(error);
    return seats > 0;
}

/* Take back the seats that nobody took, and wait until all have left: they work on our stack, so
 * that a cancellation must wait too. */
static void leave(struct call *call) {
    int cancel;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    pthread_mutex_lock(&crew.lock);
    if (call->seats) {
        crew.idle += call->seats;
        call->seats = 1;
        take_seat(call);
        call->active--;
    }
    while (call->active)
        pthread_cond_wait(&call->left, &crew.lock);
    pthread_mutex_unlock(&crew.lock);
    pthread_cond_destroy(&call->left);
    pthread_setcancelstate(cancel, NULL);
}

struct room {
    const struct tp_module *module;
    size_t bytes;
    char *memory;
};

static void make_room(void *arg) {
    struct room *room = arg;

    room->memory = room->module->operator_new(room->bytes);
}

/* One vector of all results. What the operator new throws, or NULL. */
static void *join_results(const struct call *call, struct cxx_vector *ret) {
    struct room room = {.module = call->parts->module};
    unsigned count = 0;
    bool right = true;

    for (; count < call->part_count && right; count++) {
        const struct cxx_vector *one = &call->results[count];
        size_t bytes = (size_t)(one->end - one->begin);
        right = bytes == (call->end[count] - call->first[count]) * call->parts->result_bytes;
        room.bytes += bytes;
    }
    void *thrown = room.bytes ? tp_catch(make_room, &room) : NULL;
    char *end = room.memory;
    if (thrown)
        return thrown;
    for (unsigned i = 0; i < count; i++) {
        const struct cxx_vector *one = &call->results[i];
        size_t bytes = (size_t)(one->end - one->begin);
        if (end && bytes)
            end = (char *)memcpy(end, one->begin, bytes) + bytes;
    }
    *ret = (struct cxx_vector){room.memory, end, end};
    return NULL;
}

/* Let go of what the parts have left, but for the exception that the call ends with. */
static void drop_leftovers(const struct call *call, const void *thrown) {
    for (unsigned i = 0; i < call->part_count; i++) {
        if (call->results[i].begin)
            call->parts->module->operator_delete(call->results[i].begin);
        if (call->thrown[i] && call->thrown[i] != thrown)
            tp_catch_drop(call->thrown[i]);
    }
}

static void divide(struct call *call, struct cxx_vector *ret) {
    void *thrown = run_parts(call);

    leave(call);
    tp_count(TP_CALLS_DIVIDED, 1);
    for (unsigned i = 0; i < call->part_count && !thrown; i++) {
        if (call->again[i])
            thrown = run_one(call, i);
    }
    for (unsigned i = 0; i < call->part_count && !thrown; i++)
        thrown = call->thrown[i];
    if (!thrown)
        thrown = join_results(call, ret);
    drop_leftovers(call, thrown);
    if (thrown)
        tp_throw(thrown);
}

static tp_cu_context current_context(void) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    tp_cu_context context = NULL;

    if (!cuda || !cuda->context_current || cuda->context_current(&context) != TP_CUDA_SUCCESS)
        return NULL;
    return context;
}

void tp_parts_run(const struct tp_parts *parts, struct cxx_vector *ret) {
    const struct tp_module *module = parts->module;
    unsigned threads = wanted_threads(parts->threads);
    size_t allowed = tp_parts_allowed(parts);
    struct call call = {.parts = parts, .left = PTHREAD_COND_INITIALIZER};
    bool able = threads > 1 && allowed > 1 && !in_part && module && module->operator_new &&
                module->operator_delete && tp_catch_ready(module);

    if (able)
        call.context = current_context();
    if (able && seat(&call, threads, allowed))
        divide(&call, ret);
    else
        parts->run(parts->context, 0, parts->keys, ret);
}
