/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: a forked child gives back what Mooncake's own modes have mapped, whatever another thread
 * of its parent was at. Built with shim/hooks_modes.c and pthread_mutex_unlock wrapped. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/segment.h"
#include "shim/hooks.h"
#include "shim/modules.h"
#include "shim/overlays.h"
#include "shim/start.h"

#define BYTES ((size_t)2 << 20)

static struct tp_config config = {.store.half = TP_HALF_ON, .store.kind = TP_SEGMENT_MEMFD};

/* ---- what hooks_modes.c stands on: memory as it is, with nothing laid over it ---- */

const struct tp_config *tp_shim_config(void) {
    return tp_inert() ? NULL : &config;
}

struct tp_module *tp_module_of(const void *return_address) {
    (void)return_address;
    return NULL;
}

void *tp_next(enum tp_hook hook, struct tp_module *module) {
    (void)hook;
    (void)module;
    return NULL;
}

void *tp_overlays_allocate(const struct tp_allocator *next, size_t alignment, size_t bytes,
                           const struct tp_config *settings) {
    (void)settings;
    return next->allocate(next->arg, alignment, bytes);
}

/* ---- a thread that stands still while it holds a lock ---- */

int __real_pthread_mutex_unlock(pthread_mutex_t *lock);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock);

static _Thread_local bool stands_still;
static _Atomic bool standing, go_on;

int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock) {
    while (stands_still && !atomic_load(&go_on)) {
        atomic_store(&standing, true);
        usleep(1000);
    }
    return __real_pthread_mutex_unlock(lock);
}

static void *allocate_slowly(void *unused) {
    (void)unused;
    stands_still = true;
    return tp_hook_allocate_mmap(BYTES, BYTES);
}

static bool mapped(void *address) {
    unsigned char resident;
    return mincore(address, 4096, &resident) == 0 || errno != ENOMEM;
}

int main(void) {
    pthread_t thread;
    void *later = NULL;
    int status = -1;
    tp_fork_guard();
    void *memory = tp_hook_allocate_mmap(BYTES, BYTES);
    if (memory == NULL || pthread_create(&thread, NULL, allocate_slowly, NULL) != 0)
        return 1;
    while (!atomic_load(&standing))
        usleep(1000);
    pid_t child = fork();
    if (child == 0) {
        alarm(25);
        tp_hook_free_mmap(memory, BYTES);
        _exit(mapped(memory) ? 1 : 0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        return 2;
    atomic_store(&go_on, true);
    pthread_join(thread, &later);
    tp_hook_free_mmap(later, BYTES);
    tp_hook_free_mmap(memory, BYTES);
    return mapped(memory) || mapped(later) ? 3 : 0;
}
