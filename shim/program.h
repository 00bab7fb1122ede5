/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main program, where it has Mooncake's store linked into it and exports nothing: what can be
 * known of it from outside. mooncake_client is such a program.
 *
 * It must not know: segments, engines, what is done with the answers.
 */
#ifndef TIDEPOOL_PROGRAM_H
#define TIDEPOOL_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>

/* Is this address inside the main program, not in one of its libraries? Neither allocates nor
 * locks. Any thread. */
bool tp_program_holds(const void *address);

/*
 * Does the main program hold Mooncake's store? Told by the name of a class that stripping leaves;
 * looked for once, some milliseconds. Any thread.
 */
bool tp_program_is_store(void);

/* The main program listens on this socket now: the first one that is still open when a segment is
 * made is that of the handshake. Any thread. */
void tp_program_listens(int fd);

/*
 * The name by which peers open this program, as it is at the moment when a segment is made, into
 * ret_name. 0; -ENOENT: it cannot be told, and ret_reason says in a few words what is missing
 * (static text). May allocate.
 */
int tp_program_name(char *ret_name, size_t name_bytes, const char **ret_reason);

#endif
