/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver of this process: loaded with dlopen, on first need, into one table. The only
 * place that knows libcuda's name.
 *
 * It must not know: what the driver is used for. It never calls cuInit by itself and never makes a
 * context.
 */
#ifndef TIDEPOOL_ENV_CUDA_H
#define TIDEPOOL_ENV_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "env/cuda_abi.h"

/* What is missing is NULL: ask tp_cuda_has before using a group (cuda_entries.def). */
struct tp_cuda {
#define CUDA_ENTRY(field, name, exported, version, need, parameters)                               \
    tp_cu_result(*field) parameters;
#include "env/cuda_entries.def"
#undef CUDA_ENTRY
};

/*
 * The driver, if this process has loaded libcuda.so.1 (`load`: or it can be loaded now); else NULL.
 * The stand-in for it (stubs/) counts as absent.
 * A driver that lacks a BASE entry counts as absent; *ret_unusable (may be NULL) is then true.
 * Absence is looked at again at most every 10 ms. Any thread.
 */
const struct tp_cuda *tp_cuda(bool load, bool *ret_unusable);

/* All of what copies need / what CUDA VMM memory needs is there. False without a driver. */
enum tp_cuda_group { TP_CUDA_COPY = 1, TP_CUDA_VMM = 2 };
bool tp_cuda_has(enum tp_cuda_group group);

/* Has somebody called cuInit in this process? False without a driver. Never initialises. */
bool tp_cuda_initialised(void);

#define TP_CUDA_DEVICES 64 /* as many as a mask has bits; further ones are not looked at */

/* The GPUs whose primary context this process has made active, a bit each; none without a driver
 * that copies need. Makes none itself; somebody has called cuInit. */
uint64_t tp_cuda_active_devices(void);

/* The driver's name of an error ("CUDA_ERROR_OUT_OF_MEMORY"); static storage, never NULL. */
const char *tp_cuda_error(tp_cu_result result);

/*
 * Calls of ours must not invalidate a stream capture of the application's other threads: the
 * relaxed mode between begin and end, on this thread. (CUDA Driver API,
 * cuThreadExchangeStreamCaptureMode.) tp_cuda_end takes what tp_cuda_begin returned.
 */
int tp_cuda_begin(const struct tp_cuda *cuda);
void tp_cuda_end(const struct tp_cuda *cuda, int mode);

#endif
