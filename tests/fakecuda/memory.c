/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device, managed, pinned and registered memory. Device memory has real addresses of this process
 * at which the CPU has no access (PROT_NONE): code that dereferences it faults, and a system call
 * given it says EFAULT.
 */
#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static size_t pages(size_t size) {
    return (size + 4095) & ~(size_t)4095;
}

static CUresult add_range(struct fc_call *call, void *address, size_t size, enum fc_range_kind kind,
                          struct fc_block *block, unsigned flags) {
    struct fc_range *range = calloc(1, sizeof *range);

    if (!range)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *range = (struct fc_range){.address = (uintptr_t)address,
                               .size = size,
                               .kind = kind,
                               .block = block,
                               .context = call->context,
                               .flags = flags};
    if (fc_range_add(range)) {
        free(range);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* On each side of an allocation, so that running off an end is seen. */
static size_t gap(void) {
    return fc_settings()->touching ? 0 : 4096;
}

/* Addresses for an allocation with its gaps; fc_lock is held. */
static char *find_place(size_t bytes) {
    static char *next;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *place = MAP_FAILED;

    if (fc_settings()->touching && next)
        place = mmap(next, bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    else if (fc_settings()->touching) { /* room for others behind it */
        place = mmap(NULL, bytes + ((size_t)1 << 30), PROT_NONE, flags, -1, 0);
        if (place != MAP_FAILED)
            munmap((char *)place + bytes, (size_t)1 << 30);
    }
    if (place == MAP_FAILED)
        place = mmap(NULL, bytes, PROT_NONE, flags, -1, 0);
    next = place == MAP_FAILED ? NULL : (char *)place + bytes;
    return place;
}

static CUresult allocate(struct fc_call *call, CUdeviceptr *ret, size_t size,
                         enum fc_range_kind kind) {
    int protection = kind == FC_RANGE_DEVICE ? PROT_NONE : PROT_READ | PROT_WRITE;
    struct fc_block *block;
    CUresult result;
    char *address;

    if (!size)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "size is 0");
    result = fc_block_new(FC_PLACE_DEVICE, call->context->device, pages(size), 0, &block);
    if (result != CUDA_SUCCESS)
        return result;
    address = find_place(pages(size) + 2 * gap());
    if (address == MAP_FAILED || mmap(address + gap(), pages(size), protection,
                                      MAP_SHARED | MAP_FIXED, block->fd, 0) == MAP_FAILED) {
        fc_block_drop(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *ret = (CUdeviceptr)(uintptr_t)address + gap();
    return add_range(call, address + gap(), size, kind, block, 0);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemGetInfo_v2", FC_CONTEXT, "%s", "")) {
        *total = fc_settings()->memory_bytes;
        *free_bytes = *total - fc_device_used(call.context->device);
    }
    return fc_leave(&call);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemAlloc_v2", FC_CONTEXT | FC_UNSAFE, "bytes=%zu", bytes))
        call.result = allocate(&call, address, bytes, FC_RANGE_DEVICE);
    return fc_leave(&call);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemAllocManaged", FC_CONTEXT | FC_UNSAFE, "bytes=%zu flags=%u", bytes,
                 flags))
        call.result = allocate(&call, address, bytes, FC_RANGE_MANAGED);
    return fc_leave(&call);
}

/* The range of a kind that begins at the address, or NULL with a violation. */
static struct fc_range *find_start(struct fc_call *call, uintptr_t address, unsigned kinds,
                                   CUresult error) {
    struct fc_range *range = fc_range_at(address);

    if (range && range->address == address && (kinds & 1u << range->kind))
        return range;
    if (!range)
        call->result = fc_violate(call, error, "0x%zx is %s", address, fc_range_past(address));
    else
        call->result = fc_violate(
            call, CUDA_ERROR_INVALID_VALUE, "0x%zx is not what this call takes: %s", address,
            range->address == address ? "of another kind" : "inside an allocation");
    return NULL;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemFree_v2", FC_CONTEXT | FC_UNSAFE, "address=0x%llx", address) &&
        address) {
        range =
            find_start(&call, (uintptr_t)address, 1u << FC_RANGE_DEVICE | 1u << FC_RANGE_MANAGED,
                       CUDA_ERROR_INVALID_VALUE);
        if (range) {
            fc_range_quiesce(&call, range);
            munmap((void *)(range->address - gap()), pages(range->size) + 2 * gap());
            fc_block_drop(range->block);
            fc_range_remove(range);
        }
    }
    return fc_leave(&call);
}

static CUresult allocate_host(struct fc_call *call, void **ret, size_t bytes, unsigned flags) {
    void *address;
    CUresult result;

    if (!bytes || flags > 7)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "size 0 or unknown flags");
    address = mmap(NULL, pages(bytes), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = add_range(call, address, bytes, FC_RANGE_PINNED, NULL, flags);
    if (result == CUDA_SUCCESS)
        *ret = address;
    else
        munmap(address, pages(bytes));
    return result;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemHostAlloc", FC_CONTEXT | FC_UNSAFE, "bytes=%zu flags=%u", bytes,
                 flags))
        call.result = allocate_host(&call, address, bytes, flags);
    return fc_leave(&call);
}

CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemAllocHost_v2", FC_CONTEXT | FC_UNSAFE, "bytes=%zu", bytes))
        call.result = allocate_host(&call, address, bytes, 0);
    return fc_leave(&call);
}

CUresult cuMemFreeHost(void *address) {
    struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemFreeHost", FC_CONTEXT | FC_UNSAFE, "address=%p", address)) {
        range =
            find_start(&call, (uintptr_t)address, 1u << FC_RANGE_PINNED, CUDA_ERROR_INVALID_VALUE);
        if (range) {
            fc_range_quiesce(&call, range);
            munmap(address, pages(range->size));
            fc_range_remove(range);
        }
    }
    return fc_leave(&call);
}

static CUresult register_host(struct fc_call *call, void *address, size_t bytes, unsigned flags) {
    uintptr_t start = (uintptr_t)address;
    const struct fc_range *next = fc_range_after(start);

    if (!address || !bytes || flags > 15 || start + bytes < start)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "NULL, size 0, wrap-around or unknown flags");
    if (fc_range_at(start) || (next && next->address - start < bytes)) {
        const struct fc_range *there = fc_range_at(start) ? fc_range_at(start) : next;

        return fc_violate(call,
                          there->kind == FC_RANGE_REGISTERED || there->kind == FC_RANGE_PINNED
                              ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                              : CUDA_ERROR_INVALID_VALUE,
                          "0x%zx+%zu meets memory that CUDA knows already, at 0x%zx", start, bytes,
                          there->address);
    }
    for (uintptr_t page = start & ~(uintptr_t)4095; page < start + bytes; page += 4096) {
        if (!fc_readable(page))
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "no memory at 0x%zx", page);
    }
    return add_range(call, address, bytes, FC_RANGE_REGISTERED, NULL, flags);
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemHostRegister_v2", FC_CONTEXT | FC_UNSAFE,
                 "address=%p bytes=%zu flags=%u", address, bytes, flags))
        call.result = register_host(&call, address, bytes, flags);
    return fc_leave(&call);
}

CUresult cuMemHostUnregister(void *address) {
    struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemHostUnregister", FC_CONTEXT | FC_UNSAFE, "address=%p", address)) {
        range = find_start(&call, (uintptr_t)address, 1u << FC_RANGE_REGISTERED,
                           CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        if (range) {
            if (!fc_readable(range->address))
                fc_violate(&call, CUDA_SUCCESS,
                           "the memory was unmapped before it was unregistered");
            fc_range_quiesce(&call, range);
            fc_range_remove(range);
        }
    }
    return fc_leave(&call);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags) {
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemHostGetDevicePointer_v2", FC_CONTEXT, "host=%p flags=%u", host,
                 flags)) {
        range = fc_range_at((uintptr_t)host);
        if (flags || !range ||
            (range->kind != FC_RANGE_PINNED && range->kind != FC_RANGE_REGISTERED))
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE,
                                     "%p is no pinned or registered memory", host);
        else
            *device = (CUdeviceptr)(uintptr_t)host;
    }
    return fc_leave(&call);
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *address) {
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemHostGetFlags", FC_CONTEXT, "address=%p", address)) {
        range = fc_range_at((uintptr_t)address);
        if (!range || (range->kind != FC_RANGE_PINNED && range->kind != FC_RANGE_REGISTERED))
            call.result = CUDA_ERROR_INVALID_VALUE; /* how one asks whether memory is registered */
        else
            *flags = range->flags;
    }
    return fc_leave(&call);
}
