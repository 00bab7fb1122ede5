/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside staging: what jobs (stage_job.c), slots (stage_slot.c), the pipeline (staging.c) and the
 * threads (stage_threads.c) share.
 */
#ifndef TIDEPOOL_STAGE_H
#define TIDEPOOL_STAGE_H

#include "transport/staging.h"

/*
 * A slot is the least that a driver call moves while there is enough: at 50 GB/s one is due each 20
 * us, and a call takes 3 to 5. Pieces are smaller, so that several threads share what is little,
 * and several jobs a slot.
 */
#define TP_SLOT_BYTES ((uint32_t)1 << 20)
#define TP_PIECE_BYTES ((uint32_t)256 << 10)
#define TP_PIECE_OPS 256u

/* One contiguous copy, within a piece. */
struct tp_stage_op {
    char *host, *device;
    uint32_t bytes;
    bool apart; /* nothing before it may become one copy with it on the GPU's side */
};

struct tp_stage_piece {
    struct tp_stage_job *job;
    struct tp_stage_piece *next; /* in the queue, then in the slot */
    uint32_t first, end;         /* ops of the job */
    uint32_t bytes;
};

/* A piece has ended; the last thing that is done with it, and with its job. */
void tp_stage_end_piece(struct tp_stage_piece *piece, bool good);

/* ---- the pipeline, for the threads ---- */

/* Do something for each GPU and direction for which there is something to do, counted from `first`
 * on. */
bool tp_stage_step_any(uint32_t first);

/* Is the GPU busy with slots, so that somebody has to look when they end? Two loads a direction. */
bool tp_stage_in_flight(void);

/* For how many threads more there is work, about. */
uint32_t tp_stage_work_left(void);

/* ---- the threads, for the pipeline ---- */

/* How many there are; at least 1, also when none could be started. */
uint32_t tp_stage_threads(void);

/* `bytes` were queued: wake as many sleepers as they are worth. Starts the threads at first. */
void tp_stage_news(uint64_t bytes);

/* Somebody else leaves work behind: one thread looks if all are asleep. Starts none. */
void tp_stage_rouse(void);

#endif
