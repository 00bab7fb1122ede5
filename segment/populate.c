/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Give every page of a mapping its memory, in parallel slices, and copy contents into it.
 *
 * It must not know: where the mapping will go, who will see it.
 *
 * A page that cannot be had must come back as an error, never as SIGBUS: MADV_POPULATE_WRITE
 * (Linux 5.14) reports it; where it is missing, or refused by a seccomp profile, fallocate(2)
 * reserves first and the pages are touched after.
 */
#include "segment/populate.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "env/env.h"
#include "segment/crew.h"
#include "segment/placement.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define SLICE_BYTES (UINT64_C(256) << 20)

struct job {
    const struct tp_populate_work *work;
    uint64_t slice_bytes, slices_per_piece;
};

static int reserve(int fd, uint64_t offset, uint64_t bytes) {
    int result;
    do {
        result = fallocate(fd, 0, (off_t)offset, (off_t)bytes) < 0 ? -errno : 0;
    } while (result == -EINTR);
    return result;
}

static int populate_slice(const struct tp_populate_work *work, uint32_t piece, uint64_t offset,
                          uint64_t bytes) {
    char *address = work->address + piece * work->piece_bytes + offset;
    int result = work->reserve_first ? reserve(work->fds[piece], offset, bytes) : 0;
    if (result < 0)
        return result;
    do {
        result = madvise(address, bytes, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
    } while (result == -EINTR || result == -EAGAIN);
    if (result == -EFAULT) /* what a touch would have answered with SIGBUS */
        return -ENOMEM;
    if (result != -EINVAL && result != -EPERM && result != -EACCES && result != -ENOSYS)
        return result;
    if (!work->reserve_first)
        result = reserve(work->fds[piece], offset, bytes);
    if (result < 0 && result != -EINVAL)
        return result;
    for (uint64_t i = 0; i < bytes; i += work->page_bytes)
        *(volatile char *)(address + i) = 0;
    return 0;
}

/* Neighbouring numbers are slices of different pieces, so that the threads work on different files
 * and nodes. */
static int64_t run_slice(void *arg, uint64_t number) {
    const struct job *job = arg;
    const struct tp_populate_work *work = job->work;
    uint32_t piece = (uint32_t)(number % work->piece_count);
    uint64_t offset = number / work->piece_count * job->slice_bytes;
    uint64_t start = piece * work->piece_bytes;
    uint64_t piece_bytes =
        work->bytes - start < work->piece_bytes ? work->bytes - start : work->piece_bytes;
    if (offset >= piece_bytes)
        return 0;
    uint64_t left = piece_bytes - offset;
    uint64_t bytes = left < job->slice_bytes ? left : job->slice_bytes;
    if (work->reserve_first)
        tp_placement_bind_thread(work->placement, piece);
    int result = populate_slice(work, piece, offset, bytes);
    if (result < 0)
        return result;
    if (work->copy_from != NULL)
        memcpy(work->address + start + offset, work->copy_from + start + offset, bytes);
    return (int64_t)bytes;
}

int tp_populate(const struct tp_populate_work *work) {
    /* Pages of 1 GiB are no smaller than that. */
    uint64_t slice = work->page_bytes > SLICE_BYTES ? work->page_bytes : SLICE_BYTES;
    struct job job = {.work = work,
                      .slice_bytes = slice,
                      .slices_per_piece = (work->piece_bytes - 1) / slice + 1};
    struct tp_crew_work crew = {.verb = {"populating", "populated"},
                                .count = job.slices_per_piece * work->piece_count,
                                .bytes = work->bytes,
                                .placement = work->placement,
                                .run = run_slice,
                                .arg = &job};
    return tp_crew_run(&crew);
}
