/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside segment/: what the server may ask of the table of segments. None of these logs, blocks or
 * allocates; each takes the table's lock for a moment.
 */
#ifndef TIDEPOOL_TABLE_H
#define TIDEPOOL_TABLE_H

#include <stdint.h>

#include "segment/wire.h"

/* The ids of the published segments by slot; 0: nothing published there. A slot's id changes when
 * it is reused. */
void tp_table_published(uint64_t ret_ids[static TP_WIRE_MAX_SEGMENTS]);

/* The description of a published segment. 0, or -ENOENT when it is not published (any more). */
int tp_table_describe(uint64_t segment_id, struct tp_msg_segment *ret_segment);

/*
 * Answer a WANT: send PIECES with the fds, under the lock, so that no fd can be closed and reused
 * in between. 0, -ENOENT when the segment was published once and is not now, -EPROTO for one that
 * never was or a range outside it, or what tp_wire_send says.
 */
int tp_table_send_pieces(int socket_fd, const struct tp_msg_pieces *want);

#endif
