/* SPDX-License-Identifier: Apache-2.0 */
/* For tests of the registrar: a mapped segment as the import makes one, and copies of its memory.
 */
#ifndef FAKECUDA_TEST_CHUNKS_RIG_H
#define FAKECUDA_TEST_CHUNKS_RIG_H

#include "device_rig.h"
#include "segment/wire.h"
#include "transport/copy_chunks.h"

#include <sys/mman.h>

#define PIECES 4

struct mapped {
    struct tp_msg_segment message;
    atomic_uchar pieces[PIECES];
    char *address;
    struct tp_chunks *chunks;
};

static inline struct mapped *map_segment(uint64_t bytes, uint64_t piece_bytes, uint64_t page) {
    struct mapped *made = calloc(1, sizeof(*made));
    int fd = memfd_create("store", MFD_CLOEXEC);
    must(made && fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "memfd");
    made->address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(made->address != MAP_FAILED, "mmap");
    close(fd);
    made->message =
        (struct tp_msg_segment){.segment_id = 1,
                                .base = 1 << 20,
                                .bytes = bytes,
                                .page_bytes = page,
                                .piece_bytes = piece_bytes,
                                .piece_count = (uint32_t)((bytes - 1) / piece_bytes + 1),
                                .kind = TP_WIRE_MMAP,
                                .map_bytes = bytes};
    for (unsigned i = 0; i < PIECES; i++)
        atomic_store(&made->pieces[i], 1);
    made->chunks = tp_chunks_new(made->address, &made->message, made->pieces);
    return made;
}

/* Is CUDA's record of this byte that it is registered? */
static inline bool is_registered(const struct mapped *mapped, uint64_t offset) {
    unsigned flags = 0;
    return DRIVER(cuMemHostGetFlags)(&flags, mapped->address + offset) == CUDA_SUCCESS;
}

static inline bool becomes_registered(const struct mapped *mapped, uint64_t offset,
                                      uint64_t limit_ms) {
    for (uint64_t end = tp_now_ms() + limit_ms; tp_now_ms() < end; usleep(500)) {
        if (is_registered(mapped, offset))
            return true;
    }
    return false;
}

/* Plan and start a copy of a stretch of the segment. */
static inline void start_chunks(struct tp_device_job *job, const struct mapped *mapped,
                                bool to_device, uint64_t offset, CUdeviceptr gpu, uint64_t bytes) {
    struct tp_chunk_cursor cursor = {0};
    struct tp_chunk_copy copy = {.to_device = to_device,
                                 .there = mapped->address + offset,
                                 .here = (char *)(uintptr_t)gpu,
                                 .bytes = bytes,
                                 .run_bytes = bytes};
    uint8_t group = 0;
    must(tp_chunks_add(job, mapped->chunks, &cursor, &copy, &group) == 0, "add");
    tp_device_start(job);
}

static inline bool copy_chunks(const struct mapped *mapped, bool to_device, uint64_t offset,
                               CUdeviceptr gpu, uint64_t bytes) {
    struct tp_device_job job = {0};
    start_chunks(&job, mapped, to_device, offset, gpu, bytes);
    bool done = finish(&job) == TP_DEVICE_DONE;
    tp_device_reset(&job);
    tp_device_release(&job);
    return done;
}

/* As the peer thread does when a store is gone. True: the driver kept something. */
static inline bool unmap_segment(struct mapped *mapped) {
    bool stuck = false;
    uint64_t end = tp_now_ms() + 10000;
    while (!tp_chunks_drop(mapped->chunks, &stuck)) {
        must(tp_now_ms() < end, "a segment can be dropped");
        usleep(1000);
    }
    if (!stuck)
        munmap(mapped->address, mapped->message.map_bytes);
    free(mapped);
    return stuck;
}

#endif
