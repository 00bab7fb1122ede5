/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The originals behind hooks_libc.def, and the hooks on free() and munmap(). See there for what
 * they may do. It must not know what a segment is.
 */
#include "shim/hooks_libc.h"

#include "env/env.h"
#include "segment/segment.h"
#include "shim/program.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc's own name of its free, for when there is no other. */
extern void tp_glibc_free(void *address) __asm__("__libc_free");

static const char *const names[TP_LIBC_COUNT] = {
#define HOOK(identifier, result, parameters, mangled, role, since, why) mangled,
#include "shim/hooks_libc.def"
#undef HOOK
};

static _Atomic(void *) next[TP_LIBC_COUNT];

/*
 * dlsym calls free itself when an earlier dlerror text is left over. The thread that looks for the
 * originals is remembered here: pthread_t, 0 for none.
 */
static _Atomic pthread_t looking;

/* A small allocation whose free() is being waited for: see arrives. One at a time. */
static _Atomic(void *) probe;
static pthread_mutex_t probe_lock = PTHREAD_MUTEX_INITIALIZER; /* never taken in free() */

/*
 * All are found on the first call of any, which comes before the program has threads: a later
 * search could wait for a thread that holds the dynamic linker's lock.
 */
void *tp_libc_next(enum tp_libc_hook hook) {
    pthread_t none = 0;
    void *symbol = atomic_load_explicit(&next[hook], memory_order_acquire);

    if (symbol || !atomic_compare_exchange_strong(&looking, &none, pthread_self())) {
        return symbol;
    }
    int error = errno;
    for (int i = 0; i < TP_LIBC_COUNT; i++) {
        atomic_store_explicit(&next[i], dlsym(RTLD_NEXT, names[i]), memory_order_release);
    }
    errno = error;
    atomic_store(&looking, 0);
    return atomic_load(&next[hook]);
}

/* Whose memory it is cannot be told while the original is unknown: then it is kept, a few bytes
 * once in a process. */
static void free_unknown(void *address) {
    tp_real_free real = NULL;
    void *symbol = tp_libc_next(TP_LIBC_free);

    if (!symbol && atomic_load(&looking) == 0) {
        /* another thread has just found it; or there is none */
        symbol = atomic_load(&next[TP_LIBC_free]);
        if (!symbol) {
            tp_glibc_free(address);
        }
    }
    memcpy(&real, &symbol, sizeof(real));
    if (real) {
        real(address);
    }
}

void tp_hook_free(void *address) {
    void *symbol = atomic_load_explicit(&next[TP_LIBC_free], memory_order_acquire);
    tp_real_free real = NULL;

    if (!address || tp_segment_free(address)) {
        return;
    }
    if (address == atomic_load_explicit(&probe, memory_order_relaxed)) {
        atomic_store(&probe, NULL);
    }
    memcpy(&real, &symbol, sizeof(real));
    if (real) {
        real(address);
    } else {
        free_unknown(address);
    }
}

int tp_hook_munmap(void *address, size_t bytes) {
    tp_real_munmap real = NULL;

    if (address && tp_segment_free(address)) {
        return 0;
    }
    void *symbol = tp_libc_next(TP_LIBC_munmap);
    memcpy(&real, &symbol, sizeof(real));
    return real ? real(address, bytes) : (int)syscall(SYS_munmap, address, bytes);
}

/* Is a call of `release`, the program's own free(), ours? Tried rather than compared: in a program
 * that is not position-independent the address of a library's function is that of the program's
 * jump to it. */
static bool arrives(tp_real_free release) {
    void *memory = malloc(1);

    if (!memory) { /* no segment can be made either, and that has its own line */
        return true;
    }
    pthread_mutex_lock(&probe_lock);
    atomic_store(&probe, memory);
    release(memory);
    bool arrived = !atomic_exchange(&probe, NULL);
    pthread_mutex_unlock(&probe_lock);
    return arrived;
}

bool tp_libc_hooks_reached(void) {
    tp_real_free release = NULL;
    void *symbol = dlsym(RTLD_DEFAULT, "free");

    memcpy(&release, &symbol, sizeof(release));
    return release && arrives(release);
}

void tp_libc_say_unreached(void) {
    Dl_info first = {0};

    (void)dladdr(dlsym(RTLD_DEFAULT, "free"), &first);
    tp_log(
        TP_LOG_ERROR,
        "free() is that of %s, which comes before Tidepool, and would be given segments that are "
        "not its own: name libtidepool.so first in LD_PRELOAD (an allocator linked into the "
        "program cannot be used with MC_STORE_CUMEM_SOCKET_DIR)",
        first.dli_fname ? first.dli_fname : "another library");
}

const char *tp_libc_taken_by(const char *name) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    Dl_info first = {0};
    Dl_info ours = {0};

    /* A program that is not position-independent shows its own jump to the function. */
    if (!symbol || tp_program_holds(symbol) || !dladdr(symbol, &first) || !dladdr(names, &ours) ||
        first.dli_fbase == ours.dli_fbase) {
        return NULL;
    }
    return first.dli_fname;
}
