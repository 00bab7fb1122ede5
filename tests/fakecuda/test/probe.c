/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Not a test: asks a driver, real or double, what it says in the cases where the documentation is
 * silent or vague, one line an answer. Run it on both and compare: LD_LIBRARY_PATH=<folder of a
 * libcuda.so.1> fakecuda-probe. Each group runs in a process of its own, since some answers break a
 * context or, on a real driver, crash.
 */
#include "../cuda_api.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define SIZE (4 * MIB)

static void say(const char *question, long answer) {
    printf("%s = %ld\n", question, answer);
    fflush(stdout);
}

static void start(void) {
    CUcontext context;

    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxPushCurrent_v2(context))
        say("start failed", 1);
}

static CUdeviceptr device_bytes(size_t bytes) {
    CUdeviceptr address = 0;

    if (cuMemAlloc_v2(&address, bytes))
        say("cuMemAlloc failed", 1);
    return address;
}

static CUmemGenericAllocationHandle numa_handle(void) {
    CUmemAllocationProp prop = {
        .type = 1, .requestedHandleTypes = 1, .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}};
    CUmemGenericAllocationHandle handle = 0;

    say("create host memory", cuMemCreate(&handle, SIZE, &prop, 0));
    return handle;
}

static CUdeviceptr reserve(size_t size) {
    CUdeviceptr address = 0;

    say("reserve", cuMemAddressReserve(&address, size, 0, 0, 0));
    return address;
}

static CUresult give(CUdeviceptr address, size_t size, CUmemLocationType type, int id, int flags) {
    CUmemAccessDesc desc = {.location = {type, id}, .flags = flags};

    return cuMemSetAccess(address, size, &desc, 1);
}

static void before_init(void) {
    unsigned flags;
    CUcontext context;
    int value = 0;
    void *function;

    say("cuCtxGetCurrent before init", cuCtxGetCurrent(&context));
    say("cuDeviceGetCount before init", cuDeviceGetCount(&value));
    say("cuPointerGetAttribute before init",
        cuPointerGetAttribute(&value, 2, (CUdeviceptr)(uintptr_t)&value));
    say("cuDevicePrimaryCtxGetState before init", cuDevicePrimaryCtxGetState(0, &flags, &value));
    say("cuMemRelease before init", cuMemRelease(1));
    say("cuGetProcAddress before init",
        cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &value));
    say("cuInit with a flag", cuInit(1));
}

static void addresses(void) {
    static const struct {
        const char *name;
        int version;
    } asked[] = {{"cuMemcpyBatchAsync", 13000}, {"cuMemcpyBatchAsync", 12080},
                 {"cuMemcpyBatchAsync", 12040}, {"cuNoSuchThing", 12080},
                 {"cuMemAlloc", 13000},         {"cuMemAlloc", 99000},
                 {"cuMemAlloc_v2", 12080}};
    char text[96];

    cuInit(0);
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        void *function = NULL;
        int status = -1, result = (int)cuGetProcAddress_v2(asked[i].name, &function,
                                                           asked[i].version, 0, &status);

        snprintf(text, sizeof text, "proc address %s %d: result*100 + status*10 + found",
                 asked[i].name, asked[i].version);
        say(text, result * 100 + status * 10 + (function != NULL));
    }
}

static void after_fork(void) {
    int count = 0;

    start();
    if (!fork()) {
        say("cuDeviceGetCount in a forked child", cuDeviceGetCount(&count));
        say("cuInit in a forked child", cuInit(0));
        _exit(0);
    }
    wait(NULL);
}

static void mapping(void) {
    CUmemGenericAllocationHandle handle, other = 0;
    CUmemAllocationProp prop = {
        .type = 1, .requestedHandleTypes = 1, .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 99}};
    CUdeviceptr at;

    cuInit(0);
    handle = numa_handle();
    say("create on node 99", cuMemCreate(&other, SIZE, &prop, 0));
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST, 0};
    say("create HOST with an fd type", cuMemCreate(&other, SIZE, &prop, 0));
    prop.requestedHandleTypes = 0;
    say("create HOST without", cuMemCreate(&other, SIZE, &prop, 0));
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 0};
    say("create 4096 bytes", cuMemCreate(&other, 4096, &prop, 0));
    say("create on a GPU without a context", cuMemCreate(&other, SIZE, &prop, 0));
    say("reserve 4096 bytes", cuMemAddressReserve(&at, 4096, 0, 0, 0));
    say("reserve 2 MiB + 4096", cuMemAddressReserve(&at, 2 * MIB + 4096, 0, 0, 0));
    at = reserve(4 * SIZE);
    say("map half of the allocation", cuMemMap(at + 2 * SIZE, SIZE / 2, 0, handle, 0));
    say("map", cuMemMap(at, SIZE, 0, handle, 0));
    say("map again there", cuMemMap(at, SIZE, 0, handle, 0));
    say("map unaligned", cuMemMap(at + SIZE + 4096, SIZE, 0, handle, 0));
    say("map with an offset", cuMemMap(at + SIZE, SIZE / 2, 2 * MIB, handle, 0));
    say("map more than it has", cuMemMap(at + SIZE, 2 * SIZE, 0, handle, 0));
    say("map unreserved", cuMemMap(0x600000000000, SIZE, 0, handle, 0));
    say("access half", give(at, SIZE / 2, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, 3));
    say("access HOST_NUMA node 9", give(at, SIZE, CU_MEM_LOCATION_TYPE_HOST_NUMA, 9, 3));
    say("access HOST", give(at, SIZE, CU_MEM_LOCATION_TYPE_HOST, 0, 3));
    say("access GPU 0 without a context", give(at, SIZE, CU_MEM_LOCATION_TYPE_DEVICE, 0, 3));
    say("access GPU 99", give(at, SIZE, CU_MEM_LOCATION_TYPE_DEVICE, 99, 3));
    say("access unmapped", give(at + SIZE, SIZE, CU_MEM_LOCATION_TYPE_HOST, 0, 3));
    say("unmap half", cuMemUnmap(at, SIZE / 2));
    say("free the reservation while mapped", cuMemAddressFree(at, 4 * SIZE));
    say("unmap", cuMemUnmap(at, SIZE));
    say("unmap again", cuMemUnmap(at, SIZE));
    say("free a part of the reservation", cuMemAddressFree(at, SIZE));
    say("release", cuMemRelease(handle));
}

static void gpu_mapping_for_cpu(void) {
    CUmemAllocationProp prop = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr at;
    int fd = -1;

    start();
    cuMemCreate(&handle, SIZE, &prop, 0);
    at = reserve(SIZE);
    cuMemMap(at, SIZE, 0, handle, 0);
    say("GPU memory, access HOST", give(at, SIZE, CU_MEM_LOCATION_TYPE_HOST, 0, 3));
    say("GPU memory, access HOST_NUMA", give(at, SIZE, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, 3));
    say("export without a handle type", cuMemExportToShareableHandle(&fd, handle, 1, 0));
}

static void sharing(void) {
    CUmemGenericAllocationHandle handle, other = 0;
    int fd = -1, ends[2], memfd = memfd_create("probe", 0);
    struct stat stat = {0};

    cuInit(0);
    handle = numa_handle();
    say("export", cuMemExportToShareableHandle(&fd, handle, 1, 0));
    say("fstat", fstat(fd, &stat));
    say("the descriptor's file type", (long)(stat.st_mode & S_IFMT));
    say("the descriptor's size", (long)stat.st_size);
    say("the descriptor is CLOEXEC", fcntl(fd, F_GETFD) & FD_CLOEXEC);
    errno = 0;
    say("its mmap fails", mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
    say("with errno", errno);
    say("import in the same process",
        cuMemImportFromShareableHandle(&other, (void *)(intptr_t)fd, 1));
    say("to the same handle", other == handle);
    say("import -1", cuMemImportFromShareableHandle(&other, (void *)(intptr_t)-1, 1));
    say("import a pipe",
        pipe(ends) || cuMemImportFromShareableHandle(&other, (void *)(intptr_t)ends[0], 1));
    say("import a memfd", ftruncate(memfd, SIZE) ||
                              cuMemImportFromShareableHandle(&other, (void *)(intptr_t)memfd, 1));
}

static void attributes_of(const char *what, CUdeviceptr address) {
    static const struct {
        CUpointer_attribute attribute;
        const char *name;
    } asked[] = {{1, "context set"},       {2, "memory type"}, {3, "device pointer same"},
                 {4, "host pointer same"}, {8, "managed"},     {9, "ordinal"},
                 {11, "range start same"}, {12, "range size"}, {13, "mapped"}};
    char text[128];

    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        unsigned long long value = 0;
        int result = (int)cuPointerGetAttribute(&value, asked[i].attribute, address);

        if (strstr(asked[i].name, "same"))
            value = value == address;
        else if (asked[i].attribute == 1)
            value = value != 0;
        snprintf(text, sizeof text, "%s: %s%s", what, asked[i].name, result ? " (error)" : "");
        say(text, result ? result : (int)value);
    }
}

static void attributes(void) {
    char *host = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;

    start();
    attributes_of("plain host", (CUdeviceptr)(uintptr_t)host);
    attributes_of("cuMemAlloc", device_bytes(1000));
    cuMemHostRegister_v2(host, MIB, 0);
    attributes_of("registered", (CUdeviceptr)(uintptr_t)host);
    handle = numa_handle();
    at = reserve(SIZE);
    attributes_of("reserved", at);
    cuMemMap(at, SIZE, 0, handle, 0);
    attributes_of("host VMM without access", at);
    give(at, SIZE, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, 3);
    attributes_of("host VMM with CPU access", at);
    give(at, SIZE, CU_MEM_LOCATION_TYPE_DEVICE, 0, 3);
    attributes_of("host VMM with GPU access", at);
    say("register VMM memory", cuMemHostRegister_v2((void *)(uintptr_t)at, SIZE, 0));
}

static void registration(void) {
    char *host = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr device;
    unsigned flags;
    CUstream stream;

    start();
    device = device_bytes(4 * MIB);
    cuStreamCreate(&stream, 1);
    say("register", cuMemHostRegister_v2(host, MIB, 0));
    say("register the next", cuMemHostRegister_v2(host + MIB, MIB, 0));
    say("register over both", cuMemHostRegister_v2(host + MIB / 2, MIB, 0));
    say("register odd bytes", cuMemHostRegister_v2(host + 4 * MIB + 17, 4099, 0));
    say("register overlapping pages only", cuMemHostRegister_v2(host + 4 * MIB + 6000, 4096, 0));
    say("flags of plain memory", cuMemHostGetFlags(&flags, host + 7 * MIB));
    say("copy over two registrations", cuMemcpyHtoDAsync_v2(device, host + MIB / 2, MIB, stream));
    say("copy out of a registration",
        cuMemcpyHtoDAsync_v2(device, host + 3 * MIB / 2, MIB, stream));
    say("copy into a registration",
        cuMemcpyHtoDAsync_v2(device, host + 4 * MIB - 4096, 16384, stream));
    say("synchronize", cuStreamSynchronize(stream));
    say("unregister inside", cuMemHostUnregister(host + 4096));
    say("unregister", cuMemHostUnregister(host));
    say("unregister again", cuMemHostUnregister(host));
    say("register unmapped", munmap(host, MIB) || cuMemHostRegister_v2(host, MIB, 0));
}

static void copies(void) {
    CUdeviceptr device;
    char host[64] = {0};

    start();
    device = device_bytes(4 * MIB);
    say("HtoD to host", cuMemcpyHtoD_v2((CUdeviceptr)(uintptr_t)host, host + 8, 8));
    say("HtoD from device", cuMemcpyHtoD_v2(device, (void *)(uintptr_t)(device + 64), 8));
    say("cuMemcpy host to host",
        cuMemcpy((CUdeviceptr)(uintptr_t)host, (CUdeviceptr)(uintptr_t)host + 32, 8));
    say("free inside", cuMemFree_v2(device + 4096));
    say("copy past the end", cuMemcpyDtoD_v2(device + 4 * MIB - 8, device, 64));
    say("free", cuMemFree_v2(device));
    say("free again", cuMemFree_v2(device));
    say("copy from freed", cuMemcpyDtoH_v2(host, device, 8));
}

static void copy_without_access(void) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at, device;
    CUstream stream;

    start();
    device = device_bytes(SIZE);
    handle = numa_handle();
    at = reserve(2 * SIZE);
    cuMemMap(at, SIZE, 0, handle, 0);
    cuStreamCreate(&stream, 1);
    say("copy without any access", cuMemcpyAsync(device, at, MIB, stream));
    say("and synchronize", cuStreamSynchronize(stream));
    give(at, SIZE, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, 3);
    say("copy with CPU access only", cuMemcpyAsync(device, at, MIB, stream));
    say("and synchronize", cuStreamSynchronize(stream));
    say("copy from unmapped", cuMemcpyAsync(device, at + SIZE, MIB, stream));
    say("and synchronize", cuStreamSynchronize(stream));
}

static void batches(void) {
    CUdeviceptr from = 0, to = 0, froms[2], tos[2];
    size_t sizes[2] = {64, 64}, indexes[1] = {0};
    CUmemcpyAttributes attrs[1] = {{.srcAccessOrder = 1}};
    CUstream stream;

    start();
    from = device_bytes(MIB);
    to = device_bytes(MIB);
    cuStreamCreate(&stream, 1);
    froms[0] = froms[1] = from;
    tos[0] = to;
    tos[1] = to + 64;
    say("batch", cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, attrs, indexes, 1, stream));
    say("batch in the NULL stream",
        cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, attrs, indexes, 1, NULL));
    say("batch of none", cuMemcpyBatchAsync_v2(tos, froms, sizes, 0, attrs, indexes, 1, stream));
    say("batch without attributes",
        cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, NULL, NULL, 0, stream));
    attrs[0].srcAccessOrder = 0;
    say("batch of order 0", cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, attrs, indexes, 1, stream));
    attrs[0].srcAccessOrder = 1;
    sizes[1] = 0;
    say("batch with an empty copy",
        cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, attrs, indexes, 1, stream));
    sizes[1] = 2 * MIB;
    say("batch past the end",
        cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, attrs, indexes, 1, stream));
    say("and synchronize", cuStreamSynchronize(stream));
}

/* ---- which calls disturb the capture of another thread ---- */
static CUdeviceptr scratch;
static CUstream other_stream;
static CUevent other_event;
static char scratch_host[1 << 16];

static CUresult disturb(int which) {
    CUmemAllocationProp prop = {
        .type = 1, .requestedHandleTypes = 1, .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = 0;
    CUevent event;
    CUstream stream;
    int value;

    switch (which) {
    case 0:
        return cuMemAlloc_v2(&address, 4096);
    case 1:
        return cuMemcpyHtoD_v2(scratch, scratch_host, 64);
    case 2:
        return cuMemcpyHtoDAsync_v2(scratch, scratch_host, 64, other_stream);
    case 3:
        return cuStreamSynchronize(other_stream);
    case 4:
        return cuStreamQuery(other_stream);
    case 5:
        return cuEventQuery(other_event);
    case 6:
        return cuEventSynchronize(other_event);
    case 7:
        return cuEventRecord(other_event, other_stream);
    case 8:
        return cuEventCreate(&event, 0);
    case 9:
        return cuStreamCreate(&stream, 1);
    case 10:
        return cuMemHostRegister_v2(scratch_host, sizeof scratch_host, 0);
    case 11:
        return cuMemCreate(&handle, SIZE, &prop, 0);
    case 12:
        return cuMemAddressReserve(&address, SIZE, 0, 0, 0);
    case 13:
        return cuPointerGetAttribute(&value, 2, scratch);
    case 14:
        return cuCtxSynchronize();
    case 15:
        return cuMemHostAlloc((void **)&address, 4096, 0);
    default:
        return cuMemcpyDtoDAsync_v2(scratch, scratch + 4096, 64, other_stream);
    }
}

static const char *const disturbances[] = {
    "cuMemAlloc",          "cuMemcpyHtoD",          "cuMemcpyHtoDAsync",  "cuStreamSynchronize",
    "cuStreamQuery",       "cuEventQuery",          "cuEventSynchronize", "cuEventRecord",
    "cuEventCreate",       "cuStreamCreate",        "cuMemHostRegister",  "cuMemCreate",
    "cuMemAddressReserve", "cuPointerGetAttribute", "cuCtxSynchronize",   "cuMemHostAlloc",
    "cuMemcpyDtoDAsync"};

static void *in_other_thread(void *which) {
    start();
    return (void *)(intptr_t)disturb((int)(intptr_t)which);
}

static void captures(void) {
    char text[96];

    start();
    scratch = device_bytes(MIB);
    cuStreamCreate(&other_stream, 1);
    cuEventCreate(&other_event, 0);
    cuEventRecord(other_event, other_stream);
    cuStreamSynchronize(other_stream);
    for (int i = 0; i < (int)(sizeof disturbances / sizeof disturbances[0]); i++) {
        CUgraph graph = NULL;
        CUstream stream;
        pthread_t thread;
        void *result;

        cuStreamCreate(&stream, 1);
        cuStreamBeginCapture_v2(stream, 0);
        pthread_create(&thread, NULL, in_other_thread, (void *)(intptr_t)i);
        pthread_join(thread, &result);
        snprintf(text, sizeof text, "%s during a capture: result*1000 + end of the capture",
                 disturbances[i]);
        say(text, (long)(intptr_t)result * 1000 + (long)cuStreamEndCapture(stream, &graph));
    }
}

static void contexts(void) {
    CUcontext primary, second = NULL, seen = NULL;
    CUstream stream;
    CUevent event;
    CUdeviceptr device;

    start();
    cuCtxGetCurrent(&primary);
    device = device_bytes(4096);
    cuEventCreate(&event, 0);
    cuStreamCreate(&stream, 1);
    say("second context", cuCtxCreate_v2(&second, 0, 0));
    say("event into another context's stream", cuEventRecord(event, stream));
    say("fill in another context's stream", cuMemsetD8Async(device, 1, 64, stream));
    say("query of another context's stream", cuStreamQuery(stream));
    cuStreamCreate(&stream, 1);
    say("event of another context", cuEventRecord(event, stream));
    say("fill of another context's memory", cuMemsetD8_v2(device, 1, 64));
    say("set NULL current", cuCtxSetCurrent(NULL));
    say("then current", cuCtxGetCurrent(&seen) || seen == NULL ? 0 : seen == primary ? 1 : 2);
    cuCtxPopCurrent_v2(NULL);
    cuCtxPopCurrent_v2(NULL);
    say("pop of nothing", cuCtxPopCurrent_v2(&seen));
    say("alloc without a context", cuMemAlloc_v2(&device, 64));
    say("sync of a stream without a context", cuStreamSynchronize(stream));
}

/* Last, since a real driver may crash. */
static void stale_handles(void) {
    CUmemGenericAllocationHandle handle;

    start();
    handle = numa_handle();
    cuMemRelease(handle);
    say("release again", cuMemRelease(handle));
}

static void stale_stream(void) {
    CUstream stream;

    start();
    cuStreamCreate(&stream, 1);
    cuStreamDestroy_v2(stream);
    say("query of a destroyed stream", cuStreamQuery(stream));
}

int main(void) {
    static void (*const groups[])(void) = {
        before_init, addresses,  after_fork,   mapping,       gpu_mapping_for_cpu,
        sharing,     attributes, registration, copies,        copy_without_access,
        batches,     captures,   contexts,     stale_handles, stale_stream};

    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        int status = 0;

        if (!fork()) {
            groups[i]();
            _exit(0);
        }
        wait(&status);
        if (status)
            printf("group %zu ended with status %d\n", i, status);
        fflush(stdout);
    }
    return 0;
}
