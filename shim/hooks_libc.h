/* SPDX-License-Identifier: Apache-2.0 */
/* free and munmap, for memory of ours that the host takes for its allocator's. */
#ifndef TIDEPOOL_HOOKS_LIBC_H
#define TIDEPOOL_HOOKS_LIBC_H

#include <stdbool.h>

/*
 * Does the host's call of free() come here? False when an allocator is preloaded before this
 * library or linked into the program: one line was logged that says which. May allocate.
 */
bool tp_libc_hooks_reached(void);

#endif
