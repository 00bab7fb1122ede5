/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside staging: the pinned slots of a GPU, and how copies lie in them.
 *
 * A GPU's slots serve both directions, which are rarely busy at once. They are taken up again last
 * in, first out, so that few are in use when few will do, and those stay in the CPU's cache.
 *
 * It must not know: what waits and in which order slots are sent (staging.c), threads.
 */
#ifndef TIDEPOOL_STAGE_SLOT_H
#define TIDEPOOL_STAGE_SLOT_H

#include "env/cuda.h"
#include "transport/copy_host.h"
#include "transport/stage.h"

/* What one driver call can be given. */
#define TP_SEND_OPS UINT32_C(2048)

/* Owned by whoever took it. Several are sent in one driver call, with the list and the event of the
 * first. */
struct tp_slot {
    struct tp_slot *next;   /* in a list: unused, filled, sent first of a call, or landed */
    struct tp_slot *also;   /* sent in the same call */
    char *data;             /* pinned */
    struct tp_copy_op *ops; /* pinned; TP_SEND_OPS, for tp_slot_list */
    uint64_t *scratch;      /* for tp_gpu_send_staged */
    tp_cu_event event;
    struct tp_stage_piece *pieces; /* a list, in the order in which they lie there */
    uint32_t bytes, op_count;      /* of all pieces */
};

/* One more GPU is going to be used: keep room for its slots within register_max_bytes. Once. */
void tp_slots_prepare(void);

/* An unused slot, or a new one: that calls the driver and takes a millisecond. NULL: all are in
 * use, or there is no pinned memory to be had (asked again after a while). Any thread, no lock
 * held. */
struct tp_slot *tp_slot_take(struct tp_gpu *gpu);
void tp_slot_give(struct tp_gpu *gpu, struct tp_slot *slot);

/* Has the GPU any slot? / How many would tp_slot_take have now? Hints, a few loads each. */
bool tp_slots_made(const struct tp_gpu *gpu);
uint32_t tp_slots_free(const struct tp_gpu *gpu);

/* Does the piece go into the slot beside what is there? `most`: bytes that it shall take. */
bool tp_slot_fits(const struct tp_slot *slot, const struct tp_stage_piece *piece, uint64_t most);

/* Copy between the slot and the host's memory: all its pieces. */
void tp_slot_copy(const struct tp_slot *slot, bool to_device);

/* A copy for the kernel is at most a warp's share. */
#define TP_SLOT_CUT_BYTES ((size_t)16 << 10)
#define TP_SLOT_CUTS (TP_SLOT_BYTES / TP_SLOT_CUT_BYTES)

/* How long the slot's list may be. / Append the copies between the slot and the GPU's memory to
 * `ops`, which has `count` of other slots; none larger than `most`, which is at least
 * TP_SLOT_CUT_BYTES. Returns their number. */
uint32_t tp_slot_list_max(const struct tp_slot *slot);
uint32_t tp_slot_list(const struct tp_slot *slot, bool to_device, size_t most,
                      struct tp_copy_op *ops, uint32_t count);

#endif
