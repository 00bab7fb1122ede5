/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mappings of one published segment: reserve the whole range of addresses at once, so that what
 * is contiguous in the store is contiguous here, and fill it piece by piece, what requests have
 * missed first.
 *
 * CUDA memory is mapped by the driver into a range that the driver reserves (vmm.c): later, when
 * there is CUDA in this process, by the import threads, and with access for each GPU.
 *
 * It must not know: connections, names, batches. All of it runs in the peer thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "transport/importer.h"
#include "transport/registrar.h"
#include "transport/slot.h"
#include "transport/steady.h"
#include "transport/vmm.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define HUGE_BYTES (UINT64_C(2) << 20)
/* Addresses for one store and for all together: 16 and 64 TiB of the 128 that a process has. */
#define RESERVE_STORE (UINT64_C(1) << 44)
#define RESERVE_ALL (UINT64_C(1) << 46)
/* Page tables of 16 MiB in 4 KiB pages take about a millisecond, and the thread has connections to
 * look after. */
#define PREFAULT_BYTES (UINT64_C(16) << 20)
#define RETRY_S 1 /* doubled after each failure */
#define RETRY_MAX_S 30
#define DROP_TRIES 10 /* 50 ms apart */

static void segment_free(struct tp_peer_segment *segment) {
    free(segment->mapped);
    free(segment->missed);
    free(segment->opened);
    free(segment->stages);
    segment->mapped = NULL;
    segment->missed = NULL;
    segment->opened = NULL;
    segment->stages = NULL;
    segment->chunks = NULL;
    segment->reserved = NULL;
    segment->address = NULL;
    segment->reserved_bytes = 0;
}

static bool is_cumem(const struct tp_peer_segment *segment) {
    return segment->message.kind == TP_WIRE_CUMEM;
}

/* ---- what fails is tried again ---- */

/* Memory, fds and the driver's patience run out and come back. */
static void retry_later(struct tp_peer *peer) {
    uint64_t now = tp_now_ms();
    if (peer->retry)
        return;
    bool anew = peer->retry_wait_s == 0 || now - peer->retry_ms > RETRY_MAX_S * UINT64_C(1000);
    unsigned wait_s = anew ? RETRY_S : 2U * peer->retry_wait_s;
    peer->retry_wait_s = (uint8_t)(wait_s < RETRY_MAX_S ? wait_s : RETRY_MAX_S);
    peer->retry_ms = now + peer->retry_wait_s * UINT64_C(1000);
    peer->retry = true;
}

static void piece_failed(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t index) {
    tp_count(TP_IMPORT_FAILURES, 1);
    if (segment->stages[index] == TP_PIECE_LOST)
        return;
    segment->stages[index] = TP_PIECE_FAILED;
    retry_later(peer);
}

static void ask_anew(struct tp_peer_segment *segment) {
    if (!segment->reserved)
        segment->reserved_bytes = 0;
    for (uint32_t i = 0; i < segment->message.piece_count; i++) {
        if (segment->stages[i] == TP_PIECE_FAILED)
            segment->stages[i] = TP_PIECE_ABSENT;
    }
    segment->next_piece = 0;
    segment->tickets_seen = 0;
}

void tp_import_retry(struct tp_peer *peer, uint64_t now_ms) {
    uint32_t high = atomic_load(&peer->segment_high);
    if (!peer->retry || now_ms < peer->retry_ms)
        return;
    peer->retry = false;
    peer->shut = 0;
    for (uint32_t i = 0; i < high; i++) {
        if (atomic_load(&peer->segments[i].state) == TP_SEGMENT_LIVE)
            ask_anew(&peer->segments[i]);
    }
}

/* Hugetlb files can be mapped only at multiples of their page; ordinary memory gets huge pages only
 * at multiples of 2 MiB. */
static uint64_t alignment(const struct tp_msg_segment *message) {
    return message->page_bytes > HUGE_BYTES ? message->page_bytes : HUGE_BYTES;
}

static uint64_t reserved_for(const struct tp_peer *peer) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < TP_WIRE_MAX_SEGMENTS; i++)
        bytes += peer->segments[i].reserved ? peer->segments[i].reserved_bytes : 0;
    return bytes;
}

/* Stores must not use up the addresses of this process, whatever they publish. */
static bool may_reserve(const struct tp_peer *peer, uint64_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t all = 0;
    for (uint32_t i = 0; i < TP_PEERS; i++)
        all += reserved_for(tp_peer_at(i));
    if (bytes <= RESERVE_STORE && reserved_for(peer) <= RESERVE_STORE - bytes &&
        all <= RESERVE_ALL - bytes)
        return true;
    tp_log_once(&said, TP_LOG_WARN,
                "a store's segment of %" PRIu64
                " MiB is more than this process has addresses for (16 TiB for one store, 64 TiB "
                "for all together): requests to it fall back to Mooncake's transport until other "
                "segments are gone",
                bytes >> 20);
    return false;
}

/* Addresses for memory that is mmapped. */
static bool reserve(const struct tp_peer *peer, struct tp_peer_segment *segment) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t align = alignment(&segment->message);
    segment->reserved_bytes = segment->message.map_bytes + align;
    if (!may_reserve(peer, segment->reserved_bytes))
        return false;
    void *reserved = mmap(NULL, segment->reserved_bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
        tp_log_once(&said, TP_LOG_WARN,
                    "no addresses for a store's segment of %" PRIu64
                    " MiB: %s (ulimit -v); requests to it are left to Mooncake, and it is tried "
                    "again",
                    segment->message.map_bytes >> 20, strerror(errno));
        return false;
    }
    char *address = (char *)(((uintptr_t)reserved + align - 1) & ~(uintptr_t)(align - 1));
    segment->chunks = tp_chunks_new(address, &segment->message, segment->mapped);
    if (!segment->chunks && tp_registrar_on()) {
        static atomic_flag said_memory = ATOMIC_FLAG_INIT;
        munmap(reserved, segment->reserved_bytes);
        tp_log_once(&said_memory, TP_LOG_WARN,
                    "no memory to attach to a store's segment of %" PRIu64
                    " MiB: requests to it are left to Mooncake, and it is tried again",
                    segment->message.map_bytes >> 20);
        return false;
    }
    segment->reserved = reserved;
    segment->address = address;
    return true;
}

int tp_import_begin(struct tp_peer_segment *segment, const struct tp_msg_segment *message) {
    segment->message = *message;
    segment->next_piece = 0;
    segment->next_open = 0;
    segment->tickets_seen = 0;
    segment->drop_tries = 0;
    segment->drop_next = 0;
    segment->drop_refused = false;
    segment->prefault_piece = 0;
    segment->prefault_offset = 0;
    atomic_store(&segment->mapped_count, 0);
    atomic_store(&segment->tickets, 0);
    atomic_store(&segment->open_to_all, 0);
    uint32_t count = message->piece_count;
    segment->mapped = calloc(count, sizeof(*segment->mapped));
    segment->missed = calloc(count, sizeof(*segment->missed));
    segment->stages = calloc(count, sizeof(*segment->stages));
    segment->opened = is_cumem(segment) ? calloc(count, sizeof(*segment->opened)) : NULL;
    if (segment->mapped && segment->missed && segment->stages &&
        (!is_cumem(segment) || segment->opened))
        return 0;
    segment_free(segment);
    return -ENOMEM;
}

/* The GPUs that shall reach every piece: those in use, and those that requests came from. */
static void look_for_devices(struct tp_peer *peer) {
    uint64_t wanted = atomic_load_explicit(&peer->devices_wanted, memory_order_relaxed);
    uint64_t opening = (peer->opening | wanted | tp_cuda_active_devices()) & ~peer->shut;
    uint32_t high = atomic_load(&peer->segment_high);
    for (uint32_t i = 0; i < high && opening != peer->opening; i++)
        peer->segments[i].next_open = 0;
    peer->opening = opening;
}

static bool mmap_ready(struct tp_peer *peer, struct tp_peer_segment *segment) {
    if (segment->reserved)
        return true;
    if (segment->reserved_bytes) /* it failed, and the time for the next try has not come */
        return false;
    if (!reserve(peer, segment))
        retry_later(peer);
    return segment->reserved;
}

bool tp_import_ready(struct tp_peer *peer, struct tp_peer_segment *segment) {
    if (!is_cumem(segment))
        return mmap_ready(peer, segment);
    if (segment->reserved) {
        look_for_devices(peer);
        return true;
    }
    /* A miss shows that this process really transfers: it is past its forks. */
    bool missed = atomic_load_explicit(&segment->tickets, memory_order_relaxed) != 0;
    if (segment->reserved_bytes || !tp_vmm_usable(missed))
        return false;
    segment->reserved_bytes = segment->message.map_bytes;
    if (may_reserve(peer, segment->reserved_bytes))
        segment->reserved = tp_vmm_reserve(segment->reserved_bytes);
    segment->address = segment->reserved;
    if (!segment->reserved)
        retry_later(peer);
    look_for_devices(peer);
    return segment->reserved;
}

/* ---- what comes next ---- */

/* GPUs that a mapped piece is to be opened to; none while it is at work on that. */
static uint64_t closed_to(const struct tp_peer *peer, const struct tp_peer_segment *segment,
                          uint32_t piece) {
    if (!segment->opened || segment->stages[piece] != TP_PIECE_MAPPED)
        return 0;
    return peer->opening & ~atomic_load_explicit(&segment->opened[piece], memory_order_relaxed);
}

/*
 * The piece at this stage that a request missed first, piece_count: none. Looks at all pieces, but
 * only when tickets were taken since none was found waiting.
 */
static uint32_t missed_first(const struct tp_peer *peer, struct tp_peer_segment *segment,
                             enum tp_piece_stage stage) {
    uint32_t count = segment->message.piece_count;
    uint32_t tickets = atomic_load_explicit(&segment->tickets, memory_order_relaxed);
    uint32_t found = count;
    uint32_t first = UINT32_MAX;
    bool waits = false;
    if (tickets == segment->tickets_seen)
        return count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t ticket = atomic_load_explicit(&segment->missed[i], memory_order_relaxed);
        bool open = closed_to(peer, segment, i) != 0;
        if (ticket == 0 || (segment->stages[i] != TP_PIECE_ABSENT && !open))
            continue;
        waits = true;
        if (segment->stages[i] == stage && ticket < first) {
            first = ticket;
            found = i;
        }
    }
    if (!waits)
        segment->tickets_seen = tickets;
    return found;
}

void tp_import_next(struct tp_peer *peer, struct tp_peer_segment *segment, bool missed_only,
                    uint32_t most, uint32_t *ret_first, uint32_t *ret_count) {
    uint32_t total = segment->message.piece_count;
    uint32_t first = missed_first(peer, segment, TP_PIECE_ABSENT);
    *ret_count = 0;
    if (first == total) {
        while (segment->next_piece < total && segment->stages[segment->next_piece])
            segment->next_piece++;
        first = missed_only ? total : segment->next_piece;
    }
    *ret_first = first;
    for (uint32_t i = first; i < total && *ret_count < most && !segment->stages[i]; i++) {
        segment->stages[i] = TP_PIECE_ASKED;
        (*ret_count)++;
    }
}

/* ---- pieces ---- */

static void piece_mapped(struct tp_peer_segment *segment, uint32_t index, char *at,
                         uint64_t bytes) {
    /* A child could outlive us and keep a dead store's pages; a core file of a store's size helps
     * nobody. */
    (void)madvise(at, bytes, MADV_DONTFORK);
    (void)madvise(at, bytes, MADV_DONTDUMP);
    segment->stages[index] = TP_PIECE_MAPPED;
    atomic_store_explicit(&segment->mapped[index], 1, memory_order_release);
    atomic_fetch_add_explicit(&segment->mapped_count, 1, memory_order_release);
}

/*
 * mmap with MAP_FIXED may take away what was there and then fail (hugetlbfs has no page left, say):
 * nobody owns these addresses then, and the next mmap of any thread may get them. Claim them again
 * at once. EEXIST: the kernel has left our reservation in place. When they cannot be claimed,
 * another try could hit somebody else's memory.
 */
static bool still_reserved(char *at, uint64_t bytes) {
    void *again = mmap(at, bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (again != MAP_FAILED && again != at) /* a kernel before 4.17 */
        munmap(again, bytes);
    return again == at || (again == MAP_FAILED && errno == EEXIST);
}

static int map_file(struct tp_peer_segment *segment, uint32_t index, int fd) {
    const struct tp_msg_segment *message = &segment->message;
    char *at = segment->address + (uint64_t)index * message->piece_bytes;
    uint64_t bytes = tp_wire_piece_bytes(message, index);
    int error = tp_steady_check(fd, bytes);
    if (error)
        return error;
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        error = -errno;
        if (!still_reserved(at, bytes))
            segment->stages[index] = TP_PIECE_LOST;
        return error;
    }
    if (message->page_bytes < HUGE_BYTES)
        (void)madvise(at, bytes, MADV_HUGEPAGE); /* the kernel may be built or told not to */
    piece_mapped(segment, index, at, bytes);
    return 0;
}

static struct tp_import_job job_for(struct tp_peer *peer, struct tp_peer_segment *segment,
                                    uint32_t index) {
    return (struct tp_import_job){.peer = peer,
                                  .segment = segment,
                                  .piece = index,
                                  .address = segment->address +
                                             (uint64_t)index * segment->message.piece_bytes,
                                  .bytes = tp_wire_piece_bytes(&segment->message, index),
                                  .fd = -1};
}

/* A thread maps it (importer.c). */
static int map_cumem(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t index,
                     int fd) {
    if (!segment->reserved)
        return -EPROTO; /* it was not asked for */
    struct tp_import_job job = job_for(peer, segment, index);
    job.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int error = job.fd < 0 ? -errno : 0;
    job.devices = peer->opening;
    if (!error)
        error = tp_importer_put(&job);
    if (!error)
        peer->jobs++;
    else if (job.fd >= 0)
        close(job.fd);
    return error;
}

int tp_import_piece(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t index, int fd) {
    uint64_t bytes = tp_wire_piece_bytes(&segment->message, index);
    if (bytes == 0 || segment->stages[index] != TP_PIECE_ASKED)
        return -EPROTO;
    int error =
        is_cumem(segment) ? map_cumem(peer, segment, index, fd) : map_file(segment, index, fd);
    if (error && error != -EPROTO)
        piece_failed(peer, segment, index);
    return error;
}

static void find_open_to_all(struct tp_peer_segment *segment) {
    uint64_t all = UINT64_MAX;
    if (atomic_load(&segment->mapped_count) < segment->message.piece_count)
        return;
    for (uint32_t i = 0; i < segment->message.piece_count; i++)
        all &= atomic_load_explicit(&segment->opened[i], memory_order_relaxed);
    atomic_store_explicit(&segment->open_to_all, all, memory_order_release);
}

void tp_import_ended(const struct tp_import_job *job) {
    struct tp_peer *peer = job->peer;
    struct tp_peer_segment *segment = job->segment;
    uint32_t piece = job->piece;
    bool mapping = segment->stages[piece] == TP_PIECE_ASKED;
    peer->jobs--;
    if (job->error == -ECANCELED)
        return;
    if (job->error) {
        piece_failed(peer, segment, piece);
        return;
    }
    uint64_t refused = job->devices & ~job->opened;
    if (refused) {
        tp_count(TP_IMPORT_FAILURES, 1);
        retry_later(peer);
    }
    peer->shut |= refused;
    peer->opening &= ~refused;
    atomic_fetch_or_explicit(&segment->opened[piece], job->opened, memory_order_release);
    /* A request that misses it from here on, for want of another GPU's access, says so anew. */
    atomic_store_explicit(&segment->missed[piece], 0, memory_order_relaxed);
    if (mapping)
        piece_mapped(segment, piece, job->address, job->bytes);
    segment->stages[piece] = TP_PIECE_MAPPED;
    if (closed_to(peer, segment, piece) && piece < segment->next_open)
        segment->next_open = piece;
    find_open_to_all(segment);
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

bool tp_import_open(struct tp_peer *peer, struct tp_peer_segment *segment, bool missed_only) {
    uint32_t total = segment->message.piece_count;
    if (!segment->reserved || !segment->opened)
        return false;
    uint32_t piece = missed_first(peer, segment, TP_PIECE_MAPPED);
    if (piece == total) {
        while (segment->next_open < total && !closed_to(peer, segment, segment->next_open))
            segment->next_open++;
        piece = missed_only ? total : segment->next_open;
    }
    if (piece == total)
        return false;
    struct tp_import_job job = job_for(peer, segment, piece);
    job.devices = closed_to(peer, segment, piece);
    if (tp_importer_put(&job) != 0)
        return false;
    segment->stages[piece] = TP_PIECE_OPENING;
    peer->jobs++;
    return true;
}

/* When this turn's time for unmapping ends; 0: none was unmapped in it yet. */
static uint64_t unmap_until_ms;
static unsigned unmap_ms;

void tp_import_turn(unsigned ms) {
    unmap_until_ms = 0;
    unmap_ms = ms;
}

/* The driver takes 25 ms a GiB to unmap, and the thread has the connections of other stores to
 * look after. Returns false when the time of this turn is used up. */
static bool may_unmap(void) {
    uint64_t now = tp_now_ms();
    if (unmap_until_ms == 0)
        unmap_until_ms = now + unmap_ms;
    else if (now >= unmap_until_ms)
        return false;
    return true;
}

static void unmap_piece(struct tp_peer_segment *segment, uint32_t index) {
    if (tp_vmm_unmap(segment->address + index * segment->message.piece_bytes,
                     tp_wire_piece_bytes(&segment->message, index)))
        atomic_store(&segment->mapped[index], 0);
    else
        segment->drop_refused = true;
}

/*
 * Returns false when there is more to unmap: at once, with *ret_busy, or what the driver has
 * refused, later. What it goes on refusing stays mapped, and its addresses are nobody's any more.
 */
static bool drop_cumem(struct tp_peer_segment *segment, bool *ret_busy) {
    if (!segment->reserved)
        return true;
    for (; segment->drop_next < segment->message.piece_count; segment->drop_next++) {
        if (!atomic_load(&segment->mapped[segment->drop_next]))
            continue;
        if (!may_unmap()) {
            *ret_busy = true;
            return false;
        }
        unmap_piece(segment, segment->drop_next);
    }
    if (segment->drop_refused) {
        segment->drop_refused = false;
        segment->drop_next = 0;
        return ++segment->drop_tries >= DROP_TRIES;
    }
    tp_vmm_unreserve(segment->reserved, segment->reserved_bytes);
    return true;
}

/* Addresses that nothing else may get. */
static void block(char *at, uint64_t bytes) {
    (void)mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
               0);
}

static void drop_mapped(struct tp_peer_segment *segment, bool stuck) {
    const struct tp_msg_segment *message = &segment->message;
    if (memchr(segment->stages, TP_PIECE_LOST, message->piece_count)) {
        for (uint32_t i = 0; i < message->piece_count; i++) {
            if (segment->stages[i] != TP_PIECE_LOST)
                block(segment->address + i * message->piece_bytes, tp_wire_piece_bytes(message, i));
        }
    } else if (stuck) { /* CUDA goes on taking these addresses for the old pages */
        block(segment->reserved, segment->reserved_bytes);
    } else {
        munmap(segment->reserved, segment->reserved_bytes);
    }
}

void tp_import_drop(struct tp_peer_segment *segment, bool *ret_busy) {
    bool stuck = false;
    if (segment->chunks && !tp_chunks_drop(segment->chunks, &stuck)) {
        *ret_busy |= tp_chunks_drop_goes_on(segment->chunks);
        return;
    }
    if (is_cumem(segment) && !drop_cumem(segment, ret_busy))
        return;
    if (!is_cumem(segment) && segment->reserved)
        drop_mapped(segment, stuck);
    segment_free(segment);
    atomic_store(&segment->state, TP_SEGMENT_EMPTY);
}
