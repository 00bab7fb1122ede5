/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: whose memory an address is. */
#ifndef TIDEPOOL_CUDA_H
#define TIDEPOOL_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* Whose memory an address is. */
enum tp_memory { TP_MEMORY_HOST, TP_MEMORY_DEVICE, TP_MEMORY_UNKNOWN };

/*
 * Whose memory `address` is; *ret_device (may be NULL) the GPU's ordinal, written for DEVICE only.
 * HOST at once when the process has not loaded libcuda or has not initialised it: nothing can be a
 * GPU's then. Managed memory counts as DEVICE. UNKNOWN when the driver answers with an error that
 * does not mean "not mine". Never initialises the driver and never creates a context. Any thread.
 * Costs a driver call (0.5 to 1 us): callers cache by registered range.
 */
enum tp_memory tp_cuda_classify(const void *address, int *ret_device);

#endif
