/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces that are files of a directory on hugetlbfs or tmpfs. The files have no name, or lose it as
 * soon as they are open: the memory is gone with the last process that holds or maps it, however it
 * ends.
 *
 * It must not know: addresses of segments, who maps them, the server.
 *
 * Files cannot be sealed. Readers compare their sizes with what was announced; only root and this
 * user get them at all.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/backing.h"
#include "segment/hugepages.h"

/* linux/magic.h has them too, but not in every distribution's headers. */
#define HUGETLBFS_TYPE 0x958458f6UL
#define TMPFS_TYPE 0x01021994UL

#define SMALL_PAGE UINT64_C(4096)
#define POLL_MS 250 /* while waiting for huge pages */
#define NAME_TRIES 8

static void say_shortage(const struct tp_shortage *shortage, uint64_t page_bytes, const char *path,
                         const char *then) {
    char where[32] = "";
    if (shortage->node >= 0)
        snprintf(where, sizeof where, " on node %d", shortage->node);
    tp_log(shortage->total_pages >= shortage->need_pages ? TP_LOG_WARN : TP_LOG_ERROR,
           "MC_STORE_SHM_SEGMENT_DIR=%s: the segment needs %" PRIu64 " pages of %" PRIu64
           " KiB%s, %" PRIu64 " of %" PRIu64 " are free: %s",
           path, shortage->need_pages, page_bytes >> 10, where, shortage->free_pages,
           shortage->total_pages, then);
}

/*
 * Pages of a store that has just ended come back when its last engine lets go of them: worth
 * waiting for, unless there would not be enough even then.
 */
static int wait_for_pages(const struct tp_config *config, const struct tp_need *need,
                          uint64_t page_bytes) {
    const char *path = config->store.segment_dir;
    struct tp_shortage shortage;
    struct timespec start;
    struct timespec now;
    char text[128];
    if (tp_hugepages_fit(need, page_bytes, &shortage))
        return 0;
    if (shortage.total_pages < shortage.need_pages) {
        say_shortage(&shortage, page_bytes, path,
                     "raise vm.nr_hugepages or make the segment smaller");
        return -ENOMEM;
    }
    snprintf(text, sizeof text,
             "waiting up to %u s (MC_STORE_SHM_SEGMENT_WAIT_S) for others to let go",
             config->store.wait_s);
    say_shortage(&shortage, page_bytes, path, text);
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        nanosleep(&(struct timespec){.tv_nsec = POLL_MS * 1000000L}, NULL);
        if (tp_hugepages_fit(need, page_bytes, &shortage))
            return 0;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - start.tv_sec < (time_t)config->store.wait_s);
    tp_log(TP_LOG_ERROR,
           "MC_STORE_SHM_SEGMENT_DIR=%s: still %" PRIu64 " of %" PRIu64 " pages of %" PRIu64
           " KiB free after %u s: another process holds them (grep -l hugetlb /proc/*/maps)",
           path, shortage.free_pages, shortage.need_pages, page_bytes >> 10, config->store.wait_s);
    return -ENOMEM;
}

/* What the mount itself may give: tmpfs always says, hugetlbfs only when it was mounted with a
 * size. */
static int check_mount(const struct tp_config *config, const struct tp_need *need,
                       const struct statfs *mount, uint64_t page_bytes) {
    uint64_t bytes = need->bytes / page_bytes * page_bytes;
    if ((int64_t)mount->f_blocks <= 0)
        return 0;
    uint64_t room = (uint64_t)mount->f_bavail * (uint64_t)mount->f_bsize;
    if (room >= bytes)
        return 0;
    tp_log(TP_LOG_ERROR,
           "MC_STORE_SHM_SEGMENT_DIR=%s: the segment needs %" PRIu64 " MiB and the file system has "
           "%" PRIu64 " MiB free: mount it with a larger size= or make the segment smaller",
           config->store.segment_dir, bytes >> 20, room >> 20);
    return -ENOSPC;
}

static int check_huge(const struct tp_config *config, const struct tp_need *need,
                      uint64_t page_bytes) {
    if (need->address % page_bytes != 0) {
        tp_log(TP_LOG_ERROR,
               "MC_STORE_SHM_SEGMENT_DIR=%s: memory at %#" PRIx64
               " is not aligned to the mount's pages of %" PRIu64
               " KiB: use a mount with smaller pages",
               config->store.segment_dir, need->address, page_bytes >> 10);
        return -EINVAL;
    }
    return wait_for_pages(config, need, page_bytes);
}

/* Mooncake asks for huge pages of its own; the mount's are what a segment in it gets. */
static void say_pages(const struct tp_config *config, const struct tp_backing *backing) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t asked = config->store.hugepage_bytes;
    if (asked == 0 || asked == backing->page_bytes)
        return;
    tp_log_once(&said, TP_LOG_WARN,
                "MC_STORE_USE_HUGEPAGE asks for pages of %" PRIu64
                " KiB, and those of MC_STORE_SHM_SEGMENT_DIR=%s are of %" PRIu64
                " KiB: the directory wins",
                asked >> 10, config->store.segment_dir, backing->page_bytes >> 10);
}

static int look_at_mount(const struct tp_config *config, const struct tp_need *need, int dir_fd,
                         struct tp_backing *backing) {
    const char *path = config->store.segment_dir;
    struct statfs mount;
    if (fstatfs(dir_fd, &mount) < 0) {
        int result = -errno;
        tp_log(TP_LOG_ERROR, "MC_STORE_SHM_SEGMENT_DIR=%s: %s", path, strerror(-result));
        return result;
    }
    unsigned long type = (unsigned long)mount.f_type & 0xffffffffUL;
    if (type == HUGETLBFS_TYPE) {
        backing->page_bytes = (uint64_t)mount.f_bsize;
        backing->hugetlb = true;
        snprintf(backing->detail, sizeof backing->detail, "hugetlbfs %.50s", path);
        say_pages(config, backing);
        int result = check_huge(config, need, backing->page_bytes);
        return result < 0 ? result : check_mount(config, need, &mount, backing->page_bytes);
    }
    if (type == TMPFS_TYPE) {
        backing->page_bytes = SMALL_PAGE;
        backing->advise_thp = true; /* acts on mounts with huge=advise */
        snprintf(backing->detail, sizeof backing->detail, "tmpfs %.50s", path);
        say_pages(config, backing);
        if (need->address % SMALL_PAGE == 0)
            return check_mount(config, need, &mount, SMALL_PAGE);
        tp_log(TP_LOG_ERROR, "segment at %#" PRIx64 " is not aligned to 4096 bytes: not shared",
               need->address);
        return -EINVAL;
    }
    tp_log(TP_LOG_ERROR,
           "MC_STORE_SHM_SEGMENT_DIR=%s is not hugetlbfs or tmpfs (type %#lx): name a directory on "
           "one, "
           "or 'memfd'",
           path, type);
    return -EINVAL;
}

static int files_open(const struct tp_config *config, const struct tp_need *need,
                      struct tp_backing *ret_backing) {
    struct tp_backing backing = {.ops = &tp_backing_files, .reserve_first = true};
    char error[512] = "";
    backing.dir_fd = tp_host_open_dir(config->store.segment_dir, true, config, error, sizeof error);
    if (backing.dir_fd < 0) {
        tp_log(TP_LOG_ERROR, "MC_STORE_SHM_SEGMENT_DIR: %s", error);
        return backing.dir_fd;
    }
    int result = look_at_mount(config, need, backing.dir_fd, &backing);
    if (result < 0) {
        close(backing.dir_fd);
        return result;
    }
    *ret_backing = backing;
    return 0;
}

/* A file that has a name only between two calls; a crash there leaves an empty file. */
static int make_named(int dir_fd) {
    for (unsigned i = 0; i < NAME_TRIES; i++) {
        uint8_t id[16];
        char name[48] = ".tidepool-";
        size_t used = strlen(name);
        int result = tp_random_id(id);
        if (result < 0)
            return result;
        for (unsigned k = 0; k < sizeof id; k++)
            used += (size_t)snprintf(name + used, sizeof name - used, "%02x", id[k]);
        int fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno == EEXIST)
            continue;
        if (fd < 0)
            return -errno;
        (void)unlinkat(dir_fd, name, 0);
        return fd;
    }
    return -EEXIST;
}

static int files_create(struct tp_backing *backing, uint64_t bytes, int *ret_fd) {
    /* With O_EXCL the file can never be given a name. */
    int fd = openat(backing->dir_fd, ".", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    /* File systems and kernels without it answer EOPNOTSUPP, EISDIR or EINVAL; hugetlbfs has it
     * since Linux 5.7. */
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOENT))
        fd = make_named(backing->dir_fd);
    else if (fd < 0)
        fd = -errno;
    if (fd < 0)
        return fd;
    if (ftruncate(fd, (off_t)bytes) < 0) {
        int result = -errno;
        close(fd);
        return result;
    }
    *ret_fd = fd;
    return 0;
}

static void files_close(struct tp_backing *backing) {
    close(backing->dir_fd);
}

const struct tp_backing_ops tp_backing_files = {
    .wire_kind = TP_WIRE_MMAP,
    .open = files_open,
    .create = files_create,
    .close = files_close,
};
