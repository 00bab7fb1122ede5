/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: work is asynchronous and in order; events, batches, kernels and captures follow their
 * rules. */
#include "expect.h"

#include <pthread.h>
#include <unistd.h>

static CUstream stream_of(unsigned flags) {
    CUstream stream = NULL;

    good(cuStreamCreate(&stream, flags));
    return stream;
}

static unsigned char first_byte(CUdeviceptr address) {
    unsigned char byte = 0;

    cr_assert_eq(fakecuda_peek(&byte, address, 1), 0);
    return byte;
}

Test(streams, copies_are_asynchronous_and_in_order, .timeout = 20) {
    CUdeviceptr device;
    CUstream stream;

    setenv("FAKECUDA_DELAY_US", "100000", 1);
    start(0);
    device = device_bytes(4096);
    stream = stream_of(CU_STREAM_NON_BLOCKING);
    for (int i = 1; i <= 50; i++)
        good(cuMemsetD8Async(device, (unsigned char)i, 4096, stream));
    cr_assert_eq(first_byte(device), 0, "nothing may have run yet");
    cr_assert_eq(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
    good(cuStreamSynchronize(stream));
    cr_assert_eq(first_byte(device), 50, "the last one wins");
    good(cuStreamQuery(stream));
    cr_assert_eq(fakecuda_violations(), 0);
}

Test(streams, events_order_streams, .timeout = 20) {
    CUdeviceptr device;
    CUstream one, two;
    CUevent event, end;
    float ms = -1;

    setenv("FAKECUDA_DELAY_US", "50000", 1);
    start(0);
    device = device_bytes(4096);
    one = stream_of(CU_STREAM_NON_BLOCKING);
    two = stream_of(CU_STREAM_NON_BLOCKING);
    good(cuEventCreate(&event, 0));
    good(cuEventCreate(&end, 0));
    good(cuMemsetD8Async(device, 1, 4096, one));
    good(cuEventRecord(event, one));
    cr_assert_eq(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    good(cuStreamWaitEvent(two, event, 0));
    good(cuMemsetD8Async(device, 2, 4096, two));
    good(cuEventRecord(end, two));
    good(cuEventSynchronize(end));
    good(cuEventQuery(event));
    cr_assert_eq(first_byte(device), 2);
    good(cuEventElapsedTime(&ms, event, end));
    cr_assert_geq(ms, 0.0f);
}

Test(streams, legacy_stream_waits_for_blocking_ones, .timeout = 20) {
    unsigned char byte = 0;
    CUdeviceptr device;

    setenv("FAKECUDA_DELAY_US", "50000", 1);
    start(0);
    device = device_bytes(4096);
    good(cuMemsetD8Async(device, 9, 4096, stream_of(CU_STREAM_DEFAULT)));
    good(cuMemcpyDtoH_v2(&byte, device, 1));
    cr_assert_eq(byte, 9);
    good(cuMemsetD8Async(device, 10, 4096, stream_of(CU_STREAM_NON_BLOCKING)));
    good(cuMemcpyDtoH_v2(&byte, device, 1));
    cr_assert_eq(byte, 9, "a non-blocking stream is not waited for");
}

Test(streams, freeing_what_pending_work_uses, .timeout = 20) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr device, host;
    CUstream stream;

    setenv("FAKECUDA_DELAY_US", "50000", 1);
    start(0);
    device = device_bytes(MIB);
    host = numa_bytes(2 * MIB, &handle);
    allow_device(host, 2 * MIB, 0);
    stream = stream_of(CU_STREAM_NON_BLOCKING);
    good(cuMemcpyAsync(device, host, MIB, stream));
    broke(cuMemUnmap(host, 2 * MIB), CUDA_SUCCESS, "pending");
    good(cuMemsetD8Async(device, 1, MIB, stream));
    broke(cuMemFree_v2(device), CUDA_SUCCESS, "pending");
}

Test(streams, destroyed_and_foreign_handles) {
    CUdeviceptr device;
    CUstream stream;
    CUevent event;

    start(0);
    device = device_bytes(64);
    stream = stream_of(0);
    good(cuEventCreate(&event, 0));
    good(cuStreamDestroy_v2(stream));
    broke(cuStreamDestroy_v2(stream), CUDA_ERROR_INVALID_HANDLE, "destroyed");
    broke(cuMemsetD8Async(device, 0, 1, stream), CUDA_ERROR_INVALID_HANDLE, "destroyed");
    broke(cuStreamSynchronize((CUstream)(uintptr_t)&device), CUDA_ERROR_INVALID_HANDLE,
          "not a stream");
    good(cuEventDestroy_v2(event));
    broke(cuEventRecord(event, NULL), CUDA_ERROR_INVALID_HANDLE, "destroyed");
    broke(cuEventQuery((CUevent)stream), CUDA_ERROR_INVALID_HANDLE, "not an event");
}

Test(streams, events_stay_in_their_context) {
    CUcontext other;
    CUevent event;

    start(0);
    good(cuEventCreate(&event, 0));
    good(cuDevicePrimaryCtxRetain(&other, 1));
    good(cuCtxPushCurrent_v2(other));
    broke(cuEventRecord(event, stream_of(0)), CUDA_ERROR_INVALID_HANDLE, "different contexts");
}

struct batch {
    CUdeviceptr to[4], from[4];
    size_t sizes[4], indexes[1];
    CUmemcpyAttributes attrs[1];
};

/* Four copies of 1 KiB between two buffers. */
static struct batch four(CUdeviceptr to, CUdeviceptr from, int order) {
    struct batch batch = {.indexes = {0}, .attrs = {{.srcAccessOrder = order}}};

    for (size_t i = 0; i < 4; i++) {
        batch.to[i] = to + i * 1024;
        batch.from[i] = from + (3 - i) * 1024;
        batch.sizes[i] = 1024;
    }
    return batch;
}

static CUresult run(struct batch *b, size_t count, size_t attrs, CUstream stream) {
    return cuMemcpyBatchAsync_v2(b->to, b->from, b->sizes, count, b->attrs, b->indexes, attrs,
                                 stream);
}

Test(streams, batches) {
    CUdeviceptr from, to;
    struct batch batch;
    CUstream stream;
    size_t failed = 0;

    start(0);
    from = device_bytes(4096);
    to = device_bytes(4096);
    stream = stream_of(CU_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < 4; i++)
        good(cuMemsetD8_v2(from + i * 1024, (unsigned char)(i + 1), 1024));
    batch = four(to, from, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    good(run(&batch, 4, 1, stream));
    good(cuStreamSynchronize(stream));
    cr_assert(first_byte(to) == 4 && first_byte(to + 3072) == 1);
    broke(run(&batch, 4, 1, NULL), CUDA_ERROR_INVALID_VALUE, "legacy stream");
    broke(run(&batch, 0, 1, stream), CUDA_ERROR_INVALID_VALUE, "no copies");
    broke(run(&batch, 4, 0, stream), CUDA_ERROR_INVALID_VALUE, "attributes");
    batch.sizes[2] = 5000;
    broke(cuMemcpyBatchAsync(batch.to, batch.from, batch.sizes, 3, batch.attrs, batch.indexes, 1,
                             &failed, stream),
          CUDA_ERROR_INVALID_VALUE, "passes the end");
    cr_assert_eq(failed, 2);
    batch = four(to, from, 0);
    broke(run(&batch, 4, 1, stream), CUDA_ERROR_INVALID_VALUE, "access order");
    batch = four(to, from, 1);
    batch.to[1] = to;
    broke(run(&batch, 4, 1, stream), CUDA_SUCCESS, "two copies");
}

Test(streams, any_order_may_read_early, .timeout = 20) {
    CUdeviceptr from, to;
    struct batch batch;
    CUstream stream;

    start(0);
    from = device_bytes(4096);
    to = device_bytes(4096);
    stream = stream_of(CU_STREAM_NON_BLOCKING);
    batch = four(to, from, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
    good(cuMemsetD8Async(from, 5, 4096, stream));
    good(run(&batch, 4, 1, stream));
    good(cuStreamSynchronize(stream));
    cr_assert(first_byte(to) == 5 && first_byte(to + 1024) == 0,
              "every second copy reads before the fill");
}

static const char ptx[] =
    ".version 8.0\n.target sm_90\n.visible .entry fakecuda_fill(\n)\n.entry fakecuda_missing()\n";

Test(streams, kernels) {
    unsigned long long bytes = 1000;
    unsigned value = 0x5a;
    CUfunction function;
    CUdeviceptr device;
    CUmodule module;
    void *params[] = {&device, &bytes, &value};

    start(0);
    device = device_bytes(1000);
    broke(cuModuleLoadData(&module, "no ptx"), CUDA_ERROR_INVALID_IMAGE, "no PTX");
    good(cuModuleLoadData(&module, ptx));
    broke(cuModuleGetFunction(&function, module, "fakecuda_missing"), CUDA_ERROR_NOT_FOUND,
          "no implementation");
    cr_assert_eq(cuModuleGetFunction(&function, module, "absent"), CUDA_ERROR_NOT_FOUND);
    good(cuModuleGetFunction(&function, module, "fakecuda_fill"));
    broke(cuLaunchKernel(function, 0, 1, 1, 32, 1, 1, 0, NULL, params, NULL),
          CUDA_ERROR_INVALID_VALUE, "empty grid");
    good(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
    good(cuCtxSynchronize());
    cr_assert_eq(first_byte(device + 999), 0x5a);
    bytes = 1001;
    good(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
    broke(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS, "passes the end");
}

static void *unsafe_call(void *mode) {
    CUdeviceptr address;

    start(0);
    good(cuThreadExchangeStreamCaptureMode(mode));
    return (void *)(intptr_t)cuMemAlloc_v2(&address, 1);
}

static CUresult in_thread(int mode) {
    pthread_t thread;
    void *result;

    pthread_create(&thread, NULL, unsafe_call, &mode);
    pthread_join(thread, &result);
    return (CUresult)(intptr_t)result;
}

Test(streams, unsafe_call_of_another_thread_breaks_a_capture) {
    CUdeviceptr device;
    CUstream stream;
    CUgraph graph;
    int status;

    start(0);
    device = device_bytes(64);
    stream = stream_of(CU_STREAM_NON_BLOCKING);
    good(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    good(cuMemsetD8Async(device, 1, 64, stream));
    good(in_thread(CU_STREAM_CAPTURE_MODE_RELAXED));
    good(in_thread(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    good(cuStreamIsCapturing(stream, &status));
    cr_assert_eq(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    broke(in_thread(CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "unsafe call");
    cr_assert_eq(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    cr_assert_null(graph);
    cr_assert_eq(first_byte(device), 0, "captured work does not run");
    good(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    good(in_thread(CU_STREAM_CAPTURE_MODE_GLOBAL));
    broke(cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "unsafe call");
}
