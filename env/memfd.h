/* SPDX-License-Identifier: Apache-2.0 */
/* Anonymous files that are handed to other processes. Any thread. */
#ifndef TIDEPOOL_MEMFD_H
#define TIDEPOOL_MEMFD_H

/*
 * memfd_create(2), closed on exec and sealable, with `flags` besides (MFD_HUGETLB). Where the
 * kernel knows MFD_NOEXEC_SEAL (Linux 6.3), it is asked for; earlier ones refuse it with EINVAL.
 * Returns the fd, which is the caller's, or a negative errno.
 */
int tp_memfd_make(const char *name, unsigned flags);

/*
 * Seal the memfd: whoever gets the fd can neither resize it, which would be SIGBUS for others, nor
 * map it writable, where the kernel has that seal (Linux 5.1). Mappings that exist stay writable.
 * Returns 0 or a negative errno.
 */
int tp_memfd_seal_read_only(int fd);

#endif
