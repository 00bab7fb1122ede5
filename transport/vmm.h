/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: a store's CUDA VMM memory in this process. No lock may be held. tp_vmm_map and
 * tp_vmm_open: any thread; the others the peer thread only.
 */
#ifndef TIDEPOOL_VMM_H
#define TIDEPOOL_VMM_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Can such memory be mapped now? Only when CUDA has been initialised in this process; with
 * `initialise` that is done here, if need be. A driver that is missing or fails costs one line,
 * once.
 */
bool tp_vmm_usable(bool initialise);

/* A range of addresses for `bytes`. NULL: none, with one line logged. */
char *tp_vmm_reserve(uint64_t bytes);
void tp_vmm_unreserve(char *address, uint64_t bytes);

/*
 * Import the allocation behind `fd` (which stays the caller's) and map it, open to the CPU and to
 * the GPUs of `devices` (a bit each) in one call. 0, or -EREMOTEIO with one line logged and nothing
 * left. *ret_opened: those of `devices` that the driver did not refuse.
 */
int tp_vmm_map(char *address, uint64_t bytes, int fd, uint64_t devices, uint64_t *ret_opened);

/* Open a mapped piece to these GPUs, in one call if it can be. Returns those that may reach it now;
 * one line was logged for others. */
uint64_t tp_vmm_open(char *address, uint64_t bytes, uint64_t devices);

/* Unmap a piece: its memory goes when the store and all others have let go of it. False: refused,
 * with one line logged. */
bool tp_vmm_unmap(char *address, uint64_t bytes);

#endif
