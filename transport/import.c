/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mappings of one published segment: reserve the whole range of addresses at once, so that what
 * is contiguous in the store is contiguous here, and fill it piece by piece.
 *
 * CUDA memory is mapped by the driver into a range that the driver reserves (vmm.c): later, when
 * there is CUDA in this process, and with access for each GPU.
 *
 * It must not know: connections, names, batches. All of it runs in the peer thread.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/slot.h"
#include "transport/steady.h"
#include "transport/vmm.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define HUGE_BYTES (UINT64_C(2) << 20)
#define RESERVE_LIMIT (UINT64_C(1) << 45) /* 32 TiB: an eighth of what a process can address */
/* Page tables of 16 MiB in 4 KiB pages take about a millisecond, and the thread has connections to
 * look after. */
#define PREFAULT_BYTES (UINT64_C(16) << 20)

static void segment_free(struct tp_peer_segment *segment) {
    free(segment->mapped);
    free(segment->asked);
    free(segment->opened);
    segment->mapped = NULL;
    segment->asked = NULL;
    segment->opened = NULL;
    segment->reserved = NULL;
    segment->address = NULL;
    segment->reserved_bytes = 0;
}

static bool is_cumem(const struct tp_peer_segment *segment) {
    return segment->message.kind == TP_WIRE_CUMEM;
}

/* Addresses for memory that is mmapped. */
static int reserve(struct tp_peer_segment *segment, uint64_t align) {
    segment->reserved_bytes = segment->message.map_bytes + align;
    void *reserved = mmap(NULL, segment->reserved_bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return -errno;
    segment->reserved = reserved;
    segment->address = (char *)(((uintptr_t)reserved + align - 1) & ~(uintptr_t)(align - 1));
    return 0;
}

int tp_import_reserve(struct tp_peer_segment *segment, const struct tp_msg_segment *message) {
    /* Hugetlb files can be mapped only at multiples of their page; ordinary memory gets huge pages
     * only at multiples of 2 MiB. */
    uint64_t align = message->page_bytes > HUGE_BYTES ? message->page_bytes : HUGE_BYTES;
    if (message->map_bytes > RESERVE_LIMIT || align > RESERVE_LIMIT)
        return -E2BIG;
    segment->message = *message;
    segment->next_piece = 0;
    segment->prefault_piece = 0;
    segment->prefault_offset = 0;
    atomic_store(&segment->mapped_count, 0);
    atomic_store(&segment->wanted, 0);
    segment->mapped = calloc(message->piece_count, sizeof(*segment->mapped));
    segment->asked = calloc(message->piece_count, sizeof(*segment->asked));
    segment->opened = is_cumem(segment) ? calloc(message->piece_count, sizeof(uint64_t)) : NULL;
    int error = 0;
    if (!segment->mapped || !segment->asked || (is_cumem(segment) && !segment->opened))
        error = -ENOMEM;
    else if (!is_cumem(segment))
        error = reserve(segment, align);
    if (error)
        segment_free(segment);
    return error;
}

bool tp_import_ready(struct tp_peer_segment *segment) {
    if (!is_cumem(segment) || segment->reserved)
        return true;
    /* A miss shows that this process really transfers: it is past its forks. */
    bool missed = atomic_load_explicit(&segment->wanted, memory_order_relaxed) != 0;
    if (segment->reserved_bytes || !tp_vmm_usable(missed))
        return false;
    segment->reserved_bytes = segment->message.map_bytes; /* a failure is not tried again */
    segment->reserved = tp_vmm_reserve(segment->reserved_bytes);
    segment->address = segment->reserved;
    return segment->reserved;
}

static int map_file(const struct tp_peer_segment *segment, char *at, uint64_t bytes, int fd) {
    const struct tp_msg_segment *message = &segment->message;
    int error = tp_steady_check(fd, bytes);
    if (error)
        return error;
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return -errno;
    if (message->page_bytes < HUGE_BYTES)
        (void)madvise(at, bytes, MADV_HUGEPAGE); /* the kernel may be built or told not to */
    return 0;
}

static int map_cumem(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t index,
                     char *at, int fd) {
    if (!segment->reserved)
        return -EPROTO; /* it was not asked for */
    peer->opening |= tp_vmm_active_devices() & ~peer->shut;
    uint64_t devices = peer->opening;
    int error = tp_vmm_map(at, tp_wire_piece_bytes(&segment->message, index), fd, devices);
    if (error == 0)
        segment->opened[index] = devices;
    else
        tp_count(TP_IMPORT_FAILURES, 1);
    return error;
}

int tp_import_piece(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t index, int fd) {
    const struct tp_msg_segment *message = &segment->message;
    uint64_t bytes = tp_wire_piece_bytes(message, index);
    if (bytes == 0 || atomic_load(&segment->mapped[index]))
        return -EPROTO;
    char *at = segment->address + (uint64_t)index * message->piece_bytes;
    int error = is_cumem(segment) ? map_cumem(peer, segment, index, at, fd)
                                  : map_file(segment, at, bytes, fd);
    if (error)
        return error;
    /* A child could outlive us and keep a dead store's pages; a core file of a store's size helps
     * nobody. */
    (void)madvise(at, bytes, MADV_DONTFORK);
    (void)madvise(at, bytes, MADV_DONTDUMP);
    atomic_store_explicit(&segment->mapped[index], 1, memory_order_release);
    atomic_fetch_add_explicit(&segment->mapped_count, 1, memory_order_release);
    return 0;
}

bool tp_import_prefault(struct tp_peer_segment *segment) {
    const struct tp_msg_segment *message = &segment->message;
    uint32_t piece = segment->prefault_piece;
    if (is_cumem(segment)) /* pinned, and mapped whole */
        return false;
    if (piece >= message->piece_count || !atomic_load(&segment->mapped[piece]))
        return false;
    uint64_t bytes = tp_wire_piece_bytes(message, piece);
    uint64_t left = bytes - segment->prefault_offset;
    uint64_t slice = left;
    if (message->page_bytes < HUGE_BYTES && slice > PREFAULT_BYTES)
        slice = PREFAULT_BYTES;
    char *at = segment->address + (uint64_t)piece * message->piece_bytes + segment->prefault_offset;
    if (madvise(at, slice, MADV_POPULATE_WRITE) != 0) {
        /* An older kernel, or memory that the store has not filled: faults at first use do the same
         * work later. */
        segment->prefault_piece = errno == EINVAL ? message->piece_count : piece + 1;
        segment->prefault_offset = 0;
        return segment->prefault_piece < message->piece_count;
    }
    segment->prefault_offset += slice;
    if (segment->prefault_offset == bytes) {
        segment->prefault_piece++;
        segment->prefault_offset = 0;
    }
    return true;
}

/* The first mapped piece of the segment that GPUs of peer->opening may not reach yet;
 * piece_count: none. */
static uint32_t unopened_piece(const struct tp_peer *peer, const struct tp_peer_segment *segment) {
    uint32_t i = 0;
    while (i < segment->message.piece_count &&
           (!atomic_load_explicit(&segment->mapped[i], memory_order_relaxed) ||
            (peer->opening & ~segment->opened[i]) == 0))
        i++;
    return i;
}

/* Open one piece to one GPU. A GPU that the driver refuses is not tried again. */
static void open_piece(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t piece) {
    int device = __builtin_ctzll(peer->opening & ~segment->opened[piece]);
    uint64_t bit = UINT64_C(1) << device;
    char *at = segment->address + (uint64_t)piece * segment->message.piece_bytes;
    if (tp_vmm_open(at, tp_wire_piece_bytes(&segment->message, piece), device) == 0) {
        segment->opened[piece] |= bit;
        return;
    }
    tp_count(TP_IMPORT_FAILURES, 1);
    peer->opening &= ~bit;
    peer->shut |= bit;
}

bool tp_import_open(struct tp_peer *peer) {
    uint64_t wanted = atomic_load_explicit(&peer->devices_wanted, memory_order_relaxed);
    peer->opening |= wanted & ~peer->shut;
    if ((peer->opening & ~atomic_load(&peer->devices)) == 0)
        return false;
    uint32_t high = atomic_load(&peer->segment_high);
    for (uint32_t i = 0; i < high; i++) {
        struct tp_peer_segment *segment = &peer->segments[i];
        if (atomic_load(&segment->state) != TP_SEGMENT_LIVE || !is_cumem(segment))
            continue;
        uint32_t piece = unopened_piece(peer, segment);
        if (piece < segment->message.piece_count) {
            open_piece(peer, segment, piece);
            return true;
        }
    }
    atomic_store(&peer->devices, peer->opening);
    return false;
}

static void drop_cumem(struct tp_peer_segment *segment) {
    const struct tp_msg_segment *message = &segment->message;
    if (!segment->reserved)
        return;
    for (uint32_t i = 0; i < message->piece_count; i++) {
        if (atomic_load(&segment->mapped[i]))
            tp_vmm_unmap(segment->address + i * message->piece_bytes,
                         tp_wire_piece_bytes(message, i));
    }
    tp_vmm_unreserve(segment->reserved, segment->reserved_bytes);
}

void tp_import_drop(struct tp_peer_segment *segment) {
    if (is_cumem(segment))
        drop_cumem(segment);
    else if (segment->reserved)
        munmap(segment->reserved, segment->reserved_bytes);
    segment_free(segment);
    atomic_store(&segment->state, TP_SEGMENT_EMPTY);
}
