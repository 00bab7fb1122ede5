/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: an address is a GPU's only when a driver that this process has loaded by itself says so;
 * without one everything is host memory, and what the driver cannot answer is not taken for either.
 */
#include "tests/unit/classify_driver/driver.h"
#include "transport/cuda.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

static const void *const address = (const void *)0x7f1234560000;

/* Load the double as the host process would load the real driver. */
static struct classify_driver *load(const char *kind) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/classify_driver_%s.so", CLASSIFY_DRIVER_DIR, kind);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    cr_assert_not_null(library, "%s", dlerror());
    struct classify_driver *driver = dlsym(library, "classify_driver");
    cr_assert_not_null(driver);
    return driver;
}

static void wait_ms(long ms) {
    struct timespec pause = {0, ms * 1000000};
    nanosleep(&pause, NULL);
}

Test(classify, without_a_driver_all_memory_is_the_hosts) {
    int device = 77;
    cr_assert_eq(tp_cuda_classify(address, &device), TP_MEMORY_HOST);
    cr_assert_eq(device, 77);
    cr_assert_null(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW), "it was not loaded for this");
}

Test(classify, a_driver_that_comes_later_is_noticed) {
    int device = 77;
    cr_assert_eq(tp_cuda_classify(address, &device), TP_MEMORY_HOST);
    struct classify_driver *driver = load("v2");
    driver->memory_type = 2;
    driver->ordinal = 3;
    wait_ms(30);
    cr_assert_eq(tp_cuda_classify(address, &device), TP_MEMORY_DEVICE);
    cr_assert_eq(device, 3);
    cr_assert_eq(driver->last_address, (uintptr_t)address);
}

static void check_kind(const char *kind) {
    struct classify_driver *driver = load(kind);
    driver->memory_type = 2;
    driver->ordinal = 1;
    int device = 77;
    cr_assert_eq(tp_cuda_classify(address, &device), TP_MEMORY_DEVICE);
    cr_assert_eq(device, 1);
    cr_assert_eq(tp_cuda_classify(address, NULL), TP_MEMORY_DEVICE);
}

Test(classify, through_cuGetProcAddress_v2) {
    check_kind("v2");
}

Test(classify, through_the_older_cuGetProcAddress) {
    check_kind("v1");
}

Test(classify, through_the_exported_symbol) {
    check_kind("symbol");
}

Test(classify, a_driver_without_the_function_answers_nothing) {
    load("empty");
    cr_assert_eq(tp_cuda_classify(address, NULL), TP_MEMORY_UNKNOWN);
}

Test(classify, pinned_host_memory_is_the_hosts_and_managed_memory_the_gpus) {
    struct classify_driver *driver = load("v2");
    int device = 77;
    driver->memory_type = 1;
    driver->ordinal = 2;
    cr_assert_eq(tp_cuda_classify(address, &device), TP_MEMORY_HOST);
    cr_assert_eq(device, 77);
    driver->managed = 1;
    cr_assert_eq(tp_cuda_classify(address, &device), TP_MEMORY_DEVICE);
    cr_assert_eq(device, 2);
}

Test(classify, errors_that_mean_not_mine_and_others) {
    static const int host[] = {1, 3, 4};
    static const int unknown[] = {2, 100, 201, 700, 999};
    struct classify_driver *driver = load("v2");
    driver->memory_type = 2;
    for (int i = 0; i < 3; i++) {
        driver->result = host[i];
        cr_assert_eq(tp_cuda_classify(address, NULL), TP_MEMORY_HOST, "error %d", host[i]);
    }
    for (int i = 0; i < 5; i++) {
        driver->result = unknown[i];
        cr_assert_eq(tp_cuda_classify(address, NULL), TP_MEMORY_UNKNOWN, "error %d", unknown[i]);
    }
}
