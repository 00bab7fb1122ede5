/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: a thread each that runs jobs in order, never before the delay after their submission, so
 * that code which forgets to wait sees old bytes. The legacy stream of a context is ordered with
 * all its blocking streams, as documented.
 */
#include "state.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

struct fc_job *fc_job_new(void) {
    return calloc(1, sizeof(struct fc_job));
}

void fc_job_free(struct fc_job *job) {
    if (!job)
        return;
    for (size_t i = 0; i < job->copy_count; i++) {
        fc_span_give(&job->copies[i].to);
        fc_span_give(&job->copies[i].from);
        free(job->copies[i].staged);
    }
    free(job->copies);
    free(job->deps);
    free(job->launch);
    free(job);
}

static bool ready(const struct fc_job *job) {
    for (size_t i = 0; i < job->dep_count; i++) {
        if (job->deps[i].stream->done < job->deps[i].count)
            return false;
    }
    return true;
}

static void sleep_until(uint64_t when_ns) {
    struct timespec until = {.tv_sec = (time_t)(when_ns / 1000000000u),
                             .tv_nsec = (long)(when_ns % 1000000000u)};

    while (when_ns && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
}

static int run_copy(const struct fc_copy *copy) {
    struct fc_piece staged = {.bytes = copy->staged, .size = copy->size};
    struct fc_span from = {.pieces = &staged, .count = 1};

    return fc_move(&copy->to, copy->staged ? &from : &copy->from, copy->size);
}

/* Without the lock. The error for the context, 0 if none. */
static CUresult run(struct fc_job *job) {
    int error = 0;

    for (size_t i = 0; i < job->copy_count && !error; i++)
        error =
            job->fill ? fc_fill(&job->copies[i].to, job->fill_value) : run_copy(&job->copies[i]);
    if (error) {
        fc_log_worker_violation("(stream)", CUDA_ERROR_ILLEGAL_ADDRESS,
                                "a copy ran into memory that is unmapped or not writable");
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (job->host_function)
        job->host_function(job->host_data);
    if (job->launch) {
        fc_launch_run(job->launch);
        return job->launch->error;
    }
    return CUDA_SUCCESS;
}

static void *work(void *arg) {
    struct fc_stream *stream = arg;

    pthread_mutex_lock(&fc_lock);
    while (stream->alive || stream->head) {
        struct fc_job *job = stream->head;
        CUresult result;

        if (!job || !ready(job)) {
            pthread_cond_wait(&fc_changed, &fc_lock);
            continue;
        }
        pthread_mutex_unlock(&fc_lock);
        sleep_until(job->not_before_ns);
        result = stream->context->sticky ? CUDA_SUCCESS : run(job);
        pthread_mutex_lock(&fc_lock);
        if (result != CUDA_SUCCESS)
            stream->context->sticky = result;
        if (job->event && job->event->turn == job->event_turn)
            job->event->done_ns = fc_now_ns();
        stream->head = job->next;
        if (!stream->head)
            stream->tail = NULL;
        stream->done++;
        fc_job_free(job);
        pthread_cond_broadcast(&fc_changed);
    }
    stream->started = false;
    pthread_cond_broadcast(&fc_changed);
    pthread_mutex_unlock(&fc_lock);
    return NULL;
}

static bool start(struct fc_stream *stream) {
    sigset_t all, before;
    pthread_attr_t attr;
    pthread_t thread;
    int error;

    if (stream->started)
        return true;
    sigfillset(&all);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attr, work, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    stream->started = !error;
    return stream->started;
}

struct fc_stream *fc_stream_new(struct fc_context *context, unsigned flags, int priority,
                                bool legacy) {
    struct fc_stream *stream = calloc(1, sizeof *stream);

    if (!stream)
        return NULL;
    *stream = (struct fc_stream){
        .context = context, .flags = flags, .priority = priority, .legacy = legacy, .alive = true};
    stream->handle = fc_handle_new(FC_STREAM_HANDLE, stream);
    return stream;
}

struct fc_stream *fc_stream_get(struct fc_call *call, CUstream handle) {
    struct fc_stream *stream;

    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (call->context && call->context->alive)
            return call->context->legacy;
        call->result = fc_violate(call, CUDA_ERROR_INVALID_CONTEXT,
                                  "the default stream needs a current context");
        return NULL;
    }
    stream = fc_handle_get(FC_STREAM_HANDLE, (uintptr_t)handle);
    if (!stream)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "not a stream: %p", (void *)handle);
    else if (!stream->context->alive)
        call->result =
            fc_violate(call, CUDA_ERROR_CONTEXT_IS_DESTROYED, "the stream's context was destroyed");
    else if (!stream->alive)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "stream %p was destroyed", (void *)handle);
    return call->result == CUDA_SUCCESS ? stream : NULL;
}

static int add_dep(struct fc_job *job, struct fc_stream *stream, uint64_t count) {
    struct fc_dep *grown;

    if (!stream || stream->done >= count)
        return 0;
    grown = realloc(job->deps, (job->dep_count + 1) * sizeof *grown);
    if (!grown)
        return -ENOMEM;
    job->deps = grown;
    job->deps[job->dep_count++] = (struct fc_dep){.stream = stream, .count = count};
    return 0;
}

/* What the order between the legacy stream and the blocking ones asks for. */
static int add_legacy_deps(struct fc_stream *stream, struct fc_job *job) {
    struct fc_stream *other;
    int error = 0;

    if (!stream->legacy)
        return stream->flags & CU_STREAM_NON_BLOCKING
                   ? 0
                   : add_dep(job, stream->context->legacy, stream->context->legacy->submitted);
    for (size_t i = 0; !error && (other = fc_handle_at(FC_STREAM_HANDLE, i)); i++) {
        if (other->context == stream->context && other != stream &&
            !(other->flags & CU_STREAM_NON_BLOCKING))
            error = add_dep(job, other, other->submitted);
    }
    return error;
}

CUresult fc_submit(struct fc_call *call, struct fc_stream *stream, struct fc_job *job, bool wait) {
    uint64_t count;

    if (add_legacy_deps(stream, job) || !start(stream)) {
        fc_job_free(job);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    job->not_before_ns = wait ? 0 : fc_now_ns() + fc_settings()->delay_ns;
    if (stream->tail)
        stream->tail->next = job;
    else
        stream->head = job;
    stream->tail = job;
    count = ++stream->submitted;
    pthread_cond_broadcast(&fc_changed);
    if (!wait)
        return CUDA_SUCCESS;
    fc_wait(stream, count);
    return stream->context->sticky;
}

void fc_wait(const struct fc_stream *stream, uint64_t count) {
    while (stream->done < count)
        pthread_cond_wait(&fc_changed, &fc_lock);
}

void fc_context_drain(const struct fc_context *context) {
    struct fc_stream *stream;

    for (size_t i = 0; (stream = fc_handle_at(FC_STREAM_HANDLE, i)); i++) {
        if (stream->context == context)
            fc_wait(stream, stream->submitted);
    }
}

void fc_context_kill_streams(const struct fc_context *context) {
    struct fc_stream *stream;

    for (size_t i = 0; (stream = fc_handle_at(FC_STREAM_HANDLE, i)); i++) {
        if (stream->context != context)
            continue;
        stream->alive = false;
        pthread_cond_broadcast(&fc_changed);
        while (stream->started)
            pthread_cond_wait(&fc_changed, &fc_lock);
    }
}

int fakecuda_streams(void) {
    const struct fc_stream *stream;
    int alive = 0;

    pthread_mutex_lock(&fc_lock);
    for (size_t i = 0; (stream = fc_handle_at(FC_STREAM_HANDLE, i)); i++)
        alive += stream->alive && !stream->legacy;
    pthread_mutex_unlock(&fc_lock);
    return alive;
}

static CUresult create(const char *name, CUstream *ret, unsigned flags, int priority) {
    struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, name, FC_CONTEXT, "flags=%u priority=%d", flags, priority)) {
        if (flags > CU_STREAM_NON_BLOCKING) {
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "unknown flags %u", flags);
        } else {
            stream = fc_stream_new(call.context, flags,
                                   priority > 0    ? 0
                                   : priority < -5 ? -5
                                                   : priority,
                                   false);
            if (stream)
                *ret = (CUstream)stream->handle;
            else
                call.result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return fc_leave(&call);
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    return create("cuStreamCreate", stream, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    return create("cuStreamCreateWithPriority", stream, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamDestroy_v2", FC_INIT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream && stream->legacy) {
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_HANDLE,
                                     "the default stream cannot be destroyed");
        } else if (stream) {
            stream->alive = false; /* its thread finishes what is queued */
            pthread_cond_broadcast(&fc_changed);
        }
    }
    return fc_leave(&call);
}

CUresult cuStreamQuery(CUstream handle) {
    struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamQuery", FC_INIT | FC_UNSAFE, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            call.result = fc_capture_check_sync(&call, stream);
        if (stream && call.result == CUDA_SUCCESS)
            call.result = stream->context->sticky            ? stream->context->sticky
                          : stream->done < stream->submitted ? CUDA_ERROR_NOT_READY
                                                             : CUDA_SUCCESS;
    }
    return fc_leave(&call);
}

CUresult cuStreamSynchronize(CUstream handle) {
    struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamSynchronize", FC_INIT | FC_UNSAFE, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            call.result = fc_capture_check_sync(&call, stream);
        if (stream && call.result == CUDA_SUCCESS) {
            fc_wait(stream, stream->submitted);
            call.result = stream->context->sticky;
        }
    }
    return fc_leave(&call);
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    const struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamGetCtx", FC_INIT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            *context = (CUcontext)stream->context->handle;
    }
    return fc_leave(&call);
}

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    const struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamGetPriority", FC_INIT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            *priority = stream->priority;
    }
    return fc_leave(&call);
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    const struct fc_stream *stream;
    struct fc_call call;

    if (fc_enter(&call, "cuStreamGetFlags", FC_INIT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            *flags = stream->flags;
    }
    return fc_leave(&call);
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *user_data) {
    struct fc_stream *stream;
    struct fc_job *job;
    struct fc_call call;
    bool recorded = false;

    if (fc_enter(&call, "cuLaunchHostFunc", FC_CONTEXT, "stream=%p", (void *)handle)) {
        stream = fc_stream_get(&call, handle);
        if (stream)
            call.result = fc_capture_check_stream(&call, stream, &recorded);
        if (stream && call.result == CUDA_SUCCESS && !recorded) {
            job = fc_job_new();
            if (job) {
                job->host_function = function;
                job->host_data = user_data;
            }
            call.result = job ? fc_submit(&call, stream, job, false) : CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return fc_leave(&call);
}

static CUresult wait_event(struct fc_call *call, CUstream handle, CUevent event_handle) {
    struct fc_stream *stream = fc_stream_get(call, handle);
    struct fc_event *event = fc_handle_get(FC_EVENT_HANDLE, (uintptr_t)event_handle);
    bool recorded = false;
    struct fc_job *job;
    CUresult result;

    if (!stream)
        return call->result;
    if (!event || !event->alive)
        return fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "%s event: %p",
                          event ? "a destroyed" : "not an", (void *)event_handle);
    result = fc_capture_check_stream(call, stream, &recorded);
    /* An event that was never recorded is no condition, as documented. */
    if (result != CUDA_SUCCESS || recorded || !event->recorded)
        return result;
    job = fc_job_new();
    if (!job || add_dep(job, event->stream, event->count)) {
        fc_job_free(job);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return fc_submit(call, stream, job, false);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuStreamWaitEvent", FC_CONTEXT, "stream=%p event=%p", (void *)stream,
                 (void *)event))
        call.result = wait_event(&call, stream, event);
    return fc_leave(&call);
}
