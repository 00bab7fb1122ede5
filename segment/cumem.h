/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: segments of CUDA VMM host memory, which have addresses of their own. */
#ifndef TIDEPOOL_CUMEM_H
#define TIDEPOOL_CUMEM_H

#include <stdint.h>

#include "env/cuda_abi.h"
#include "segment/pieces.h"

struct tp_config;
struct tp_cuda;

/* Make one page of such memory on a NUMA node and give it back. cuInit has been called; no context
 * is made. */
tp_cu_result tp_cumem_probe_node(const struct tp_cuda *cuda, int node, uint64_t *ret_page_bytes);

/*
 * Make a segment of at least `bytes` at a multiple of `alignment` (a power of two): pieces on the
 * nodes in turn, mapped in one range, open to the CPU, an fd of each. No context is made. Loads and
 * initialises the driver. `held_fds`: fds that other segments hold. 0 or -errno with one line
 * logged.
 */
int tp_cumem_build(uint64_t bytes, uint64_t alignment, uint64_t held_fds,
                   const struct tp_config *config, struct tp_pieces *ret_pieces);

/*
 * Let these GPUs (a bit each) reach all of it as well: copies of theirs from and to these addresses
 * fail without. Returns those that do now; one line was logged for others. No lock is held, and it
 * stays for so long.
 */
uint64_t tp_cumem_open(const struct tp_pieces *pieces, uint64_t devices);

/* Unmap and give back all of it. Neither logs nor allocates. */
void tp_cumem_remove(struct tp_pieces *pieces);

#endif
