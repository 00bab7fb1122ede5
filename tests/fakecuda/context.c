/* SPDX-License-Identifier: Apache-2.0 */
/* Start-up, devices, and contexts with their per-thread stack. It must not know memory or streams
 * beyond draining them. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STACK_ROOM 32

static __thread struct fc_context *stack[STACK_ROOM];
static __thread int stack_top; /* entries in use; the current context is the last */
static struct fc_context *primaries[FC_MAX_DEVICES];

struct fc_context *fc_current(void) {
    return stack_top ? stack[stack_top - 1] : NULL;
}

struct fc_context *fc_primary(int device) {
    return primaries[device];
}

static bool bad_device(CUdevice device) {
    return device < 0 || device >= fc_settings()->devices;
}

CUresult cuInit(unsigned int flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuInit", FC_ANYTIME, "flags=%u", flags)) {
        if (flags) {
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "flags must be 0");
        } else if (!fc_settings()->devices) {
            call.result = CUDA_ERROR_NO_DEVICE;
        } else {
            fc_set_initialised();
        }
    }
    return fc_leave(&call);
}

CUresult cuDriverGetVersion(int *version) {
    struct fc_call call;

    if (fc_enter(&call, "cuDriverGetVersion", FC_ANYTIME, "%s", ""))
        *version = fc_settings()->driver_version;
    return fc_leave(&call);
}

CUresult cuDeviceGetCount(int *count) {
    struct fc_call call;

    if (fc_enter(&call, "cuDeviceGetCount", FC_INIT, "%s", ""))
        *count = fc_settings()->devices;
    return fc_leave(&call);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    struct fc_call call;

    if (fc_enter(&call, "cuDeviceGet", FC_INIT, "ordinal=%d", ordinal)) {
        if (bad_device(ordinal))
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_DEVICE, "no such device: %d", ordinal);
        else
            *device = ordinal;
    }
    return fc_leave(&call);
}

/* For the calls that ask a device something. */
static bool enter_device(struct fc_call *call, const char *name, CUdevice device) {
    bool asks_state = !strcmp(name, "cuDevicePrimaryCtxGetState");

    if (!fc_enter(call, name, asks_state ? FC_INIT | FC_QUIET : FC_INIT, "device=%d", device))
        return false;
    if (!bad_device(device))
        return true;
    call->result = fc_violate(call, CUDA_ERROR_INVALID_DEVICE, "no such device: %d", device);
    return false;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDeviceGetName", device))
        snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return fc_leave(&call);
}

static int attribute_value(CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 49152;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 132;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 3;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return 0x10 + device;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return 233472;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return 232448;
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
        return fc_settings()->hmm;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        return fc_settings()->host_pointers;
    case CU_DEVICE_ATTRIBUTE_NUMA_ID:
        return -1; /* no memory of its own as a NUMA node */
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        return device % fc_settings()->numa_nodes;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return fc_settings()->driver_version >= 12020 && fc_settings()->numa_nodes > 0;
    case CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return fc_settings()->driver_version >= 13000;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        return 1;
    default:
        return 0;
    }
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDeviceGetAttribute", device)) {
        snprintf(call.args, sizeof call.args, "attribute=%d device=%d", (int)attribute, device);
        if ((int)attribute <= 0 || attribute > 200)
            call.result = CUDA_ERROR_INVALID_VALUE;
        else
            *value = attribute_value(attribute, device);
    }
    return fc_leave(&call);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDeviceTotalMem_v2", device))
        *bytes = fc_settings()->memory_bytes;
    return fc_leave(&call);
}

static CUresult get_uuid(const char *name, CUuuid *uuid, CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, name, device)) {
        memset(uuid, 0, sizeof *uuid);
        memcpy(uuid->bytes, "fakecuda", 8);
        uuid->bytes[15] = (char)(device + 1);
    }
    return fc_leave(&call);
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    return get_uuid("cuDeviceGetUuid", uuid, device);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    return get_uuid("cuDeviceGetUuid_v2", uuid, device);
}

CUresult cuDeviceGetPCIBusId(char *text, int bytes, CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDeviceGetPCIBusId", device))
        snprintf(text, (size_t)bytes, "0000:%02X:00.0", 0x10 + device);
    return fc_leave(&call);
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    struct fc_call call;
    unsigned bus = 0;

    if (fc_enter(&call, "cuDeviceGetByPCIBusId", FC_INIT, "%s", text)) {
        if (sscanf(text, "0000:%x:00.0", &bus) != 1 ||
            bad_device((int)bus - 0x10)) /* NOLINT(cert-err34-c) */
            call.result = CUDA_ERROR_INVALID_DEVICE;
        else
            *device = (int)bus - 0x10;
    }
    return fc_leave(&call);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    struct fc_call call;

    if (enter_device(&call, "cuDeviceCanAccessPeer", device)) {
        if (bad_device(peer))
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_DEVICE, "no such device: %d", peer);
        else
            *can = device != peer;
    }
    return fc_leave(&call);
}

static struct fc_context *new_context(int device, bool primary) {
    struct fc_context *context = calloc(1, sizeof *context);

    if (!context)
        return NULL;
    context->device = device;
    context->primary = primary;
    context->alive = true;
    context->handle = fc_handle_new(FC_CONTEXT_HANDLE, context);
    context->legacy = fc_stream_new(context, CU_STREAM_DEFAULT, 0, true);
    return context;
}

static void destroy_context(struct fc_context *context) {
    fc_context_drain(context);
    fc_context_kill_streams(context);
    context->alive = false;
    context->retained = 0;
}

static struct fc_context *get_context(struct fc_call *call, CUcontext handle) {
    struct fc_context *context = fc_handle_get(FC_CONTEXT_HANDLE, (uintptr_t)handle);

    if (!context)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_CONTEXT, "not a context: %p", (void *)handle);
    else if (!context->alive)
        call->result = fc_violate(call, CUDA_ERROR_CONTEXT_IS_DESTROYED, "context %p was destroyed",
                                  (void *)handle);
    return call->result == CUDA_SUCCESS ? context : NULL;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ret, CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDevicePrimaryCtxRetain", device)) {
        if (!primaries[device])
            primaries[device] = new_context(device, true);
        if (!primaries[device]) {
            call.result = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            if (!primaries[device]->alive)
                primaries[device]->sticky = CUDA_SUCCESS;
            primaries[device]->alive = true;
            primaries[device]->retained++;
            primaries[device]->legacy->alive = true;
            *ret = (CUcontext)primaries[device]->handle;
        }
    }
    return fc_leave(&call);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDevicePrimaryCtxRelease_v2", device)) {
        if (!primaries[device] || !primaries[device]->retained)
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_CONTEXT, "released more often than retained");
        else if (!--primaries[device]->retained)
            destroy_context(primaries[device]);
    }
    return fc_leave(&call);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    struct fc_call call;

    if (enter_device(&call, "cuDevicePrimaryCtxReset_v2", device) && primaries[device] &&
        primaries[device]->alive)
        call.result = fc_violate(&call, CUDA_ERROR_NOT_SUPPORTED,
                                 "the double does not reset a context that is in use");
    return fc_leave(&call);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    struct fc_call call;

    if (enter_device(&call, "cuDevicePrimaryCtxGetState", device)) {
        *flags = primaries[device] ? primaries[device]->flags : 0;
        *active = primaries[device] && primaries[device]->alive;
    }
    return fc_leave(&call);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    struct fc_call call;

    if (enter_device(&call, "cuDevicePrimaryCtxSetFlags_v2", device) && primaries[device])
        primaries[device]->flags = flags;
    return fc_leave(&call);
}

static CUresult push(struct fc_call *call, struct fc_context *context) {
    if (stack_top == STACK_ROOM)
        return fc_violate(call, CUDA_ERROR_OUT_OF_MEMORY, "%d contexts pushed and none popped",
                          STACK_ROOM);
    stack[stack_top++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(const char *name, CUcontext *ret, unsigned int flags, CUdevice device) {
    struct fc_context *context = NULL;
    struct fc_call call;

    if (enter_device(&call, name, device)) {
        context = new_context(device, false);
        call.result = context ? push(&call, context) : CUDA_ERROR_OUT_OF_MEMORY;
        if (call.result == CUDA_SUCCESS) {
            context->flags = flags;
            *ret = (CUcontext)context->handle;
        }
    }
    return fc_leave(&call);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    return create("cuCtxCreate_v2", context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned int flags, CUdevice device) {
    return create("cuCtxCreate_v4", context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
    struct fc_context *context;
    struct fc_call call;

    if (fc_enter(&call, "cuCtxDestroy_v2", FC_INIT, "context=%p", (void *)handle)) {
        context = get_context(&call, handle);
        if (context && context->primary) {
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_CONTEXT,
                                     "a primary context is released, not destroyed");
        } else if (context) {
            destroy_context(context);
            if (fc_current() == context)
                stack_top--;
        }
    }
    return fc_leave(&call);
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
    struct fc_context *context;
    struct fc_call call;

    if (fc_enter(&call, "cuCtxPushCurrent_v2", FC_INIT, "context=%p", (void *)handle)) {
        context = get_context(&call, handle);
        if (context)
            call.result = push(&call, context);
    }
    return fc_leave(&call);
}

CUresult cuCtxPopCurrent_v2(CUcontext *ret) {
    struct fc_call call;

    if (fc_enter(&call, "cuCtxPopCurrent_v2", FC_INIT, "%s", "")) {
        if (!stack_top) {
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_CONTEXT, "popped more often than pushed");
        } else {
            stack_top--;
            if (ret)
                *ret = (CUcontext)(stack[stack_top] ? stack[stack_top]->handle : 0);
        }
    }
    return fc_leave(&call);
}

/* Replaces the top of the stack; NULL pops it, as documented. */
CUresult cuCtxSetCurrent(CUcontext handle) {
    struct fc_context *context;
    struct fc_call call;

    if (fc_enter(&call, "cuCtxSetCurrent", FC_INIT, "context=%p", (void *)handle)) {
        if (!handle) {
            stack_top -= stack_top > 0;
        } else {
            context = get_context(&call, handle);
            if (context && stack_top)
                stack[stack_top - 1] = context;
            else if (context)
                call.result = push(&call, context);
        }
    }
    return fc_leave(&call);
}

CUresult cuCtxGetCurrent(CUcontext *ret) {
    struct fc_call call;

    if (fc_enter(&call, "cuCtxGetCurrent", FC_INIT | FC_QUIET, "%s", ""))
        *ret = (CUcontext)(fc_current() ? fc_current()->handle : 0);
    return fc_leave(&call);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    struct fc_call call;

    if (fc_enter(&call, "cuCtxGetDevice", FC_CONTEXT, "%s", ""))
        *device = call.context->device;
    return fc_leave(&call);
}

CUresult cuCtxSynchronize(void) {
    struct fc_call call;

    if (fc_enter(&call, "cuCtxSynchronize", FC_CONTEXT | FC_UNSAFE, "%s", "")) {
        fc_context_drain(call.context);
        call.result = call.context->sticky;
    }
    return fc_leave(&call);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    struct fc_call call;

    if (fc_enter(&call, "cuCtxGetStreamPriorityRange", FC_CONTEXT, "%s", "")) {
        if (least)
            *least = 0;
        if (greatest)
            *greatest = -5;
    }
    return fc_leave(&call);
}

static CUresult peer_access(const char *name, CUcontext handle, bool enable) {
    struct fc_context *peer;
    struct fc_call call;

    if (fc_enter(&call, name, FC_CONTEXT, "peer=%p", (void *)handle)) {
        peer = get_context(&call, handle);
        if (peer && peer->device == call.context->device)
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_DEVICE, "a device is not its own peer");
        else if (peer && call.context->peers[peer->device] == enable)
            call.result = enable ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
                                 : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
        else if (peer)
            call.context->peers[peer->device] = enable;
    }
    return fc_leave(&call);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    return peer_access("cuCtxEnablePeerAccess", peer, true);
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    return peer_access("cuCtxDisablePeerAccess", peer, false);
}

int fakecuda_contexts(void) {
    struct fc_context *context;
    int alive = 0;

    pthread_mutex_lock(&fc_lock);
    for (size_t i = 0; (context = fc_handle_at(FC_CONTEXT_HANDLE, i)); i++)
        alive += context->alive;
    pthread_mutex_unlock(&fc_lock);
    return alive;
}
