/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: has this whole process stood still (SIGSTOP, a freezer cgroup, a paused
 * container)? Meanwhile Mooncake's master may have given the place of a write to another object.
 */
#ifndef TIDEPOOL_STALL_H
#define TIDEPOOL_STALL_H

#include <stdbool.h>
#include <stdint.h>

/* Nobody having been seen running for longer than this means that the process stood still. */
#define TP_STALL_MS 5000

/*
 * This thread runs: to be called each second by some thread, and before each piece of work. Returns
 * the time, which later tells with tp_stall_late what was submitted now; never 0. One read of a
 * clock, no system call (vdso).
 */
uint64_t tp_stall_look(void);

/*
 * Has the process stood still since this time? Then what was submitted is not to be written any
 * more. 0: what may be late, such as reads; never. Looks as above. The first time one line says so.
 */
bool tp_stall_late(uint64_t submitted_ms);

#endif
