/* SPDX-License-Identifier: Apache-2.0 */
/* Peek, poke and count, for tests. */
#include "state.h"

#include <string.h>

static int exchange(CUdeviceptr address, void *host, size_t bytes, bool write) {
    struct fc_piece piece = {.bytes = host, .size = bytes};
    struct fc_span own = {.pieces = &piece, .count = 1}, span;
    struct fc_call call = {.name = "peek"};
    int error;

    if (!bytes)
        return 0;
    pthread_mutex_lock(&fc_lock);
    /* Without a context no access flags are looked at. */
    if (fc_span_take(&call, NULL, address, bytes, write, FC_SIDE_ANY, &span) != CUDA_SUCCESS) {
        pthread_mutex_unlock(&fc_lock);
        return -1;
    }
    error = write ? fc_move(&span, &own, bytes) : fc_move(&own, &span, bytes);
    fc_span_give(&span);
    pthread_mutex_unlock(&fc_lock);
    return error ? -1 : 0;
}

int fakecuda_peek(void *to, CUdeviceptr from, size_t bytes) {
    return exchange(from, to, bytes, false);
}

int fakecuda_poke(CUdeviceptr to, const void *from, size_t bytes) {
    return exchange(to, (void *)from, bytes, true);
}
