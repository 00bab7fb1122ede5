/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: whose memory a buffer is, answered from the registered ranges where possible.
 */
#ifndef TIDEPOOL_RANGES_H
#define TIDEPOOL_RANGES_H

#include <stdint.h>

#include "transport/cuda.h"

/* The range that answered last: a caller's own, zero at first; neighbours of one batch usually lie
 * in the same. */
struct tp_range_hint {
    uintptr_t first, end;
    enum tp_memory memory;
    int device; /* of DEVICE memory: the GPU's ordinal */
};

/* Whose memory all of [address, address + bytes) is, and of which GPU (written for DEVICE).
 * Lock-free; a driver call only where no registered range covers it. */
enum tp_memory tp_range_memory(const void *address, uint64_t bytes, struct tp_range_hint *hint,
                               int *ret_device);

/* Where the registered range begins in which tp_range_memory has just found `address`; `address`
 * itself where there was none. */
uintptr_t tp_range_start(const struct tp_range_hint *hint, const void *address);

#endif
