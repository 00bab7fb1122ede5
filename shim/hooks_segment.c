/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks on segment memory, and the life of overlays (overlays.h). It must not know what an
 * overlay is made of.
 */
#include "env/env.h"
#include "env/stats.h"
#include "segment/segment.h"
#include "shim/endpoints.h"
#include "shim/hooks.h"
#include "shim/hooks_libc.h"
#include "shim/modules.h"
#include "shim/overlays.h"
#include "shim/start.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#define CALLER() __builtin_return_address(0)

/* Segments are allocated with 16 MiB alignment, the client's local buffer with 64 bytes
 * (UPSTREAM.md). */
#define SEGMENT_ALIGNMENT ((size_t)2 << 20)

#define OWNERS 64

/* How often memory is looked for that no earlier store had. */
#define PLACES 8

/* Memory of a segment that is not shared, with its line logged. */
static _Atomic(void *) unshared;

struct owner {
    const void *engine;
    void *address;
};
static struct owner owners[OWNERS];
static pthread_mutex_t owners_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- overlays
 * ----------------------------------------------------------------------------------------------------------
 */

/*
 * Mooncake registers memory with remote access that is no segment: its local hot cache
 * (MC_STORE_LOCAL_HOT_CACHE_SIZE), and files that it was told to mount, which others see too. What
 * was not made shareable when it was allocated stays as it is: its pages may be pinned or in use.
 */
static void log_left_to_mooncake(const void *caller, const void *address, size_t bytes,
                                 const struct tp_config *config) {
    static atomic_flag said_cache = ATOMIC_FLAG_INIT;
    static atomic_flag said_other = ATOMIC_FLAG_INIT;

    if (tp_registers_hot_cache(caller)) {
        tp_log_once(&said_cache, TP_LOG_INFO,
                    "%zu MiB at %p are Mooncake's local hot cache: it is left as it is, engines do "
                    "not read it",
                    bytes >> 20, address);
    } else if (!tp_restore_missed(bytes, config)) {
        tp_log_once(&said_other, TP_LOG_WARN,
                    "%zu MiB at %p were not allocated by Mooncake as a segment (a file that this "
                    "store was told to mount with mount_segment): falls back to Mooncake's "
                    "transport; allocate_and_mount_segment makes memory that engines can map",
                    bytes >> 20, address);
    }
}

static void say_addresses(const void *address, size_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;

    tp_log_once(&said, TP_LOG_WARN,
                "%zu MiB at %p are at addresses that a segment of an earlier store had, for whose "
                "objects engines may still look there: falls back to Mooncake's transport; name "
                "libtidepool.so first in LD_PRELOAD, so that it can choose addresses",
                bytes >> 20, address);
}

int tp_overlays_prepare(const void *caller, void *address, size_t bytes,
                        const struct tp_config *config) {
    if (config->store.half == TP_HALF_INVALID) {
        return -1; /* the configuration's own line was logged when it was read */
    }
    if (tp_restore_refused(address)) {
        return -1; /* with a line, when it was tried */
    }
    if (!tp_segment_contains(address) && atomic_load(&unshared) != address) {
        log_left_to_mooncake(caller, address, bytes, config);
    }
    return 0;
}

void tp_overlays_publish(const void *engine, void *address, const struct tp_config *config) {
    if (tp_segment_publish(address, config) != 0) {
        return; /* part of an overlay, or a failure that has its own line: served by Mooncake's
                   transport */
    }
    tp_endpoints_serve(engine);
    pthread_mutex_lock(&owners_lock);
    struct owner *free_slot = NULL;
    for (size_t i = 0; i < OWNERS; i++) {
        if (owners[i].address == address || (!owners[i].address && !free_slot)) {
            free_slot = &owners[i];
        }
        if (owners[i].address == address) {
            break;
        }
    }
    if (free_slot) {
        *free_slot = (struct owner){.engine = engine, .address = address};
    }
    pthread_mutex_unlock(&owners_lock);
}

void tp_overlays_move(const void *engine, const void *now) {
    pthread_mutex_lock(&owners_lock);
    for (size_t i = 0; i < OWNERS; i++) {
        if (owners[i].address && owners[i].engine == engine) {
            owners[i].engine = now;
        }
    }
    pthread_mutex_unlock(&owners_lock);
}

/* Take the next address of `engine` off the list (or only look, from *index on). NULL: no more. */
static void *next_owned(const void *engine, size_t *index, bool take) {
    void *address = NULL;

    pthread_mutex_lock(&owners_lock);
    for (; *index < OWNERS && !address; ++*index) {
        if (owners[*index].address && owners[*index].engine == engine) {
            address = owners[*index].address;
            if (take) {
                owners[*index] = (struct owner){0};
            }
        }
    }
    pthread_mutex_unlock(&owners_lock);
    return address;
}

void tp_overlays_withdraw(const void *engine) {
    size_t index = 0;

    for (void *address = next_owned(engine, &index, false); address;
         address = next_owned(engine, &index, false)) {
        (void)tp_segment_withdraw(address); /* may be withdrawn already */
    }
}

void tp_overlays_end(const void *engine) {
    size_t index = 0;

    for (void *address = next_owned(engine, &index, true); address;
         address = next_owned(engine, &index, true)) {
        (void)tp_segment_restore(address); /* may be gone through a free function already */
    }
}

/* ---- allocation
 * --------------------------------------------------------------------------------------------------------
 */

static bool is_text(const struct cxx_string *string, const char *text) {
    return string->bytes == strlen(text) && memcmp(string->data, text, string->bytes) == 0;
}

/* Protocols whose segments are plain host memory. Others (ascend, cxl, ub, nvlink) have allocators
 * of their own. */
static bool plain_memory(const struct cxx_string *protocol) {
    return is_text(protocol, "tcp") || is_text(protocol, "rdma") || is_text(protocol, "efa");
}

static void log_no_memory(size_t bytes) {
    tp_log(TP_LOG_ERROR,
           "there are no %zu MiB of addresses for a segment: make it smaller, or raise what the "
           "kernel promises (ulimit -v, vm.overcommit_memory=1)",
           bytes >> 20);
}

/* `next`'s memory, at which an overlay can be laid that is to be published: memory at addresses
 * that an earlier store had is held until other memory is found, a few times. */
static void *overlay_in_place(const struct tp_allocator *next, size_t alignment, size_t bytes,
                              const struct tp_config *config) {
    void *tried[PLACES];
    size_t count = 0;
    int result = -EADDRINUSE;

    while (result == -EADDRINUSE && count < PLACES) {
        void *address = next->allocate(next->arg, alignment, bytes);
        if (!address) {
            if (count == 0) {
                log_no_memory(bytes);
            }
            break;
        }
        tried[count++] = address;
        tp_segment_forget(address, bytes);
        result = tp_segment_settle(address, bytes)
                     ? tp_segment_overlay(address, bytes, false, config)
                     : -EBUSY;
    }
    void *kept = NULL;
    if (count && (result == 0 || result == -EADDRINUSE)) {
        kept = tried[--count];
    }
    while (count) {
        next->release(next->arg, tried[--count]);
    }
    if (kept && result == -EADDRINUSE) {
        atomic_store(&unshared, kept);
        say_addresses(kept, bytes);
    }
    return kept;
}

/* Whole pages, so that none of it is left to Mooncake's transport. */
static void *allocate_in_place(const struct tp_allocator *next, size_t alignment, size_t bytes,
                               const struct tp_config *config) {
    size_t page = tp_segment_page_bytes(config);

    if (bytes > SIZE_MAX - page) {
        return NULL;
    }
    bytes = (bytes + page - 1) / page * page;
    return overlay_in_place(next, alignment > page ? alignment : page, bytes, config);
}

void *tp_overlays_allocate(const struct tp_allocator *next, size_t alignment, size_t bytes,
                           const struct tp_config *config) {
    bool cumem = config->store.kind == TP_SEGMENT_CUMEM && !next->host_memory;
    void *address = NULL;
    int result = -EADDRNOTAVAIL;

    /* Before memory is made: a directory that cannot be used is found at once, with a line of its
     * own. */
    if (tp_server_start(true, config) != 0) {
        return NULL;
    }
    if (tp_libc_hooks_reached()) {
        result = tp_segment_allocate(bytes, alignment, cumem, config, &address);
    } else if (cumem) {
        tp_libc_say_unreached();
        return NULL;
    }
    if (result == -EADDRNOTAVAIL) {
        address = allocate_in_place(next, alignment, bytes, config);
    }
    return address;
}

struct allocation {
    enum tp_hook allocate, release;
    struct tp_module *module;
    size_t bytes, alignment;
    const struct cxx_string *protocol;
    uintptr_t extra;
};

static void *allocate_next(void *arg, size_t alignment, size_t bytes) {
    const struct allocation *call = arg;
    tp_real_allocate_plain real = (tp_real_allocate_plain)tp_next(call->allocate, call->module);

    return real ? real(bytes, call->protocol, alignment, call->extra) : NULL;
}

static void release_next(void *arg, void *address) {
    const struct allocation *call = arg;
    tp_real_free_plain release = (tp_real_free_plain)tp_next(call->release, call->module);

    if (release) {
        release(call->protocol, address, call->extra);
    }
}

static void *allocate(struct allocation *call) {
    const struct tp_config *config = tp_shim_config();
    bool segment = config && config->store.half != TP_HALF_OFF &&
                   call->alignment >= SEGMENT_ALIGNMENT && plain_memory(call->protocol);
    struct tp_allocator next = {.allocate = allocate_next, .release = release_next, .arg = call};

    if (!segment) {
        return allocate_next(call, call->alignment, call->bytes);
    }
    if (config->store.half == TP_HALF_INVALID || !tp_has(call->allocate, call->module)) {
        return NULL; /* setup fails; the configuration's own line says why */
    }
    return tp_overlays_allocate(&next, call->alignment, call->bytes, config);
}

void *tp_hook_allocate_plain(size_t bytes, const struct cxx_string *protocol, size_t alignment,
                             uintptr_t extra) {
    struct allocation call = {TP_HOOK_allocate_plain,
                              TP_HOOK_free_plain,
                              tp_module_of(CALLER()),
                              bytes,
                              alignment,
                              protocol,
                              extra};
    return allocate(&call);
}

void *tp_hook_allocate_flag(size_t bytes, const struct cxx_string *protocol, size_t alignment,
                            uintptr_t extra) {
    struct allocation call = {TP_HOOK_allocate_flag,
                              TP_HOOK_free_flag,
                              tp_module_of(CALLER()),
                              bytes,
                              alignment,
                              protocol,
                              extra};
    return allocate(&call);
}

void *tp_hook_allocate_dma(size_t bytes, const struct cxx_string *protocol, size_t alignment,
                           uintptr_t extra) {
    struct allocation call = {TP_HOOK_allocate_dma,
                              TP_HOOK_free_dma,
                              tp_module_of(CALLER()),
                              bytes,
                              alignment,
                              protocol,
                              extra};
    return allocate(&call);
}

/* ---- free
 * --------------------------------------------------------------------------------------------------------------
 */

static void free_memory(enum tp_hook hook, struct tp_module *module,
                        const struct cxx_string *protocol, void *address, uintptr_t extra) {
    tp_real_free_plain real = (tp_real_free_plain)tp_next(hook, module);

    if (tp_segment_free(address)) {
        return;
    }
    if (tp_shim_config() && tp_segment_contains(address)) {
        (void)tp_segment_restore(address);
    }
    if (real) {
        real(protocol, address, extra);
    }
}

void tp_hook_free_plain(const struct cxx_string *protocol, void *address, uintptr_t extra) {
    free_memory(TP_HOOK_free_plain, tp_module_of(CALLER()), protocol, address, extra);
}

void tp_hook_free_flag(const struct cxx_string *protocol, void *address, uintptr_t extra) {
    free_memory(TP_HOOK_free_flag, tp_module_of(CALLER()), protocol, address, extra);
}

void tp_hook_free_dma(const struct cxx_string *protocol, void *address, uintptr_t extra) {
    free_memory(TP_HOOK_free_dma, tp_module_of(CALLER()), protocol, address, extra);
}
