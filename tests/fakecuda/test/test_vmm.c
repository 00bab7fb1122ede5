/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: VMM memory obeys its rules of alignment, access, mapping, reference counts and sharing
 * between processes. */
#include "expect.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE (4 * MIB)

Test(vmm, needs_no_context) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;

    good(cuInit(0));
    address = numa_bytes(SIZE, &handle);
    allow_host(address, SIZE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    memset((void *)(uintptr_t)address, 7, SIZE);
    cr_assert_eq(fakecuda_contexts(), 0);
    cr_assert_eq(fakecuda_violations(), 0);
}

Test(vmm, no_access_until_set, .signal = SIGSEGV) {
    CUmemGenericAllocationHandle handle;

    good(cuInit(0));
    *(volatile char *)(uintptr_t)numa_bytes(SIZE, &handle) = 1;
}

Test(vmm, read_access_is_no_write_access, .signal = SIGSEGV) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;

    good(cuInit(0));
    address = numa_bytes(SIZE, &handle);
    allow_host(address, SIZE, CU_MEM_ACCESS_FLAGS_PROT_READ);
    cr_assert_eq(*(volatile char *)(uintptr_t)address, 0);
    *(volatile char *)(uintptr_t)address = 1;
}

Test(vmm, gpu_needs_access) {
    CUmemGenericAllocationHandle handle;
    unsigned long long flags = 9;
    CUdeviceptr address, device;
    CUmemLocation gpu = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};

    start(0);
    device = device_bytes(MIB);
    address = numa_bytes(SIZE, &handle);
    broke(cuMemcpy(device, address, MIB), CUDA_ERROR_INVALID_VALUE, "no read access");
    good(cuMemGetAccess(&flags, &gpu, address));
    cr_assert_eq(flags, 0);
    allow_device(address, SIZE, 1);
    broke(cuMemcpy(device, address, MIB), CUDA_ERROR_INVALID_VALUE, "GPU 0 has no read access");
    allow_device(address, SIZE, 0);
    good(cuMemcpy(device, address, MIB));
}

static CUresult create(CUmemLocationType type, int id, size_t size, int handle_types) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = handle_types,
                                .location = {.type = type, .id = id}};
    CUmemGenericAllocationHandle handle;

    return cuMemCreate(&handle, size, &prop, 0);
}

Test(vmm, what_cannot_be_created) {
    setenv("FAKECUDA_LOG", "/dev/null", 1);
    setenv("FAKECUDA_NUMA_NODES", "1", 1);
    good(cuInit(0));
    broke(create(CU_MEM_LOCATION_TYPE_DEVICE, 0, 4096, 0), CUDA_ERROR_INVALID_VALUE, "granularity");
    broke(create(CU_MEM_LOCATION_TYPE_DEVICE, 2, SIZE, 0), CUDA_ERROR_INVALID_DEVICE,
          "no such device");
    broke(create(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0, SIZE, 0), CUDA_ERROR_INVALID_VALUE,
          "location type");
    broke(create(CU_MEM_LOCATION_TYPE_HOST, 0, SIZE, 1), CUDA_ERROR_INVALID_VALUE,
          "no shareable handles");
    good(create(CU_MEM_LOCATION_TYPE_HOST, 0, SIZE, 0));
    cr_assert_eq(create(CU_MEM_LOCATION_TYPE_HOST_NUMA, 1, SIZE, 1), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(create(CU_MEM_LOCATION_TYPE_DEVICE, 0, SIZE, CU_MEM_HANDLE_TYPE_FABRIC),
                 CUDA_ERROR_NOT_SUPPORTED);
}

Test(vmm, mapping_rules) {
    CUmemGenericAllocationHandle handle, again;
    CUdeviceptr address, other = 0;
    CUmemAccessDesc cpu = {.location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA}, .flags = 3};

    setenv("FAKECUDA_LOG", "/dev/null", 1);
    good(cuInit(0));
    address = numa_bytes(SIZE, &handle);
    good(cuMemAddressReserve(&other, 2 * SIZE, 0, 0, 0));
    broke(cuMemMap(address, SIZE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE, "mapped");
    broke(cuMemMap(other + 4096, SIZE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE, "aligned");
    broke(cuMemMap(other, SIZE + 1, 0, handle, 0), CUDA_ERROR_INVALID_VALUE, "aligned");
    broke(cuMemMap(other, SIZE, 2 * MIB, handle, 0), CUDA_ERROR_NOT_SUPPORTED, "only a whole");
    broke(cuMemMap(other, 2 * SIZE, 0, handle, 0), CUDA_ERROR_NOT_SUPPORTED, "only a whole");
    broke(cuMemMap(other + 2 * SIZE, SIZE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE, "reservation");
    broke(cuMemMap(other, SIZE, 0, 77, 0), CUDA_ERROR_INVALID_VALUE, "not an allocation");
    broke(cuMemSetAccess(other, SIZE, &cpu, 1), CUDA_ERROR_INVALID_VALUE, "nothing is mapped");
    broke(cuMemSetAccess(address, SIZE / 2, &cpu, 1), CUDA_ERROR_INVALID_VALUE, "a part of");
    broke(cuMemUnmap(address, SIZE / 2), CUDA_ERROR_INVALID_VALUE, "a part of");
    broke(cuMemAddressFree(address, SIZE), CUDA_ERROR_INVALID_VALUE, "still mapped");
    good(cuMemRelease(handle));
    broke(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE, "released already");
    broke(cuMemMap(other, SIZE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE, "released already");
    good(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)address));
    good(cuMemRelease(again));
    good(cuMemUnmap(address, SIZE));
    broke(cuMemUnmap(address, SIZE), CUDA_SUCCESS, "nothing is mapped");
    good(cuMemAddressFree(address, SIZE));
    broke(cuMemAddressFree(address, SIZE), CUDA_ERROR_INVALID_VALUE, "not reserved");
}

Test(vmm, memory_lives_while_mapped_or_held) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    char byte = 42;

    good(cuInit(0));
    address = numa_bytes(SIZE, &handle);
    good(cuMemRelease(handle));
    cr_assert_eq(fakecuda_poke(address, &byte, 1), 0);
    allow_host(address, SIZE, CU_MEM_ACCESS_FLAGS_PROT_READ);
    cr_assert_eq(*(volatile char *)(uintptr_t)address, 42);
    good(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address));
    good(cuMemUnmap(address, SIZE));
    good(cuMemMap(address, SIZE, 0, handle, 0));
    byte = 0;
    cr_assert_eq(fakecuda_peek(&byte, address, 1), 0);
    cr_assert_eq(byte, 42);
}

Test(vmm, cpu_gets_no_device_memory) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemAccessDesc cpu = {.location = {.type = CU_MEM_LOCATION_TYPE_HOST}, .flags = 3};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = 0;
    int fd;

    setenv("FAKECUDA_LOG", "/dev/null", 1);
    good(cuInit(0));
    good(cuMemCreate(&handle, SIZE, &prop, 0));
    good(cuMemAddressReserve(&address, SIZE, 0, 0, 0));
    good(cuMemMap(address, SIZE, 0, handle, 0));
    broke(cuMemSetAccess(address, SIZE, &cpu, 1), CUDA_ERROR_NOT_SUPPORTED, "device memory");
    broke(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          CUDA_ERROR_INVALID_VALUE, "created without");
}

/* As seen on an H200 with driver 580. */
Test(vmm, addresses_are_given_as_wanted) {
    const CUdeviceptr wanted = 0x5a000000000ULL;
    CUdeviceptr address = 0, other = 0;

    good(cuInit(0));
    good(cuMemAddressReserve(&address, SIZE, 0, 0, 0));
    cr_assert_eq(address, 0x302000000ULL);
    good(cuMemAddressReserve(&other, SIZE, 0, wanted, 0));
    cr_assert_eq(other, wanted);
    good(cuMemAddressReserve(&address, SIZE, 0, wanted, 0));
    cr_assert_neq(address, wanted, "it is taken");
    good(cuMemAddressFree(other, SIZE));
    good(cuMemAddressReserve(&address, SIZE, 0, wanted - 2 * MIB, 0));
    cr_assert_eq(address, wanted, "rounded up");
    broke(cuMemAddressReserve(&address, SIZE, 16 * MIB, wanted + 2 * MIB, 0),
          CUDA_ERROR_INVALID_VALUE, "no multiple of the alignment");
}

Test(vmm, copy_over_two_mappings) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    unsigned char sent[256], back[256];
    CUmemGenericAllocationHandle a, b;
    CUdeviceptr address = 0;

    start(0);
    good(cuMemCreate(&a, 2 * MIB, &prop, 0));
    good(cuMemCreate(&b, 2 * MIB, &prop, 0));
    good(cuMemAddressReserve(&address, 6 * MIB, 0, 0, 0));
    good(cuMemMap(address, 2 * MIB, 0, a, 0));
    good(cuMemMap(address + 2 * MIB, 2 * MIB, 0, b, 0));
    allow_device(address, 4 * MIB, 0);
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (unsigned char)i;
    good(cuMemcpyHtoD_v2(address + 2 * MIB - 128, sent, sizeof sent));
    good(cuMemcpyDtoH_v2(back, address + 2 * MIB - 128, sizeof back));
    cr_assert_arr_eq(sent, back, sizeof sent);
    broke(cuMemcpyHtoD_v2(address + 4 * MIB - 128, sent, sizeof sent), CUDA_ERROR_INVALID_VALUE,
          "passes the end");
    broke(cuMemcpyHtoD_v2(address + 4 * MIB, sent, sizeof sent), CUDA_ERROR_INVALID_VALUE,
          "reserved");
}

static void send_fd(int socket, int fd) {
    char control[CMSG_SPACE(sizeof fd)] = {0}, byte = 1;
    struct iovec data = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    cr_assert_eq(sendmsg(socket, &message, 0), 1);
}

static int receive_fd(int socket) {
    char control[CMSG_SPACE(sizeof(int))], byte;
    struct iovec data = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    int fd = -1;

    if (recvmsg(socket, &message, 0) == 1 && CMSG_FIRSTHDR(&message))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* In another process: import, map, read what the exporter wrote, write an answer. 0 when all is
 * well. */
static int importer(int socket) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = 0;
    int fd = receive_fd(socket);
    CUmemAccessDesc cpu = {.location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA}, .flags = 3};

    if (mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED)
        return 2;
    if (cuInit(0) || cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, 1))
        return 3;
    close(fd);
    if (cuMemAddressReserve(&address, SIZE, 0, 0, 0) || cuMemMap(address, SIZE, 0, handle, 0) ||
        cuMemSetAccess(address, SIZE, &cpu, 1) || cuMemRelease(handle))
        return 4;
    if (strcmp((char *)(uintptr_t)address + SIZE - 64, "from the exporter") != 0)
        return 5;
    strcpy((char *)(uintptr_t)address, "from the importer");
    return cuMemUnmap(address, SIZE) || cuMemAddressFree(address, SIZE) || fakecuda_violations()
               ? 6
               : 0;
}

Test(vmm, export_and_import_between_processes, .timeout = 20) {
    CUmemGenericAllocationHandle handle;
    int sockets[2], status, fd = -1;
    CUdeviceptr address;
    pid_t pid;

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    pid = fork();
    if (!pid)
        _exit(importer(sockets[1]));
    good(cuInit(0));
    address = numa_bytes(SIZE, &handle);
    allow_host(address, SIZE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    strcpy((char *)(uintptr_t)address + SIZE - 64, "from the exporter");
    good(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    send_fd(sockets[0], fd);
    waitpid(pid, &status, 0);
    cr_assert_eq(status, 0, "the importer says %d", WEXITSTATUS(status));
    cr_assert_str_eq((char *)(uintptr_t)address, "from the importer");
}

Test(vmm, foreign_descriptors_are_refused) {
    CUmemGenericAllocationHandle handle;
    int memfd = memfd_create("foreign", MFD_CLOEXEC), ends[2];

    setenv("FAKECUDA_LOG", "/dev/null", 1);
    good(cuInit(0));
    cr_assert_eq(ftruncate(memfd, SIZE), 0);
    cr_assert_eq(pipe(ends), 0);
    broke(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)memfd, 1),
          CUDA_ERROR_INVALID_VALUE, "not of an exported");
    broke(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)ends[0], 1),
          CUDA_ERROR_INVALID_VALUE, "not of an exported");
    broke(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)-1, 1), CUDA_ERROR_UNKNOWN,
          "not of an exported");
}
