/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The counters' shared page.
 *
 * The page is a static object, so it exists before anything can fail; tp_stats_open maps a memfd
 * over it in place, so that pointers into it stay right for ever. While the page moves, counts go
 * to `parked_counts`; the move waits for the adds that are on their way before and after, so none
 * is lost.
 *
 * It must not know: how the fd travels, Mooncake, CUDA.
 */
#include "env/stats.h"

#include "env/env.h"
#include "env/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define OS_PAGE_BYTES 4096
#define MAX_VIEW_BYTES ((off_t)1 << 20)
#define MAP_BYTES                                                                                  \
    ((sizeof(struct tp_stats_page) + OS_PAGE_BYTES - 1) / OS_PAGE_BYTES * OS_PAGE_BYTES)

union page_space {
    struct tp_stats_page page;
    char bytes[MAP_BYTES];
};

static union page_space own_space __attribute__((aligned(OS_PAGE_BYTES)));
static struct tp_stats_page
    child_page; /* what a forked child scribbles on: own_space may be shared with its parent */

enum { PAGE_PRIVATE, PAGE_MOVING, PAGE_SHARED };
static _Atomic int move_state;
static _Atomic unsigned adds_in_flight[2]; /* to the private page, to the parked counts */
static _Atomic uint64_t parked_counts[TP_COUNTER_COUNT];

static pthread_once_t header_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t page_lock =
    PTHREAD_MUTEX_INITIALIZER; /* the move, events; never taken in a forked child */
static int page_fd = -1;       /* under page_lock */
static unsigned next_event;    /* under page_lock */

const struct tp_counter_info tp_counter_infos[TP_COUNTER_COUNT] = {
#define TP_COUNTER(identifier, json_name, unit_name, meaning_text)                                 \
    {.name = (json_name), .unit = (unit_name), .meaning = (meaning_text)},
#include "env/counters.def"
#undef TP_COUNTER
};

static ssize_t read_file(const char *path, char *ret_text, size_t bytes) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got;

    if (fd < 0)
        return -errno;
    got = read(fd, ret_text, bytes - 1);
    close(fd);
    if (got < 0)
        return -EIO;
    ret_text[got] = '\0';
    return got;
}

static void copy_text(char *ret_text, size_t bytes, const char *text) {
    size_t length = strlen(text);

    if (length > bytes - 1)
        length = bytes - 1;
    memcpy(ret_text, text, length);
    ret_text[length] = '\0';
}

/* For an interpreter, the script or module says more than its own name. */
static void read_program(char *ret_text, size_t bytes) {
    char comm[32] = "", arguments[1024];
    ssize_t got;

    if (read_file("/proc/self/comm", comm, sizeof(comm)) > 0)
        comm[strcspn(comm, "\n")] = '\0';
    copy_text(ret_text, bytes, comm);
    if (strncmp(comm, "python", 6) != 0)
        return;
    got = read_file("/proc/self/cmdline", arguments, sizeof(arguments));
    for (ssize_t at = 0; at < got; at += (ssize_t)strlen(arguments + at) + 1) {
        const char *argument = arguments + at;
        const char *base = strrchr(argument, '/');

        if (strcmp(argument, "-c") == 0)
            return; /* what follows is code, which may hold secrets */
        if (at == 0 || !*argument || *argument == '-')
            continue;
        copy_text(ret_text, bytes, base ? base + 1 : argument);
        return;
    }
}

static void write_header(void) {
    struct tp_stats_page *page = &own_space.page;
    struct timespec now = {0};

    page->magic = TP_STATS_MAGIC;
    page->version = TP_STATS_VERSION;
    page->size_bytes = sizeof(*page);
    page->counter_count = TP_COUNTER_COUNT;
    page->pid = (int32_t)getpid();
    page->uid = (uint32_t)geteuid();
    clock_gettime(CLOCK_REALTIME, &now);
    page->start_s = (uint64_t)now.tv_sec;
    tp_random_id(page->instance);
    copy_text(page->library_version, sizeof(page->library_version), TP_VERSION);
    if (gethostname(page->hostname, sizeof(page->hostname) - 1) != 0)
        page->hostname[0] = '\0';
    read_program(page->program, sizeof(page->program));
}

struct tp_stats_page *tp_stats_page(void) {
    if (tp_inert())
        return &child_page;
    pthread_once(&header_once, write_header);
    return &own_space.page;
}

void tp_count(enum tp_counter counter, uint64_t amount) {
    if ((unsigned)counter >= TP_COUNTER_COUNT || tp_inert())
        return;
    for (;;) {
        int state = atomic_load_explicit(&move_state, memory_order_acquire);
        _Atomic uint64_t *target = state == PAGE_MOVING ? parked_counts : own_space.page.counters;
        bool right;

        if (state == PAGE_SHARED) {
            atomic_fetch_add_explicit(&target[counter], amount, memory_order_relaxed);
            return;
        }
        /* Sequentially consistent: either the mover sees this add in flight, or this thread sees
         * the new state. */
        atomic_fetch_add(&adds_in_flight[state], 1);
        right = atomic_load(&move_state) == state;
        if (right)
            atomic_fetch_add_explicit(&target[counter], amount, memory_order_relaxed);
        atomic_fetch_sub(&adds_in_flight[state], 1);
        if (right)
            return;
    }
}

void tp_stats_condition(enum tp_condition condition, bool holds) {
    _Atomic uint32_t *conditions = &tp_stats_page()->conditions;

    if (holds) {
        atomic_fetch_or(conditions, (uint32_t)condition);
    } else {
        atomic_fetch_and(conditions, ~(uint32_t)condition);
    }
}

void tp_stats_event(const char *text) {
    struct tp_stats_page *page = tp_stats_page();
    struct tp_stats_event *event;
    struct timespec now = {.tv_sec = 1};

    if (tp_inert())
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    pthread_mutex_lock(&page_lock);
    event = &page->events[next_event++ % TP_STATS_EVENTS];
    atomic_store_explicit(&event->time_s, 0, memory_order_release);
    copy_text(event->text, sizeof(event->text), text);
    atomic_store_explicit(&event->time_s, (uint64_t)now.tv_sec, memory_order_release);
    pthread_mutex_unlock(&page_lock);
}

/* A thread is between its load and its add for nanoseconds, unless it is preempted there: hence the
 * sleep. */
static int wait_for_adds(int state) {
    const struct timespec pause = {.tv_nsec = 100000};

    for (int i = 0; atomic_load(&adds_in_flight[state]) != 0; i++) {
        if (i == 10000)
            return -EAGAIN;
        nanosleep(&pause, NULL);
    }
    return 0;
}

static void unpark_counts(void) {
    for (size_t i = 0; i < TP_COUNTER_COUNT; i++) {
        uint64_t amount = atomic_exchange_explicit(&parked_counts[i], 0, memory_order_relaxed);

        if (amount > 0)
            atomic_fetch_add_explicit(&own_space.page.counters[i], amount, memory_order_relaxed);
    }
}

static int write_page(int fd) {
    int rc = tp_host_resize(fd, MAP_BYTES);

    if (rc < 0)
        return rc;
    for (size_t done = 0; done < MAP_BYTES;) {
        ssize_t put = pwrite(fd, own_space.bytes + done, MAP_BYTES - done, (off_t)done);

        if (put <= 0)
            return put < 0 ? -errno : -EIO;
        done += (size_t)put;
    }
    return 0;
}

static int move_page(int *ret_fd) {
    int fd = tp_memfd_make("tidepool-stats", 0);
    int rc;

    if (fd < 0)
        return fd;
    rc = write_page(fd);
    if (rc < 0)
        goto fail;
    if (mmap(own_space.bytes, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED) {
        rc = -errno;
        goto fail;
    }
    /* Readers get this very fd. */
    rc = tp_memfd_seal_read_only(fd);
    if (rc < 0)
        goto fail; /* the page stays mapped, and nobody else can have the fd */
    *ret_fd = fd;
    return 0;
fail:
    close(fd);
    return rc;
}

static void say_not_shared(int error) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    bool refused = error == -EPERM || error == -EACCES || error == -ENOSYS;
    bool fds = error == -EMFILE || error == -ENFILE;

    tp_log_once(&said, TP_LOG_WARN,
                "the counters of this process cannot be shared (a memfd and its seals): %s%s; "
                "tidepool status does not show them, transfers work",
                strerror(-error),
                refused ? ", refused by a seccomp profile, which has to allow memfd_create"
                : fds   ? " (ulimit -n)"
                        : "");
}

int tp_stats_open(int *ret_fd) {
    int rc;

    if (tp_inert())
        return -ECHILD;
    tp_fork_guard(); /* a child must not count into its parent's page */
    tp_stats_page();
    pthread_mutex_lock(&page_lock);
    rc = 0;
    if (page_fd < 0) {
        atomic_store(&move_state, PAGE_MOVING);
        rc = wait_for_adds(PAGE_PRIVATE);
        if (rc == 0)
            rc = move_page(&page_fd);
        atomic_store(&move_state, rc == 0 ? PAGE_SHARED : PAGE_PRIVATE);
        (void)wait_for_adds(PAGE_MOVING);
    }
    unpark_counts(); /* also what was parked by a thread that was not waited for any longer */
    if (rc == 0)
        *ret_fd = page_fd;
    pthread_mutex_unlock(&page_lock);
    if (rc < 0)
        say_not_shared(rc);
    return rc;
}

static int read_page(int fd, struct tp_stats_page *ret_page) {
    struct stat status;

    if (fstat(fd, &status) != 0)
        return -errno;
    if (!S_ISREG(status.st_mode) || status.st_size < (off_t)sizeof(*ret_page) ||
        status.st_size > MAX_VIEW_BYTES)
        return -EPROTO;
    /* Only memfds know seals: a file of another kind could block in read for as long as its server
     * likes (FUSE, NFS). */
    if (fcntl(fd, F_GET_SEALS) < 0)
        return -EPROTO;
    for (size_t done = 0; done < sizeof(*ret_page);) {
        ssize_t got = pread(fd, (char *)ret_page + done, sizeof(*ret_page) - done, (off_t)done);

        if (got <= 0)
            return got < 0 ? -errno : -EPROTO;
        done += (size_t)got;
    }
    return 0;
}

#define END_TEXT(text) ((text)[sizeof(text) - 1] = '\0')

static void bound_state(_Atomic uint32_t *state) {
    if (atomic_load_explicit(state, memory_order_relaxed) > TP_SLOT_GONE)
        atomic_store_explicit(state, TP_SLOT_EMPTY, memory_order_relaxed);
}

static void bound_page(struct tp_stats_page *page) {
    if (page->counter_count > TP_COUNTER_COUNT)
        page->counter_count = TP_COUNTER_COUNT;
    END_TEXT(page->library_version);
    END_TEXT(page->program);
    END_TEXT(page->hostname);
    END_TEXT(page->name);
    for (size_t i = 0; i < TP_STATS_SEGMENTS; i++) {
        bound_state(&page->segments[i].state);
        END_TEXT(page->segments[i].detail);
    }
    for (size_t i = 0; i < TP_STATS_CLIENTS; i++)
        bound_state(&page->clients[i].state);
    for (size_t i = 0; i < TP_STATS_PEERS; i++) {
        bound_state(&page->peers[i].state);
        END_TEXT(page->peers[i].name);
        END_TEXT(page->peers[i].path);
    }
    for (size_t i = 0; i < TP_STATS_EVENTS; i++)
        END_TEXT(page->events[i].text);
    for (size_t i = 0; i < TP_STATS_MISSES; i++) {
        bound_state(&page->misses[i].state);
        END_TEXT(page->misses[i].name);
    }
}

int tp_stats_view(int fd, struct tp_stats_page *ret_page) {
    struct tp_stats_page *copy = calloc(1, sizeof(*copy));
    int rc;

    if (!copy)
        return -ENOMEM;
    rc = read_page(fd, copy);
    if (rc < 0)
        goto out;
    rc = -EPROTO;
    if (copy->magic != TP_STATS_MAGIC)
        goto out;
    rc = -EPROTONOSUPPORT;
    if (copy->version != TP_STATS_VERSION)
        goto out;
    rc = -EPROTO;
    if (copy->size_bytes != sizeof(*copy))
        goto out;
    bound_page(copy);
    memcpy(ret_page, copy, sizeof(*copy));
    rc = 0;
out:
    free(copy);
    return rc;
}
