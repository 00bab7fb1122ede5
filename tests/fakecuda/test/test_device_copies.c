/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: copies between GPU memory and the host bring the right bytes, by every method, and leave
 * the application's contexts alone. */
#include "device_rig.h"
#include "stood_still.h"

#include <criterion/criterion.h>
#include <errno.h>

static void no_violation(void) {
    cr_assert_eq(DRIVER(fakecuda_violations)(), 0, "%s", DRIVER(fakecuda_last_violation)());
}

static void check_random(const char *settings, bool mapped) {
    uint64_t seed = 42;
    struct tp_device_job job = {0};
    load_driver(settings);
    CUcontext before = use_device(0);
    CUcontext after = NULL;
    cr_assert_not_null(wait_gpu(0, 5000));
    size_t room = 600000;
    unsigned char *host = mapped ? pinned_memory(room) : malloc(room);
    struct random_copies copies = {
        .mapped = mapped, .gpu = device_memory(room), .host = host, .room = room, .largest = 90000};
    for (int i = 0; i < 24; i++) {
        copies.to_device = i & 1;
        copies.count = i < 4 ? 1 : 1 + rig_random(&seed) % 200;
        cr_assert_eq(run_random(&copies, &job, &seed), TP_DEVICE_DONE);
    }
    DRIVER(cuCtxGetCurrent)(&after);
    cr_assert_eq(before, after);
    cr_assert_eq(DRIVER(fakecuda_contexts)(), 1);
    tp_device_release(&job);
    if (!mapped)
        free(host);
    no_violation();
}

Test(device_copies, random_by_copy_engine, .timeout = 60) {
    check_random("\"copy_engine\": \"dma\"", true);
    cr_assert_eq(counted(TP_KERNEL_BYTES), 0);
    cr_assert_gt(counted(TP_DMA_BYTES), 0);
}

Test(device_copies, random_by_kernel, .timeout = 60) {
    check_random("\"copy_engine\": \"kernel\", \"kernel_blocks\": 3", true);
    cr_assert_eq(counted(TP_DMA_BYTES), 0);
    cr_assert_gt(counted(TP_KERNEL_BYTES), 0);
}

Test(device_copies, random_by_both, .timeout = 60) {
    check_random("\"kernel_max_bytes\": 20000", true);
    cr_assert_gt(counted(TP_DMA_BYTES), 0);
    cr_assert_gt(counted(TP_KERNEL_BYTES), 0);
}

Test(device_copies, plain_host_memory_is_not_the_kernels, .timeout = 60) {
    check_random("\"copy_engine\": \"kernel\"", false);
    cr_assert_eq(counted(TP_KERNEL_BYTES), 0);
}

static void check_large(const char *settings) {
    struct tp_device_job job = {0};
    uint64_t seed = 7;
    uint8_t group;
    size_t room = 20 * MIB;
    unsigned char *want = malloc(room);
    load_driver(settings);
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    CUdeviceptr gpu = device_memory(room);
    unsigned char *host = pinned_memory(room);
    fill_random(want, room, &seed);
    memcpy(host, want, room);
    /* One large copy, then the same bytes back in more pieces than a wave holds. */
    cr_assert_eq(tp_device_add(&job, 0, true, true, (void *)(uintptr_t)gpu, host, room, &group), 0);
    tp_device_start(&job);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    tp_device_reset(&job);
    memset(host, 0, room);
    size_t piece = room / 10000;
    for (size_t i = 10000; i-- > 0;)
        cr_assert_eq(tp_device_add(&job, 0, false, true, host + i * piece,
                                   (void *)(uintptr_t)(gpu + i * piece), piece, &group),
                     0);
    cr_assert_eq(job.groups[0].op_count, 10000);
    tp_device_start(&job);
    cr_assert_geq(job.groups[0].wave_count, 3);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    cr_assert_eq(memcmp(host, want, piece * 10000), 0);
    tp_device_reset(&job);
    free(want);
    tp_device_release(&job);
    no_violation();
}

Test(device_copies, many_waves_by_kernel, .timeout = 60) {
    check_large("\"copy_engine\": \"kernel\"");
}

Test(device_copies, many_waves_by_copy_engine, .timeout = 60) {
    check_large("\"copy_engine\": \"dma\"");
}

Test(device_copies, two_gpus_and_ranges_of_several_mappings, .timeout = 60) {
    struct random_copies copies[2];
    struct tp_device_job job = {0};
    uint64_t seed = 3;
    load_driver("\"kernel_max_bytes\": 3000");
    for (int device = 1; device >= 0; device--) {
        (void)use_device(device);
        cr_assert_not_null(wait_gpu(device, 5000));
        size_t room = 3 * 2 * MIB;
        copies[device] = (struct random_copies){.device = device,
                                                .mapped = true,
                                                .gpu = pieced_memory(device, 2 * MIB, 3),
                                                .host = pinned_memory(room),
                                                .room = room,
                                                .count = 400,
                                                .largest = 60000};
    }
    for (int i = 0; i < 8; i++) {
        copies[i & 1].to_device = i & 2;
        cr_assert_eq(run_random(&copies[i & 1], &job, &seed), TP_DEVICE_DONE);
    }
    tp_device_release(&job);
    no_violation();
}

Test(device_copies, without_an_active_context_none_is_made, .timeout = 60) {
    struct tp_device_job job = {0};
    uint8_t group = 77;
    char byte;
    load_driver("");
    cr_assert_eq(tp_device_add(&job, 0, true, true, (void *)4096, &byte, 1, &group), -ENODEV);
    usleep(50000);
    cr_assert_null(tp_gpu_get(0));
    cr_assert_null(tp_gpu_get(-1));
    cr_assert_null(tp_gpu_get(TP_DEVICES));
    cr_assert_eq(DRIVER(fakecuda_contexts)(), 0);
    cr_assert_eq(job.group_count, 0);
    cr_assert_eq(group, 77);
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000), "a context that comes later is used");
    no_violation();
}

Test(device_copies, calibration_measures_and_ends, .timeout = 60) {
    load_driver("");
    (void)use_device(0);
    size_t free_before = 0;
    size_t free_after = 0;
    size_t total;
    DRIVER(cuMemGetInfo_v2)(&free_before, &total);
    struct tp_gpu *gpu = wait_gpu(0, 5000);
    cr_assert_not_null(gpu);
    usleep(600000);
    DRIVER(cuMemGetInfo_v2)(&free_after, &total);
    cr_assert_eq(free_before, free_after);
    for (int i = 0; i < 2; i++)
        cr_assert(tp_gpu_kernel_max(gpu, i) >= 32 << 10 && tp_gpu_kernel_max(gpu, i) <= 2 * MIB);
    no_violation();
}

/* ---- deferring
 * ------------------------------------------------------------------------------------------ */

struct one_copy {
    struct tp_device_job job;
    CUdeviceptr gpu;
    unsigned char *host;
};

static void start_one(struct one_copy *copy, unsigned char value) {
    uint8_t group;
    memset(copy->host, value, 100);
    cr_assert_eq(tp_device_add(&copy->job, 0, true, true, (void *)(uintptr_t)copy->gpu, copy->host,
                               100, &group),
                 0);
    tp_device_start(&copy->job);
}

static bool arrived(const struct one_copy *copy, unsigned char value) {
    unsigned char got = 0;
    DRIVER(fakecuda_peek)(&got, copy->gpu + 99, 1);
    return got == value;
}

static struct one_copy make_one(void) {
    return (struct one_copy){.gpu = device_memory(100), .host = pinned_memory(100)};
}

/* A copy that gathers while the process stands still. Returns the first byte where it goes. */
static unsigned char copy_over_a_stall(bool to_device, enum tp_device_state expected) {
    uint8_t group;
    unsigned char got = 0;
    load_driver("");
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    struct one_copy copy = make_one();
    void *device = (void *)(uintptr_t)copy.gpu;
    memset(copy.host, 1, 100);
    copy.job.submitted_ms = tp_stall_look();
    cr_assert_eq(tp_device_add(&copy.job, 0, to_device, true, to_device ? device : copy.host,
                               to_device ? copy.host : device, 100, &group),
                 0);
    tp_device_defer_begin();
    tp_device_start(&copy.job);
    stand_still();
    tp_device_defer_end();
    cr_assert_eq(finish(&copy.job), expected);
    DRIVER(fakecuda_peek)(&got, copy.gpu, 1);
    got = to_device ? got : copy.host[0];
    tp_device_reset(&copy.job);
    tp_device_release(&copy.job);
    no_violation();
    return got;
}

Test(device_copies, a_write_fails_that_the_process_stood_still_before, .timeout = 60) {
    cr_assert_eq(copy_over_a_stall(false, TP_DEVICE_FAILED), 1, "nothing is copied");
    cr_assert_eq(counted(TP_LATE_WRITES), 1);
}

Test(device_copies, a_read_does_not, .timeout = 60) {
    cr_assert_eq(copy_over_a_stall(true, TP_DEVICE_DONE), 1);
    cr_assert_eq(counted(TP_LATE_WRITES), 0);
}

static void *start_plainly(void *arg) {
    start_one(arg, 9);
    return NULL;
}

Test(device_copies, deferred_submits_gather, .timeout = 60) {
    load_driver("\"copy_engine\": \"kernel\"");
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    struct one_copy a = make_one();
    struct one_copy b = make_one();
    tp_device_defer_begin();
    tp_device_defer_begin();
    start_one(&a, 1);
    start_one(&b, 2);
    cr_assert_eq(a.job.groups[0].waves[0], b.job.groups[0].waves[0], "one wave for both");
    tp_device_defer_end();
    tp_device_defer_end();
    usleep(50000);
    cr_assert(arrived(&a, 1) && arrived(&b, 2), "the outer end does");
    cr_assert_eq(finish(&a.job), TP_DEVICE_DONE);
    /* a lets go; b still refers to the wave, so the next copy needs another. */
    struct tp_wave *shared = b.job.groups[0].waves[0];
    tp_device_reset(&a.job);
    start_one(&a, 3);
    cr_assert_neq(a.job.groups[0].waves[0], shared);
    cr_assert_eq(finish(&b.job), TP_DEVICE_DONE);
    cr_assert_eq(finish(&a.job), TP_DEVICE_DONE);
    tp_device_reset(&b.job);
    tp_device_reset(&a.job);
    /* A poll sends what gathers, and so does another thread's submit. */
    tp_device_defer_begin();
    start_one(&a, 4);
    cr_assert_eq(finish(&a.job), TP_DEVICE_DONE);
    cr_assert(arrived(&a, 4));
    tp_device_reset(&a.job);
    start_one(&a, 5);
    pthread_t other;
    pthread_create(&other, NULL, start_plainly, &b);
    pthread_join(other, NULL);
    usleep(50000);
    cr_assert(arrived(&a, 5) && arrived(&b, 9));
    tp_device_defer_end();
    cr_assert_eq(finish(&a.job), TP_DEVICE_DONE);
    cr_assert_eq(finish(&b.job), TP_DEVICE_DONE);
    tp_device_reset(&a.job);
    tp_device_reset(&b.job);
    tp_device_release(&a.job);
    tp_device_release(&b.job);
    no_violation();
}

static uint64_t ms_unasked(struct one_copy *copy, unsigned char value, unsigned wait_ms) {
    tp_device_defer_begin();
    usleep(wait_ms * 1000);
    start_one(copy, value);
    uint64_t from = tp_now_ms();
    while (!arrived(copy, value) && tp_now_ms() < from + 5000)
        usleep(500);
    cr_assert(arrived(copy, value));
    uint64_t took_ms = tp_now_ms() - from;
    tp_device_defer_end();
    cr_assert_eq(finish(&copy->job), TP_DEVICE_DONE);
    tp_device_reset(&copy->job);
    return took_ms;
}

/* Nobody polls, and the bracket stays open: also after the flusher has gone to sleep, before the
 * bracket was opened or since. About 2 ms; another program may have the CPU now and then. */
Test(device_copies, a_wave_that_nobody_asks_about_goes_out, .timeout = 60) {
    static const unsigned waits_ms[][2] = {{1, 0}, {200, 0}, {1, 200}};
    load_driver("\"copy_engine\": \"kernel\"");
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    struct one_copy copy = make_one();
    for (unsigned way = 0; way < 3; way++) {
        uint64_t best_ms = UINT64_MAX;
        for (unsigned round = 1; round < 12 && best_ms > 50; round++) {
            usleep(waits_ms[way][0] * 1000);
            uint64_t took_ms =
                ms_unasked(&copy, (unsigned char)(round + 20 * way), waits_ms[way][1]);
            best_ms = took_ms < best_ms ? took_ms : best_ms;
        }
        cr_assert_leq(best_ms, 50, "way %u", way);
    }
    tp_device_release(&copy.job);
    no_violation();
}

/* ---- capture
 * -------------------------------------------------------------------------------------------- */

static void *copy_beside_capture(void *arg) {
    struct one_copy *copy = arg;
    start_one(copy, 6);
    cr_assert_eq(finish(&copy->job), TP_DEVICE_DONE);
    tp_device_reset(&copy->job);
    return NULL;
}

Test(device_copies, a_capture_of_another_thread_stays_valid, .timeout = 60) {
    CUstream stream;
    CUgraph graph = NULL;
    pthread_t other;
    load_driver("\"copy_engine\": \"kernel\"");
    (void)use_device(0);
    struct one_copy copy = make_one();
    DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
    cr_assert_eq(DRIVER(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL),
                 CUDA_SUCCESS);
    cr_assert_not_null(wait_gpu(0, 5000), "the kernel is loaded during the capture too");
    pthread_create(&other, NULL, copy_beside_capture, &copy);
    pthread_join(other, NULL);
    cr_assert_eq(DRIVER(cuStreamEndCapture)(stream, &graph), CUDA_SUCCESS);
    cr_assert_not_null(graph);
    tp_device_release(&copy.job);
    no_violation();
}

/* ---- a driver that fails
 * --------------------------------------------------------------------------------- */

/* What a kernel does, where there is one. */
static struct random_copies small_copies(void) {
    return (struct random_copies){.mapped = true,
                                  .gpu = device_memory(50000),
                                  .host = pinned_memory(50000),
                                  .room = 50000,
                                  .count = 50,
                                  .largest = 900};
}

/* Fail each call in turn; later copies work or are refused, and what is called done is right. */
static enum tp_device_state fail(const char *settings, const char *rule, bool *ret_usable) {
    uint64_t seed = 11;
    struct tp_device_job job = {0};
    load_driver(settings);
    CUcontext before = use_device(0);
    CUcontext after = NULL;
    cr_assert_not_null(wait_gpu(0, 5000));
    struct random_copies copies = {.mapped = true,
                                   .to_device = true,
                                   .gpu = device_memory(300000),
                                   .host = pinned_memory(300000),
                                   .room = 300000,
                                   .count = 100,
                                   .largest = 9000};
    cr_assert_eq(DRIVER(fakecuda_set_failures)(rule), 0);
    enum tp_device_state state = run_random(&copies, &job, &seed);
    cr_assert_neq(state, TP_DEVICE_RUNNING);
    cr_assert_eq(DRIVER(fakecuda_set_failures)(""), 0);
    *ret_usable = tp_gpu_get(0);
    if (*ret_usable)
        cr_assert_eq(run_random(&copies, &job, &seed), TP_DEVICE_DONE);
    DRIVER(cuCtxGetCurrent)(&after);
    cr_assert_eq(before, after);
    tp_device_release(&job);
    no_violation();
    return state;
}

static void expect(const char *settings, const char *rule, enum tp_device_state state,
                   bool usable) {
    bool got = false;
    cr_assert_eq(fail(settings, rule, &got), state, "%s", rule);
    cr_assert_eq(got, usable, "%s", rule);
}

#define DMA "\"copy_engine\": \"dma\""
#define KERNEL "\"copy_engine\": \"kernel\""

Test(device_faults, launch, .timeout = 60) {
    expect(KERNEL, "cuLaunchKernel:*=701", TP_DEVICE_DONE, true);
    cr_assert_eq(counted(TP_KERNEL_BYTES), 0);
}
Test(device_faults, launch_without_memory, .timeout = 60) {
    bool usable;
    uint64_t seed = 12;
    struct tp_device_job job = {0};
    cr_assert_eq(fail(KERNEL, "cuLaunchKernel:1=2", &usable), TP_DEVICE_DONE);
    cr_assert(usable);
    struct random_copies copies = small_copies();
    cr_assert_eq(counted(TP_KERNEL_BYTES), 0);
    for (uint64_t end = tp_now_ms() + 10000; !counted(TP_KERNEL_BYTES) && tp_now_ms() < end;)
        cr_assert_eq(run_random(&copies, &job, &seed), TP_DEVICE_DONE);
    cr_assert_gt(counted(TP_KERNEL_BYTES), 0, "it is used again");
    tp_device_release(&job);
    no_violation();
}
Test(device_faults, batch, .timeout = 60) {
    expect(DMA, "cuMemcpyBatchAsync:*=801", TP_DEVICE_DONE, true);
}
Test(device_faults, every_copy, .timeout = 60) {
    expect(DMA, "cuMemcpyBatchAsync:*=1,cuMemcpyAsync:2=1", TP_DEVICE_FAILED, true);
}
Test(device_faults, record, .timeout = 60) {
    expect(KERNEL, "cuEventRecord:*=2", TP_DEVICE_DONE, true);
}
Test(device_faults, query, .timeout = 60) {
    expect(KERNEL, "cuEventQuery:1=999", TP_DEVICE_DONE, true);
}
Test(device_faults, query_and_wait, .timeout = 60) {
    expect(KERNEL, "cuEventQuery:*=700,cuStreamSynchronize:*=700", TP_DEVICE_FAILED, false);
}
/* Waves are made with the GPU, so a driver that fails later costs those that need more. */
Test(device_faults, event, .timeout = 60) {
    expect(DMA, "cuEventCreate:*=2", TP_DEVICE_DONE, true);
}
Test(device_faults, pinned_memory, .timeout = 60) {
    expect(KERNEL, "cuMemHostAlloc:*=2", TP_DEVICE_DONE, true);
    cr_assert_eq(counted(TP_DMA_BYTES), 0);
}
Test(device_faults, push_for_the_send, .timeout = 60) {
    expect(DMA, "cuCtxPushCurrent:1=201", TP_DEVICE_FAILED, false);
}
Test(device_faults, push_for_the_send_without_memory, .timeout = 60) {
    expect(DMA, "cuCtxPushCurrent:1=2", TP_DEVICE_FAILED, true);
}
Test(device_faults, push_for_the_query, .timeout = 60) {
    expect(DMA, "cuCtxPushCurrent:2=201", TP_DEVICE_DONE, true);
}

Test(device_faults, no_event_for_one_more_wave, .timeout = 60) {
    struct tp_device_job job = {0};
    uint8_t group;
    load_driver(DMA);
    (void)use_device(0);
    cr_assert_not_null(wait_gpu(0, 5000));
    size_t count = 20000; /* five waves of 4096 */
    CUdeviceptr gpu = device_memory(2 * count);
    unsigned char *host = pinned_memory(2 * count);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(tp_device_add(&job, 0, true, true, (void *)(uintptr_t)(gpu + 2 * i),
                                   host + 2 * i, 1, &group),
                     0);
    cr_assert_eq(DRIVER(fakecuda_set_failures)("cuEventCreate:*=2"), 0);
    tp_device_start(&job);
    cr_assert_eq(finish(&job), TP_DEVICE_FAILED);
    tp_device_reset(&job);
    cr_assert(tp_gpu_rests(0), "what is asked for now is Mooncake's");
    cr_assert_eq(DRIVER(fakecuda_set_failures)(""), 0);
    for (uint64_t end = tp_now_ms() + 10000; tp_gpu_rests(0) && tp_now_ms() < end;)
        usleep(1000);
    cr_assert_not(tp_gpu_rests(0));
    cr_assert_eq(tp_device_add(&job, 0, true, true, (void *)(uintptr_t)gpu, host, 1, &group), 0);
    tp_device_start(&job);
    cr_assert_eq(finish(&job), TP_DEVICE_DONE);
    tp_device_reset(&job);
    tp_device_release(&job);
    no_violation();
}

/* The thread's capture mode is the application's, whatever is refused. */
static void check_mode(const char *rule) {
    bool usable;
    int mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    (void)fail(DMA, rule, &usable);
    cr_assert_eq(DRIVER(cuThreadExchangeStreamCaptureMode)(&mode), CUDA_SUCCESS);
    cr_assert_eq(mode, CU_STREAM_CAPTURE_MODE_GLOBAL, "%s", rule);
}

Test(device_faults, the_capture_mode_cannot_be_set, .timeout = 60) {
    check_mode("cuThreadExchangeStreamCaptureMode:1=2");
}
Test(device_faults, the_capture_mode_cannot_be_set_back, .timeout = 60) {
    check_mode("cuThreadExchangeStreamCaptureMode:2=2");
}

/* While it is made: usable without the kernel, or only later, and until then nothing is retained.
 */
static void fail_making(const char *rule, bool usable) {
    struct tp_device_job job = {0};
    uint64_t seed = 1;
    load_driver(KERNEL);
    (void)use_device(0);
    cr_assert_eq(DRIVER(fakecuda_set_failures)(rule), 0);
    cr_assert_eq(wait_gpu(0, usable ? 5000 : 300) != NULL, usable, "%s", rule);
    cr_assert_eq(DRIVER(fakecuda_set_failures)(""), 0);
    if (!usable) {
        uint8_t group;
        cr_assert_eq(DRIVER(fakecuda_streams)(), 0, "none is left");
        cr_assert_eq(DRIVER(cuDevicePrimaryCtxRelease_v2)(0), CUDA_SUCCESS);
        cr_assert_eq(DRIVER(fakecuda_contexts)(), 0, "nothing holds the context");
        cr_assert_eq(tp_device_add(&job, 0, true, true, (void *)4096, &seed, 1, &group), -ENODEV);
        (void)use_device(0);
        cr_assert_not_null(wait_gpu(0, 20000), "it is tried again");
    }
    struct random_copies copies = small_copies();
    cr_assert_eq(run_random(&copies, &job, &seed), TP_DEVICE_DONE);
    cr_assert_eq(counted(TP_KERNEL_BYTES) == 0, usable);
    tp_device_release(&job);
    no_violation();
}

Test(device_faults, module, .timeout = 60) {
    fail_making("cuModuleLoadData:*=218", true);
}
Test(device_faults, function, .timeout = 60) {
    fail_making("cuModuleGetFunction:*=500", true);
}
Test(device_faults, module_without_memory, .timeout = 60) {
    fail_making("cuModuleLoadData:1=2", false);
}
Test(device_faults, module_never_with_memory, .timeout = 60) {
    struct tp_device_job job = {0};
    load_driver(KERNEL);
    (void)use_device(0);
    cr_assert_eq(DRIVER(fakecuda_set_failures)("cuModuleLoadData:*=2"), 0);
    cr_assert_not_null(wait_gpu(0, 30000), "it is done without in the end");
    tp_device_release(&job);
    no_violation();
}
Test(device_faults, streams, .timeout = 60) {
    fail_making("cuStreamCreateWithPriority:3=2", false);
}
Test(device_faults, retain, .timeout = 60) {
    fail_making("cuDevicePrimaryCtxRetain:1=2", false);
}
Test(device_faults, push_while_made, .timeout = 60) {
    fail_making("cuCtxPushCurrent:*=201", false);
}
