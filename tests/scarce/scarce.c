/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A preload for tests: threads, memory, address space, files and sockets that run out, for Tidepool
 * alone.
 *
 * SCARCE=CALL:FIRST:LAST[,...] lets those calls of CALL fail that libtidepool.so itself makes and
 * that have these numbers, counted in this process from 1; LAST 0: all from FIRST on. CALL is one
 * of the names below; open=TEXT counts only paths that contain TEXT, since which thread opens what
 * first is a matter of chance. What Mooncake, python and libc ask for by themselves is left alone.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/ours.h"

enum scarce { THREAD, ALLOCATE, MAP, MEMFD, SOCKET, EPOLL, EVENT, ACCEPT, OPEN, FALLOCATE, SCARCE };

static const char *const names[SCARCE] = {"thread", "allocate", "map",    "memfd", "socket",
                                          "epoll",  "event",    "accept", "open",  "reserve"};
static const int errors[SCARCE] = {EAGAIN, ENOMEM, ENOMEM, EMFILE, EMFILE,
                                   EMFILE, EMFILE, EMFILE, EMFILE, ENOSPC};
static atomic_uint counts[SCARCE];
static unsigned first[SCARCE], last[SCARCE];
static char only[64]; /* paths to open */

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);

__attribute__((constructor)) static void look(void) {
    const char *setting = getenv("SCARCE");
    find_ours();
    for (unsigned i = 0; setting != NULL && i < SCARCE; i++) {
        const char *at = strstr(setting, names[i]);
        if (at == NULL)
            continue;
        at += strlen(names[i]);
        if (i == OPEN && sscanf(at, "=%63[^:]", only) == 1)
            at += 1 + strlen(only);
        if (sscanf(at, ":%u:%u", &first[i], &last[i]) != 2)
            _exit(97);
    }
}

static bool fails(enum scarce which, const void *caller) {
    if (first[which] == 0 || !is_ours(caller))
        return false;
    unsigned number = atomic_fetch_add(&counts[which], 1) + 1;
    bool chosen = number >= first[which] && (last[which] == 0 || number <= last[which]);
    if (chosen)
        errno = errors[which];
    return chosen;
}

#define FAILS(which) fails(which, __builtin_return_address(0))

static void *original(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        original("pthread_create");
    return FAILS(THREAD) ? EAGAIN : real(thread, attr, run, arg);
}

void *malloc(size_t bytes) {
    return FAILS(ALLOCATE) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    return FAILS(ALLOCATE) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes) {
    return FAILS(ALLOCATE) ? NULL : __libc_realloc(memory, bytes);
}

void *reallocarray(void *memory, size_t count, size_t bytes) {
    if (FAILS(ALLOCATE))
        return NULL;
    return count != 0 && bytes > SIZE_MAX / count ? NULL : __libc_realloc(memory, count * bytes);
}

void *mmap64(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    void *(*real)(void *, size_t, int, int, int, off_t) = original("mmap64");
    return FAILS(MAP) ? MAP_FAILED : real(address, bytes, protection, flags, fd, offset);
}

int memfd_create(const char *name, unsigned flags) {
    int (*real)(const char *, unsigned) = original("memfd_create");
    return FAILS(MEMFD) ? -1 : real(name, flags);
}

int socket(int domain, int type, int protocol) {
    int (*real)(int, int, int) = original("socket");
    return FAILS(SOCKET) ? -1 : real(domain, type, protocol);
}

int epoll_create1(int flags) {
    int (*real)(int) = original("epoll_create1");
    return FAILS(EPOLL) ? -1 : real(flags);
}

int eventfd(unsigned value, int flags) {
    int (*real)(unsigned, int) = original("eventfd");
    return FAILS(EVENT) ? -1 : real(value, flags);
}

int accept4(int fd, struct sockaddr *address, socklen_t *bytes, int flags) {
    int (*real)(int, struct sockaddr *, socklen_t *, int) = original("accept4");
    return FAILS(ACCEPT) ? -1 : real(fd, address, bytes, flags);
}

static mode_t mode_of(int flags, va_list args) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(args, mode_t) : 0;
}

int open64(const char *path, int flags, ...) {
    int (*real)(const char *, int, ...) = original("open64");
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return strstr(path, only) && FAILS(OPEN) ? -1 : real(path, flags, mode);
}

int openat64(int dir_fd, const char *path, int flags, ...) {
    int (*real)(int, const char *, int, ...) = original("openat64");
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return strstr(path, only) && FAILS(OPEN) ? -1 : real(dir_fd, path, flags, mode);
}

FILE *fopen64(const char *path, const char *mode) {
    FILE *(*real)(const char *, const char *) = original("fopen64");
    return strstr(path, only) && FAILS(OPEN) ? NULL : real(path, mode);
}

int fallocate64(int fd, int mode, off_t offset, off_t bytes) {
    int (*real)(int, int, off_t, off_t) = original("fallocate64");
    return FAILS(FALLOCATE) ? -1 : real(fd, mode, offset, bytes);
}
