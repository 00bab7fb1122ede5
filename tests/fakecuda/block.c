/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Physical memory: a sealed memfd and a hidden mapping through which copies go. A page behind the
 * memory says what it is, for a process that imports it.
 *
 * The shareable descriptor is the memfd reopened with O_PATH: it travels with SCM_RIGHTS and its
 * mmap fails, as that of the driver's does. Unlike the driver's (580) it is a regular file with a
 * size to fstat, where theirs is a character device of size 0; its mmap says EBADF, theirs EINVAL;
 * and whoever reopens it through /proc/self/fd gets at the memory, which is how import works here.
 */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define TRAILER_BYTES 4096

struct trailer {
    char magic[8]; /* "FAKECUDA", written by the exporter's process */
    int place, location, handle_types;
    uint64_t size;
};

static size_t device_used[FC_MAX_DEVICES];
static uint64_t next_id = 1;

size_t fc_device_used(int device) {
    return device_used[device];
}

static CUresult map_hidden(struct fc_block *block) {
    block->hidden =
        mmap(NULL, block->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, block->fd, 0);
    if (block->hidden == MAP_FAILED) {
        block->hidden = NULL;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* A child shares the memory; the real driver's mappings are not inherited at all. */
    madvise(block->hidden, block->size, MADV_DONTFORK);
    return CUDA_SUCCESS;
}

static void destroy(struct fc_block *block) {
    if (block->hidden)
        munmap(block->hidden, block->size);
    if (block->fd >= 0)
        close(block->fd);
    free(block);
}

static int make_memfd(struct fc_block *block) {
    struct trailer trailer = {.magic = "FAKECUDA",
                              .place = (int)block->place,
                              .location = block->location,
                              .handle_types = block->handle_types,
                              .size = block->size};
    char name[64];

    /* sizeof magic leaves no room for a terminator, which is intended */
    snprintf(name, sizeof name, "fakecuda-%s%d", block->place == FC_PLACE_DEVICE ? "gpu" : "host",
             block->location);
    block->fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (block->fd < 0 || ftruncate(block->fd, (off_t)(block->size + TRAILER_BYTES)) ||
        pwrite(block->fd, &trailer, sizeof trailer, (off_t)block->size) != (ssize_t)sizeof trailer)
        return -1;
    return fcntl(block->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

CUresult fc_block_new(enum fc_place place, int location, size_t size, int handle_types,
                      struct fc_block **ret) {
    struct fc_block *block;

    if (place == FC_PLACE_DEVICE && device_used[location] + size > fc_settings()->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    block = calloc(1, sizeof *block);
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *block = (struct fc_block){.id = next_id++,
                               .place = place,
                               .location = location,
                               .size = size,
                               .handle_types = handle_types,
                               .holders = 1};
    if (make_memfd(block) || map_hidden(block)) {
        destroy(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (place == FC_PLACE_DEVICE)
        device_used[location] += size;
    *ret = block;
    return CUDA_SUCCESS;
}

static bool trailer_is_sound(const struct trailer *trailer, const struct stat *stat) {
    return !memcmp(trailer->magic, "FAKECUDA", 8) && trailer->size % FC_GRANULARITY == 0 &&
           trailer->size == (uint64_t)stat->st_size - TRAILER_BYTES &&
           (trailer->place == FC_PLACE_NUMA ||
            (trailer->place == FC_PLACE_DEVICE && trailer->location >= 0 &&
             trailer->location < fc_settings()->devices));
}

CUresult fc_block_import(int path_fd, struct fc_block **ret) {
    struct fc_block *block = calloc(1, sizeof *block);
    struct trailer trailer;
    struct stat stat;
    char path[64];

    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (fcntl(path_fd, F_GETFD) < 0) {
        free(block);
        return CUDA_ERROR_UNKNOWN;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", path_fd);
    block->fd = -1;
    if (fstat(path_fd, &stat) || !S_ISREG(stat.st_mode) || stat.st_size <= TRAILER_BYTES)
        goto foreign;
    block->fd = open(path, O_RDWR | O_CLOEXEC);
    if (block->fd < 0 ||
        pread(block->fd, &trailer, sizeof trailer, stat.st_size - TRAILER_BYTES) !=
            (ssize_t)sizeof trailer ||
        !trailer_is_sound(&trailer, &stat))
        goto foreign;
    block->id = next_id++;
    block->place = (enum fc_place)trailer.place;
    block->location = trailer.location;
    block->handle_types = trailer.handle_types;
    block->size = trailer.size;
    block->holders = 1;
    if (map_hidden(block)) {
        destroy(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    /* The memory is the exporter's; it is not counted here. */
    *ret = block;
    return CUDA_SUCCESS;
foreign:
    destroy(block);
    return CUDA_ERROR_INVALID_VALUE;
}

int fc_block_export(const struct fc_block *block, int *ret_fd) {
    char path[64];
    int fd;

    snprintf(path, sizeof path, "/proc/self/fd/%d", block->fd);
    fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    *ret_fd = fd;
    return 0;
}

void fc_block_drop(struct fc_block *block) {
    if (--block->holders)
        return;
    if (block->place == FC_PLACE_DEVICE && device_used[block->location] >= block->size)
        device_used[block->location] -= block->size;
    destroy(block);
}
