/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Build the pieces of one segment and lay them over a range, which somebody else allocated or which
 * was reserved for them.
 *
 * It must not know: the table of segments, publishing, the server.
 */
#include "segment/pieces.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/addresses.h"
#include "segment/backing.h"
#include "segment/hugepages.h"
#include "segment/placement.h"
#include "segment/populate.h"
#include "segment/segment.h"

#define DEFAULT_PIECE_BYTES (UINT64_C(2) << 30)
#define SMALL_PAGE UINT64_C(4096)
#define PMD_BYTES (UINT64_C(2) << 20) /* x86-64: what a transparent huge page covers */

struct build {
    struct tp_need need;
    struct tp_placement placement;
    struct tp_backing backing;
    struct tp_pieces pieces;
    char *staging;    /* where the pieces are made; pieces [0, moved) have left it */
    uint32_t created; /* pieces with an fd */
    uint32_t moved;
};

uint64_t tp_need_piece_bytes(const struct tp_need *need, uint64_t page_bytes) {
    uint64_t piece = need->piece_bytes > 0 ? need->piece_bytes : DEFAULT_PIECE_BYTES;
    uint64_t whole = need->bytes / page_bytes * page_bytes;
    /* Piece starts that are multiples of 2 MiB let every piece be mapped by huge pages. */
    uint64_t unit = piece >= PMD_BYTES && page_bytes < PMD_BYTES ? PMD_BYTES : page_bytes;
    if (piece >= whole)
        return whole > 0 ? whole : page_bytes;
    return (piece + unit - 1) / unit * unit;
}

uint64_t tp_need_node_pages(const struct tp_need *need, uint64_t page_bytes, unsigned node) {
    uint64_t piece = tp_need_piece_bytes(need, page_bytes);
    uint64_t whole = need->bytes / page_bytes * page_bytes;
    uint64_t full = whole / piece;
    uint64_t mine = full / need->node_count + (node < full % need->node_count ? 1 : 0);
    uint64_t bytes = mine * piece;
    if (full % need->node_count == node)
        bytes += whole - full * piece; /* the shorter last piece */
    return bytes / page_bytes;
}

static uint64_t piece_length(const struct tp_pieces *pieces, uint32_t index) {
    uint64_t start = index * pieces->piece_bytes;
    return pieces->bytes - start < pieces->piece_bytes ? pieces->bytes - start
                                                       : pieces->piece_bytes;
}

/* NULL: none is configured. */
static const struct tp_backing_ops *choose_backing(const struct tp_config *config) {
    switch (config->store.kind) {
    case TP_SEGMENT_MEMFD:
    case TP_SEGMENT_CUMEM: /* has addresses of its own; memory that exists already gets memfds */
        return &tp_backing_memfd;
    case TP_SEGMENT_FILES:
        return &tp_backing_files;
    case TP_SEGMENT_NONE:
    default:
        return NULL;
    }
}

size_t tp_segment_page_bytes(const struct tp_config *config) {
    const struct tp_backing_ops *ops = choose_backing(config);
    return ops != NULL ? ops->page_bytes(config) : SMALL_PAGE;
}

/* fds are the host process's too: a quarter of its limit is ours. */
static int check_fds(const struct tp_pieces *pieces, uint64_t held_fds) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        limit.rlim_cur = RLIM_INFINITY; /* a seccomp profile may forbid to ask */
    uint64_t quarter = limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur / 4;
    uint64_t room = quarter > held_fds ? quarter - held_fds : 0;
    if (room > TP_WIRE_MAX_PIECES)
        room = TP_WIRE_MAX_PIECES;
    uint64_t count = (pieces->bytes - 1) / pieces->piece_bytes + 1;
    if (count <= room)
        return 0;
    uint64_t unit = pieces->page_bytes > PMD_BYTES ? pieces->page_bytes : PMD_BYTES;
    uint64_t enough = room > 0 ? (pieces->bytes - 1) / room + 1 : 0;
    enough = (enough + unit - 1) / unit * unit;
    tp_log(TP_LOG_ERROR,
           "a segment of %" PRIu64 " MiB in pieces of %" PRIu64 " KiB needs %" PRIu64
           " file descriptors and may use %" PRIu64 " (a quarter of RLIMIT_NOFILE %" PRIu64
           ", %" PRIu64 " held): set MC_STORE_CUMEM_PIECE_BYTES=%" PRIu64 " or raise ulimit -n",
           pieces->bytes >> 20, pieces->piece_bytes >> 10, count, room, (uint64_t)limit.rlim_cur,
           held_fds, enough);
    return -EMFILE;
}

/* Later would be too late: the kernel promises pages that it does not have, and kills when they are
 * touched. */
static int check_memory(const struct tp_pieces *pieces, bool overcommit) {
    uint64_t available;
    if (tp_host_memory_available(&available) < 0 || pieces->bytes <= available)
        return 0;
    tp_log(overcommit ? TP_LOG_WARN : TP_LOG_ERROR,
           "a segment of %" PRIu64 " MiB does not fit: %" PRIu64
           " MiB of memory are available (MemAvailable and the cgroup's limit); %s",
           pieces->bytes >> 20, available >> 20,
           overcommit
               ? "it is made because of TIDEPOOL_OVERCOMMIT=1, and the kernel may swap or end "
                 "processes"
               : "make it smaller, raise the limit, or set TIDEPOOL_OVERCOMMIT=1 to try anyway");
    return overcommit ? 0 : -ENOMEM;
}

int tp_pieces_check(const struct tp_pieces *pieces, uint64_t held_fds, bool pool, bool overcommit) {
    int result = check_fds(pieces, held_fds);
    return result < 0 || pool ? result : check_memory(pieces, overcommit);
}

static int plan(struct build *build, uint64_t held_fds) {
    struct tp_pieces *pieces = &build->pieces;
    const struct tp_backing *backing = &build->backing;
    pieces->page_bytes = backing->page_bytes;
    pieces->bytes = build->need.bytes / backing->page_bytes * backing->page_bytes;
    if (pieces->bytes == 0) {
        tp_log(TP_LOG_ERROR,
               "a segment of %" PRIu64 " bytes is smaller than a page of %" PRIu64
               " bytes: not shared",
               build->need.bytes, backing->page_bytes);
        return -EINVAL;
    }
    pieces->piece_bytes = tp_need_piece_bytes(&build->need, backing->page_bytes);
    pieces->node_count = build->placement.count;
    pieces->wire_kind = backing->ops->wire_kind;
    memcpy(pieces->detail, backing->detail, sizeof pieces->detail);
    int result = tp_pieces_check(pieces, held_fds, backing->hugetlb, build->need.overcommit);
    if (result < 0)
        return result;
    pieces->count = (uint32_t)((pieces->bytes - 1) / pieces->piece_bytes + 1);
    if (!backing->hugetlb)
        tp_placement_check_room(&build->placement,
                                tp_need_node_pages(&build->need, backing->page_bytes, 0) *
                                    backing->page_bytes);
    pieces->fds = reallocarray(NULL, pieces->count, sizeof *pieces->fds);
    if (pieces->fds == NULL) {
        tp_log(TP_LOG_ERROR, "no memory for the table of %" PRIu32 " pieces", pieces->count);
        return -ENOMEM;
    }
    return 0;
}

/* Address space for the pieces, congruent to their last place, so that page tables move whole
 * (mremap). */
static int reserve_staging(struct build *build) {
    uint64_t bytes = build->pieces.bytes;
    uint64_t unit = build->pieces.page_bytes > PMD_BYTES ? build->pieces.page_bytes : PMD_BYTES;
    char *start =
        mmap(NULL, bytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        int result = -errno;
        tp_log(TP_LOG_ERROR, "no address space for a segment of %" PRIu64 " MiB: %s (ulimit -v)",
               bytes >> 20, strerror(-result));
        return result;
    }
    uint64_t skip = ((uintptr_t)build->pieces.base - (uintptr_t)start) % unit;
    build->staging = start + skip;
    /* Exactly the pieces remain: what a move leaves behind may be taken by other threads at once.
     */
    if (skip > 0)
        (void)munmap(start, skip);
    (void)munmap(build->staging + bytes, unit - skip);
    return 0;
}

/* Refused by a security policy, rather than for want of something. */
static bool refused(int error) {
    return error == -EPERM || error == -EACCES || error == -ENOSYS;
}

static const char *remedy(int error) {
    switch (error) {
    case -EFBIG:
        return " (ulimit -f; or smaller pieces, MC_STORE_CUMEM_PIECE_BYTES)";
    case -EMFILE:
    case -ENFILE:
        return " (ulimit -n)";
    case -ENOMEM:
        return " (ulimit -v)";
    default:
        return "";
    }
}

static int create_piece(struct build *build, uint32_t index) {
    uint64_t bytes = piece_length(&build->pieces, index);
    void *address = build->staging + index * build->pieces.piece_bytes;
    int *fd = &build->pieces.fds[index];
    int result = build->backing.ops->create(&build->backing, bytes, fd);
    if (result == 0) {
        build->created = index + 1;
        if (mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, *fd, 0) ==
            MAP_FAILED)
            result = -errno;
    }
    if (result < 0) {
        bool no_memfd =
            build->created == index && refused(result) && build->backing.ops == &tp_backing_memfd;
        tp_log(TP_LOG_ERROR,
               "cannot make piece %" PRIu32 " of %" PRIu32 " (%" PRIu64 " MiB, %s): %s%s", index,
               build->pieces.count, bytes >> 20, build->backing.detail, strerror(-result),
               no_memfd ? " (memfd_create or sealing is refused, by a seccomp profile?): set "
                          "MC_STORE_SHM_SEGMENT_DIR to a directory on tmpfs instead of memfd"
                        : remedy(result));
        return result;
    }
    if (build->backing.advise_thp)
        (void)madvise(address, bytes, MADV_HUGEPAGE);
    return tp_placement_bind(&build->placement, index, address, bytes);
}

static void say_unfilled(const struct build *build, int error) {
    const struct tp_pieces *pieces = &build->pieces;
    struct tp_hugepages pool = {0};
    if (build->backing.hugetlb && tp_hugepages_read(pieces->page_bytes, -1, &pool) == 0)
        /* They were there a moment ago: another process was faster, or a cgroup or a node's cpuset
         * says no. */
        tp_log(TP_LOG_ERROR,
               "cannot populate a segment of %" PRIu64 " pages of %" PRIu64
               " KiB (%s): %s; %" PRIu64
               " are free now: raise vm.nr_hugepages, check the cgroup's hugetlb limit, or make it "
               "smaller",
               pieces->bytes / pieces->page_bytes, pieces->page_bytes >> 10, build->backing.detail,
               strerror(-error), pool.free);
    else if (error == -EAGAIN)
        tp_log(TP_LOG_ERROR,
               "no thread can be started to make a segment (ulimit -u, the cgroup's pids.max)");
    else if (refused(error))
        tp_log(TP_LOG_ERROR,
               "cannot populate a segment of %" PRIu64
               " MiB (%s): %s: madvise(2) or fallocate(2) is refused by a seccomp profile, which "
               "has to allow them",
               pieces->bytes >> 20, build->backing.detail, strerror(-error));
    else
        tp_log(TP_LOG_ERROR,
               "cannot populate a segment of %" PRIu64
               " MiB (%s): %s; make it smaller or free memory",
               pieces->bytes >> 20, build->backing.detail, strerror(-error));
}

static int fill(struct build *build, bool keep_contents) {
    const struct tp_pieces *pieces = &build->pieces;
    struct tp_populate_work work = {
        .address = build->staging,
        .copy_from = keep_contents ? pieces->base : NULL,
        .bytes = pieces->bytes,
        .piece_bytes = pieces->piece_bytes,
        .page_bytes = pieces->page_bytes,
        .piece_count = pieces->count,
        .fds = pieces->fds,
        .reserve_first = build->backing.reserve_first,
        .placement = &build->placement,
    };
    int result = tp_populate(&work);
    if (result < 0)
        say_unfilled(build, result);
    return result;
}

/* Move one piece over its part of the range. Kernels before 5.16 cannot move hugetlb mappings:
 * those are mapped again. */
static int move_piece(struct build *build, uint32_t index) {
    uint64_t bytes = piece_length(&build->pieces, index);
    char *from = build->staging + index * build->pieces.piece_bytes;
    char *to = (char *)build->pieces.base + index * build->pieces.piece_bytes;
    if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED)
        return 0;
    if (errno != EINVAL)
        return -errno;
    if (mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, build->pieces.fds[index],
             0) == MAP_FAILED)
        return -errno;
    (void)munmap(from, bytes);
    return 0;
}

/* Give a moved piece's part of the range private memory again, with its contents. */
static void move_back(struct build *build, uint32_t index, bool keep_contents) {
    uint64_t bytes = piece_length(&build->pieces, index);
    char *to = (char *)build->pieces.base + index * build->pieces.piece_bytes;
    void *copy = MAP_FAILED;
    if (keep_contents)
        copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy != MAP_FAILED) {
        memcpy(copy, to, bytes);
        if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED)
            return;
        (void)munmap(copy, bytes);
    }
    if (!keep_contents)
        (void)mmap(to, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    /* Else the piece stays mapped there, unlisted: contents count more than where they lie. */
}

static int move_all(struct build *build) {
    for (; build->moved < build->pieces.count; build->moved++) {
        int result = move_piece(build, build->moved);
        if (result < 0) {
            tp_log(TP_LOG_ERROR,
                   "cannot map piece %" PRIu32 " of %" PRIu32 " over %p: %s (vm.max_map_count?)",
                   build->moved, build->pieces.count, build->pieces.base, strerror(-result));
            return result;
        }
    }
    return 0;
}

static void undo(struct build *build, bool keep_contents) {
    const struct tp_pieces *pieces = &build->pieces;
    for (uint32_t i = 0; i < build->moved; i++)
        move_back(build, i, keep_contents);
    uint64_t gone = build->moved * pieces->piece_bytes;
    if (build->staging != NULL && gone < pieces->bytes)
        (void)munmap(build->staging + gone, pieces->bytes - gone);
    for (uint32_t i = 0; i < build->created; i++)
        close(pieces->fds[i]);
    free(pieces->fds);
}

static int make_and_move(struct build *build, bool keep_contents) {
    int result = reserve_staging(build);
    for (uint32_t i = 0; result == 0 && i < build->pieces.count; i++)
        result = create_piece(build, i);
    if (result == 0)
        result = fill(build, keep_contents);
    if (result == 0)
        result = move_all(build);
    return result;
}

int tp_pieces_build(void *address, size_t bytes, bool keep_contents, struct tp_held held,
                    const struct tp_config *config, struct tp_pieces *ret_pieces) {
    struct build build = {.pieces = {.base = address}};
    int result = 0;
    const struct tp_backing_ops *ops = choose_backing(config);
    if (ops == NULL) {
        tp_log(TP_LOG_ERROR, "no segment memory is configured: set MC_STORE_SHM_SEGMENT_DIR");
        return -EINVAL;
    }
    tp_placement_choose(config, &build.placement);
    build.need = (struct tp_need){.address = (uintptr_t)address,
                                  .bytes = bytes,
                                  .node_count = build.placement.count,
                                  .nodes = build.placement.nodes,
                                  .piece_bytes = config->store.piece_bytes,
                                  .held_bytes = held.bytes,
                                  .overcommit = config->store.overcommit};
    result = ops->open(config, &build.need, &build.backing);
    if (result < 0)
        return result;
    result = plan(&build, held.fds);
    if (result == 0)
        result = make_and_move(&build, keep_contents);
    if (result < 0)
        undo(&build, keep_contents);
    else
        *ret_pieces = build.pieces;
    ops->close(&build.backing);
    return result;
}

int tp_pieces_allocate(size_t bytes, size_t alignment, struct tp_held held,
                       const struct tp_config *config, struct tp_pieces *ret_pieces) {
    size_t page = tp_segment_page_bytes(config);
    size_t unit = page > PMD_BYTES ? page : PMD_BYTES;
    void *address;
    if (bytes > SIZE_MAX - page) {
        tp_log(TP_LOG_ERROR, "a segment of %zu bytes cannot be made", bytes);
        return -EINVAL;
    }
    bytes = (bytes + page - 1) / page * page;
    int result = tp_addresses_reserve(config, bytes, alignment > unit ? alignment : unit, &address);
    if (result == -EADDRNOTAVAIL)
        return result;
    if (result < 0) {
        tp_log(TP_LOG_ERROR,
               "there are no %zu MiB of addresses for a segment (%s): make it smaller, or raise "
               "what the kernel promises (ulimit -v)",
               bytes >> 20, strerror(-result));
        return result;
    }
    result = tp_pieces_build(address, bytes, false, held, config, ret_pieces);
    if (result < 0)
        (void)munmap(address, bytes);
    else
        ret_pieces->ours = true;
    return result;
}

int tp_pieces_remove(struct tp_pieces *pieces) {
    int result = 0;
    if (pieces->ours)
        result = munmap(pieces->base, pieces->bytes);
    else if (mmap(pieces->base, pieces->bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        result = -1;
    if (result < 0)
        result = -errno;
    tp_pieces_forget(pieces);
    return result;
}

void tp_pieces_forget(struct tp_pieces *pieces) {
    for (uint32_t i = 0; i < pieces->count; i++)
        close(pieces->fds[i]);
    free(pieces->fds);
    pieces->fds = NULL;
    pieces->count = 0;
}
