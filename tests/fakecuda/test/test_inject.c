/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: any call can be made to fail on demand; old drivers can be played; all calls are in the
 * log, in order. */
#include "expect.h"

#include <stdio.h>
#include <unistd.h>

Test(inject, nth_call_and_every_call) {
    CUdeviceptr address;

    setenv("FAKECUDA_FAIL", "cuMemAlloc:3=2,cuMemFree:*=700,cuStreamCreate:1=999", 1);
    start(0);
    address = device_bytes(1);
    device_bytes(1);
    cr_assert_eq(cuMemAlloc_v2(&address, 1), CUDA_ERROR_OUT_OF_MEMORY);
    device_bytes(1);
    cr_assert_eq(cuMemFree_v2(address), CUDA_ERROR_ILLEGAL_ADDRESS);
    cr_assert_eq(cuMemFree_v2(address), CUDA_ERROR_ILLEGAL_ADDRESS);
    cr_assert_eq(fakecuda_set_failures("nonsense"), -1);
    cr_assert_eq(fakecuda_set_failures(""), 0);
    good(cuMemFree_v2(address));
    cr_assert_eq(fakecuda_violations(), 0);
}

Test(inject, a_name_is_not_a_prefix) {
    CUstream stream;

    setenv("FAKECUDA_FAIL", "cuStreamCreate:*=2", 1);
    start(0);
    good(cuStreamCreateWithPriority(&stream, 0, -1));
}

Test(inject, old_driver) {
    void *function = NULL;
    int status = 9;

    setenv("FAKECUDA_DRIVER_VERSION", "12040", 1);
    cr_assert_eq(cuGetProcAddress_v2("cuMemcpyBatchAsync", &function, 12080, 0, &status),
                 CUDA_ERROR_INVALID_VALUE, "more than the driver has");
    good(cuGetProcAddress_v2("cuMemcpyBatchAsync", &function, 12040, 0, &status));
    cr_assert(!function && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    cr_assert_eq(cuGetProcAddress("cuMemcpyBatchAsync", &function, 12040, 0), CUDA_ERROR_NOT_FOUND);
    good(cuGetProcAddress_v2("cuMemAlloc", &function, 12040, 0, &status));
    cr_assert_eq(function, (void *)cuMemAlloc_v2);
}

Test(inject, versions_of_a_call) {
    void *function = NULL;
    int status;

    good(cuGetProcAddress_v2("cuMemcpyBatchAsync", &function, 12080, 0, &status));
    cr_assert_eq(function, (void *)cuMemcpyBatchAsync);
    good(cuGetProcAddress_v2("cuMemcpyBatchAsync", &function, 13000, 0, &status));
    cr_assert_eq(function, (void *)cuMemcpyBatchAsync_v2);
    good(cuGetProcAddress_v2("cuMemcpyBatchAsync", &function, 12040, 0, &status));
    cr_assert_null(function);
    cr_assert_eq(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
}

Test(inject, log_has_every_call_in_order) {
    char path[] = "/tmp/fakecuda-log-XXXXXX", line[2048];
    const char *calls[] = {"\"cuInit\"",
                           "\"cuDevicePrimaryCtxRetain\"",
                           "\"cuCtxPushCurrent_v2\"",
                           "\"cuMemAlloc_v2\"",
                           "\"note\"",
                           "\"cuMemFree_v2\""};
    CUdeviceptr address;
    size_t seen = 0;
    FILE *log;

    close(mkstemp(path));
    setenv("FAKECUDA_LOG", path, 1);
    start(0);
    address = device_bytes(77);
    fakecuda_note("half way");
    cuMemFree_v2(address + 1);
    log = fopen(path, "r");
    cr_assert_not_null(log);
    for (; fgets(line, sizeof line, log); seen++) {
        cr_assert_lt(seen, 6);
        cr_assert_not_null(strstr(line, calls[seen]), "%s is not %s", line, calls[seen]);
        cr_assert_not_null(strstr(line, seen == 5 ? "\"violation\":\"" : "\"violation\":null"),
                           "%s", line);
    }
    cr_assert_eq(seen, 6);
    fclose(log);
    unlink(path);
}
