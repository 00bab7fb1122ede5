/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store's CUDA VMM memory in this process: import, map, access.
 *
 * Facts, measured on driver 580: none of these calls needs a context, and none makes one; importing
 * and mapping 2 GiB takes 48 ms, of which access for a GPU is 20; the fds cannot be mmapped, and
 * only a whole allocation can be mapped, so a store cannot promise more than it gives; a mapping
 * keeps its memory without the handle.
 *
 * cuInit must not come before a fork: CUDA does not work in a child of a process that has called
 * it, and inference engines fork their workers. So it is the host's to call, until the host
 * transfers.
 *
 * It must not know: segments, peers, batches.
 */
#include "transport/vmm.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

#include "env/cuda.h"
#include "env/env.h"

#define RETRY_MS UINT64_C(1000)
#define RELEASE_TRIES 3
#define RETRY_DOUBLED 8 /* after each failure, so many times: about 4 minutes */

/* The peer thread's own. What this driver has not is not asked for again; memory and fds, without
 * which it cannot be loaded or started, come back. */
static struct {
    bool given_up;
    unsigned failures;
    uint64_t next_ms; /* CLOCK_MONOTONIC */
} start;

static void say(const char *what, const char *why, const char *how_long) {
    tp_log(TP_LOG_INFO,
           "a store publishes CUDA host memory, and %s%s%s: its transfers are left to Mooncake%s",
           what, *why ? ": " : "", why, how_long);
}

static void give_up(const char *what) {
    start.given_up = true;
    say(what, "", "");
}

static void try_later(const char *what, const char *why) {
    start.next_ms = tp_now_ms() + tp_backoff(RETRY_MS, start.failures, RETRY_DOUBLED);
    if (start.failures++ == 0)
        say(what, why, ", and it is tried again");
}

bool tp_vmm_usable(bool initialise) {
    if (start.given_up)
        return false;
    bool unusable = false;
    initialise = initialise && tp_now_ms() >= start.next_ms;
    const struct tp_cuda *cuda = tp_cuda(initialise, &unusable);
    if (!cuda) {
        if (unusable)
            give_up("this CUDA driver lacks what is needed");
        else if (initialise)
            try_later("this process cannot load libcuda.so.1", "");
        return false;
    }
    if (!tp_cuda_has(TP_CUDA_VMM) || !cuda->init) {
        give_up("this CUDA driver has no virtual memory management");
        return false;
    }
    if (tp_cuda_initialised())
        return true;
    if (!initialise)
        return false;
    tp_cu_result result = cuda->init(0);
    if (result != TP_CUDA_SUCCESS)
        try_later("cuInit failed", tp_cuda_error(result));
    return result == TP_CUDA_SUCCESS;
}

char *tp_vmm_reserve(uint64_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    tp_cu_deviceptr address = 0;
    int mode = tp_cuda_begin(cuda);
    tp_cu_result result = cuda->vmm_reserve(&address, bytes, 0, 0, 0);
    tp_cuda_end(cuda, mode);
    if (result == TP_CUDA_SUCCESS)
        return (char *)(uintptr_t)address; /* NOLINT(performance-no-int-to-ptr) */
    tp_log_once(&said, TP_LOG_WARN,
                "no addresses for a store's segment of %llu bytes: cuMemAddressReserve: %s (ulimit "
                "-v); its transfers are left to Mooncake, and it is tried again",
                (unsigned long long)bytes, tp_cuda_error(result));
    return NULL;
}

void tp_vmm_unreserve(char *address, uint64_t bytes) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    int mode = tp_cuda_begin(cuda);
    (void)cuda->vmm_unreserve((uintptr_t)address, bytes);
    tp_cuda_end(cuda, mode);
}

static tp_cu_result open_to(const struct tp_cuda *cuda, const char *address, uint64_t bytes,
                            bool host, uint64_t devices) {
    struct tp_cu_access access[TP_CUDA_DEVICES + 1];
    size_t count = 0;
    if (host)
        access[count++] = (struct tp_cu_access){{TP_CU_LOCATION_HOST, 0}, TP_CU_ACCESS_READWRITE};
    for (int device = 0; device < TP_CUDA_DEVICES; device++) {
        if (devices >> device & 1)
            access[count++] =
                (struct tp_cu_access){{TP_CU_LOCATION_DEVICE, device}, TP_CU_ACCESS_READWRITE};
    }
    return cuda->vmm_access((uintptr_t)address, bytes, access, count);
}

static tp_cu_result import(const struct tp_cuda *cuda, const char *address, uint64_t bytes, int fd,
                           const char **ret_call) {
    tp_cu_handle handle = 0;
    /* The driver takes the number of the fd as if it were a pointer (CUDA Driver API,
     * cuMemImportFromShareableHandle). NOLINTNEXTLINE(performance-no-int-to-ptr) */
    void *os_handle = (void *)(intptr_t)fd;
    *ret_call = "cuMemImportFromShareableHandle";
    tp_cu_result result = cuda->vmm_import(&handle, os_handle, TP_CU_HANDLE_POSIX_FD);
    if (result != TP_CUDA_SUCCESS)
        return result;
    *ret_call = "cuMemMap";
    result = cuda->vmm_map((uintptr_t)address, bytes, 0, handle, 0);
    /* What is not released is held for the life of the process. */
    for (int i = 0; i < RELEASE_TRIES && cuda->vmm_release(handle) != TP_CUDA_SUCCESS; i++)
        continue;
    return result;
}

/* One GPU that is refused must not cost the others theirs: asked one by one then. */
static uint64_t open_singly(const struct tp_cuda *cuda, const char *address, uint64_t bytes,
                            uint64_t devices) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t opened = 0;
    for (int device = 0; device < TP_CUDA_DEVICES; device++) {
        uint64_t bit = UINT64_C(1) << device;
        tp_cu_result result =
            devices & bit ? open_to(cuda, address, bytes, false, bit) : TP_CUDA_SUCCESS;
        if (result == TP_CUDA_SUCCESS)
            opened |= devices & bit;
        else
            tp_log_once(&said, TP_LOG_WARN,
                        "GPU %d cannot be given access to a store's memory: cuMemSetAccess: %s; "
                        "its requests are left to Mooncake, and it is tried again",
                        device, tp_cuda_error(result));
    }
    return opened;
}

/* Access for the CPU and GPUs of a fresh mapping; undone when the CPU has none. */
static tp_cu_result open_fresh(const struct tp_cuda *cuda, const char *address, uint64_t bytes,
                               uint64_t devices, uint64_t *ret_opened) {
    tp_cu_result result = open_to(cuda, address, bytes, true, devices);
    uint64_t opened = devices;
    if (result != TP_CUDA_SUCCESS && devices) {
        result = open_to(cuda, address, bytes, true, 0);
        opened = result == TP_CUDA_SUCCESS ? open_singly(cuda, address, bytes, devices) : 0;
    }
    if (result == TP_CUDA_SUCCESS)
        *ret_opened = opened;
    else
        (void)cuda->vmm_unmap((uintptr_t)address, bytes);
    return result;
}

int tp_vmm_map(char *address, uint64_t bytes, int fd, uint64_t devices, uint64_t *ret_opened) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    const char *call = NULL;
    int mode = tp_cuda_begin(cuda);
    tp_cu_result result = import(cuda, address, bytes, fd, &call);
    if (result == TP_CUDA_SUCCESS) {
        call = "cuMemSetAccess";
        result = open_fresh(cuda, address, bytes, devices, ret_opened);
    }
    tp_cuda_end(cuda, mode);
    if (result == TP_CUDA_SUCCESS)
        return 0;
    tp_log_once(
        &said, TP_LOG_WARN,
        "cannot map %llu MiB of a store's CUDA host memory: %s: %s; requests to it are left "
        "to Mooncake, and it is tried again",
        (unsigned long long)bytes >> 20, call, tp_cuda_error(result));
    return -EREMOTEIO;
}

uint64_t tp_vmm_open(char *address, uint64_t bytes, uint64_t devices) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    int mode = tp_cuda_begin(cuda);
    uint64_t opened = devices;
    if (open_to(cuda, address, bytes, false, devices) != TP_CUDA_SUCCESS)
        opened = open_singly(cuda, address, bytes, devices);
    tp_cuda_end(cuda, mode);
    return opened;
}

bool tp_vmm_unmap(char *address, uint64_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    int mode = tp_cuda_begin(cuda);
    tp_cu_result result = cuda->vmm_unmap((uintptr_t)address, bytes);
    tp_cuda_end(cuda, mode);
    if (result != TP_CUDA_SUCCESS)
        tp_log_once(
            &said, TP_LOG_WARN,
            "cannot let go of %llu MiB of a store's CUDA host memory: cuMemUnmap: %s; it is "
            "tried again for a while",
            (unsigned long long)bytes >> 20, tp_cuda_error(result));
    return result == TP_CUDA_SUCCESS;
}
