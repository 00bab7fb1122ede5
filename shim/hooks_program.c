/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks on aligned_alloc() and listen(): segments of programs with Mooncake linked into them.
 * Everybody else's calls, and all calls in processes that are not configured as a store, pass on.
 * It must not know how such a program is told from others, or what a segment is made of.
 */
#include "env/env.h"
#include "env/stats.h"
#include "segment/segment.h"
#include "shim/hooks_libc.h"
#include "shim/overlays.h"
#include "shim/program.h"
#include "shim/start.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CALLER() __builtin_return_address(0)

/* The alignment of global segments, which nothing else in these programs asks for (UPSTREAM.md). */
#define PROGRAM_ALIGNMENT ((size_t)16 << 20)

/* glibc's own name, for when there is no other. */
extern void *tp_glibc_memalign(size_t alignment, size_t bytes) __asm__("__libc_memalign");

/* The settings when this process may be a store of this kind, else NULL. */
static const struct tp_config *store_config(const void *caller) {
    const struct tp_config *config = tp_program_holds(caller) ? tp_shim_config() : NULL;
    return config && config->store.half != TP_HALF_OFF ? config : NULL;
}

/* ---- its name
 * ------------------------------------------------------------------------------------ */

/* It has a segment, and the name by which peers would open it could not be learned. */
static atomic_bool unnamed;

static void learn_name(void) {
    char name[256];
    const char *reason = NULL;
    bool known = tp_program_name(name, sizeof(name), &reason) == 0;

    bool before = atomic_exchange(&unnamed, !known);
    if (known) {
        tp_shim_set_name(name, true);
    } else {
        tp_stats_condition(TP_CONDITION_UNNAMED, true);
    }
    if (known && before) {
        tp_log(TP_LOG_WARN, "the name by which peers open this program is known now: %s", name);
    } else if (!known && !before) {
        tp_log(TP_LOG_WARN,
               "the name by which peers open this program could not be learned (%s): engines will "
               "use Mooncake's transport",
               reason);
    }
}

/* ---- listen
 * ------------------------------------------------------------------------------------ */

/* An allocator before us takes the segment's allocation, and nobody would say why nothing is
 * shared. */
static void check_reached(void) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const char *other = tp_libc_taken_by("aligned_alloc");

    if (other && tp_program_is_store()) {
        tp_log_once(&said, TP_LOG_WARN,
                    "aligned_alloc() is that of %s, which comes before Tidepool: the segments of "
                    "this program are left to Mooncake; name libtidepool.so first in LD_PRELOAD",
                    other);
    }
}

/* Such segments it maps by calls of its own, and neither asks of libc. */
static void say_huge_pages(const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;

    if (config->store.asks_hugepages && tp_program_is_store()) {
        tp_log_once(&said, TP_LOG_WARN,
                    "MC_STORE_USE_HUGEPAGE wins in this program, whose mappings of huge pages "
                    "cannot be taken: Mooncake's own transport serves its segments; unset it and "
                    "use TIDEPOOL_HUGEPAGES=1 or a directory on hugetlbfs");
    }
}

int tp_hook_listen(int fd, int backlog) {
    tp_real_listen real = NULL;
    void *symbol = tp_libc_next(TP_LIBC_listen);

    memcpy(&real, &symbol, sizeof(real));
    int rc = real ? real(fd, backlog) : (int)syscall(SYS_listen, fd, backlog);
    const struct tp_config *config = rc == 0 ? store_config(CALLER()) : NULL;
    if (config) {
        int error = errno;
        tp_program_listens(fd);
        check_reached();
        say_huge_pages(config);
        if (atomic_load(&unnamed)) { /* fds run out and come back */
            learn_name();
        }
        errno = error;
    }
    return rc;
}

/* ---- aligned_alloc
 * ----------------------------------------------------------------------------- */

static void *allocate_next(void *unused, size_t alignment, size_t bytes) {
    tp_real_aligned_alloc real = NULL;
    void *symbol = tp_libc_next(TP_LIBC_aligned_alloc);

    memcpy(&real, &symbol, sizeof(real));
    return real ? real(alignment, bytes) : tp_glibc_memalign(alignment, bytes);
}

static void release(void *unused, void *address) {
    tp_hook_free(address);
}

void tp_overlays_publish_program(void *address, const struct tp_config *config) {
    learn_name();
    /* Nobody sees it registered: told now, it is used when the master gives out its addresses,
     * after that. A failure has its own line: served by Mooncake's transport. */
    (void)tp_segment_publish(address, config);
}

/* What modules are kept from (hooks_modes.c) such a program does unseen. */
static void say_pinning(const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    bool cumem = config->store.kind == TP_SEGMENT_CUMEM;

    if (config->store.pins_segments && (cumem || config->platform_cpu)) {
        tp_log_once(&said, TP_LOG_WARN, "MC_STORE_PIN_MEMORY_MAX_BYTES: %s",
                    cumem ? "segments of MC_STORE_CUMEM_SOCKET_DIR are pinned as they are; this "
                            "program tries to all the same, in vain, and makes a CUDA context for "
                            "it: unset it"
                          : "this program pins its segments itself, and makes a CUDA context for "
                            "it: it wins over MC_TENT_PLATFORM=cpu; unset it to keep this store "
                            "off the GPU");
    }
}

static void *allocate_segment(size_t bytes, const struct tp_config *config) {
    static const struct tp_allocator next = {.allocate = allocate_next, .release = release};

    if (config->store.half == TP_HALF_INVALID) {
        return NULL; /* setup fails; the configuration's own line says why */
    }
    tp_shim_start_store(config);
    void *address = tp_overlays_allocate(&next, PROGRAM_ALIGNMENT, bytes, config);
    if (address) {
        tp_overlays_publish_program(address, config);
        say_pinning(config);
    }
    return address;
}

void *tp_hook_aligned_alloc(size_t alignment, size_t bytes) {
    const struct tp_config *config = alignment == PROGRAM_ALIGNMENT ? store_config(CALLER()) : NULL;

    if (!config || !tp_program_is_store()) {
        return allocate_next(NULL, alignment, bytes);
    }
    void *address = allocate_segment(bytes, config);
    if (!address) {
        errno = ENOMEM;
    }
    return address;
}
