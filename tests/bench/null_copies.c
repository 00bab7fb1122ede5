/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library without its copies: what is left of a transfer's time is Mooncake's own and the
 * planning. For gpu_bench.py only: every get through it "succeeds" without one byte moved.
 *
 * Linked with --wrap, so that everything else is the product's own object code: the calls of the
 * functions below that cross a source file end here. It must not be installed, nor named
 * libtidepool.so.
 */
#include "env/env.h"
#include "transport/copy_host.h"
#include "transport/gpu.h"
#include "transport/transport.h"

int __real_tp_transport_start(const struct tp_config *config);
int __wrap_tp_transport_start(const struct tp_config *config);
void __wrap_tp_copy_bytes(void *to, const void *from, size_t bytes);
tp_cu_result __wrap_tp_gpu_send(struct tp_gpu *gpu, enum tp_gpu_method *method, bool to_device,
                                const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                                tp_cu_event event);
tp_cu_result __wrap_tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event);

/* At the level that no setting silences. */
int __wrap_tp_transport_start(const struct tp_config *config) {
    tp_log(TP_LOG_ERROR,
           "THIS IS libtidepool-null.so: NOTHING IS COPIED, every get returns garbage as success; "
           "it measures Mooncake's own time and must never serve anybody");
    return __real_tp_transport_start(config);
}

void __wrap_tp_copy_bytes(void *to, const void *from, size_t bytes) {
}

tp_cu_result __wrap_tp_gpu_send(struct tp_gpu *gpu, enum tp_gpu_method *method, bool to_device,
                                const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch,
                                tp_cu_event event) {
    return TP_CUDA_SUCCESS;
}

tp_cu_result __wrap_tp_gpu_query(struct tp_gpu *gpu, tp_cu_event event) {
    return TP_CUDA_SUCCESS;
}
