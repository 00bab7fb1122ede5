/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs of staged copies: cut into pieces, and their end.
 *
 * It must not know: slots, GPUs, threads.
 */
#include "transport/stage.h"

#include <stdlib.h>
#include <string.h>

static uint32_t room_for(uint32_t room, uint64_t need) {
    if (need <= room)
        return room;
    uint64_t wanted = need > (uint64_t)room * 2 ? need : (uint64_t)room * 2;
    wanted = wanted < 32 ? 32 : wanted;
    return wanted > UINT32_MAX / 2 ? 0 : (uint32_t)wanted;
}

bool tp_stage_reserve(struct tp_stage_job *job, uint64_t bytes, uint32_t count) {
    /* Each copy may be cut at the start of a piece, and at its end. */
    uint64_t more = bytes / TP_PIECE_BYTES + 2 * (uint64_t)count;
    uint32_t op_room = room_for(job->op_room, job->op_count + more);
    uint32_t piece_room = room_for(job->piece_room, job->piece_count + more);
    if (op_room == 0 || piece_room == 0)
        return false;
    if (op_room != job->op_room) {
        struct tp_stage_op *ops = reallocarray(job->ops, op_room, sizeof(*ops));
        if (!ops)
            return false;
        job->ops = ops;
        job->op_room = op_room;
    }
    if (piece_room != job->piece_room) {
        struct tp_stage_piece *pieces = reallocarray(job->pieces, piece_room, sizeof(*pieces));
        if (!pieces)
            return false;
        job->pieces = pieces;
        job->piece_room = piece_room;
    }
    return true;
}

/* A piece with room for some of a copy of so many bytes; one that fits into a piece is not cut. */
static struct tp_stage_piece *open_piece(struct tp_stage_job *job, uint64_t bytes) {
    struct tp_stage_piece *last = job->piece_count ? &job->pieces[job->piece_count - 1] : NULL;
    if (last && last->end - last->first < TP_PIECE_OPS && last->bytes < TP_PIECE_BYTES) {
        uint32_t room = TP_PIECE_BYTES - last->bytes;
        if (bytes <= room || bytes > TP_PIECE_BYTES)
            return last;
    }
    last = &job->pieces[job->piece_count++];
    *last = (struct tp_stage_piece){.job = job, .first = job->op_count, .end = job->op_count};
    return last;
}

static bool continues(const struct tp_stage_op *op, const char *host, const char *device) {
    return op->host + op->bytes == host && op->device + op->bytes == device;
}

void tp_stage_add(struct tp_stage_job *job, char *host, char *device, uint64_t bytes,
                  uintptr_t gpu_start) {
    if (!job->ops || !job->pieces) /* nothing was reserved */
        return;
    bool apart = job->op_count == 0 || (uintptr_t)job->ops[job->op_count - 1].device < gpu_start;
    job->bytes += bytes;
    while (bytes > 0) {
        struct tp_stage_piece *piece = open_piece(job, bytes);
        uint32_t room = TP_PIECE_BYTES - piece->bytes;
        uint32_t part = bytes < room ? (uint32_t)bytes : room;
        struct tp_stage_op *last = piece->end > piece->first ? &job->ops[piece->end - 1] : NULL;
        if (last && !apart && continues(last, host, device)) {
            last->bytes += part;
        } else {
            job->ops[job->op_count++] = (struct tp_stage_op){host, device, part, apart};
            piece->end = job->op_count;
        }
        apart = false;
        piece->bytes += part;
        host += part;
        device += part;
        bytes -= part;
    }
}

void tp_stage_end_piece(struct tp_stage_piece *piece, bool good) {
    struct tp_stage_job *job = piece->job;
    if (!good)
        atomic_store_explicit(&job->failed, true, memory_order_relaxed);
    atomic_fetch_sub_explicit(&job->left, 1, memory_order_acq_rel);
}

enum tp_stage_state tp_stage_look(const struct tp_stage_job *job) {
    if (atomic_load_explicit(&job->left, memory_order_acquire) > 0)
        return TP_STAGE_RUNNING;
    return atomic_load_explicit(&job->failed, memory_order_relaxed) ? TP_STAGE_FAILED
                                                                    : TP_STAGE_DONE;
}

void tp_stage_reset(struct tp_stage_job *job) {
    job->op_count = 0;
    job->piece_count = 0;
    job->bytes = 0;
    job->submitted_ms = 0;
    job->stage = NULL;
    atomic_store_explicit(&job->failed, false, memory_order_relaxed);
}

void tp_stage_release(struct tp_stage_job *job) {
    free(job->ops);
    free(job->pieces);
    memset(job, 0, sizeof(*job));
}
