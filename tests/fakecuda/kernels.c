/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that the double can run: a name from the PTX and a C function that does the same to
 * the same memory. A kernel sees memory only through fakecuda_span, which holds it to what its GPU
 * may touch.
 */
#include "state.h"

#include <stdlib.h>
#include <string.h>

#define MAX_KERNELS 32

/* fakecuda_fill(unsigned char *to, unsigned long long bytes, unsigned value): for the double's own
 * tests. */
static void run_fill(struct fakecuda_launch *launch) {
    unsigned long long address, bytes;
    unsigned value;
    void *to;

    memcpy(&address, fakecuda_param(launch, 0), sizeof address);
    memcpy(&bytes, fakecuda_param(launch, 1), sizeof bytes);
    memcpy(&value, fakecuda_param(launch, 2), sizeof value);
    to = fakecuda_span(launch, address, bytes, true);
    if (to)
        memset(to, (int)value, bytes);
}

/* How many of `bytes` lie in the same allocation or mapping as the first. */
static size_t within(CUdeviceptr address, size_t bytes) {
    pthread_mutex_lock(&fc_lock);
    const struct fc_range *range = fc_range_at((uintptr_t)address);
    size_t left = range ? range->size - ((uintptr_t)address - range->address) : bytes;
    pthread_mutex_unlock(&fc_lock);
    return left < bytes ? left : bytes;
}

static bool copy_bytes(struct fakecuda_launch *launch, CUdeviceptr to, CUdeviceptr from,
                       size_t bytes) {
    while (bytes) {
        size_t step = within(to, within(from, bytes));
        void *target = fakecuda_span(launch, to, step, true);
        const void *source = target ? fakecuda_span(launch, from, step, false) : NULL;

        if (!source)
            return false;
        memcpy(target, source, step);
        to += step;
        from += step;
        bytes -= step;
    }
    return true;
}

/* tp_gather(const struct copy *copies, unsigned count, unsigned group): the copy kernel of
 * transport/gather.cu. */
static void run_gather(struct fakecuda_launch *launch) {
    struct {
        unsigned long long to, from, bytes;
    } copy;
    unsigned long long address;
    unsigned count, group;

    memcpy(&address, fakecuda_param(launch, 0), sizeof address);
    memcpy(&count, fakecuda_param(launch, 1), sizeof count);
    memcpy(&group, fakecuda_param(launch, 2), sizeof group);
    if (group < 1 || group > 32)
        launch->error = CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count && launch->error == CUDA_SUCCESS; i++) {
        const void *entry = fakecuda_span(launch, address + i * sizeof copy, sizeof copy, false);

        if (!entry)
            return;
        memcpy(&copy, entry, sizeof copy);
        if (!copy_bytes(launch, copy.to, copy.from, copy.bytes))
            return;
    }
}

static struct fc_kernel kernels[MAX_KERNELS] = {
    {.name = "fakecuda_fill", .run = run_fill, .param_bytes = {8, 8, 4}, .param_count = 3},
    {.name = "tp_gather", .run = run_gather, .param_bytes = {8, 4, 4}, .param_count = 3},
};
static size_t kernel_count = 2;

const struct fc_kernel *fc_kernel_find(const char *name) {
    for (size_t i = 0; i < kernel_count; i++) {
        if (!strcmp(kernels[i].name, name))
            return &kernels[i];
    }
    return NULL;
}

int fakecuda_register_kernel(const char *name, fakecuda_kernel run, const size_t *param_bytes,
                             size_t param_count) {
    struct fc_kernel kernel = {.run = run, .param_count = param_count};
    int result = -1;

    if (strlen(name) >= sizeof kernel.name || param_count > 16)
        return -1;
    memcpy(kernel.name, name, strlen(name) + 1);
    for (size_t i = 0; i < param_count; i++) {
        if (param_bytes[i] > sizeof((struct fakecuda_launch *)NULL)->params[0])
            return -1;
        kernel.param_bytes[i] = param_bytes[i];
    }
    pthread_mutex_lock(&fc_lock);
    if (kernel_count < MAX_KERNELS && !fc_kernel_find(name)) {
        kernels[kernel_count++] = kernel;
        result = 0;
    }
    pthread_mutex_unlock(&fc_lock);
    return result;
}

const void *fakecuda_param(const struct fakecuda_launch *launch, size_t index) {
    return index < launch->kernel->param_count ? launch->params[index] : NULL;
}

void fakecuda_grid(const struct fakecuda_launch *launch, unsigned int grid[3],
                   unsigned int block[3]) {
    memcpy(grid, launch->grid, sizeof launch->grid);
    memcpy(block, launch->block, sizeof launch->block);
}

/* Like a copy's rules, but plain host memory only with HMM, and only one piece: a span is one
 * address. */
static bool may_use(struct fc_call *call, const struct fc_range *range, CUdeviceptr address) {
    if (range && range->kind == FC_RANGE_REGISTERED &&
        (!(range->flags & FC_REGISTER_DEVICEMAP) || !fc_settings()->host_pointers))
        fc_violate(call, CUDA_ERROR_ILLEGAL_ADDRESS,
                   "a kernel touched registered memory at 0x%llx that it has no address of",
                   address);
    else if (!range && !fc_settings()->hmm)
        fc_violate(call, CUDA_ERROR_ILLEGAL_ADDRESS,
                   "a kernel touched unregistered host memory at 0x%llx", address);
    else
        return true;
    return false;
}

static void *span(struct fakecuda_launch *launch, struct fc_call *call, CUdeviceptr address,
                  size_t bytes, bool write) {
    struct fc_span span;
    void *result = NULL;

    if (fc_span_take(call, launch->context, address, bytes, write, FC_SIDE_ANY, &span) !=
        CUDA_SUCCESS)
        return NULL;
    if (span.count > 1)
        fc_violate(call, CUDA_ERROR_ILLEGAL_ADDRESS,
                   "the double cannot give a kernel one span over several mappings");
    else if (span.count && may_use(call, span.pieces[0].range, address))
        result = span.pieces[0].bytes;
    fc_span_give(&span);
    return result;
}

void *fakecuda_span(struct fakecuda_launch *launch, CUdeviceptr address, size_t bytes, bool write) {
    struct fc_call call = {.name = launch->kernel->name};
    void *result;

    pthread_mutex_lock(&fc_lock);
    result = span(launch, &call, address, bytes, write);
    pthread_mutex_unlock(&fc_lock);
    if (!result) {
        launch->error = CUDA_ERROR_ILLEGAL_ADDRESS;
        fc_log_worker_violation(launch->kernel->name, CUDA_ERROR_ILLEGAL_ADDRESS, "%s",
                                call.violation);
    }
    return result;
}

void fc_launch_run(struct fakecuda_launch *launch) {
    launch->kernel->run(launch);
}
