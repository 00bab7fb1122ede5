/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver and its GPUs, as far as GPU copies and stores on CUDA host memory need them.
 * cuInit is called and no context made: nothing here shows up on a GPU. Each NUMA node is asked for
 * one granule, which is given back: what the attributes promise, a container may forbid.
 */
#include "tools/doctor.h"

#include "env/cuda.h"
#include "env/env.h"
#include "segment/cumem.h"
#include "tools/tool.h"

#include <numa.h>
#include <stdlib.h>

static bool on_cumem(const struct tp_config *config) {
    return config->store.half == TP_HALF_ON && config->store.kind == TP_SEGMENT_CUMEM;
}

/* The driver, ready for questions; NULL when there is none, with the finding made. */
static const struct tp_cuda *open_driver(const struct tp_config *config,
                                         struct findings *findings) {
    enum finding_level missing = on_cumem(config) ? FINDING_FAIL : FINDING_OK;
    bool unusable = false;
    const struct tp_cuda *cuda = tp_cuda(true, &unusable);
    int version = 0;

    if (!cuda || !tp_cuda_has(TP_CUDA_COPY)) {
        finding_add(findings, unusable || cuda ? FINDING_WARN : missing, "gpu driver",
                    missing == FINDING_OK ? NULL
                                          : "MC_STORE_CUMEM_SOCKET_DIR needs it: start the "
                                            "container with --gpus all, or mount libcuda.so.1",
                    unusable || cuda ? "libcuda.so.1 is too old for GPU copies"
                                     : "no libcuda.so.1: host memory only");
        return NULL;
    }
    tp_cu_result result = cuda->init(0);
    if (result != TP_CUDA_SUCCESS) {
        finding_add(findings, missing, "gpu driver",
                    missing == FINDING_OK ? NULL
                                          : "the store needs a GPU that it can see: --gpus all",
                    "libcuda.so.1 is there, cuInit: %s", tp_cuda_error(result));
        return NULL;
    }
    (void)cuda->driver_get_version(&version);
    finding_add(findings, FINDING_OK, "gpu driver", NULL, "libcuda.so.1 for CUDA %d.%d",
                version / 1000, version % 1000 / 10);
    return cuda;
}

static void check_batch_call(const struct tp_cuda *cuda, struct findings *findings) {
    bool there = cuda->memcpy_batch;

    finding_add(findings, there ? FINDING_OK : FINDING_WARN, "gpu batch copies",
                there ? NULL : "copies are sent one by one: a driver for CUDA 12.8 has the call",
                "cuMemcpyBatchAsync %s", there ? "is there" : "is missing");
}

static void check_devices(const struct tp_cuda *cuda, const struct tp_config *config,
                          struct findings *findings) {
    int count = 0;

    (void)cuda->device_get_count(&count);
    for (int i = 0; i < count; i++) {
        tp_cu_device device = 0;
        int pageable = 0;
        int numa = 0;
        char what[32];
        (void)snprintf(what, sizeof(what), "gpu %d", i);
        if (cuda->device_get(&device, i) != TP_CUDA_SUCCESS) {
            continue;
        }
        (void)cuda->device_get_attribute(&pageable, TP_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
                                         device);
        (void)cuda->device_get_attribute(
            &numa, TP_CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
        bool lacks = on_cumem(config) && !numa;
        finding_add(
            findings, lacks ? FINDING_WARN : FINDING_OK, what,
            lacks ? "this driver may refuse to make the store's memory: CUDA 12.2 or newer" : NULL,
            "CUDA host memory %s; %s", numa ? "on NUMA nodes" : "on NUMA nodes is not supported",
            pageable ? "reads any host memory by itself"
                     : "host memory of other kinds goes through pinned bounce buffers");
    }
}

/* What Mooncake's store service is told to allocate; 0: not said in this environment. */
static uint64_t store_bytes(void) {
    const char *text = getenv("MOONCAKE_GLOBAL_SEGMENT_SIZE");
    char *end = NULL;
    uint64_t bytes = text ? strtoull(text, &end, 10) : 0;

    return text && end != text && *end == '\0' ? bytes : 0;
}

static void check_node(const struct tp_cuda *cuda, int node, uint64_t share,
                       enum finding_level refused, struct findings *findings) {
    uint64_t page = 0;
    tp_cu_result result = tp_cumem_probe_node(cuda, node, &page);
    long long unused = 0;
    char what[48];
    char free_text[16];
    char share_text[16];

    (void)snprintf(what, sizeof(what), "gpu host memory %d", node);
    if (result != TP_CUDA_SUCCESS) {
        finding_add(findings, refused, what,
                    "if the node has memory, start the container with --cap-add SYS_NICE",
                    "NUMA node %d gives none: %s", node, tp_cuda_error(result));
        return;
    }
    bool known = numa_node_size64(node, &unused) >= 0 && unused > 0;
    bool little = share && known && (uint64_t)unused < share;
    finding_add(findings, little ? FINDING_WARN : FINDING_OK, what,
                little ? "make the store smaller (MOONCAKE_GLOBAL_SEGMENT_SIZE), or name fewer "
                         "nodes (MC_STORE_CUMEM_NUMA_NODES)"
                       : NULL,
                "NUMA node %d gives memory that can be exported; %s free%s%s", node,
                known ? text_bytes((uint64_t)unused, free_text) : "unknown",
                share ? ", the store's share is " : "", share ? text_bytes(share, share_text) : "");
}

static void check_nodes(const struct tp_cuda *cuda, const struct tp_config *config,
                        struct findings *findings) {
    int nodes[TP_MAX_NODES];
    unsigned count = tp_host_memory_nodes(nodes);

    if (!tp_cuda_has(TP_CUDA_VMM)) {
        finding_add(findings, on_cumem(config) ? FINDING_FAIL : FINDING_WARN, "gpu host memory",
                    "stores on CUDA host memory need a driver for CUDA 12.2 or newer",
                    "this driver has no virtual memory management");
        return;
    }
    if (on_cumem(config) && config->store.node_count) {
        count = config->store.node_count;
    }
    for (unsigned i = 0; i < count; i++) {
        int node = on_cumem(config) && config->store.node_count ? config->store.nodes[i] : nodes[i];
        check_node(cuda, node, on_cumem(config) ? store_bytes() / count : 0,
                   on_cumem(config) && count == 1 ? FINDING_FAIL : FINDING_WARN, findings);
    }
}

void doctor_gpu(const struct tp_config *config, struct findings *findings) {
    const struct tp_cuda *cuda = open_driver(config, findings);

    if (cuda) {
        check_batch_call(cuda, findings);
        check_devices(cuda, config, findings);
        check_nodes(cuda, config, findings);
    }
}
