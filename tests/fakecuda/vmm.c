/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory management: allocations with handles, reservations, mappings and who may access
 * them. Mappings begin without any access, the CPU's included. Memory lives while a handle, a
 * mapping or pending work holds it.
 */
#include "state.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct allocation {
    struct fc_block *block; /* valid while refs > 0 or it is mapped */
    uintptr_t handle;
    unsigned refs;
};

struct reservation {
    uintptr_t address;
    size_t size;
};

static struct reservation *reservations;
static size_t reservation_count, reservation_room;

static const struct reservation *reservation_of(uintptr_t address, size_t size) {
    for (size_t i = 0; i < reservation_count; i++) {
        const struct reservation *r = &reservations[i];

        if (address >= r->address && size <= r->size && address - r->address <= r->size - size)
            return r;
    }
    return NULL;
}

bool fc_reserved(uintptr_t address, size_t size, bool whole) {
    if (whole)
        return reservation_of(address, size) != NULL;
    for (size_t i = 0; i < reservation_count; i++) {
        if (address < reservations[i].address + reservations[i].size &&
            reservations[i].address < address + size)
            return true;
    }
    return false;
}

static CUresult check_prop(struct fc_call *call, const CUmemAllocationProp *prop) {
    const CUmemLocation *at = &prop->location;

    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "the type must be PINNED, not %d",
                          prop->type);
    if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED; /* fabric handles need hardware: programs ask and fall back
                                          */
    switch (at->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        if (at->id < 0 || at->id >= fc_settings()->devices)
            return fc_violate(call, CUDA_ERROR_INVALID_DEVICE, "no such device: %d", at->id);
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
        if (prop->requestedHandleTypes)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                              "HOST allocations have no shareable handles; HOST_NUMA have");
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        /* A node without memory or CPUs is refused; a program that probes node after node breaks no
         * rule. */
        return at->id < 0 || at->id >= fc_settings()->numa_nodes ? CUDA_ERROR_INVALID_VALUE
                                                                 : CUDA_SUCCESS;
    default:
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "location type %d cannot hold memory",
                          (int)at->type);
    }
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       int option) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemGetAllocationGranularity", FC_INIT, "location=%d:%d option=%d",
                 (int)prop->location.type, prop->location.id, option)) {
        call.result = check_prop(&call, prop);
        if (call.result == CUDA_SUCCESS)
            *granularity = FC_GRANULARITY;
    }
    return fc_leave(&call);
}

static CUresult add_allocation(struct fc_block *block, CUmemGenericAllocationHandle *ret) {
    struct allocation *allocation = calloc(1, sizeof *allocation);

    if (!allocation) {
        fc_block_drop(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    allocation->block = block;
    allocation->refs = 1;
    allocation->handle = fc_handle_new(FC_ALLOCATION_HANDLE, allocation);
    *ret = allocation->handle;
    return CUDA_SUCCESS;
}

static CUresult create(struct fc_call *call, CUmemGenericAllocationHandle *ret, size_t size,
                       const CUmemAllocationProp *prop) {
    static const enum fc_place places[] = {0, FC_PLACE_DEVICE, FC_PLACE_HOST, FC_PLACE_NUMA};
    struct fc_block *block;
    CUresult result = check_prop(call, prop);

    if (result != CUDA_SUCCESS)
        return result;
    if (!size || size % FC_GRANULARITY)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "size %zu is no multiple of the granularity %zu", size, FC_GRANULARITY);
    result = fc_block_new(places[prop->location.type], prop->location.id, size,
                          prop->requestedHandleTypes, &block);
    return result == CUDA_SUCCESS ? add_allocation(block, ret) : result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemCreate", FC_INIT, "size=%zu location=%d:%d handle_types=%d", size,
                 (int)prop->location.type, prop->location.id, prop->requestedHandleTypes))
        call.result = flags ? fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "flags must be 0")
                            : create(&call, handle, size, prop);
    return fc_leave(&call);
}

static struct allocation *get_allocation(struct fc_call *call,
                                         CUmemGenericAllocationHandle handle) {
    struct allocation *allocation = fc_handle_get(FC_ALLOCATION_HANDLE, (uintptr_t)handle);

    if (!allocation)
        call->result =
            fc_violate(call, CUDA_ERROR_INVALID_VALUE, "not an allocation handle: 0x%llx", handle);
    else if (!allocation->refs)
        call->result = fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                                  "handle 0x%llx was released already", handle);
    return call->result == CUDA_SUCCESS ? allocation : NULL;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct allocation *allocation;
    struct fc_call call;

    if (fc_enter(&call, "cuMemRelease", FC_INIT, "handle=0x%llx", handle)) {
        allocation = get_allocation(&call, handle);
        if (allocation) {
            allocation->refs--;
            fc_block_drop(allocation->block);
        }
    }
    return fc_leave(&call);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    struct allocation *allocation;
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemRetainAllocationHandle", FC_INIT, "address=%p", address)) {
        range = fc_range_at((uintptr_t)address);
        if (!range || range->kind != FC_RANGE_MAPPED) {
            call.result = CUDA_ERROR_INVALID_VALUE; /* how one asks whether memory is VMM memory */
        } else {
            allocation = fc_handle_get(FC_ALLOCATION_HANDLE, range->allocation);
            allocation->refs++;
            allocation->block->holders++;
            *handle = allocation->handle;
        }
    }
    return fc_leave(&call);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                CUmemGenericAllocationHandle handle) {
    const struct allocation *allocation;
    struct fc_call call;

    if (fc_enter(&call, "cuMemGetAllocationPropertiesFromHandle", FC_INIT, "handle=0x%llx",
                 handle)) {
        allocation = get_allocation(&call, handle);
        if (allocation) {
            memset(prop, 0, sizeof *prop);
            prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
            prop->requestedHandleTypes = allocation->block->handle_types;
            prop->location.type = (CUmemLocationType)allocation->block->place;
            prop->location.id = allocation->block->location;
        }
    }
    return fc_leave(&call);
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      int type, unsigned long long flags) {
    const struct allocation *allocation;
    struct fc_call call;

    if (fc_enter(&call, "cuMemExportToShareableHandle", FC_INIT, "handle=0x%llx type=%d", handle,
                 type)) {
        allocation = get_allocation(&call, handle);
        if (allocation && (flags || !type || !(allocation->block->handle_types & type)))
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE,
                                     "created without handle type %d, or flags not 0", type);
        else if (allocation && fc_block_export(allocation->block, shareable))
            call.result = CUDA_ERROR_UNKNOWN;
    }
    return fc_leave(&call);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        int type) {
    int fd = (int)(intptr_t)shareable;
    struct fc_block *block;
    struct fc_call call;

    if (fc_enter(&call, "cuMemImportFromShareableHandle", FC_INIT, "fd=%d type=%d", fd, type)) {
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
            call.result = CUDA_ERROR_NOT_SUPPORTED;
        } else {
            call.result = fc_block_import(fd, &block);
            if (call.result == CUDA_SUCCESS)
                call.result = add_allocation(block, handle);
            else if (call.result != CUDA_ERROR_OUT_OF_MEMORY)
                fc_violate(&call, call.result, "descriptor %d is not of an exported allocation",
                           fd);
        }
    }
    return fc_leave(&call);
}

#define FIRST_ADDRESS 0x302000000UL
#define ADDRESS_UNIT (32UL << 20)
#define ADDRESS_STEPS 512

static void *map_at(uintptr_t address, size_t size) {
    void *got = mmap((void *)address, size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

    if (got != MAP_FAILED && got != (void *)address) { /* Linux before 4.17 has no such flag */
        munmap(got, size);
        got = MAP_FAILED;
    }
    return got;
}

static uintptr_t round_to(uintptr_t address, size_t unit) {
    return (address + unit - 1) / unit * unit;
}

static void *map_anywhere(size_t size, size_t align) {
    char *got =
        mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t skip;

    if (got == MAP_FAILED)
        return got;
    skip = round_to((uintptr_t)got, align) - (uintptr_t)got;
    if (skip)
        munmap(got, skip);
    munmap(got + skip + size, align - skip);
    return got + skip;
}

/* As driver 580 does: at the hint, rounded up to 32 MiB, or somewhere else where that is taken;
 * without a hint at the first free one of low addresses, the same in every process. MAP_FAILED:
 * there is none. */
static void *find_range(size_t size, size_t align, uintptr_t hint) {
    uintptr_t at = hint ? round_to(hint, ADDRESS_UNIT) : round_to(FIRST_ADDRESS, align);
    void *got = map_at(at, size);

    for (unsigned i = 0; !hint && got == MAP_FAILED && i < ADDRESS_STEPS; i++) {
        at = round_to(at + ADDRESS_UNIT, align);
        got = map_at(at, size);
    }
    return got == MAP_FAILED ? map_anywhere(size, align) : got;
}

static CUresult reserve(struct fc_call *call, CUdeviceptr *ret, size_t size, size_t alignment,
                        uintptr_t hint) {
    size_t align = alignment > FC_GRANULARITY ? alignment : FC_GRANULARITY;
    void *got;

    if (!size || size % FC_GRANULARITY || (alignment & (alignment - 1)))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "size %zu or alignment %zu is wrong",
                          size, alignment);
    if (hint % align)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "hint 0x%zx is no multiple of the alignment %zu", hint, align);
    if (reservation_count == reservation_room) {
        size_t room = reservation_room ? reservation_room * 2 : 32;
        struct reservation *grown = realloc(reservations, room * sizeof *grown);

        if (!grown)
            return CUDA_ERROR_OUT_OF_MEMORY;
        reservations = grown;
        reservation_room = room;
    }
    got = find_range(size, align, hint);
    if (got == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    reservations[reservation_count++] =
        (struct reservation){.address = (uintptr_t)got, .size = size};
    *ret = (uintptr_t)got;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemAddressReserve", FC_INIT, "size=%zu alignment=%zu hint=0x%llx", size,
                 alignment, hint))
        call.result = flags ? fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "flags must be 0")
                            : reserve(&call, address, size, alignment, (uintptr_t)hint);
    return fc_leave(&call);
}

static CUresult free_reservation(struct fc_call *call, uintptr_t address, size_t size) {
    const struct fc_range *range = fc_range_after(address);

    for (size_t i = 0; i < reservation_count; i++) {
        if (reservations[i].address != address || reservations[i].size != size)
            continue;
        if (range && range->address < address + size)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "still mapped at 0x%zx",
                              range->address);
        munmap((void *)address, size);
        reservations[i] = reservations[--reservation_count];
        return CUDA_SUCCESS;
    }
    return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "0x%zx+%zu was not reserved as such", address,
                      size);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemAddressFree", FC_INIT, "address=0x%llx size=%zu", address, size))
        call.result = free_reservation(&call, (uintptr_t)address, size);
    return fc_leave(&call);
}

static CUresult check_map(struct fc_call *call, uintptr_t address, size_t size, size_t offset,
                          const struct fc_block *block) {
    const struct fc_range *next = fc_range_after(address);

    if (!size || size % FC_GRANULARITY || address % FC_GRANULARITY)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx+%zu is not aligned to the granularity", address, size);
    if (offset || size != block->size) /* driver 580 says NOT_SUPPORTED to both */
        return fc_violate(call, CUDA_ERROR_NOT_SUPPORTED,
                          "only a whole allocation of %zu bytes can be mapped, not %zu+%zu",
                          block->size, offset, size);
    if (!fc_reserved(address, size, true))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx+%zu does not lie in one reservation", address, size);
    if (fc_range_at(address) || (next && next->address < address + size))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "something is mapped in 0x%zx+%zu already", address, size);
    return CUDA_SUCCESS;
}

static CUresult map(struct fc_call *call, uintptr_t address, size_t size, size_t offset,
                    struct allocation *allocation) {
    struct fc_block *block = allocation->block;
    CUresult result = check_map(call, address, size, offset, block);
    struct fc_range *range;

    if (result != CUDA_SUCCESS)
        return result;
    range = calloc(1, sizeof *range);
    if (!range)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *range = (struct fc_range){.address = address,
                               .size = size,
                               .kind = FC_RANGE_MAPPED,
                               .block = block,
                               .allocation = allocation->handle};
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, block->fd,
             0) == MAP_FAILED ||
        fc_range_add(range)) {
        free(range);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->holders++;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    struct allocation *allocation;
    struct fc_call call;

    if (fc_enter(&call, "cuMemMap", FC_INIT, "address=0x%llx size=%zu offset=%zu handle=0x%llx",
                 address, size, offset, handle)) {
        allocation = get_allocation(&call, handle);
        if (flags)
            call.result = fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "flags must be 0");
        else if (allocation)
            call.result = map(&call, (uintptr_t)address, size, offset, allocation);
    }
    return fc_leave(&call);
}

/* Is [address, size) made of whole mappings without a gap? */
static CUresult check_mapped(struct fc_call *call, uintptr_t address, size_t size) {
    uintptr_t at = address, end = address + size;

    while (at < end) {
        const struct fc_range *range = fc_range_at(at);

        if (!range || range->kind != FC_RANGE_MAPPED)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "nothing is mapped at 0x%zx (%s)", at,
                              fc_range_past(at));
        if (range->address != at || range->size > end - at)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                              "0x%zx+%zu is a part of the mapping 0x%zx+%zu", address, size,
                              range->address, range->size);
        at += range->size;
    }
    return size ? CUDA_SUCCESS : fc_violate(call, CUDA_ERROR_INVALID_VALUE, "size is 0");
}

static CUresult unmap(struct fc_call *call, uintptr_t address, size_t size) {
    const struct fc_range *next = fc_range_after(address);
    CUresult result;

    /* Driver 580 gives success for a reservation in which nothing is mapped. */
    if (fc_reserved(address, size, true) && !fc_range_at(address) &&
        (!next || next->address >= address + size))
        return fc_violate(call, CUDA_SUCCESS, "nothing is mapped at 0x%zx (%s)", address,
                          fc_range_past(address));
    result = check_mapped(call, address, size);
    while (result == CUDA_SUCCESS && size) {
        struct fc_range *range = fc_range_at(address);
        size_t length = range->size;

        fc_range_quiesce(call, range);
        if (mmap((void *)address, length, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
            return CUDA_ERROR_UNKNOWN;
        fc_block_drop(range->block);
        fc_range_remove(range);
        address += length;
        size -= length;
    }
    return result;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemUnmap", FC_INIT, "address=0x%llx size=%zu", address, size))
        call.result = unmap(&call, (uintptr_t)address, size);
    return fc_leave(&call);
}

static CUresult check_access(struct fc_call *call, const struct fc_range *range,
                             const CUmemAccessDesc *desc) {
    const CUmemLocation *at = &desc->location;

    if (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "unknown access flags %d", desc->flags);
    switch (at->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        if (at->id < 0 || at->id >= fc_settings()->devices)
            return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "no such device: %d", at->id);
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
        if (range->block->place == FC_PLACE_DEVICE)
            return fc_violate(call, CUDA_ERROR_NOT_SUPPORTED,
                              "the CPU cannot be given access to device memory");
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: /* the node is ignored */
        if (range->block->place != FC_PLACE_NUMA)
            return fc_violate(call, CUDA_ERROR_NOT_SUPPORTED,
                              "HOST_NUMA access is for HOST_NUMA memory only");
        return CUDA_SUCCESS;
    default:
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "location type %d cannot have access",
                          (int)at->type);
    }
}

static CUresult set_access(struct fc_call *call, struct fc_range *range,
                           const CUmemAccessDesc *desc) {
    static const int protections[] = {PROT_NONE, PROT_READ, 0, PROT_READ | PROT_WRITE};
    CUresult result = check_access(call, range, desc);

    if (result != CUDA_SUCCESS)
        return result;
    if (desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        range->access[desc->location.id] = (unsigned char)desc->flags;
        return CUDA_SUCCESS;
    }
    range->host_access = (unsigned char)desc->flags;
    if (mprotect((void *)range->address, range->size, protections[desc->flags]))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc,
                        size_t count) {
    struct fc_call call;

    if (fc_enter(&call, "cuMemSetAccess", FC_INIT,
                 "address=0x%llx size=%zu count=%zu first=%d:%d=%d", address, size, count,
                 count ? (int)desc[0].location.type : 0, count ? desc[0].location.id : 0,
                 count ? desc[0].flags : 0)) {
        call.result = count ? check_mapped(&call, (uintptr_t)address, size)
                            : fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "no descriptors");
        for (uintptr_t at = (uintptr_t)address;
             call.result == CUDA_SUCCESS && at < (uintptr_t)address + size;) {
            struct fc_range *range = fc_range_at(at);

            for (size_t i = 0; i < count && call.result == CUDA_SUCCESS; i++)
                call.result = set_access(&call, range, &desc[i]);
            at += range->size;
        }
    }
    return fc_leave(&call);
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                        CUdeviceptr address) {
    const struct fc_range *range;
    struct fc_call call;

    if (fc_enter(&call, "cuMemGetAccess", FC_INIT, "location=%d:%d address=0x%llx",
                 (int)location->type, location->id, address)) {
        range = fc_range_at((uintptr_t)address);
        if (!range || range->kind != FC_RANGE_MAPPED)
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_VALUE, "nothing is mapped at 0x%llx", address);
        else if (location->type != CU_MEM_LOCATION_TYPE_DEVICE)
            *flags = range->host_access;
        else if (location->id >= 0 && location->id < fc_settings()->devices)
            *flags = range->access[location->id];
        else
            call.result =
                fc_violate(&call, CUDA_ERROR_INVALID_DEVICE, "no such device: %d", location->id);
    }
    return fc_leave(&call);
}
