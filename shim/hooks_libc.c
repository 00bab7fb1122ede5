/* SPDX-License-Identifier: Apache-2.0 */
/*
 * free() and munmap(). See hooks_libc.def for what they may do.
 *
 * The originals are the next ones in link order: libc's, or those of an allocator that is preloaded
 * after this library. It must not know what a segment is.
 */
#include "shim/hooks_libc.h"

#include "env/env.h"
#include "segment/segment.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HOOK(identifier, result, parameters, mangled, role, since, why)                            \
    result tp_hook_##identifier parameters __asm__(mangled)                                        \
        __attribute__((visibility("default")));                                                    \
    typedef result(*tp_real_##identifier) parameters;
#include "shim/hooks_libc.def"
#undef HOOK

/* glibc's own name of its free, for when there is no other. */
extern void tp_glibc_free(void *address) __asm__("__libc_free");

static _Atomic(void *) next_free, next_munmap;

/*
 * dlsym calls free itself when an earlier dlerror text is left over. The thread that looks for the
 * original is remembered here: pthread_t, 0 for none.
 */
static _Atomic pthread_t looking;

/* A small allocation whose free() is being waited for: see arrives. */
static _Atomic(void *) probe;

/*
 * The original, found on the first call, which comes before the program has threads. NULL for calls
 * from inside that look-up, or from another thread during it: nobody may wait here, since that
 * thread may hold the dynamic linker's lock.
 */
static void *find_next(_Atomic(void *) *next, const char *name) {
    pthread_t none = 0;
    void *symbol = atomic_load_explicit(next, memory_order_acquire);

    if (symbol || !atomic_compare_exchange_strong(&looking, &none, pthread_self())) {
        return symbol;
    }
    int error = errno;
    symbol = dlsym(RTLD_NEXT, name);
    atomic_store_explicit(next, symbol, memory_order_release);
    errno = error;
    atomic_store(&looking, 0);
    return symbol;
}

/* Whose memory it is cannot be told while the original is unknown: then it is kept, a few bytes
 * once in a process. */
static void free_unknown(void *address) {
    tp_real_free real = NULL;
    void *symbol = find_next(&next_free, "free");

    if (!symbol && atomic_load(&looking) == 0) {
        symbol = atomic_load(&next_free); /* another thread has just found it; or there is none */
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
    void *symbol = atomic_load_explicit(&next_free, memory_order_acquire);
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
    void *symbol = find_next(&next_munmap, "munmap");
    memcpy(&real, &symbol, sizeof(real));
    return real ? real(address, bytes) : (int)syscall(SYS_munmap, address, bytes);
}

/* Is a call of `release`, the program's own free(), ours? Tried rather than compared: in a program
 * that is not position-independent the address of a library's function is that of the program's
 * jump to it. */
static bool arrives(tp_real_free release) {
    void *memory = malloc(1);

    atomic_store(&probe, memory);
    release(memory);
    return memory && !atomic_exchange(&probe, NULL);
}

bool tp_libc_hooks_reached(void) {
    Dl_info first = {0};
    tp_real_free release = NULL;
    void *symbol = dlsym(RTLD_DEFAULT, "free");

    memcpy(&release, &symbol, sizeof(release));
    if (release && arrives(release)) {
        return true;
    }
    (void)dladdr(symbol, &first);
    tp_log(
        TP_LOG_ERROR,
        "free() is that of %s, which comes before Tidepool, and would be given segments that are "
        "not its own: name libtidepool.so first in LD_PRELOAD (an allocator linked into the "
        "program cannot be used with MC_STORE_CUMEM_SOCKET_DIR)",
        first.dli_fname ? first.dli_fname : "another library");
    return false;
}
