/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: the lease page (wire.h), by which engines see at once what is withdrawn, and
 * that this process has died. */
#ifndef TIDEPOOL_LEASE_H
#define TIDEPOOL_LEASE_H

#include <stdint.h>

/* From now on the page says that this slot of the table publishes this segment; 0: none. Any
 * thread. Neither logs nor allocates. */
void tp_lease_set(unsigned slot, uint64_t segment_id);

/*
 * The fd of the page, which stays the library's. Makes the page at the first call, and says in it
 * that this process lives. `directory` is where a file may be made if there are no memfds. For the
 * server's thread. 0, or -errno with one line logged: the next call tries again.
 */
int tp_lease_open(const char *directory, int *ret_fd);

/* The server's thread ends: the page says that nobody serves any more. For that thread. */
void tp_lease_end(void);

#endif
