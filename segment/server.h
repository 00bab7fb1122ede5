/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: the server's thread has something to tell its clients. */
#ifndef TIDEPOOL_SERVER_H
#define TIDEPOOL_SERVER_H

/* The table changed: look at it soon. Cheap, any thread; nothing happens when no server runs.
 * Neither logs nor allocates. */
void tp_server_wake(void);

#endif
