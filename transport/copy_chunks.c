/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies split at the edges of chunks.
 *
 * A request may lie in several chunks, of which some are registered, for the GPU's own copies, and
 * some not, which are staged. Where nothing can be staged the request is one of plain memory, that
 * is, the copy engines', but split all the same, since the driver refuses a copy that crosses the
 * end of a registration.
 *
 * It must not know: peers, batches, when a chunk is registered, how copies are staged.
 */
#include "transport/copy_chunks.h"

#include <errno.h>

#include "transport/gpu.h"
#include "transport/staging.h"

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* What becomes of the parts of a copy. */
struct ways {
    uint32_t count;  /* chunks that it lies in */
    bool registered; /* all of them are */
    bool staged;     /* what lies in those that are not can be staged */
    bool mapped;     /* the group: the GPU reaches what is registered by itself */
};

/* Hold all chunks of the copy. */
static void hold_all(struct tp_chunks *chunks, struct tp_gpu *gpu, const struct tp_chunk_copy *copy,
                     struct ways *ret_ways) {
    struct ways ways = {.registered = true};
    uint64_t here = 0;
    for (uint64_t done = 0; done < copy->bytes; done += here, ways.count++) {
        struct tp_chunk *chunk = tp_chunk_at(chunks, copy->there + done, &here);
        if (!tp_chunk_hold(chunk, gpu, least(here, copy->run_bytes - done)))
            ways.registered = false;
    }
    ways.staged = !ways.registered && tp_stage_ready(gpu);
    ways.mapped = (ways.registered || ways.staged) && tp_registrar_kernel_may(gpu);
    *ret_ways = ways;
}

static void release_all(struct tp_chunks *chunks, const struct tp_chunk_copy *copy) {
    uint64_t here = 0;
    for (uint64_t done = 0; done < copy->bytes; done += here)
        tp_chunk_release(tp_chunk_at(chunks, copy->there + done, &here));
}

static int reserve(struct tp_device_job *job, const struct tp_chunk_copy *copy,
                   const struct ways *ways) {
    int error = tp_device_reserve(job, copy->device, copy->to_device, ways->mapped, ways->count);
    if (error == 0 && ways->staged)
        error = tp_device_reserve_staged(job, copy->device, copy->to_device, ways->mapped,
                                         copy->bytes, ways->count);
    return error;
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

static int add_staged(struct tp_device_job *job, const struct tp_chunk_copy *copy, bool mapped,
                      uint64_t done, uint64_t bytes, uint8_t *ret_group) {
    return tp_device_add_staged(job, copy->device, copy->to_device, mapped, copy->there + done,
                                copy->here + done, bytes, ret_group);
}

/* There is room for all, and it fails only when the GPU has been lost: then the whole group fails
 * at its start. A chunk that is registered only now is as good. */
static int add_all(struct tp_device_job *job, struct tp_chunks *chunks,
                   const struct tp_chunk_copy *copy, const struct ways *ways,
                   struct tp_chunk_cursor *cursor, uint8_t *ret_group) {
    uint64_t part = 0;
    int error = 0;
    for (uint64_t done = 0; done < copy->bytes && error == 0; done += part) {
        uint64_t here;
        struct tp_chunk *chunk = tp_chunk_at(chunks, copy->there + done, &here);
        bool staged = ways->staged && !tp_chunk_registered(chunk);
        part = least(here, copy->bytes - done);
        error = staged ? add_staged(job, copy, ways->mapped, done, part, ret_group)
                       : add_part(job, copy, ways->mapped, chunk, done, part, ret_group);
        *cursor = (struct tp_chunk_cursor){.first = copy->there + done,
                                           .end = copy->there + done + here,
                                           .chunk = ways->mapped ? chunk : NULL,
                                           .device = copy->device,
                                           .to_device = copy->to_device,
                                           .staged = staged};
    }
    return error;
}

/* Most copies of a submit go where the one before went. */
static bool goes_on(struct tp_device_job *job, const struct tp_chunk_cursor *cursor,
                    const struct tp_chunk_copy *copy) {
    return cursor->chunk && copy->there >= cursor->first && copy->there < cursor->end &&
           copy->bytes <= (uint64_t)(cursor->end - copy->there) && copy->device == cursor->device &&
           copy->to_device == cursor->to_device &&
           (cursor->staged ||
            tp_device_holds(job, copy->device, copy->to_device, true, cursor->chunk));
}

static int add_there(struct tp_device_job *job, const struct tp_chunk_cursor *cursor,
                     const struct tp_chunk_copy *copy, uint8_t *ret_group) {
    int error = cursor->staged
                    ? add_staged(job, copy, true, 0, copy->bytes, ret_group)
                    : add_part(job, copy, true, cursor->chunk, 0, copy->bytes, ret_group);
    if (error == 0)
        *(cursor->staged ? &job->misses : &job->hits) += 1;
    return error;
}

int tp_chunks_add(struct tp_device_job *job, struct tp_chunks *chunks,
                  struct tp_chunk_cursor *cursor, const struct tp_chunk_copy *copy,
                  uint8_t *ret_group) {
    struct ways ways;
    if (goes_on(job, cursor, copy))
        return add_there(job, cursor, copy, ret_group);
    struct tp_gpu *gpu = tp_gpu_get(copy->device);
    if (!gpu)
        return -ENODEV;
    tp_chunks_expect(chunks, gpu, copy->there, copy->run_bytes);
    hold_all(chunks, gpu, copy, &ways);
    int error = reserve(job, copy, &ways);
    if (error == 0)
        error = add_all(job, chunks, copy, &ways, cursor, ret_group);
    if (error == 0)
        *(ways.registered ? &job->hits : &job->misses) += 1;
    release_all(chunks, copy);
    return error;
}
