/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the registrar: what is registered, in order of use. All of it under the registrar's lock.
 */
#ifndef TIDEPOOL_CHUNK_ORDER_H
#define TIDEPOOL_CHUNK_ORDER_H

#include "transport/chunk.h"

/* Room for `more` chunks beside those that are there. False: no memory. */
bool tp_order_reserve(uint32_t more);

/* A chunk that is registered now: the one used last. There is room. */
void tp_order_add(struct tp_chunk *chunk);
void tp_order_remove(struct tp_chunk *chunk);

/* REGISTERED to UNREGISTERING, if nothing holds it. */
bool tp_order_begin_end(struct tp_chunk *chunk);

/* The chunk that was not used for longest, if that is `idle_ticks` or more, and that may go: taken
 * out and UNREGISTERING. NULL: all have been used since, or are in use. */
struct tp_chunk *tp_order_take_least(uint64_t idle_ticks);

#endif
