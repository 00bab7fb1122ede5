/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: is the memory behind an fd there to stay? */
#ifndef TIDEPOOL_STEADY_H
#define TIDEPOOL_STEADY_H

#include <stdbool.h>
#include <stdint.h>

/*
 * May `fd` be mapped as a piece of `bytes` bytes? It must be of that size, and of a kind that
 * cannot shrink, or that only those could shrink who may write to it anyway. 0; -EPROTO when it may
 * not; or -errno when that could not be found out. Any thread; the fd stays the caller's.
 */
int tp_steady_check(int fd, uint64_t bytes);

#endif
