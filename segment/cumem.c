/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments of CUDA VMM host memory (cuMemCreate with location HOST_NUMA): GPUs copy from and to it
 * at full speed with no registration, and other processes import its fds.
 *
 * Facts, measured on driver 580: cuInit is enough for all calls here, no context is needed and none
 * comes to be, so the store does not appear on any GPU; making 1 GiB takes 0.31 s; the granularity
 * is 2 MiB; a mapping keeps its memory without the handle. cuMemAddressReserve gives 0x302000000
 * each time to a process that wants no address in particular. A wanted one is kept to where it is
 * free and a multiple of 32 MiB; another is rounded up to that, one that is no multiple of the
 * alignment asked for is refused, and in place of one that is taken another is given, so such
 * memory cannot be laid over memory that exists.
 *
 * It must not know: the table of segments, publishing, the server, who frees it.
 */
#include "segment/cumem.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "segment/addresses.h"
#include "segment/backing.h"
#include "segment/crew.h"
#include "segment/placement.h"

#define WANTED_UNIT (UINT64_C(32) << 20) /* wanted addresses are multiples of it */
#define WANTED_TRIES 4                   /* where the driver gives others */

struct build {
    const struct tp_cuda *cuda;
    struct tp_placement placement;
    struct tp_pieces pieces;
    atomic_flag said; /* why a piece could not be made */
};

static struct tp_cu_allocation_prop prop_of(int node) {
    return (struct tp_cu_allocation_prop){.type = TP_CU_ALLOCATION_PINNED,
                                          .handle_types = TP_CU_HANDLE_POSIX_FD,
                                          .location = {TP_CU_LOCATION_HOST_NUMA, node}};
}

/* ---- the driver
 * -------------------------------------------------------------------------------------------------------
 */

static int open_driver(const struct tp_cuda **ret_cuda) {
    bool unusable = false;
    const struct tp_cuda *cuda = tp_cuda(true, &unusable);
    if (cuda == NULL && !unusable) {
        tp_log(
            TP_LOG_ERROR,
            "MC_STORE_CUMEM_SOCKET_DIR needs the CUDA driver, and libcuda.so.1 cannot be loaded: "
            "give the container the driver's libraries (NVIDIA_DRIVER_CAPABILITIES=compute), or "
            "use MC_STORE_SHM_SEGMENT_DIR");
        return -ENOENT;
    }
    if (cuda == NULL || !tp_cuda_has(TP_CUDA_VMM) || cuda->init == NULL) {
        tp_log(TP_LOG_ERROR,
               "MC_STORE_CUMEM_SOCKET_DIR: this CUDA driver has no virtual memory management "
               "(cuMemCreate and others; CUDA 12.2 or newer is needed)");
        return -ENOTSUP;
    }
    tp_cu_result result = cuda->init(0);
    if (result != TP_CUDA_SUCCESS) {
        tp_log(
            TP_LOG_ERROR,
            "MC_STORE_CUMEM_SOCKET_DIR: cuInit failed: %s; the store needs a GPU that it can see "
            "(it makes no context there), or use MC_STORE_SHM_SEGMENT_DIR",
            tp_cuda_error(result));
        return -ENODEV;
    }
    *ret_cuda = cuda;
    return 0;
}

tp_cu_result tp_cumem_probe_node(const struct tp_cuda *cuda, int node, uint64_t *ret_page_bytes) {
    struct tp_cu_allocation_prop prop = prop_of(node);
    tp_cu_handle handle = 0;
    size_t granularity = 0;
    tp_cu_result result = cuda->vmm_granularity(&granularity, &prop, TP_CU_GRANULARITY_MINIMUM);
    if (result != TP_CUDA_SUCCESS)
        return result;
    result = cuda->vmm_create(&handle, granularity, &prop, 0);
    if (result != TP_CUDA_SUCCESS)
        return result;
    (void)cuda->vmm_release(handle);
    *ret_page_bytes = granularity;
    return TP_CUDA_SUCCESS;
}

/*
 * Leave out the nodes that cannot hold such memory: nodes without memory or CPUs, and all of them
 * where a container's seccomp profile forbids the NUMA calls that the driver makes (Docker's
 * default profile does).
 */
static int probe_nodes(struct build *build) {
    struct tp_placement *placement = &build->placement;
    tp_cu_result last = TP_CUDA_SUCCESS;
    unsigned kept = 0;
    for (unsigned i = 0; i < placement->count; i++) {
        int node = placement->nodes[i];
        last = tp_cumem_probe_node(build->cuda, node, &build->pieces.page_bytes);
        if (last == TP_CUDA_SUCCESS)
            placement->nodes[kept++] = node;
        else
            tp_log(TP_LOG_WARN,
                   "NUMA node %d gives no CUDA host memory (%s): it is skipped; if it has memory, "
                   "start the container with --cap-add SYS_NICE",
                   node, tp_cuda_error(last));
    }
    if (kept == 0) {
        tp_log(TP_LOG_ERROR,
               "none of %u NUMA nodes gives CUDA host memory (%s): start the container with "
               "--cap-add SYS_NICE, check MC_STORE_CUMEM_NUMA_NODES, or use "
               "MC_STORE_SHM_SEGMENT_DIR",
               placement->count, tp_cuda_error(last));
        return -ENOMEM;
    }
    placement->count = kept;
    return 0;
}

/* ---- the plan
 * ---------------------------------------------------------------------------------------------------------
 */

static uint64_t piece_length(const struct tp_pieces *pieces, uint32_t index) {
    uint64_t start = index * pieces->piece_bytes;
    uint64_t left = pieces->bytes - start;
    return left < pieces->piece_bytes ? left : pieces->piece_bytes;
}

static int plan(struct build *build, uint64_t bytes, uint64_t held_fds,
                const struct tp_config *config) {
    struct tp_pieces *pieces = &build->pieces;
    uint64_t page = pieces->page_bytes;
    if (page < 4096 || (page & (page - 1)) != 0 || bytes == 0 || bytes > UINT64_MAX / 2) {
        tp_log(TP_LOG_ERROR,
               "a segment of %" PRIu64 " bytes in pages of %" PRIu64 " cannot be made", bytes,
               page);
        return -EINVAL;
    }
    pieces->bytes = (bytes + page - 1) / page * page;
    struct tp_need need = {.bytes = pieces->bytes, .piece_bytes = config->store.piece_bytes};
    pieces->piece_bytes = tp_need_piece_bytes(&need, page);
    pieces->node_count = build->placement.count;
    pieces->wire_kind = TP_WIRE_CUMEM;
    pieces->ours = true;
    snprintf(pieces->detail, sizeof pieces->detail, "CUDA host memory");
    int result = tp_pieces_check(pieces, held_fds, false, config->store.overcommit);
    if (result < 0)
        return result;
    pieces->count = (uint32_t)((pieces->bytes - 1) / pieces->piece_bytes + 1);
    pieces->fds = reallocarray(NULL, pieces->count, sizeof *pieces->fds);
    if (pieces->fds == NULL) {
        tp_log(TP_LOG_ERROR, "no memory for the table of %" PRIu32 " pieces", pieces->count);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < pieces->count; i++)
        pieces->fds[i] = -1;
    return 0;
}

/* Addresses at a multiple of `alignment`, at `wanted` if it can be (0: anywhere). A driver that
 * does not keep to the alignment is asked for more room. */
static tp_cu_result reserve_at(struct build *build, uint64_t alignment, uint64_t wanted) {
    struct tp_pieces *pieces = &build->pieces;
    uint64_t bytes = pieces->bytes;
    tp_cu_deviceptr address = 0;
    int mode = tp_cuda_begin(build->cuda);
    tp_cu_result result = build->cuda->vmm_reserve(&address, bytes, alignment, wanted, 0);
    if (result == TP_CUDA_ERROR_INVALID_VALUE && wanted != 0)
        result = build->cuda->vmm_reserve(&address, bytes, alignment, 0, 0);
    if (result == TP_CUDA_SUCCESS && address % alignment != 0) {
        (void)build->cuda->vmm_unreserve(address, bytes);
        bytes += alignment;
        result = build->cuda->vmm_reserve(&address, bytes, 0, 0, 0);
    }
    tp_cuda_end(build->cuda, mode);
    if (result == TP_CUDA_SUCCESS) {
        pieces->reserved = address;
        pieces->reserved_bytes = bytes;
        pieces->base = (void *)(uintptr_t)((address + alignment - 1) / alignment * alignment);
    }
    return result;
}

static void unreserve(struct build *build) {
    int mode = tp_cuda_begin(build->cuda);
    (void)build->cuda->vmm_unreserve(build->pieces.reserved, build->pieces.reserved_bytes);
    tp_cuda_end(build->cuda, mode);
    build->pieces.reserved = 0;
}

/* At drawn addresses; where the driver gives others, such that no earlier store had, if it can be.
 */
static tp_cu_result reserve_fresh(struct build *build, uint64_t alignment,
                                  const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const struct tp_pieces *pieces = &build->pieces;
    uint64_t unit = alignment > WANTED_UNIT ? alignment : WANTED_UNIT;
    for (unsigned i = 1;; i++) {
        uint64_t wanted = 0;
        (void)tp_addresses_draw(config, pieces->bytes, unit, &wanted);
        tp_cu_result result = reserve_at(build, alignment, wanted);
        if (result != TP_CUDA_SUCCESS || (uintptr_t)pieces->base == wanted ||
            tp_addresses_take(config, pieces->base, pieces->bytes, false))
            return result;
        if (i == WANTED_TRIES)
            break;
        unreserve(build);
    }
    tp_log_once(&said, TP_LOG_WARN,
                "the CUDA driver gives a segment of %" PRIu64
                " MiB only addresses that an earlier store had (%p): an engine that has not heard "
                "yet that it is gone may take what lies there for that store's",
                pieces->bytes >> 20, pieces->base);
    (void)tp_addresses_take(config, pieces->base, pieces->bytes, true);
    return TP_CUDA_SUCCESS;
}

static int reserve(struct build *build, uint64_t alignment, const struct tp_config *config) {
    tp_cu_result result = reserve_fresh(build, alignment, config);
    if (result == TP_CUDA_SUCCESS)
        return 0;
    tp_log(TP_LOG_ERROR,
           "no addresses for a segment of %" PRIu64
           " MiB of CUDA host memory: cuMemAddressReserve: %s (ulimit -v?)",
           build->pieces.bytes >> 20, tp_cuda_error(result));
    return -ENOMEM;
}

/* ---- pieces
 * -----------------------------------------------------------------------------------------------------------
 */

/* Map a new allocation, open it to the CPU, and get its fd. On failure *ret_call names the call and
 * nothing is left mapped. */
static tp_cu_result map_piece(const struct tp_cuda *cuda, tp_cu_handle handle,
                              tp_cu_deviceptr address, uint64_t bytes, int *ret_fd,
                              const char **ret_call) {
    struct tp_cu_access cpu = {.location = {TP_CU_LOCATION_HOST, 0},
                               .flags = TP_CU_ACCESS_READWRITE};
    int fd = -1;
    *ret_call = "cuMemMap";
    tp_cu_result result = cuda->vmm_map(address, bytes, 0, handle, 0);
    if (result != TP_CUDA_SUCCESS)
        return result;
    *ret_call = "cuMemSetAccess";
    result = cuda->vmm_access(address, bytes, &cpu, 1);
    if (result == TP_CUDA_SUCCESS) {
        *ret_call = "cuMemExportToShareableHandle";
        result = cuda->vmm_export(&fd, handle, TP_CU_HANDLE_POSIX_FD, 0);
    }
    if (result != TP_CUDA_SUCCESS) {
        (void)cuda->vmm_unmap(address, bytes);
        return result;
    }
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    *ret_fd = fd;
    return TP_CUDA_SUCCESS;
}

static int64_t make_piece(void *arg, uint64_t number) {
    struct build *build = arg;
    struct tp_pieces *pieces = &build->pieces;
    uint32_t index = (uint32_t)number;
    uint64_t bytes = piece_length(pieces, index);
    int node = tp_placement_node(&build->placement, index);
    struct tp_cu_allocation_prop prop = prop_of(node);
    tp_cu_handle handle = 0;
    const char *call = "cuMemCreate";
    int mode = tp_cuda_begin(build->cuda);
    tp_cu_result result = build->cuda->vmm_create(&handle, bytes, &prop, 0);
    if (result == TP_CUDA_SUCCESS) {
        result =
            map_piece(build->cuda, handle, (uintptr_t)pieces->base + index * pieces->piece_bytes,
                      bytes, &pieces->fds[index], &call);
        (void)build->cuda->vmm_release(handle);
    }
    tp_cuda_end(build->cuda, mode);
    if (result == TP_CUDA_SUCCESS)
        return (int64_t)bytes;
    tp_log_once(&build->said, TP_LOG_ERROR,
                "cannot make piece %" PRIu32 " of %" PRIu32 " (%" PRIu64
                " MiB of CUDA host memory on NUMA node %d): %s: %s%s",
                index, pieces->count, bytes >> 20, node, call, tp_cuda_error(result),
                result == TP_CUDA_ERROR_OUT_OF_MEMORY
                    ? "; make the segment smaller or free memory there"
                    : "");
    return -ENOMEM;
}

static int make_pieces(struct build *build) {
    struct tp_crew_work work = {.verb = {"making", "made"},
                                .count = build->pieces.count,
                                .bytes = build->pieces.bytes,
                                .placement = &build->placement,
                                .run = make_piece,
                                .arg = build};
    int result = tp_crew_run(&work);
    if (result == -EAGAIN)
        tp_log_once(
            &build->said, TP_LOG_ERROR,
            "no thread can be started to make a segment (ulimit -u, the cgroup's pids.max)");
    return result;
}

/* Mooncake asks for huge pages of the kernel's pool; the driver has its own. */
static void say_pages(const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (config->store.hugepage_bytes)
        tp_log_once(
            &said, TP_LOG_WARN,
            "MC_STORE_USE_HUGEPAGE is not followed: MC_STORE_CUMEM_SOCKET_DIR wins, and its "
            "segments are memory of the CUDA driver, not of the pool of huge pages");
}

int tp_cumem_build(uint64_t bytes, uint64_t alignment, uint64_t held_fds,
                   const struct tp_config *config, struct tp_pieces *ret_pieces) {
    struct build build = {.said = ATOMIC_FLAG_INIT};
    int result = open_driver(&build.cuda);
    if (result < 0)
        return result;
    say_pages(config);
    tp_placement_choose(config, &build.placement);
    result = probe_nodes(&build);
    if (result == 0)
        result = plan(&build, bytes, held_fds, config);
    if (result == 0)
        result = reserve(&build,
                         alignment > build.pieces.page_bytes ? alignment : build.pieces.page_bytes,
                         config);
    if (result == 0)
        result = make_pieces(&build);
    if (result < 0)
        tp_cumem_remove(&build.pieces);
    else
        *ret_pieces = build.pieces;
    return result;
}

static tp_cu_result open_to(const struct tp_cuda *cuda, const struct tp_pieces *pieces,
                            int device) {
    struct tp_cu_access access = {.location = {TP_CU_LOCATION_DEVICE, device},
                                  .flags = TP_CU_ACCESS_READWRITE};
    tp_cu_result result = TP_CUDA_SUCCESS;
    for (uint32_t i = 0; i < pieces->count && result == TP_CUDA_SUCCESS; i++)
        result = cuda->vmm_access((uintptr_t)pieces->base + i * pieces->piece_bytes,
                                  piece_length(pieces, i), &access, 1);
    return result;
}

uint64_t tp_cumem_open(const struct tp_pieces *pieces, uint64_t devices) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    uint64_t opened = 0;
    if (cuda == NULL)
        return 0;
    int mode = tp_cuda_begin(cuda);
    for (int device = 0; device < TP_CUDA_DEVICES; device++) {
        uint64_t bit = UINT64_C(1) << device;
        tp_cu_result result = devices & bit ? open_to(cuda, pieces, device) : TP_CUDA_SUCCESS;
        if (result == TP_CUDA_SUCCESS)
            opened |= devices & bit;
        else
            tp_log_once(&said, TP_LOG_WARN,
                        "GPU %d cannot be given access to the segment of %" PRIu64
                        " MiB that this process lends: cuMemSetAccess: %s; copies between the two "
                        "may fail, and it is tried again",
                        device, pieces->bytes >> 20, tp_cuda_error(result));
    }
    tp_cuda_end(cuda, mode);
    return opened;
}

void tp_cumem_remove(struct tp_pieces *pieces) {
    const struct tp_cuda *cuda = tp_cuda(false, NULL);
    int mode = cuda != NULL ? tp_cuda_begin(cuda) : 0;
    bool unmapped = true;
    for (uint32_t i = 0; i < pieces->count && cuda != NULL && pieces->fds != NULL; i++) {
        if (pieces->fds[i] < 0)
            continue;
        if (cuda->vmm_unmap((uintptr_t)pieces->base + i * pieces->piece_bytes,
                            piece_length(pieces, i)) != TP_CUDA_SUCCESS)
            unmapped = false;
        close(pieces->fds[i]);
    }
    /* Addresses that are still mapped cannot be given back; the process's end does it. */
    if (cuda != NULL && pieces->reserved != 0 && unmapped)
        (void)cuda->vmm_unreserve(pieces->reserved, pieces->reserved_bytes);
    if (cuda != NULL)
        tp_cuda_end(cuda, mode);
    free(pieces->fds);
    *pieces = (struct tp_pieces){0};
}
