/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Anonymous files that are handed to other processes, and what those may not do with them.
 */
#include "env/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1 */
#endif

int tp_memfd_make(const char *name, unsigned flags) {
    flags |= MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create(name, flags);
    return fd < 0 ? -errno : fd;
}

int tp_memfd_seal_read_only(int fd) {
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        return -errno;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0 && errno != EINVAL)
        return -errno;
    return fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL) == 0 ? 0 : -errno;
}
