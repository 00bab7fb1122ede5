/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: one GPU as this process uses it: its primary context, streams, the copy kernel, and sending a list of copies. No
 * queueing and no waiting: copy_device.c does that.
 */
#ifndef TIDEPOOL_GPU_H
#define TIDEPOOL_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "env/cuda_abi.h"
#include "transport/copy_host.h"

enum tp_gpu_method { TP_GPU_ENGINE, TP_GPU_KERNEL, TP_GPU_METHODS };

struct tp_gpu; /* lives for ever once made */

/*
 * The GPU with this ordinal, if its primary context is active (it is then retained for good; never created) and the driver has
 * what copies need; else NULL. The first call for a device loads the kernel and makes streams; later ones are a load. Any thread.
 */
struct tp_gpu *tp_gpu_get(int device);

/* The largest copy that the kernel shall do, for this direction; 0: none. */
uint64_t tp_gpu_kernel_max(const struct tp_gpu *gpu, bool to_device);

/* Pinned memory that every GPU can read; NULL when there is none. */
void *tp_gpu_pinned_alloc(struct tp_gpu *gpu, size_t bytes);

/* An event without timing, NULL when the driver refuses. */
tp_cu_event tp_gpu_event(struct tp_gpu *gpu);

/*
 * Send `count` copies (in pinned memory for the kernel) and record `event` behind them. The copies may run in any order.
 * Returns a driver result. `scratch` holds room for 3 * count words, for the copy engines' lists.
 */
tp_cu_result tp_gpu_send(struct tp_gpu *gpu, enum tp_gpu_method method, bool to_device, const struct tp_copy_op *ops,
                         uint32_t count, uint64_t *scratch, tp_cu_event event);

/* TP_CUDA_SUCCESS when the event has passed, TP_CUDA_ERROR_NOT_READY, or an error. */
tp_cu_result tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event);

#endif
