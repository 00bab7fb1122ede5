/* SPDX-License-Identifier: Apache-2.0 */
#include "faults.h"

#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The functions below are defined with other types than their headers': those are not included. */
extern char *getenv(const char *name);
extern int dprintf(int fd, const char *format, ...);
extern int open(const char *path, int flags, ...);
extern int close(int fd);
extern unsigned long strtoul(const char *text, char **end, int base);
extern size_t strlen(const char *text);
extern int strncmp(const char *one, const char *other, size_t bytes);
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
#include "tests/ours.h"

#define WRITE_APPEND_CREATE 02101 /* O_WRONLY | O_CREAT | O_APPEND */

static const char *const names[FAULTS_FUNCTIONS] = {
#define FAULT(name, ...) #name,
    FAULTS_ALL(FAULT)
#undef FAULT
};

static atomic_uint counts[FAULTS_FUNCTIONS], chosen, number, happened;
static atomic_int error_value;
static bool whole_program;

void faults_arm(unsigned function, unsigned nth, int error) {
    for (unsigned i = 0; i < FAULTS_FUNCTIONS; i++)
        atomic_store(&counts[i], 0);
    atomic_store(&chosen, function);
    atomic_store(&error_value, error);
    atomic_store(&happened, 0);
    atomic_store(&number, nth);
}

unsigned faults_count(unsigned function) {
    return atomic_load(&counts[function]);
}

int faults_happened(void) {
    return (int)atomic_load(&happened);
}

static int find_program(struct dl_phdr_info *info, size_t bytes, void *arg) {
    (void)bytes;
    (void)arg;
    ours_low = ours_high = info->dlpi_addr;
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && ours_low + header->p_vaddr + header->p_memsz > ours_high)
            ours_high = ours_low + header->p_vaddr + header->p_memsz;
    }
    return 1; /* the program comes first */
}

__attribute__((constructor)) static void look(void) {
    const char *setting = getenv("FAULTS");
    whole_program = getenv("FAULTS_PROGRAM") != NULL;
    if (whole_program)
        dl_iterate_phdr(find_program, NULL);
    else
        find_ours();
    for (unsigned i = 0; setting != NULL && i < FAULTS_FUNCTIONS; i++) {
        size_t length = strlen(names[i]);
        if (strncmp(setting, names[i], length) != 0 || setting[length] != ':')
            continue;
        char *end;
        unsigned nth = (unsigned)strtoul(setting + length + 1, &end, 10);
        faults_arm(i, nth, (int)strtoul(end + 1, NULL, 10));
    }
}

__attribute__((destructor)) static void say_counts(void) {
    const char *path = getenv("FAULTS_COUNTS");
    int fd = path == NULL ? -1 : open(path, WRITE_APPEND_CREATE, 0600);
    for (unsigned i = 0; fd >= 0 && i < FAULTS_FUNCTIONS; i++)
        dprintf(fd, "%s %u\n", names[i], faults_count(i));
    if (fd >= 0)
        close(fd);
}

static bool fails(unsigned function, const void *caller) {
    if (!is_ours(caller))
        return false;
    unsigned count = atomic_fetch_add(&counts[function], 1) + 1;
    if (count != atomic_load(&number) || function != atomic_load(&chosen))
        return false;
    atomic_store(&happened, 1);
    errno = atomic_load(&error_value);
    return true;
}

/* All arguments of these functions are integers or pointers, seven at most: passed on as they are,
 * also those that a caller has not given. */
typedef long (*any_function)(long, long, long, long, long, long, long);

static any_function find(_Atomic(any_function) *known, const char *name) {
    any_function function = atomic_load(known);
    if (function == NULL) {
        function = (any_function)(uintptr_t)dlsym(RTLD_NEXT, name);
        atomic_store(known, function);
    }
    return function;
}

#define DEFINE(name, failure, real)                                                                \
    long name(long a, long b, long c, long d, long e, long f, long g) {                            \
        static _Atomic(any_function) known;                                                        \
        (void)known;                                                                               \
        if (fails(FAULTS_##name, __builtin_return_address(0)))                                     \
            return failure;                                                                        \
        return (real)(a, b, c, d, e, f, g);                                                        \
    }
/* dlsym() allocates: libc's own names need no look-up. */
#define DEFINE_ALLOCATION(name, ...)                                                               \
    void *name(long a, long b) {                                                                   \
        (void)b;                                                                                   \
        if (fails(FAULTS_##name, __builtin_return_address(0)))                                     \
            return NULL;                                                                           \
        return __libc_##name(__VA_ARGS__);                                                         \
    }
#define FOUND(name) find(&known, #name)
DEFINE(open64, -1, FOUND(open64))
DEFINE(openat64, -1, FOUND(openat64))
DEFINE(fopen64, 0, FOUND(fopen64))
DEFINE(opendir, 0, FOUND(opendir))
DEFINE(fdopendir, 0, FOUND(fdopendir))
DEFINE(readdir64, 0, FOUND(readdir64))
DEFINE(read, -1, FOUND(read))
DEFINE(write, -1, FOUND(write))
DEFINE(pread64, -1, FOUND(pread64))
DEFINE(pwrite64, -1, FOUND(pwrite64))
DEFINE(socket, -1, FOUND(socket))
DEFINE(connect, -1, FOUND(connect))
DEFINE(bind, -1, FOUND(bind))
DEFINE(listen, -1, FOUND(listen))
DEFINE(accept4, -1, FOUND(accept4))
DEFINE(recvmsg, -1, FOUND(recvmsg))
DEFINE(sendmsg, -1, FOUND(sendmsg))
DEFINE(getsockopt, -1, FOUND(getsockopt))
DEFINE(setsockopt, -1, FOUND(setsockopt))
DEFINE(poll, -1, FOUND(poll))
DEFINE(epoll_create1, -1, FOUND(epoll_create1))
DEFINE(epoll_ctl, -1, FOUND(epoll_ctl))
DEFINE(epoll_wait, -1, FOUND(epoll_wait))
DEFINE(eventfd, -1, FOUND(eventfd))
DEFINE(inotify_init1, -1, FOUND(inotify_init1))
DEFINE(inotify_add_watch, -1, FOUND(inotify_add_watch))
DEFINE(mmap64, -1, FOUND(mmap64))
DEFINE(mremap, -1, FOUND(mremap))
DEFINE(madvise, -1, FOUND(madvise))
DEFINE(memfd_create, -1, FOUND(memfd_create))
DEFINE(ftruncate64, -1, FOUND(ftruncate64))
DEFINE(fallocate64, -1, FOUND(fallocate64))
DEFINE(fcntl64, -1, FOUND(fcntl64))
DEFINE(flock, -1, FOUND(flock))
DEFINE(ioctl, -1, FOUND(ioctl))
DEFINE(fstat64, -1, FOUND(fstat64))
DEFINE(stat64, -1, FOUND(stat64))
DEFINE(lstat64, -1, FOUND(lstat64))
DEFINE(fstatat64, -1, FOUND(fstatat64))
DEFINE(fstatfs64, -1, FOUND(fstatfs64))
DEFINE(mkdir, -1, FOUND(mkdir))
DEFINE(renameat, -1, FOUND(renameat))
DEFINE(unlinkat, -1, FOUND(unlinkat))
DEFINE(fchmod, -1, FOUND(fchmod))
DEFINE(fchmodat, -1, FOUND(fchmodat))
DEFINE(fchown, -1, FOUND(fchown))
DEFINE(access, -1, FOUND(access))
DEFINE(faccessat, -1, FOUND(faccessat))
DEFINE(syscall, -1, FOUND(syscall))
DEFINE(getrandom, -1, FOUND(getrandom))
DEFINE(getrlimit64, -1, FOUND(getrlimit64))
DEFINE(sched_getaffinity, -1, FOUND(sched_getaffinity))
DEFINE(pthread_create, errno, FOUND(pthread_create))
DEFINE_ALLOCATION(malloc, (size_t)a)
DEFINE_ALLOCATION(calloc, (size_t)a, (size_t)b)
DEFINE_ALLOCATION(realloc, (void *)a, (size_t)b)

void *reallocarray(long memory, long count, long bytes) {
    if (fails(FAULTS_reallocarray, __builtin_return_address(0)))
        return NULL;
    size_t whole;
    if (__builtin_mul_overflow((size_t)count, (size_t)bytes, &whole))
        return NULL;
    return __libc_realloc((void *)memory, whole);
}
