/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies split at the edges of chunks.
 *
 * A request may lie in several chunks, of which some are registered and some not: it is then one of
 * plain memory, that is, the copy engines', but split all the same, since the driver refuses a copy
 * that crosses the end of a registration.
 *
 * It must not know: peers, batches, when a chunk is registered.
 */
#include "transport/copy_chunks.h"

#include <errno.h>

#include "transport/gpu.h"

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Hold all chunks of the copy. Their number; *ret_registered: all of them are. */
static uint32_t hold_all(struct tp_chunks *chunks, struct tp_gpu *gpu,
                         const struct tp_chunk_copy *copy, bool *ret_registered) {
    uint32_t count = 0;
    uint64_t here = 0;
    bool registered = true;
    for (uint64_t done = 0; done < copy->bytes; done += here, count++) {
        struct tp_chunk *chunk = tp_chunk_at(chunks, copy->there + done, &here);
        registered = tp_chunk_hold(chunk, gpu, least(here, copy->run_bytes - done)) && registered;
    }
    *ret_registered = registered;
    return count;
}

static void release_all(struct tp_chunks *chunks, const struct tp_chunk_copy *copy) {
    uint64_t here = 0;
    for (uint64_t done = 0; done < copy->bytes; done += here)
        tp_chunk_release(tp_chunk_at(chunks, copy->there + done, &here));
}

/* The part of the copy from `done` on. */
static int add_part(struct tp_device_job *job, const struct tp_chunk_copy *copy, bool mapped,
                    struct tp_chunk *chunk, uint64_t done, uint64_t bytes, uint8_t *ret_group) {
    char *there = copy->there + done;
    char *here = copy->here + done;
    return tp_device_add_chunk(job, copy->device, copy->to_device, mapped, chunk,
                               copy->to_device ? here : there, copy->to_device ? there : here,
                               bytes, ret_group);
}

/* There is room for all. */
static void add_all(struct tp_device_job *job, struct tp_chunks *chunks,
                    const struct tp_chunk_copy *copy, bool mapped, struct tp_chunk_cursor *cursor,
                    uint8_t *ret_group) {
    uint64_t part = 0;
    for (uint64_t done = 0; done < copy->bytes; done += part) {
        uint64_t here;
        struct tp_chunk *chunk = tp_chunk_at(chunks, copy->there + done, &here);
        part = least(here, copy->bytes - done);
        (void)add_part(job, copy, mapped, chunk, done, part, ret_group);
        *cursor = (struct tp_chunk_cursor){.first = copy->there + done,
                                           .end = copy->there + done + here,
                                           .chunk = mapped ? chunk : NULL};
    }
}

/* Most copies of a submit go where the one before went. */
static bool goes_on(struct tp_device_job *job, const struct tp_chunk_cursor *cursor,
                    const struct tp_chunk_copy *copy) {
    return cursor->chunk && copy->there >= cursor->first && copy->there < cursor->end &&
           copy->bytes <= (uint64_t)(cursor->end - copy->there) &&
           tp_device_holds(job, copy->device, copy->to_device, true, cursor->chunk);
}

int tp_chunks_add(struct tp_device_job *job, struct tp_chunks *chunks,
                  struct tp_chunk_cursor *cursor, const struct tp_chunk_copy *copy,
                  uint8_t *ret_group) {
    bool registered = false;
    if (goes_on(job, cursor, copy)) {
        int error = add_part(job, copy, true, cursor->chunk, 0, copy->bytes, ret_group);
        job->hits += error == 0;
        return error;
    }
    struct tp_gpu *gpu = tp_gpu_get(copy->device);
    if (!gpu)
        return -ENODEV;
    tp_chunks_expect(chunks, gpu, copy->there, copy->run_bytes);
    uint32_t count = hold_all(chunks, gpu, copy, &registered);
    bool mapped = registered && tp_registrar_kernel_may(gpu);
    int error = tp_device_reserve(job, copy->device, copy->to_device, mapped, count);
    if (error == 0) {
        add_all(job, chunks, copy, mapped, cursor, ret_group);
        *(registered ? &job->hits : &job->misses) += 1;
    }
    release_all(chunks, copy);
    return error;
}
