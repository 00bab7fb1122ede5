/* SPDX-License-Identifier: Apache-2.0 */
/* Modules, functions and launches. PTX text is kept and searched for names; only kernels that
 * kernels.c knows can run. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DYNAMIC_SHARED 232448

struct module {
    char *text;
    struct fc_context *context;
    bool alive;
};

struct function {
    struct module *module;
    const struct fc_kernel *kernel;
    int dynamic_shared;
};

static CUresult load(struct fc_call *call, CUmodule *ret, const char *image) {
    struct module *module;

    if (!image || !strstr(image, ".version") || !strstr(image, ".target"))
        return fc_violate(call, CUDA_ERROR_INVALID_IMAGE, "the image is no PTX text");
    module = calloc(1, sizeof *module);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->text = strdup(image);
    module->context = call->context;
    module->alive = true;
    *ret = (CUmodule)fc_handle_new(FC_MODULE_HANDLE, module);
    return module->text ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    struct fc_call call;

    if (fc_enter(&call, "cuModuleLoadData", FC_CONTEXT | FC_UNSAFE, "image=%p", image))
        call.result = load(&call, module, image);
    return fc_leave(&call);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, int *options,
                            void **values) {
    struct fc_call call;

    if (fc_enter(&call, "cuModuleLoadDataEx", FC_CONTEXT | FC_UNSAFE, "image=%p options=%u", image,
                 count))
        call.result = load(&call, module, image);
    return fc_leave(&call);
}

static struct module *get_module(struct fc_call *call, CUmodule handle) {
    struct module *module = fc_handle_get(FC_MODULE_HANDLE, (uintptr_t)handle);

    if (!module || !module->alive)
        call->result = fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "%s module: %p",
                                  module ? "an unloaded" : "not a", (void *)handle);
    else if (module->context != call->context)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_CONTEXT, "the module is of another context");
    return call->result == CUDA_SUCCESS ? module : NULL;
}

CUresult cuModuleUnload(CUmodule handle) {
    struct module *module;
    struct fc_call call;

    if (fc_enter(&call, "cuModuleUnload", FC_CONTEXT | FC_UNSAFE, "module=%p", (void *)handle)) {
        module = get_module(&call, handle);
        if (module)
            module->alive = false;
    }
    return fc_leave(&call);
}

/* Is there `.entry NAME` in the text? */
static bool has_entry(const char *text, const char *name) {
    size_t length = strlen(name);

    for (const char *at = strstr(text, ".entry"); at; at = strstr(at, ".entry")) {
        at += 6;
        at += strspn(at, " \t\n");
        if (!strncmp(at, name, length) && strchr(" \t\n({", at[length]))
            return true;
    }
    return false;
}

static CUresult get_function(struct fc_call *call, CUfunction *ret, const struct module *module,
                             const char *name) {
    struct function *function;

    if (!has_entry(module->text, name))
        return CUDA_ERROR_NOT_FOUND; /* how one asks for a kernel that may be missing */
    if (!fc_kernel_find(name))
        return fc_violate(call, CUDA_ERROR_NOT_FOUND,
                          "the double has no implementation of kernel %s", name);
    function = calloc(1, sizeof *function);
    if (!function)
        return CUDA_ERROR_OUT_OF_MEMORY;
    function->module = (struct module *)module;
    function->kernel = fc_kernel_find(name);
    *ret = (CUfunction)fc_handle_new(FC_FUNCTION_HANDLE, function);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule handle, const char *name) {
    const struct module *module;
    struct fc_call call;

    if (fc_enter(&call, "cuModuleGetFunction", FC_CONTEXT, "module=%p name=%s", (void *)handle,
                 name)) {
        module = get_module(&call, handle);
        if (module)
            call.result = get_function(&call, function, module, name);
    }
    return fc_leave(&call);
}

static struct function *find_function(struct fc_call *call, CUfunction handle) {
    struct function *function = fc_handle_get(FC_FUNCTION_HANDLE, (uintptr_t)handle);

    if (!function)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "not a function: %p", (void *)handle);
    else if (!function->module->alive)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_HANDLE, "the function's module was unloaded");
    return call->result == CUDA_SUCCESS ? function : NULL;
}

CUresult cuFuncSetAttribute(CUfunction handle, int attribute, int value) {
    struct function *function;
    struct fc_call call;

    if (fc_enter(&call, "cuFuncSetAttribute", FC_CONTEXT, "function=%p attribute=%d value=%d",
                 (void *)handle, attribute, value)) {
        function = find_function(&call, handle);
        if (function && attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
            call.result = CUDA_ERROR_INVALID_VALUE;
        else if (function && (value < 0 || value > MAX_DYNAMIC_SHARED))
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "%d bytes of shared memory", value);
        else if (function)
            function->dynamic_shared = value;
    }
    return fc_leave(&call);
}

CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction handle) {
    const struct function *function;
    struct fc_call call;

    if (fc_enter(&call, "cuFuncGetAttribute", FC_CONTEXT, "function=%p attribute=%d",
                 (void *)handle, attribute)) {
        function = find_function(&call, handle);
        if (function)
            *value = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                         ? function->dynamic_shared
                     : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                     : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS              ? 32
                                                                            : 0;
    }
    return fc_leave(&call);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads,
                                                     size_t shared_bytes) {
    struct fc_call call;

    if (fc_enter(&call, "cuOccupancyMaxActiveBlocksPerMultiprocessor", FC_CONTEXT,
                 "threads=%d shared=%zu", threads, shared_bytes) &&
        find_function(&call, handle)) {
        if (threads < 1 || threads > 1024)
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "%d threads", threads);
        else
            *blocks = shared_bytes > MAX_DYNAMIC_SHARED ? 0
                      : 2048 / threads > 32             ? 32
                                                        : 2048 / threads;
    }
    return fc_leave(&call);
}

CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *threads, CUfunction handle,
                                          void *to_shared, size_t shared_bytes, int limit) {
    struct fc_call call;

    if (fc_enter(&call, "cuOccupancyMaxPotentialBlockSize", FC_CONTEXT, "shared=%zu limit=%d",
                 shared_bytes, limit) &&
        find_function(&call, handle)) {
        *threads = limit > 0 && limit < 1024 ? limit : 1024;
        *grid = 264;
    }
    return fc_leave(&call);
}

/* The parameters' bytes: one pointer each in `params`, or one packed buffer in `extra`, aligned to
 * their sizes. */
static CUresult read_params(struct fc_call *call, struct fakecuda_launch *launch, void **params,
                            void **extra) {
    const struct fc_kernel *kernel = launch->kernel;
    const unsigned char *packed = NULL;
    size_t packed_bytes = 0, at = 0;

    if ((params == NULL) == (extra == NULL) && kernel->param_count)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "parameters come by kernelParams or by extra");
    for (void **e = extra; e && *e != CU_LAUNCH_PARAM_END; e += 2) {
        if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER)
            packed = e[1];
        else if (*e == CU_LAUNCH_PARAM_BUFFER_SIZE)
            packed_bytes = *(const size_t *)e[1];
    }
    for (size_t i = 0; i < kernel->param_count; i++) {
        size_t size = kernel->param_bytes[i], align = size < 8 ? size : 8;

        if (params) {
            memcpy(launch->params[i], params[i], size);
            continue;
        }
        at = (at + align - 1) & ~(align - 1);
        if (!packed || at + size > packed_bytes)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                              "parameter %zu lies outside the packed buffer", i);
        memcpy(launch->params[i], packed + at, size);
        at += size;
    }
    return CUDA_SUCCESS;
}

static CUresult check_launch(struct fc_call *call, const struct function *function,
                             const struct fc_stream *stream, const CUlaunchConfig *config) {
    size_t threads = (size_t)config->blockDimX * config->blockDimY * config->blockDimZ;

    if (function->module->context != stream->context || call->context != stream->context)
        return fc_violate(call, CUDA_ERROR_INVALID_HANDLE,
                          "function, stream and current context are not of one context");
    if (!threads || threads > 1024 || !config->gridDimX || !config->gridDimY || !config->gridDimZ ||
        config->gridDimY > 65535 || config->gridDimZ > 65535)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "%zu threads a block, or an empty grid",
                          threads);
    if (config->sharedMemBytes > 49152 &&
        config->sharedMemBytes > (unsigned)function->dynamic_shared)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "%u bytes of shared memory without cuFuncSetAttribute",
                          config->sharedMemBytes);
    return CUDA_SUCCESS;
}

static CUresult launch_job(struct fc_call *call, const struct function *function,
                           struct fc_stream *stream, const CUlaunchConfig *config, void **params,
                           void **extra, bool run) {
    struct fc_job *job = fc_job_new();
    struct fakecuda_launch *launch;
    CUresult result;

    if (!job)
        return CUDA_ERROR_OUT_OF_MEMORY;
    launch = calloc(1, sizeof *launch);
    job->launch = launch;
    if (!launch) {
        fc_job_free(job);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *launch = (struct fakecuda_launch){
        .kernel = function->kernel,
        .context = stream->context,
        .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
        .block = {config->blockDimX, config->blockDimY, config->blockDimZ}};
    result = read_params(call, launch, params, extra);
    if (result == CUDA_SUCCESS && run)
        return fc_submit(call, stream, job, false);
    fc_job_free(job);
    return result;
}

static CUresult launch_function(const char *name, const CUlaunchConfig *config, CUfunction handle,
                                void **params, void **extra) {
    const struct function *function;
    struct fc_stream *stream;
    bool recorded = false;
    struct fc_call call;

    if (fc_enter(&call, name, FC_CONTEXT, "function=%p grid=%u,%u,%u block=%u,%u,%u stream=%p",
                 (void *)handle, config->gridDimX, config->gridDimY, config->gridDimZ,
                 config->blockDimX, config->blockDimY, config->blockDimZ,
                 (void *)config->hStream)) {
        function = find_function(&call, handle);
        stream = function ? fc_stream_get(&call, config->hStream) : NULL;
        if (stream)
            call.result = check_launch(&call, function, stream, config);
        if (stream && call.result == CUDA_SUCCESS)
            call.result = fc_capture_check_stream(&call, stream, &recorded);
        if (stream && call.result == CUDA_SUCCESS)
            call.result = launch_job(&call, function, stream, config, params, extra, !recorded);
    }
    return fc_leave(&call);
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                        void **params, void **extra) {
    return launch_function("cuLaunchKernel",
                           &(CUlaunchConfig){.gridDimX = grid_x,
                                             .gridDimY = grid_y,
                                             .gridDimZ = grid_z,
                                             .blockDimX = block_x,
                                             .blockDimY = block_y,
                                             .blockDimZ = block_z,
                                             .sharedMemBytes = shared_bytes,
                                             .hStream = stream},
                           function, params, extra);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                          void **extra) {
    return launch_function("cuLaunchKernelEx", config, function, params, extra);
}
