/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory as stores have it, made by the same code, for what must not be done to a store's own. It
 * must not know what is copied.
 */
#include "tests/bench/limits/limits.h"

#include "env/env.h"
#include "segment/cumem.h"
#include "segment/segment.h"
#include "transport/vmm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGN ((size_t)2 << 20)

static void set_parts(struct bench_scratch *scratch, char *base) {
    for (size_t i = 0; i < BENCH_PARTS; i++) {
        scratch->memory.parts[i] = base + i * BENCH_PART;
    }
    scratch->memory.part_bytes = BENCH_PART;
}

/* A store's configuration for memory of this kind, in pieces so small that all nodes have some. */
static struct tp_config *config_for(const struct tp_config *config, enum tp_segment_kind kind) {
    struct tp_config *own = malloc(sizeof(*own));

    if (own) {
        *own = *config;
        own->store.half = TP_HALF_ON;
        own->store.kind = kind;
        own->store.hugepages = false;
        own->store.hugepage_bytes = 0;
        own->store.piece_bytes = BENCH_PART;
        own->store.socket_dir[0] = 0; /* no segment: no record of its addresses */
    }
    return own;
}

static bool open_pieces(const struct tp_pieces *pieces, uint64_t devices) {
    for (uint32_t i = 0; i < pieces->count; i++) {
        if (tp_vmm_open((char *)pieces->base + i * pieces->piece_bytes, pieces->piece_bytes,
                        devices) != devices) {
            return false;
        }
    }
    return true;
}

int bench_scratch_cumem(const struct tp_config *config, uint64_t devices,
                        struct bench_scratch *ret_scratch) {
    struct bench_scratch scratch = {0};
    struct tp_config *own = config_for(config, TP_SEGMENT_CUMEM);
    int error = own ? tp_cumem_build(BENCH_AREA, ALIGN, 0, own, &scratch.pieces) : -ENOMEM;

    free(own);
    if (error) {
        return error;
    }
    /* BENCH_AREA in pieces of a part each: none is shorter than the others */
    if (!open_pieces(&scratch.pieces, devices)) {
        tp_cumem_remove(&scratch.pieces);
        return -EACCES;
    }
    set_parts(&scratch, scratch.pieces.base);
    (void)snprintf(scratch.kind, sizeof(scratch.kind), "%s", scratch.pieces.detail);
    *ret_scratch = scratch;
    return 0;
}

int bench_scratch_memfd(const struct tp_config *config, struct bench_scratch *ret_scratch) {
    struct bench_scratch scratch = {0};
    struct tp_config *own = config_for(config, TP_SEGMENT_MEMFD);
    char *mapped = mmap(NULL, BENCH_AREA + ALIGN, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int error = -ENOMEM;

    if (own && mapped != MAP_FAILED) {
        char *base = mapped + (ALIGN - (uintptr_t)mapped % ALIGN) % ALIGN;
        set_parts(&scratch, base);
        scratch.mapped = mapped;
        (void)snprintf(scratch.kind, sizeof(scratch.kind), "memfd");
        error = tp_segment_overlay(base, BENCH_AREA, false, own);
    }
    free(own);
    if (!error) {
        *ret_scratch = scratch;
    } else if (mapped != MAP_FAILED) {
        (void)munmap(mapped, BENCH_AREA + ALIGN);
    }
    return error;
}

int bench_scratch_pinned(struct tp_gpu *gpu, struct bench_scratch *ret_scratch) {
    struct bench_scratch scratch = {.pinned_by = gpu};
    char *base = tp_gpu_pinned_alloc(gpu, BENCH_AREA);

    if (!base) {
        return -ENOMEM;
    }
    set_parts(&scratch, base);
    (void)snprintf(scratch.kind, sizeof(scratch.kind), "pinned memory");
    *ret_scratch = scratch;
    return 0;
}

void bench_scratch_free(struct bench_scratch *scratch) {
    if (scratch->mapped) {
        (void)tp_segment_restore(scratch->memory.parts[0]);
        (void)munmap(scratch->mapped, BENCH_AREA + ALIGN);
    } else if (scratch->pinned_by) {
        tp_gpu_pinned_free(scratch->pinned_by, scratch->memory.parts[0]);
    } else if (scratch->kind[0]) {
        tp_cumem_remove(&scratch->pieces);
    }
    *scratch = (struct bench_scratch){0};
}
