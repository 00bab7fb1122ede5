/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Can the memory behind an fd be taken away while it is mapped? A file that is cut off turns the
 * next copy into SIGBUS, in a process that is not ours to guard: a handler of our own would have to
 * live beside those of python, CUDA and the host. So the rule is here, before anything is mapped.
 *
 * | what                        | taken when                                          |
 * |-----------------------------|-----------------------------------------------------|
 * | memfd, ordinary or hugetlb  | it has F_SEAL_SHRINK                                |
 * | file on tmpfs or hugetlbfs  | always: such files cannot be sealed; whoever has an |
 * |                             | fd of it (the store, its engines) could cut it off  |
 * | anything else               | never: no store makes segments of it                |
 *
 * It must not know: mappings, segments, connections.
 */
#include "transport/steady.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

/* linux/magic.h has them too, but not in every distribution's headers. */
#define HUGETLBFS_TYPE 0x958458f6UL
#define TMPFS_TYPE 0x01021994UL

/*
 * Is this file on the mount that the kernel keeps for memfds? There is one for ordinary pages and
 * one for each size of huge pages, none of them can be mounted by anybody, and all memfds of a
 * kernel share them; a memfd made without MFD_ALLOW_SEALING looks like a file otherwise. 1, 0 or
 * -errno.
 */
static int is_memfd(const struct stat *status, const struct statfs *mount, bool huge) {
    struct stat own;
    unsigned flags = MFD_CLOEXEC;
    if (huge)
        flags |= MFD_HUGETLB |
                 ((unsigned)__builtin_ctzl((unsigned long)mount->f_bsize) << MFD_HUGE_SHIFT);
    int fd = memfd_create("tidepool-probe", flags); /* empty: takes no page, huge or not */
    if (fd < 0)
        return -errno;
    int result = fstat(fd, &own) != 0 ? -errno : own.st_dev == status->st_dev;
    close(fd);
    return result;
}

int tp_steady_check(int fd, uint64_t bytes) {
    struct stat status;
    struct statfs mount;
    if (fstat(fd, &status) != 0)
        return -errno;
    if (!S_ISREG(status.st_mode) || status.st_size < 0 || (uint64_t)status.st_size != bytes)
        return -EPROTO;
    if (fstatfs(fd, &mount) != 0)
        return -errno;
    unsigned long type = (unsigned long)mount.f_type & 0xffffffffUL;
    if ((type != TMPFS_TYPE && type != HUGETLBFS_TYPE) || mount.f_bsize <= 0)
        return -EPROTO;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals >= 0 && (seals & F_SEAL_SHRINK))
        return 0;
    if (seals >= 0 && !(seals & F_SEAL_SEAL))
        return -EPROTO; /* it could have been sealed */
    int memfd = is_memfd(&status, &mount, type == HUGETLBFS_TYPE);
    if (memfd < 0)
        return memfd;
    return memfd ? -EPROTO : 0;
}
