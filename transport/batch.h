/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: what the peer thread asks of batch.c. */
#ifndef TIDEPOOL_BATCH_H
#define TIDEPOOL_BATCH_H

/* Let go of dead stores that only ended copies still refer to. Takes each shard's lock in turn. The peer thread. */
void tp_batch_reap(void);

#endif
