/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: the server's thread has something to tell its clients. */
#ifndef TIDEPOOL_SERVER_H
#define TIDEPOOL_SERVER_H

#include <stdbool.h>

/* The table changed: look at it soon. Cheap, any thread; nothing happens when no server runs.
 * Neither logs nor allocates. */
void tp_server_wake(void);

/*
 * Wait until every client has taken from its socket what the table says now, and had a moment to
 * act on it; not longer than `limit_ms`. False: one has not. Any thread but the server's.
 */
bool tp_server_settle(unsigned limit_ms);

#endif
