/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hook on posix_memalign(): the buffer of the SSD tier into which a store reads objects back
 * and from which engines pull them. It becomes shared memory when it is allocated, before Mooncake
 * fills it with zeros; a module's is published when it is registered, as segments are.
 *
 * It is known by its size (MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES) and alignment (UPSTREAM.md).
 * One that is not recognised stays Mooncake's.
 */
#include "env/env.h"
#include "segment/segment.h"
#include "shim/hooks_libc.h"
#include "shim/modules.h"
#include "shim/overlays.h"
#include "shim/program.h"
#include "shim/start.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CALLER() __builtin_return_address(0)

/* AlignedClientBufferAllocator's, made for direct I/O: sizes are rounded up to it too. */
#define RESTORE_ALIGNMENT ((size_t)4096)

/* BucketStorageBackend's buffer for writing, allocated after the other, as that is, and never
 * registered. */
#define SCRATCH_BYTES ((size_t)32 << 20)

/* glibc's own name, for when there is no other. */
extern void *tp_glibc_memalign(size_t alignment, size_t bytes) __asm__("__libc_memalign");

/* The buffer made last. */
static _Atomic(void *) latest;

/* Memory of Mooncake's own, given in place of a buffer that could not be made. */
static _Atomic(void *) refused;

bool tp_restore_refused(const void *address) {
    return address && atomic_load(&refused) == address;
}

static int next_posix_memalign(void **ret_address, size_t alignment, size_t bytes) {
    tp_real_posix_memalign real = NULL;
    void *symbol = tp_libc_next(TP_LIBC_posix_memalign);

    memcpy(&real, &symbol, sizeof(real));
    if (real) {
        return real(ret_address, alignment, bytes);
    }
    void *address = tp_glibc_memalign(alignment, bytes);
    if (!address) {
        return ENOMEM;
    }
    *ret_address = address;
    return 0;
}

static void *allocate_next(void *unused, size_t alignment, size_t bytes) {
    void *address = NULL;
    return next_posix_memalign(&address, alignment, bytes) == 0 ? address : NULL;
}

static void release(void *unused, void *address) {
    tp_hook_free(address);
}

static bool restore_size(size_t bytes, const struct tp_config *config) {
    uint64_t wanted = config->store.restore_bytes;

    return wanted > 0 &&
           bytes == (wanted + RESTORE_ALIGNMENT - 1) / RESTORE_ALIGNMENT * RESTORE_ALIGNMENT;
}

static bool right_size(size_t alignment, size_t bytes, const struct tp_config *config) {
    if (bytes == SCRATCH_BYTES && tp_segment_contains(atomic_load(&latest))) {
        return false;
    }
    return alignment == RESTORE_ALIGNMENT && restore_size(bytes, config);
}

bool tp_restore_missed(size_t bytes, const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const char *other = restore_size(bytes, config) ? tp_libc_taken_by("posix_memalign") : NULL;

    if (other) {
        tp_log_once(&said, TP_LOG_WARN,
                    "posix_memalign() is that of %s, which comes before Tidepool: the SSD tier's "
                    "buffer of %zu MiB falls back to Mooncake's transport; name libtidepool.so "
                    "first in LD_PRELOAD",
                    other, bytes >> 20);
    }
    return other != NULL;
}

/*
 * io_uring and direct I/O pin the pages they write to, and whether those of CUDA memory can be
 * pinned is the driver's affair: with MOONCAKE_OFFLOAD_USE_URING the buffer is a memfd beside them.
 */
static void *allocate_restore(size_t alignment, size_t bytes, const struct tp_config *config) {
    const struct tp_allocator next = {
        .allocate = allocate_next, .release = release, .host_memory = config->store.restore_uring};

    return config->store.half == TP_HALF_ON ? tp_overlays_allocate(&next, alignment, bytes, config)
                                            : NULL;
}

/* Whose call is it? *ret_program: of a program that registers unseen. */
static bool of_a_store(const void *caller, bool *ret_program) {
    const struct tp_module *module;

    *ret_program = tp_program_holds(caller) && tp_program_is_store();
    if (*ret_program) {
        return true;
    }
    module = tp_module_of(caller);
    return module && module->store && (uintptr_t)caller >= module->low &&
           (uintptr_t)caller < module->high;
}

int tp_hook_posix_memalign(void **ret_address, size_t alignment, size_t bytes) {
    const struct tp_config *config = alignment == RESTORE_ALIGNMENT ? tp_shim_config() : NULL;
    bool program;

    if (!config || config->store.half == TP_HALF_OFF || !right_size(alignment, bytes, config) ||
        !of_a_store(CALLER(), &program)) {
        return next_posix_memalign(ret_address, alignment, bytes);
    }
    if (program) {
        tp_shim_start_store(config);
    }
    void *address = allocate_restore(alignment, bytes, config);
    if (address) {
        atomic_store(&refused, NULL);
        atomic_store(&latest, address);
        *ret_address = address;
        if (program) {
            tp_overlays_publish_program(address, config);
        }
        return 0;
    }
    /* Mooncake does not look whether it got a buffer. It looks whether it could register it. */
    int result = next_posix_memalign(ret_address, alignment, bytes);
    atomic_store(&refused, result == 0 ? *ret_address : NULL);
    return result;
}
