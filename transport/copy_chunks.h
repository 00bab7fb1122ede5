/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: a GPU's copies from and to a store's memory that is registered in chunks. */
#ifndef TIDEPOOL_COPY_CHUNKS_H
#define TIDEPOOL_COPY_CHUNKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transport/copy_device.h"
#include "transport/registrar.h"

/* Where the last copy of a submit lay; zero at first. */
struct tp_chunk_cursor {
    const char *first, *end; /* of the chunk */
    struct tp_chunk *chunk;  /* NULL: none, or it was copied as plain memory */
    int device;
    bool to_device, staged;
};

struct tp_chunk_copy {
    int device;
    bool to_device;
    char *there; /* in the store's memory */
    char *here;  /* the GPU's memory */
    uint64_t bytes;
    uint64_t run_bytes; /* from `there` on, of this submit: at least `bytes` */
};

/*
 * Append a copy to the job, split at the edges of chunks. Those that are registered are held from
 * now on until the job lets go of them; what lies in others is staged. Into one group. As
 * tp_device_add otherwise, and for all of it where nothing can be staged.
 */
int tp_chunks_add(struct tp_device_job *job, struct tp_chunks *chunks,
                  struct tp_chunk_cursor *cursor, const struct tp_chunk_copy *copy,
                  uint8_t *ret_group);

#endif
