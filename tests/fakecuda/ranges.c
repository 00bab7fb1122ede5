/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lies at which address: allocations, registrations and mappings, in one sorted table, and the
 * rules for touching them. It must not know streams.
 */
#include "state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct fc_range **table;
static size_t count, room;
static uint64_t next_id = 1;

#define PAST_ROOM 256
static struct {
    uintptr_t address;
    size_t size;
    enum fc_range_kind kind;
} past[PAST_ROOM];
static size_t past_next;

static const char *kind_name(enum fc_range_kind kind) {
    static const char *const names[] = {"device allocation", "managed allocation",
                                        "pinned allocation", "registration", "mapping"};

    return names[kind];
}

/* The index of the first range that starts after the address. */
static size_t upper(uintptr_t address) {
    size_t low = 0, high = count;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (table[middle]->address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct fc_range *fc_range_at(uintptr_t address) {
    size_t index = upper(address);

    if (!index || address - table[index - 1]->address >= table[index - 1]->size)
        return NULL;
    return table[index - 1];
}

struct fc_range *fc_range_after(uintptr_t address) {
    size_t index = address ? upper(address - 1) : 0;

    return index < count ? table[index] : NULL;
}

int fc_range_add(struct fc_range *range) {
    size_t index = upper(range->address);
    const struct fc_range *next = fc_range_after(range->address);

    if (fc_range_at(range->address) || (next && next->address - range->address < range->size))
        return -EEXIST;
    if (count == room) {
        size_t more = room ? room * 2 : 64;
        struct fc_range **grown = realloc(table, more * sizeof(struct fc_range *));

        if (!grown)
            return -ENOMEM;
        table = grown;
        room = more;
    }
    memmove(&table[index + 1], &table[index], (count - index) * sizeof(struct fc_range *));
    table[index] = range;
    count++;
    range->id = next_id++;
    return 0;
}

void fc_range_remove(struct fc_range *range) {
    size_t index = upper(range->address) - 1;

    past[past_next].address = range->address;
    past[past_next].size = range->size;
    past[past_next].kind = range->kind;
    past_next = (past_next + 1) % PAST_ROOM;
    memmove(&table[index], &table[index + 1], (count - index - 1) * sizeof(struct fc_range *));
    count--;
    free(range);
}

const char *fc_range_past(uintptr_t address) {
    static char text[96];

    for (size_t i = 0; i < PAST_ROOM; i++) {
        size_t at = (past_next + PAST_ROOM - 1 - i) % PAST_ROOM;

        if (past[at].size && address - past[at].address < past[at].size) {
            snprintf(text, sizeof text, "freed: it was in a %s at 0x%zx", kind_name(past[at].kind),
                     past[at].address);
            return text;
        }
    }
    return "never known";
}

void fc_range_quiesce(struct fc_call *call, struct fc_range *range) {
    if (range->pending)
        fc_violate(call, call->result, "%s at 0x%zx goes while %u pending operation(s) use it",
                   kind_name(range->kind), range->address, range->pending);
    while (range->pending)
        pthread_cond_wait(&fc_changed, &fc_lock);
}

static CUresult check_mapping(struct fc_call *call, const struct fc_context *context,
                              const struct fc_range *range, bool write) {
    unsigned char has = range->access[context->device];

    if (has == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
        (!write && has == CU_MEM_ACCESS_FLAGS_PROT_READ))
        return CUDA_SUCCESS;
    return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                      "GPU %d has no %s access to the mapping at 0x%zx (cuMemSetAccess)",
                      context->device, write ? "write" : "read", range->address);
}

/* Plain host memory, up to its end: a copy that runs on into a registration is refused. Driver 580
 * takes it (and not the other way round); nothing promises that. */
static CUresult take_plain(struct fc_call *call, uintptr_t address, size_t size,
                           struct fc_piece *ret) {
    const struct fc_range *next = fc_range_after(address);

    if (fc_reserved(address, size, false))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx is reserved but nothing is mapped there", address);
    if (!fc_readable(address) || !fc_readable(address + size - 1))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "no memory at 0x%zx..0x%zx (%s)", address,
                          address + size, fc_range_past(address));
    if (next && next->address - address < size)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx+%zu begins outside and runs into a %s at 0x%zx", address, size,
                          kind_name(next->kind), next->address);
    *ret = (struct fc_piece){.bytes = (unsigned char *)address, .size = size, .raw = true};
    return CUDA_SUCCESS;
}

static CUresult take_known(struct fc_call *call, const struct fc_context *context,
                           struct fc_range *range, uintptr_t address, size_t size, bool write,
                           struct fc_piece *ret) {
    size_t offset = address - range->address, rest = range->size - offset;
    const struct fc_range *next = fc_range_after(range->address + range->size);
    CUresult result;

    if (range->context && !range->context->alive && range->kind != FC_RANGE_MAPPED)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx is of a context that was destroyed", address);
    if (size > rest &&
        !(range->kind == FC_RANGE_MAPPED && next && next->address == range->address + range->size &&
          next->kind == FC_RANGE_MAPPED))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx+%zu passes the end of the %s 0x%zx+%zu by %zu bytes", address,
                          size, kind_name(range->kind), range->address, range->size, size - rest);
    if (range->kind == FC_RANGE_REGISTERED && context && range->context != context &&
        !(range->flags & FC_REGISTER_PORTABLE))
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx is registered in another context, and not PORTABLE", address);
    if (range->kind == FC_RANGE_MAPPED && context) {
        result = check_mapping(call, context, range, write);
        if (result != CUDA_SUCCESS)
            return result;
    }
    *ret = (struct fc_piece){.range = range,
                             .bytes = range->block ? range->block->hidden + offset
                                                   : (unsigned char *)address,
                             .size = size < rest ? size : rest,
                             .raw = range->kind == FC_RANGE_REGISTERED};
    return CUDA_SUCCESS;
}

/* Driver 580 takes a device pointer for a host pointer (all addresses are one space), not the
 * reverse. */
static CUresult check_side(struct fc_call *call, const struct fc_piece *piece, uintptr_t address,
                           enum fc_side side) {
    bool on_device =
        piece->range && piece->range->kind != FC_RANGE_REGISTERED &&
        piece->range->kind != FC_RANGE_PINNED &&
        !(piece->range->kind == FC_RANGE_MAPPED && piece->range->block->place != FC_PLACE_DEVICE);

    if (side == FC_SIDE_DEVICE && !piece->range)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE,
                          "0x%zx should be a device pointer but is host memory", address);
    if (side == FC_SIDE_HOST && on_device)
        return fc_violate(call, CUDA_SUCCESS, "0x%zx should be a host pointer but is device memory",
                          address);
    return CUDA_SUCCESS;
}

static int grow(struct fc_span *span, const struct fc_piece *piece) {
    struct fc_piece *grown = realloc(span->pieces, (span->count + 1) * sizeof *grown);

    if (!grown)
        return -ENOMEM;
    span->pieces = grown;
    span->pieces[span->count++] = *piece;
    if (piece->range)
        piece->range->pending++;
    return 0;
}

CUresult fc_span_take(struct fc_call *call, const struct fc_context *context, CUdeviceptr start,
                      size_t size, bool write, enum fc_side side, struct fc_span *ret) {
    struct fc_span span = {.count = 0};
    uintptr_t address = (uintptr_t)start;
    CUresult result = CUDA_SUCCESS;

    if (address + size < address)
        return fc_violate(call, CUDA_ERROR_INVALID_VALUE, "0x%zx+%zu wraps around", address, size);
    while (size && result == CUDA_SUCCESS) {
        struct fc_range *range = fc_range_at(address);
        struct fc_piece piece = {.size = 0};

        result = range ? take_known(call, context, range, address, size, write, &piece)
                       : take_plain(call, address, size, &piece);
        if (result == CUDA_SUCCESS)
            result = check_side(call, &piece, address, side);
        if (result == CUDA_SUCCESS && grow(&span, &piece))
            result = CUDA_ERROR_OUT_OF_MEMORY;
        address += piece.size;
        size -= piece.size;
    }
    if (result != CUDA_SUCCESS) {
        fc_span_give(&span);
        return result;
    }
    *ret = span;
    return CUDA_SUCCESS;
}

void fc_span_give(struct fc_span *span) {
    for (size_t i = 0; i < span->count; i++) {
        if (span->pieces[i].range)
            span->pieces[i].range->pending--;
    }
    free(span->pieces);
    *span = (struct fc_span){.count = 0};
}
