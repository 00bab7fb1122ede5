/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces that are files of a directory on hugetlbfs or tmpfs. The files have no name, or lose it as
 * soon as they are open: the memory is gone with the last process that holds or maps it, however it
 * ends.
 *
 * It must not know: addresses of segments, who maps them, the server.
 *
 * Files cannot be sealed. Readers compare their sizes with what was announced; only root, this user
 * and those that it lists (TIDEPOOL_ALLOW_UIDS) get them at all, and could cut them off.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/backing.h"
#include "segment/room.h"

/* linux/magic.h has them too, but not in every distribution's headers. */
#define HUGETLBFS_TYPE 0x958458f6UL
#define TMPFS_TYPE 0x01021994UL

#define SMALL_PAGE UINT64_C(4096)
#define NAME_TRIES 8
#define NAME_PREFIX ".tidepool-"
#define NAME_DIGITS 32
#define SWEEP_NAMES 4096

static unsigned long type_of(const struct statfs *mount) {
    return (unsigned long)mount->f_type & 0xffffffffUL;
}

/* Mappings begin at whole pages. The shim allocates so that they do; memory that it has not seen
 * allocated may not. */
static int check_address(const char *path, const struct tp_need *need, uint64_t page_bytes) {
    if (page_bytes > 0 && need->address % page_bytes == 0)
        return 0;
    tp_log(
        TP_LOG_ERROR,
        "MC_STORE_SHM_SEGMENT_DIR=%s: memory at %#" PRIx64
        " is not aligned to the mount's pages of %" PRIu64
        " KiB: name libtidepool.so first in LD_PRELOAD, set "
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES if it is the SSD tier's buffer, or use a mount "
        "with smaller pages",
        path, need->address, page_bytes >> 10);
    return -EINVAL;
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

static void say_unsealed(const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (config->allow_uid_count > 0)
        tp_log_once(&said, TP_LOG_WARN,
                    "MC_STORE_SHM_SEGMENT_DIR=%s: files there cannot be sealed, and "
                    "TIDEPOOL_ALLOW_UIDS lists other users: a process of theirs could cut a "
                    "segment off, and this store and its engines would die of SIGBUS; use memfd "
                    "unless you trust them",
                    config->store.segment_dir);
}

static int look_at_mount(const char *path, int dir_fd, struct tp_backing *backing) {
    struct statfs mount;
    if (fstatfs(dir_fd, &mount) < 0) {
        int result = -errno;
        tp_log(TP_LOG_ERROR, "MC_STORE_SHM_SEGMENT_DIR=%s: %s", path, strerror(-result));
        return result;
    }
    unsigned long type = type_of(&mount);
    if (type == HUGETLBFS_TYPE) {
        backing->page_bytes = (uint64_t)mount.f_bsize;
        backing->hugetlb = true;
        snprintf(backing->detail, sizeof backing->detail, "hugetlbfs %.50s", path);
        return 0;
    }
    if (type == TMPFS_TYPE) {
        backing->page_bytes = SMALL_PAGE;
        backing->advise_thp = true; /* acts on mounts with huge=advise */
        snprintf(backing->detail, sizeof backing->detail, "tmpfs %.50s", path);
        return 0;
    }
    tp_log(TP_LOG_ERROR,
           "MC_STORE_SHM_SEGMENT_DIR=%s is not hugetlbfs or tmpfs (type %#lx): name a directory on "
           "one, or 'memfd'",
           path, type);
    return -EINVAL;
}

static uint64_t files_page_bytes(const struct tp_config *config) {
    char error[512];
    struct statfs mount;
    int fd = tp_host_open_dir(config->store.segment_dir, true, config, error, sizeof error);
    uint64_t bytes = SMALL_PAGE;
    if (fd >= 0 && fstatfs(fd, &mount) == 0 && type_of(&mount) == HUGETLBFS_TYPE)
        bytes = (uint64_t)mount.f_bsize;
    if (fd >= 0)
        close(fd);
    return bytes;
}

/*
 * Names that make_named left when it was killed between its two calls. One that a live store is
 * about to take away itself may be among them: it needs the file, not the name.
 */
static void sweep_names(int dir_fd) {
    int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    if (directory == NULL) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (unsigned i = 0; i < SWEEP_NAMES && (entry = readdir(directory)) != NULL; i++) {
        size_t prefix = strlen(NAME_PREFIX);
        if (strncmp(entry->d_name, NAME_PREFIX, prefix) == 0 &&
            strspn(entry->d_name + prefix, "0123456789abcdef") == NAME_DIGITS &&
            entry->d_name[prefix + NAME_DIGITS] == 0)
            (void)unlinkat(dir_fd, entry->d_name, 0);
    }
    closedir(directory);
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
    sweep_names(backing.dir_fd);
    const char *path = config->store.segment_dir;
    int result = look_at_mount(path, backing.dir_fd, &backing);
    if (result == 0)
        result = check_address(path, need, backing.page_bytes);
    if (result == 0)
        result = tp_room_wait(&(struct tp_room){.path = path,
                                                .dir_fd = backing.dir_fd,
                                                .hugetlb = backing.hugetlb,
                                                .page_bytes = backing.page_bytes,
                                                .wait_s = config->store.wait_s},
                              need);
    if (result < 0) {
        close(backing.dir_fd);
        return result;
    }
    say_pages(config, &backing);
    say_unsealed(config);
    *ret_backing = backing;
    return 0;
}

/* A file that has a name only between two calls; a crash there leaves an empty file. */
static int make_named(int dir_fd) {
    for (unsigned i = 0; i < NAME_TRIES; i++) {
        uint8_t id[16];
        char name[48] = NAME_PREFIX;
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
    int result = tp_host_resize(fd, bytes);
    if (result < 0) {
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
    .page_bytes = files_page_bytes,
    .open = files_open,
    .create = files_create,
    .close = files_close,
};
