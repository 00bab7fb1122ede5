/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A preload for tests: one chosen call of one libc function fails, if it is the library that makes
 * it. All calls of the library are counted, so that a sweep knows how many there are.
 *
 * "The library" is libtidepool.so, or the whole program with FAULTS_PROGRAM=1 in the environment.
 * A process is told what fails by faults_arm(), or by FAULTS=FUNCTION:NTH:ERRNO (numbers from 1).
 * With FAULTS_COUNTS=FILE a process writes a line "FUNCTION COUNT" for each function when it exits.
 */
#ifndef TIDEPOOL_TESTS_FAULTS_H
#define TIDEPOOL_TESTS_FAULTS_H

/* FAULT(function, value on failure, errors that its manual page names) */
#define FAULTS_ALL(FAULT)                                                                          \
    FAULT(open64, -1, EMFILE, EACCES)                                                              \
    FAULT(openat64, -1, EMFILE, ENOENT)                                                            \
    FAULT(fopen64, 0, EMFILE, ENOENT)                                                              \
    FAULT(opendir, 0, EMFILE, EACCES)                                                              \
    FAULT(fdopendir, 0, ENOMEM, EBADF)                                                             \
    FAULT(readdir64, 0, EBADF, ENOENT)                                                             \
    FAULT(read, -1, EINTR, EIO)                                                                    \
    FAULT(write, -1, EINTR, EIO)                                                                   \
    FAULT(pread64, -1, EINTR, EIO)                                                                 \
    FAULT(pwrite64, -1, EINTR, ENOSPC)                                                             \
    FAULT(socket, -1, EMFILE, ENOBUFS)                                                             \
    FAULT(connect, -1, ECONNREFUSED, EAGAIN)                                                       \
    FAULT(bind, -1, EADDRINUSE, EROFS)                                                             \
    FAULT(listen, -1, EADDRINUSE, EOPNOTSUPP)                                                      \
    FAULT(accept4, -1, EMFILE, ECONNABORTED)                                                       \
    FAULT(recvmsg, -1, ECONNRESET, EINTR)                                                          \
    FAULT(sendmsg, -1, EPIPE, EAGAIN)                                                              \
    FAULT(getsockopt, -1, ENOBUFS, EINVAL)                                                         \
    FAULT(setsockopt, -1, ENOBUFS, EINVAL)                                                         \
    FAULT(poll, -1, EINTR, ENOMEM)                                                                 \
    FAULT(epoll_create1, -1, EMFILE, ENOMEM)                                                       \
    FAULT(epoll_ctl, -1, ENOMEM, ENOSPC)                                                           \
    FAULT(epoll_wait, -1, EINTR, EINTR)                                                            \
    FAULT(eventfd, -1, EMFILE, ENOMEM)                                                             \
    FAULT(inotify_init1, -1, EMFILE, ENOMEM)                                                       \
    FAULT(inotify_add_watch, -1, ENOSPC, ENOMEM)                                                   \
    FAULT(mmap64, -1, ENOMEM, EPERM)                                                               \
    FAULT(mremap, -1, ENOMEM, EINVAL)                                                              \
    FAULT(madvise, -1, EINVAL, ENOMEM)                                                             \
    FAULT(memfd_create, -1, ENOSYS, EMFILE)                                                        \
    FAULT(ftruncate64, -1, ENOSPC, EINTR)                                                          \
    FAULT(fallocate64, -1, ENOSPC, EINTR)                                                          \
    FAULT(fcntl64, -1, EBADF, EPERM)                                                               \
    FAULT(flock, -1, ENOLCK, EINTR)                                                                \
    FAULT(ioctl, -1, ENOTTY, EINVAL)                                                               \
    FAULT(fstat64, -1, EBADF, ENOMEM)                                                              \
    FAULT(stat64, -1, ENOENT, EACCES)                                                              \
    FAULT(lstat64, -1, ENOENT, EACCES)                                                             \
    FAULT(fstatat64, -1, ENOENT, EACCES)                                                           \
    FAULT(fstatfs64, -1, ENOSYS, EIO)                                                              \
    FAULT(mkdir, -1, EACCES, ENOSPC)                                                               \
    FAULT(renameat, -1, EACCES, ENOSPC)                                                            \
    FAULT(unlinkat, -1, EACCES, EBUSY)                                                             \
    FAULT(fchmod, -1, EPERM, EROFS)                                                                \
    FAULT(fchmodat, -1, EPERM, EROFS)                                                              \
    FAULT(fchown, -1, EPERM, EROFS)                                                                \
    FAULT(access, -1, ENOENT, EACCES)                                                              \
    FAULT(faccessat, -1, ENOENT, EACCES)                                                           \
    FAULT(syscall, -1, ENOSYS, EPERM)                                                              \
    FAULT(getrandom, -1, ENOSYS, EINTR)                                                            \
    FAULT(getrlimit64, -1, EPERM, EINVAL)                                                          \
    FAULT(sched_getaffinity, -1, EINVAL, EPERM)                                                    \
    FAULT(pthread_create, EAGAIN, EAGAIN, EPERM)                                                   \
    FAULT(malloc, 0, ENOMEM, ENOMEM)                                                               \
    FAULT(calloc, 0, ENOMEM, ENOMEM)                                                               \
    FAULT(realloc, 0, ENOMEM, ENOMEM)                                                              \
    FAULT(reallocarray, 0, ENOMEM, ENOMEM)

enum faults_function {
#define FAULT(name, ...) FAULTS_##name,
    FAULTS_ALL(FAULT)
#undef FAULT
        FAULTS_FUNCTIONS
};

/* Counting begins anew, and the call with this number fails; nth 0: none does. */
void faults_arm(unsigned function, unsigned nth, int error);
unsigned faults_count(unsigned function);
/* Has the armed failure happened? */
int faults_happened(void);

#endif
