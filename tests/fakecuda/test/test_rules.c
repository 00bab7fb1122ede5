/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: each misuse of contexts and plain memory gives its documented error and a record of the
 * broken rule. */
#include "expect.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

Test(rules, needs_init) {
    int count;

    setenv("FAKECUDA_LOG", "/dev/null", 1);
    broke(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED, "before cuInit");
}

Test(rules, asking_before_init_is_no_violation) {
    CUcontext context;

    cr_assert_eq(cuCtxGetCurrent(&context), CUDA_ERROR_NOT_INITIALIZED);
    cr_assert_eq(fakecuda_violations(), 0);
}

Test(rules, no_device) {
    setenv("FAKECUDA_DEVICES", "0", 1);
    cr_assert_eq(cuInit(0), CUDA_ERROR_NO_DEVICE);
    cr_assert_eq(fakecuda_violations(), 0);
}

Test(rules, no_context) {
    CUdeviceptr address;

    setenv("FAKECUDA_LOG", "/dev/null", 1);
    good(cuInit(0));
    broke(cuMemAlloc_v2(&address, 1), CUDA_ERROR_INVALID_CONTEXT, "no current context");
}

Test(rules, context_stack) {
    CUcontext first = start(0), second, popped;

    good(cuDevicePrimaryCtxRetain(&second, 1));
    good(cuCtxPushCurrent_v2(second));
    good(cuCtxPopCurrent_v2(&popped));
    cr_assert_eq(popped, second);
    good(cuCtxGetCurrent(&popped));
    cr_assert_eq(popped, first);
    good(cuCtxPopCurrent_v2(NULL));
    broke(cuCtxPopCurrent_v2(NULL), CUDA_ERROR_INVALID_CONTEXT, "popped more often");
    broke(cuCtxPushCurrent_v2((CUcontext)(uintptr_t)0x1234), CUDA_ERROR_INVALID_CONTEXT,
          "not a context");
}

Test(rules, destroyed_context) {
    CUdeviceptr address;

    start(0);
    cr_assert_eq(fakecuda_contexts(), 1);
    good(cuDevicePrimaryCtxRelease_v2(0));
    cr_assert_eq(fakecuda_contexts(), 0);
    broke(cuMemAlloc_v2(&address, 1), CUDA_ERROR_CONTEXT_IS_DESTROYED, "destroyed");
    broke(cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT, "more often than retained");
}

Test(rules, forked_child) {
    int status, count;
    pid_t pid;

    start(0);
    pid = fork();
    if (!pid)
        _exit(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED && fakecuda_violations() == 1
                  ? 0
                  : 1);
    waitpid(pid, &status, 0);
    cr_assert_eq(status, 0);
}

Test(rules, cpu_faults_on_device_memory, .signal = SIGSEGV) {
    start(0);
    *(volatile char *)(uintptr_t)device_bytes(4096) = 1;
}

Test(rules, system_calls_refuse_device_memory) {
    int ends[2];

    start(0);
    cr_assert_eq(pipe(ends), 0);
    cr_assert_lt(write(ends[1], (void *)(uintptr_t)device_bytes(4096), 16), 0);
}

Test(rules, copy_passes_the_end) {
    char bytes[200] = {0};
    CUdeviceptr address;

    start(0);
    address = device_bytes(100);
    good(cuMemcpyHtoD_v2(address, bytes, 100));
    broke(cuMemcpyHtoD_v2(address, bytes, 101), CUDA_ERROR_INVALID_VALUE, "passes the end");
    broke(cuMemcpyDtoH_v2(bytes, address + 60, 41), CUDA_ERROR_INVALID_VALUE, "by 1 bytes");
}

Test(rules, sides) {
    char bytes[64] = {0};
    CUdeviceptr address;

    start(0);
    address = device_bytes(64);
    broke(cuMemcpyHtoD_v2((CUdeviceptr)(uintptr_t)bytes, bytes, 8), CUDA_ERROR_INVALID_VALUE,
          "should be a device pointer");
    broke(cuMemcpyHtoD_v2(address, (void *)(uintptr_t)address, 8), CUDA_SUCCESS,
          "should be a host pointer");
}

Test(rules, freed_and_foreign_memory) {
    char bytes[64] = {0};
    CUdeviceptr address;

    start(0);
    address = device_bytes(64);
    broke(cuMemFree_v2(address + 8), CUDA_ERROR_INVALID_VALUE, "inside an allocation");
    good(cuMemFree_v2(address));
    broke(cuMemFree_v2(address), CUDA_ERROR_INVALID_VALUE, "freed");
    broke(cuMemcpyDtoH_v2(bytes, address, 8), CUDA_ERROR_INVALID_VALUE, "freed");
    broke(cuMemFree_v2((CUdeviceptr)(uintptr_t)bytes), CUDA_ERROR_INVALID_VALUE, "never known");
}

Test(rules, out_of_memory) {
    CUdeviceptr address;

    setenv("FAKECUDA_MEMORY_MB", "8", 1);
    start(0);
    device_bytes(6 * MIB);
    cr_assert_eq(cuMemAlloc_v2(&address, 4 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
}

Test(rules, registration) {
    char *bytes = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device, seen = 0;

    start(0);
    device = device_bytes(2 * MIB);
    good(cuMemHostRegister_v2(bytes, MIB, 0));
    good(cuMemHostRegister_v2(bytes + MIB, MIB, 0));
    good(cuMemHostGetDevicePointer_v2(&seen, bytes + 5, 0));
    cr_assert_eq(seen, (CUdeviceptr)(uintptr_t)bytes + 5);
    broke(cuMemHostRegister_v2(bytes + MIB / 2, MIB, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          "knows already");
    good(cuMemcpyHtoD_v2(device, bytes, MIB));
    broke(cuMemcpyHtoD_v2(device, bytes + 1, MIB), CUDA_ERROR_INVALID_VALUE, "registration");
    broke(cuMemcpyHtoD_v2(device, bytes + 2 * MIB - 8, 16), CUDA_ERROR_INVALID_VALUE,
          "passes the end of the registration");
    broke(cuMemHostUnregister(bytes + 4096), CUDA_ERROR_INVALID_VALUE, "inside an allocation");
    good(cuMemHostUnregister(bytes));
    broke(cuMemHostUnregister(bytes), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "freed");
    broke(cuMemcpyHtoD_v2(device, bytes + MIB / 2, MIB), CUDA_ERROR_INVALID_VALUE,
          "begins outside");
    munmap(bytes + MIB, MIB);
    broke(cuMemHostUnregister(bytes + MIB), CUDA_SUCCESS, "unmapped before");
    broke(cuMemHostRegister_v2(bytes + MIB, MIB, 0), CUDA_ERROR_INVALID_VALUE, "no memory");
}

Test(rules, unmapped_host_memory) {
    char *bytes = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device;

    start(0);
    device = device_bytes(8192);
    munmap(bytes + 4096, 4096);
    broke(cuMemcpyHtoD_v2(device, bytes, 8192), CUDA_ERROR_INVALID_VALUE, "no memory");
}

Test(rules, errors_stick) {
    char *bytes = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device;

    start(0);
    device = device_bytes(64);
    broke(cuMemcpyDtoH_v2(bytes, device, 64), CUDA_ERROR_ILLEGAL_ADDRESS, "not writable");
    cr_assert_eq(cuMemcpyHtoD_v2(device, bytes, 8), CUDA_ERROR_ILLEGAL_ADDRESS,
                 "the context is broken from then on");
}

Test(rules, pointer_attributes) {
    int type = 0, ordinal = -5;
    CUdeviceptr device, begin = 0;
    char bytes[8];
    size_t size = 0;

    start(1);
    device = device_bytes(1000);
    good(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 999));
    good(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device + 999));
    good(cuMemGetAddressRange_v2(&begin, &size, device + 999));
    cr_assert(type == CU_MEMORYTYPE_DEVICE && ordinal == 1 && begin == device && size == 1000);
    cr_assert_eq(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                       (CUdeviceptr)(uintptr_t)bytes),
                 CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(fakecuda_violations(), 0, "asking about foreign memory is allowed");
}

/* An asynchronous copy and a batch of one, from `from` to the device. */
static void refused_both_ways(CUdeviceptr device, char *from, CUstream stream, const char *text) {
    CUdeviceptr to = device;
    CUdeviceptr source = (CUdeviceptr)(uintptr_t)from;
    size_t bytes = MIB;
    size_t index = 0;
    size_t failed = 0;
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};

    broke(cuMemcpyHtoDAsync_v2(device, from, MIB, stream), CUDA_ERROR_INVALID_VALUE, text);
    broke(cuMemcpyBatchAsync(&to, &source, &bytes, 1, &attributes, &index, 1, &failed, stream),
          CUDA_ERROR_INVALID_VALUE, text);
}

Test(rules, a_copy_keeps_within_one_registration_or_plain_memory) {
    char *bytes = mmap(NULL, 6 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device;
    CUstream stream;

    start(0);
    device = device_bytes(MIB);
    good(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    good(cuMemHostRegister_v2(bytes + MIB, MIB, 3));
    good(cuMemHostRegister_v2(bytes + 2 * MIB, MIB, 3));
    refused_both_ways(device, bytes + MIB / 2, stream, "begins outside");
    refused_both_ways(device, bytes + MIB * 3 / 2, stream, "passes the end");
    refused_both_ways(device, bytes + MIB * 5 / 2, stream, "passes the end");
}

Test(rules, a_registration_in_use_does_not_go) {
    char *bytes = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device;
    CUstream stream;

    setenv("FAKECUDA_DELAY_US", "50000", 1);
    start(0);
    device = device_bytes(MIB);
    good(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    good(cuMemHostRegister_v2(bytes, MIB, 3));
    good(cuMemcpyHtoDAsync_v2(device, bytes, MIB, stream));
    broke(cuMemHostUnregister(bytes), CUDA_SUCCESS, "pending");
}

Test(rules, registrations_of_another_context_must_be_portable) {
    char *bytes = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device;

    start(0);
    good(cuMemHostRegister_v2(bytes, MIB, 2));
    good(cuMemHostRegister_v2(bytes + MIB, MIB, 3));
    start(1);
    device = device_bytes(MIB);
    good(cuMemcpyHtoD_v2(device, bytes + MIB, MIB));
    broke(cuMemcpyHtoD_v2(device, bytes, MIB), CUDA_ERROR_INVALID_VALUE, "not PORTABLE");
}
