/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lease page. Its first word tells engines whether this process lives, and the kernel itself
 * writes it when the process dies, however that happens: it is the futex word of a robust mutex
 * that the server's thread holds for as long as it runs. When a thread ends, the kernel goes
 * through the list of robust futexes that the thread holds and sets FUTEX_OWNER_DIED in each
 * (Linux, Documentation/locking/robust-futex-ABI.rst; kernel/futex/core.c, exit_robust_list),
 * before the process's memory and files are let go (kernel/exit.c, do_exit). glibc keeps that list
 * for robust mutexes, and the futex word is the first member of pthread_mutex_t, __data.__lock
 * (glibc, sysdeps/nptl/bits/struct_mutex.h and nptl/pthread_mutex_lock.c); take_ownership checks
 * it.
 *
 * It must not know: who is connected, what segments are made of.
 */
#include "segment/lease.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "env/env.h"
#include "env/memfd.h"
#include "segment/wire.h"

union lease_space {
    struct tp_lease_page page;
    pthread_mutex_t alive;
};
static_assert(sizeof(pthread_mutex_t) <= offsetof(struct tp_lease_page, segments),
              "the mutex lies before the segments");
static_assert(TP_LEASE_OWNER_DIED == FUTEX_OWNER_DIED, "wire.h says it for engines");

static struct {
    pthread_mutex_t lock;
    uint64_t segments[TP_WIRE_MAX_SEGMENTS]; /* what the page says, also before there is one */
    union lease_space *space;                /* NULL: no page yet */
    int fd;
    bool owned; /* the server's thread holds space->alive */
} lease = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

void tp_lease_set(unsigned slot, uint64_t segment_id) {
    pthread_mutex_lock(&lease.lock);
    lease.segments[slot] = segment_id;
    if (lease.space != NULL)
        atomic_store(&lease.space->page.segments[slot], segment_id);
    pthread_mutex_unlock(&lease.lock);
}

/*
 * A memfd, or where they are refused (seccomp), a file without a name on a tmpfs, as which engines
 * take it (transport/steady.c). *ret_sealable says which. An fd or -errno.
 */
static int make_file(const char *directory, bool *ret_sealable) {
    int fd = tp_memfd_make("tidepool-lease", 0);
    *ret_sealable = fd >= 0;
    if (fd < 0)
        fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    struct statfs mount;
    if (fd < 0)
        return -errno;
    if (fstatfs(fd, &mount) == 0 && ((unsigned long)mount.f_type & 0xffffffffUL) == TMPFS_MAGIC)
        return fd;
    close(fd);
    return -ENOTSUP;
}

static int make_mutex(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attributes;
    int error = pthread_mutexattr_init(&attributes);
    if (error != 0)
        return -error;
    error = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    if (error == 0)
        error = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    if (error == 0)
        error = pthread_mutex_init(mutex, &attributes);
    (void)pthread_mutexattr_destroy(&attributes);
    return -error;
}

/* Under the lock. */
static int make_page(const char *directory) {
    bool sealable;
    union lease_space *space = MAP_FAILED;
    int fd = make_file(directory, &sealable);
    if (fd < 0)
        return fd;
    int result = tp_host_resize(fd, TP_LEASE_BYTES);
    if (result == 0) {
        space = mmap(NULL, TP_LEASE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        result = space == MAP_FAILED ? -errno : make_mutex(&space->alive);
    }
    if (result == 0 && sealable)
        result = tp_memfd_seal_read_only(fd); /* engines get this very fd */
    if (result < 0) {
        if (space != MAP_FAILED)
            munmap(space, TP_LEASE_BYTES);
        close(fd);
        return result;
    }
    (void)madvise(space, TP_LEASE_BYTES, MADV_DONTFORK);
    (void)tp_fork_close_add(fd);
    for (unsigned i = 0; i < TP_WIRE_MAX_SEGMENTS; i++)
        atomic_store(&space->page.segments[i], lease.segments[i]);
    lease.space = space;
    lease.fd = fd;
    return 0;
}

/* Under the lock. */
static int take_ownership(void) {
    uint32_t thread = (uint32_t)syscall(SYS_gettid);
    if (!lease.owned) {
        int error = pthread_mutex_trylock(&lease.space->alive);
        if (error == EOWNERDEAD)
            error = pthread_mutex_consistent(&lease.space->alive);
        if (error != 0)
            return -error;
        lease.owned = true;
    }
    bool shown = (atomic_load(&lease.space->page.owner) & FUTEX_TID_MASK) == thread;
    return shown ? 0 : -ENOTSUP;
}

int tp_lease_open(const char *directory, int *ret_fd) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    pthread_mutex_lock(&lease.lock);
    int result = lease.space != NULL ? 0 : make_page(directory);
    if (result == 0)
        result = take_ownership();
    int fd = lease.fd;
    pthread_mutex_unlock(&lease.lock);
    if (result < 0)
        tp_log_once(&said, TP_LOG_WARN,
                    "cannot make the page by which engines see whether this store lives: %s; they "
                    "use Mooncake's transport until it can be made (it is a memfd, or a file in "
                    "/dev/shm or %s if that is a tmpfs)",
                    strerror(-result), directory);
    else
        *ret_fd = fd;
    return result;
}

void tp_lease_end(void) {
    pthread_mutex_lock(&lease.lock);
    if (lease.owned)
        (void)pthread_mutex_unlock(&lease.space->alive);
    lease.owned = false;
    pthread_mutex_unlock(&lease.lock);
}
