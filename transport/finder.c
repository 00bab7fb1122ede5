/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peer thread: finds stores in the directory, holds the connections (link.c), brings pieces in, and drops the memory of stores
 * that are gone once no copy uses it.
 *
 * A directory that does not exist yet is looked for each second. Where inotify works, a store that appears is seen at once;
 * elsewhere within a second. Nothing blocks: a stopped store delays only itself.
 *
 * It must not know: messages, batches beyond "let go of ended copies", Mooncake.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "segment/wire.h"
#include "transport/batch.h"
#include "transport/link.h"
#include "transport/peer.h"
#include "transport/slot.h"

#define SCAN_MS 1000
#define SILENCE_MS 2000 /* a store that has not said WELCOME by then is dropped */
#define RETRY_MS 5000   /* before a store that was lost during the handshake is tried again */
#define DRAIN_MS 20     /* between looks at memory that copies still use */
#define SHUNNED 256

enum source { SOURCE_KICK = TP_PEERS, SOURCE_DIRECTORY };

/* An instance that is not to be connected to before `until_ms`. */
struct shunned {
    uint8_t instance[16];
    uint64_t until_ms;
};

static struct {
    pthread_t thread;
    bool running;
    const struct tp_config *config;
    _Atomic bool stop;
    _Atomic bool kicked;
    int kick_fd, epoll_fd;
    /* the thread's own: */
    int dir_fd, inotify_fd;
    uint64_t scanned_ms;
    struct tp_link links[TP_PEERS];
    bool draining[TP_PEERS]; /* the slot's peer is dead and its memory not dropped yet */
    struct shunned shunned[SHUNNED];
    unsigned next_shunned;
} finder = {.kick_fd = -1, .epoll_fd = -1, .dir_fd = -1, .inotify_fd = -1};

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void tp_peer_kick(void) {
    uint64_t one = 1;
    if (!atomic_exchange(&finder.kicked, true) && finder.kick_fd >= 0)
        (void)!write(finder.kick_fd, &one, sizeof one); /* full means that a wake is pending already */
}

static bool watch(int fd, uint32_t source) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = source};
    return epoll_ctl(finder.epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* ---- which stores to connect to -------------------------------------------------------------------------------------- */

static void shun(const uint8_t instance[16], uint64_t until_ms) {
    struct shunned *entry = &finder.shunned[finder.next_shunned++ % SHUNNED];
    memcpy(entry->instance, instance, sizeof entry->instance);
    entry->until_ms = until_ms;
}

static bool is_known(const uint8_t instance[16], uint64_t now) {
    if (memcmp(instance, tp_stats_page()->instance, 16) == 0)
        return true; /* this process: Mooncake copies within one process itself */
    for (unsigned i = 0; i < TP_PEERS; i++) {
        if (finder.links[i].fd >= 0 && memcmp(finder.links[i].instance, instance, 16) == 0)
            return true;
    }
    for (unsigned i = 0; i < SHUNNED; i++) {
        if (finder.shunned[i].until_ms > now && memcmp(finder.shunned[i].instance, instance, 16) == 0)
            return true;
    }
    return false;
}

static struct tp_link *free_link(void) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    for (unsigned i = 0; i < TP_PEERS; i++) {
        if (finder.links[i].fd < 0 && !finder.draining[i])
            return &finder.links[i];
    }
    tp_log_once(&said, TP_LOG_WARN, "%d stores of this directory are attached, which is all that a process can be: further ones are left to Mooncake",
                TP_PEERS);
    return NULL;
}

static void try_entry(const char *name, uint64_t now) {
    uint8_t instance[16];
    if (tp_wire_parse_name(name, instance) != 's' || is_known(instance, now))
        return;
    struct tp_link *link = free_link();
    if (!link)
        return;
    link->peer = tp_peer_at((uint32_t)(link - finder.links));
    int error = tp_link_open(link, finder.dir_fd, name, instance, now, finder.config);
    if (error) {
        /* A dead store's socket stays until somebody sweeps it: look again, but not at once. */
        shun(instance, error == -EACCES ? UINT64_MAX : now + RETRY_MS);
        return;
    }
    (void)watch(link->fd, (uint32_t)(link - finder.links));
}

static void scan(uint64_t now) {
    int fd = openat(finder.dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir))
        try_entry(entry->d_name, now);
    closedir(dir);
}

/* ---- the directory --------------------------------------------------------------------------------------------------- */

static void leave_directory(void) {
    if (finder.inotify_fd >= 0)
        close(finder.inotify_fd);
    if (finder.dir_fd >= 0)
        close(finder.dir_fd);
    finder.inotify_fd = finder.dir_fd = -1;
}

/* Open the directory; a replaced one (removed and made again) is noticed by its link count. */
static bool enter_directory(void) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char path[64];
    char error[256];
    struct stat status;
    if (finder.dir_fd >= 0 && fstat(finder.dir_fd, &status) == 0 && status.st_nlink > 0)
        return true;
    leave_directory();
    int fd = tp_host_open_dir(finder.config->engine.socket_dir, false, finder.config, error, sizeof error);
    if (fd < 0) {
        if (fd != -ENOENT)
            tp_log_once(&said, TP_LOG_ERROR, "%s; until then transfers are left to Mooncake", error);
        return false;
    }
    finder.dir_fd = fd;
    finder.inotify_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (finder.inotify_fd >= 0 && (inotify_add_watch(finder.inotify_fd, path, IN_CREATE | IN_MOVED_TO) < 0 ||
                                   !watch(finder.inotify_fd, SOURCE_DIRECTORY))) {
        close(finder.inotify_fd);
        finder.inotify_fd = -1; /* the scan each second remains */
    }
    return true;
}

static void drain(int fd) {
    char bytes[4096];
    while (read(fd, bytes, sizeof bytes) > 0)
        continue;
}

/* ---- connections ----------------------------------------------------------------------------------------------------- */

static void end_link(struct tp_link *link, enum tp_link_end end, uint64_t now) {
    unsigned index = (unsigned)(link - finder.links);
    if (end == TP_LINK_REFUSED || !link->welcome)
        shun(link->instance, end == TP_LINK_REFUSED ? UINT64_MAX : now + RETRY_MS);
    tp_link_close(link);
    finder.draining[index] = !tp_link_drop_memory(link->peer, true);
}

static void read_link(struct tp_link *link, uint64_t now) {
    enum tp_link_end end = tp_link_read(link, finder.config);
    if (end == TP_LINK_LIVES)
        end = tp_link_ask(link);
    if (end != TP_LINK_LIVES)
        end_link(link, end, now);
}

/* What is due without an event: requests that missed a piece, silent stores, memory of withdrawn segments. */
static void tend_links(uint64_t now) {
    for (unsigned i = 0; i < TP_PEERS; i++) {
        struct tp_link *link = &finder.links[i];
        if (link->fd < 0)
            continue;
        if (!link->welcome && now > link->since_ms + SILENCE_MS)
            end_link(link, TP_LINK_LOST, now);
        else if (tp_link_ask(link) != TP_LINK_LIVES)
            end_link(link, TP_LINK_LOST, now);
        else
            (void)tp_link_drop_memory(link->peer, false);
    }
}

static bool prefault(void) {
    bool more = false;
    for (unsigned i = 0; i < TP_PEERS; i++) {
        if (finder.links[i].fd >= 0)
            more |= tp_link_prefault(&finder.links[i]);
    }
    return more;
}

/* true while dead stores' memory is still in use. */
static bool drain_dead(void) {
    bool any = false;
    for (unsigned i = 0; i < TP_PEERS; i++)
        any |= finder.draining[i];
    if (!any)
        return false;
    tp_batch_reap();
    any = false;
    for (unsigned i = 0; i < TP_PEERS; i++) {
        if (finder.draining[i])
            finder.draining[i] = !tp_link_drop_memory(tp_peer_at(i), true);
        any |= finder.draining[i];
    }
    return any;
}

/* ---- the thread ------------------------------------------------------------------------------------------------------ */

static void handle(const struct epoll_event *event, bool *scan_now, uint64_t now) {
    if (event->data.u32 == SOURCE_KICK) {
        drain(finder.kick_fd);
        atomic_store(&finder.kicked, false);
        *scan_now = true;
    } else if (event->data.u32 == SOURCE_DIRECTORY) {
        drain(finder.inotify_fd);
        *scan_now = true;
    } else if (finder.links[event->data.u32].fd >= 0) {
        read_link(&finder.links[event->data.u32], now);
    }
}

static void *run(void *arg) {
    (void)arg;
    struct epoll_event events[16];
    bool busy = true;
    while (!atomic_load(&finder.stop)) {
        bool draining = drain_dead();
        int count = epoll_wait(finder.epoll_fd, events, 16, busy ? 0 : draining ? DRAIN_MS : SCAN_MS);
        uint64_t now = now_ms();
        bool scan_now = now >= finder.scanned_ms + SCAN_MS;
        for (int i = 0; i < count; i++)
            handle(&events[i], &scan_now, now);
        if (scan_now) {
            finder.scanned_ms = now;
            if (enter_directory())
                scan(now);
        }
        tend_links(now);
        busy = prefault();
    }
    return NULL;
}

static void close_all(void) {
    leave_directory();
    for (unsigned i = 0; i < TP_PEERS; i++) {
        if (finder.links[i].fd >= 0)
            end_link(&finder.links[i], TP_LINK_LOST, 0);
    }
    tp_fork_close_remove(finder.kick_fd);
    tp_fork_close_remove(finder.epoll_fd);
    close(finder.kick_fd);
    close(finder.epoll_fd);
    finder.kick_fd = finder.epoll_fd = -1;
}

int tp_peer_start(const struct tp_config *config) {
    if (finder.running)
        return 0;
    finder.config = config;
    finder.scanned_ms = 0;
    atomic_store(&finder.stop, false);
    for (unsigned i = 0; i < TP_PEERS; i++)
        finder.links[i].fd = -1;
    finder.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    finder.kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = finder.epoll_fd < 0 || finder.kick_fd < 0 || !watch(finder.kick_fd, SOURCE_KICK) ? -errno : 0;
    if (!error) {
        (void)tp_fork_close_add(finder.epoll_fd);
        (void)tp_fork_close_add(finder.kick_fd);
        error = tp_thread_start("tidepool-peer", run, NULL, &finder.thread);
    }
    if (error) {
        tp_log(TP_LOG_ERROR, "the thread that looks for stores in %s cannot be started: %s; transfers are left to Mooncake",
               config->engine.socket_dir, strerror(-error));
        if (finder.epoll_fd >= 0)
            close(finder.epoll_fd);
        if (finder.kick_fd >= 0)
            close(finder.kick_fd);
        finder.epoll_fd = finder.kick_fd = -1;
        return error;
    }
    finder.running = true;
    return 0;
}

void tp_peer_stop(void) {
    if (!finder.running || tp_inert())
        return;
    atomic_store(&finder.stop, true);
    atomic_store(&finder.kicked, false);
    tp_peer_kick();
    pthread_join(finder.thread, NULL);
    close_all();
    finder.running = false;
}
