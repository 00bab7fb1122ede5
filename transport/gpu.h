/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: one GPU as this process uses it: its primary context, streams, the copy
 * kernel, and sending a list of copies. No queueing and no waiting: copy_device.c does that.
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
 * The GPU with this ordinal once it is ready; else NULL. The first call starts the making (see
 * tp_gpu_prepare); later ones are two loads. NULL again after its context was lost. Any thread;
 * waits for nothing.
 */
struct tp_gpu *tp_gpu_get(int device);

/*
 * Let a thread of its own make the GPU ready (compiling the kernel takes tens of milliseconds), if
 * its primary context is active (it is then retained for good; never created) and the driver has
 * what copies need. Does nothing when that has begun before.
 */
void tp_gpu_prepare(int device);

/* A copy found no memory: for a second, no more are to be planned; what is planned goes on. One
 * line says why. / Is it so now? One load, two while it rests. */
void tp_gpu_rest(struct tp_gpu *gpu, const char *why);
bool tp_gpu_rests(int device);

/* No more copies by this GPU: later requests are Mooncake's. One line says why. */
void tp_gpu_give_up(struct tp_gpu *gpu, const char *why);

int tp_gpu_device(const struct tp_gpu *gpu);

/* The largest copy that the kernel shall do, for this direction; 0: none. After it could not be
 * started for want of memory, none for a while. */
uint64_t tp_gpu_kernel_max(struct tp_gpu *gpu, bool to_device);
void tp_gpu_set_kernel_max(struct tp_gpu *gpu, bool to_device, uint64_t bytes);

/* Has it been found out, as far as it can be? Until then the limits above may still change. */
bool tp_gpu_calibrated(const struct tp_gpu *gpu);

/* Pinned memory that every GPU can read, and memory of this GPU (0: none); NULL when there is none.
 */
void *tp_gpu_pinned_alloc(struct tp_gpu *gpu, size_t bytes);
void tp_gpu_pinned_free(struct tp_gpu *gpu, void *memory);
tp_cu_deviceptr tp_gpu_memory_alloc(struct tp_gpu *gpu, size_t bytes);
void tp_gpu_memory_free(struct tp_gpu *gpu, tp_cu_deviceptr memory);

/*
 * Register memory of this process with CUDA, for all GPUs and for kernels; and back. A driver
 * result. They block in the driver: 50 us a MiB (hugetlbfs: 22), measured on an H200.
 */
tp_cu_result tp_gpu_host_register(struct tp_gpu *gpu, void *address, size_t bytes);
tp_cu_result tp_gpu_host_unregister(struct tp_gpu *gpu, void *address);

/* Does this GPU copy host memory at full speed only when it is registered (no HMM)? And may its
 * kernels use the addresses of registered memory as they are? Facts of the device. */
bool tp_gpu_wants_registration(const struct tp_gpu *gpu);
bool tp_gpu_takes_host_pointers(const struct tp_gpu *gpu);

/* Has it streams for staged copies (staging.h)? Not a GPU that reads any memory by itself. */
bool tp_gpu_stages(const struct tp_gpu *gpu);

/* Is its context lost? */
bool tp_gpu_lost(const struct tp_gpu *gpu);

/* An event without timing, NULL when the driver refuses. */
tp_cu_event tp_gpu_event(struct tp_gpu *gpu);
void tp_gpu_event_free(struct tp_gpu *gpu, tp_cu_event event);

/*
 * Send `count` copies (in pinned memory for the kernel) and record `event` behind them. The copies
 * may run in any order. *method is what shall be used, and then what was: a kernel that the driver
 * refuses to start is replaced by the copy engines. Returns a driver result; after an error nothing
 * of it is under way any more. `scratch` holds room for 3 * count words, for the copy engines'
 * lists.
 */
tp_cu_result tp_gpu_send(struct tp_gpu *gpu, enum tp_gpu_method *method, bool to_device,
                         const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                         tp_cu_event event);

/* The same on streams of their own, beside the others: for GPUs that tp_gpu_stages. */
tp_cu_result tp_gpu_send_staged(struct tp_gpu *gpu, enum tp_gpu_method *method, bool to_device,
                                const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                                tp_cu_event event);

/*
 * TP_CUDA_SUCCESS when the event has passed, TP_CUDA_ERROR_NOT_READY, or an error: then the context
 * is lost, and the GPU with it. A query that fails is followed by waiting for the streams, so that
 * memory is never let go under a copy.
 */
tp_cu_result tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event);

#endif
