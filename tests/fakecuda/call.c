/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The frame of every call: lock, count for injection, the rules that hold for all calls (cuInit
 * first, not in a forked child, a current context in order, no unsafe call during a capture), and
 * the log line at the end.
 */
#include "state.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

pthread_mutex_t fc_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fc_changed = PTHREAD_COND_INITIALIZER;
static atomic_int init_pid;

void fc_set_initialised(void) {
    atomic_store(&init_pid, getpid());
}

CUresult fc_violate(struct fc_call *call, CUresult result, const char *format, ...) {
    va_list list;

    if (!call->violation[0]) {
        va_start(list, format);
        /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false alarm of clang-tidy 14 */
        vsnprintf(call->violation, sizeof call->violation, format, list);
        va_end(list);
    }
    return result;
}

static CUresult check_context(struct fc_call *call) {
    if (!call->context)
        return fc_violate(call, CUDA_ERROR_INVALID_CONTEXT, "no current context in this thread");
    if (!call->context->alive)
        return fc_violate(call, CUDA_ERROR_CONTEXT_IS_DESTROYED,
                          "the current context was destroyed");
    return call->context->sticky;
}

static CUresult check(struct fc_call *call, unsigned needs) {
    CUresult result = CUDA_SUCCESS;
    int injected;

    if (fc_inject(call->name, &injected)) {
        call->injected = true;
        return (CUresult)injected;
    }
    if (needs && !atomic_load(&init_pid))
        return needs & FC_QUIET
                   ? CUDA_ERROR_NOT_INITIALIZED
                   : fc_violate(call, CUDA_ERROR_NOT_INITIALIZED, "called before cuInit");
    call->context = fc_current();
    if (needs & FC_CONTEXT)
        result = check_context(call);
    if (result == CUDA_SUCCESS && (needs & FC_UNSAFE))
        result = fc_capture_check_unsafe(call);
    return result;
}

bool fc_enter(struct fc_call *call, const char *name, unsigned needs, const char *format, ...) {
    int pid = atomic_load(&init_pid);
    va_list list;

    *call = (struct fc_call){.name = name, .start_ns = fc_now_ns()};
    va_start(list, format);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false alarm of clang-tidy 14 */
    vsnprintf(call->args, sizeof call->args, format, list);
    va_end(list);
    /* The real driver's state does not survive fork: cuInit fails in the child of a process that
     * had called it. */
    if (pid && pid != getpid()) {
        call->result = fc_violate(call, CUDA_ERROR_NOT_INITIALIZED,
                                  "called in the forked child of a process that had called cuInit");
        return false;
    }
    fc_slow(name);
    pthread_mutex_lock(&fc_lock);
    call->locked = true;
    call->result = check(call, needs);
    return call->result == CUDA_SUCCESS && !call->injected;
}

CUresult fc_leave(struct fc_call *call) {
    fc_log(call);
    if (call->locked)
        pthread_mutex_unlock(&fc_lock);
    return call->result;
}
