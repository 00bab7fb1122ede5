/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the double offers to tests beyond the CUDA API, exported from its libcuda.so.1. Reach it
 * with dlsym, so that a test can also run on a real driver.
 *
 * Environment, read at the first call:
 *
 * - FAKECUDA_LOG=FILE: every call as one JSON line: seq, t_ns, dt_ns, pid, tid, call, args, result,
 *   injected, violation (null when the call was proper). Several processes may share the file.
 *   Without it, violations go to stderr.
 * - FAKECUDA_DEVICES=N: GPUs (default 2, at most 16; 0: cuInit says NO_DEVICE)
 * - FAKECUDA_MEMORY_MB=N: memory of each GPU (default 4096)
 * - FAKECUDA_NUMA_NODES=N: host NUMA nodes that can hold memory (default: those of the machine)
 * - FAKECUDA_DRIVER_VERSION=N: default 13000. Below 12080 cuGetProcAddress hides cuMemcpyBatchAsync
 *   and a direct call fails; the library in the folder driver-12.4 has no such symbol at all.
 * - FAKECUDA_DELAY_US=N: least time between the submission and the execution of a stream's work
 *   (default 200)
 * - FAKECUDA_HMM=1: PAGEABLE_MEMORY_ACCESS: kernels may touch unregistered host memory
 * - FAKECUDA_HOST_POINTERS=0: CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: kernels may not use
 *   registered memory by its address
 * - FAKECUDA_TOUCHING=1: GPU allocations lie behind each other without a gap, where there is room;
 *   copies across two are refused all the same
 * - FAKECUDA_FAIL=RULES: CALL:NTH=RESULT, comma-separated; NTH counts from 1, * is every call.
 *   Example: cuMemMap:3=2,cuMemcpyBatchAsync:*=700. An injected failure has no effect but its
 *   result.
 * - FAKECUDA_SLOW=RULES: CALL=MICROSECONDS, comma-separated: how long these calls take
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include "cuda_api.h"
#include <stdbool.h>

/* Read and write memory that the CPU may not touch, without a context and whatever its access
 * flags. 0 or -1. */
FC_API int fakecuda_peek(void *to, CUdeviceptr from, size_t bytes);
FC_API int fakecuda_poke(CUdeviceptr to, const void *from, size_t bytes);

FC_API unsigned long fakecuda_violations(void);   /* by this process */
FC_API const char *fakecuda_last_violation(void); /* "" when there is none */
FC_API int fakecuda_contexts(void);               /* live contexts of this process */
FC_API int fakecuda_streams(void);                /* live streams that were created in them */
FC_API int fakecuda_set_failures(
    const char *rules); /* replaces FAKECUDA_FAIL; 0, or -1: not understood, nothing changed */
/* Replaces FAKECUDA_SLOW: CALL=MICROSECONDS, comma-separated. 0, or -1: not understood. Slow calls
 * wait for each other, as calls that take the driver's lock do. */
FC_API int fakecuda_set_delays(const char *rules);
FC_API void fakecuda_note(const char *text); /* a line of the test's own in the log: call "note" */

/* For the double of the runtime library, so that its calls are in the same log. */
FC_API void fakecuda_log_runtime(const char *name, int result, const char *args);
FC_API bool fakecuda_inject_runtime(const char *name, int *result);

/*
 * A kernel that cuModuleGetFunction will find by this name in any module whose PTX has the name. It
 * runs once a launch, in the stream's thread. The parameters are copied at launch by the sizes
 * given.
 */
struct fakecuda_launch;
typedef void (*fakecuda_kernel)(struct fakecuda_launch *launch);
FC_API int fakecuda_register_kernel(const char *name, fakecuda_kernel run,
                                    const size_t *param_bytes, size_t param_count);

/* Inside a kernel. The span is what the GPU sees at `address`, or NULL (the context is then broken:
 * ILLEGAL_ADDRESS). */
FC_API const void *fakecuda_param(const struct fakecuda_launch *launch, size_t index);
FC_API void *fakecuda_span(struct fakecuda_launch *launch, CUdeviceptr address, size_t bytes,
                           bool write);
FC_API void fakecuda_grid(const struct fakecuda_launch *launch, unsigned int grid[3],
                          unsigned int block[3]);

#endif
