/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peer thread: watches the directory for stores, connects to each, and keeps their links going.
 * It never waits for any of them: a stopped or hostile store costs a bounded share of this thread
 * and nothing else.
 *
 * It must not know: what is said on a link (link.c), batches.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "transport/importer.h"
#include "transport/link.h"
#include "transport/names.h"
#include "transport/peer.h"
#include "transport/stall.h"

#define RESCAN_MS                                                                                  \
    1000 /* also finds what inotify does not tell: network file systems, a directory made anew */
#define HELD_MS 50     /* between looks at mappings that wait for their last reference */
#define BACKOFF_MS 250 /* doubled after each failure */
#define BACKOFF_MAX 7  /* doublings: 32 s */
#define STORES 1024    /* entries of the directory that are remembered */
#define TURNS 512      /* failed entries that give way in one scan when there are more */
#define EVENTS 32
#define ATTACHING_MS 1000 /* a store that has not said its name by then may never do so */
#define UNMAP_MS 20       /* of a turn, for dead stores' CUDA memory */

enum store_state { STORE_FREE, STORE_WAITING, STORE_LINKED, STORE_SHUNNED };

/* An entry of the directory. */
struct store {
    enum store_state state;
    uint8_t instance[16];
    uint64_t next_try_ms;
    unsigned failures;
    unsigned link;
    bool seen; /* in this scan */
};

enum { TAG_KICK = TP_PEERS, TAG_WATCH };

static struct {
    const struct tp_config *config;
    struct tp_link_self self;
    pthread_t thread;
    bool running;
    int dir_fd, epoll_fd, kick_fd, watch_fd;
    int watch;
    struct tp_link links[TP_PEERS];
    struct store stores[STORES];
    unsigned turn;   /* where in the line of names without a place the next scan goes on */
    unsigned victim; /* where the search for an entry that gives way goes on */
    uint64_t next_scan_ms;
    char dir_error[256]; /* said last, so that it is said once */
} finder = {.dir_fd = -1, .epoll_fd = -1, .kick_fd = -1, .watch_fd = -1, .watch = -1};

static _Atomic bool finder_stop;
static _Atomic bool kick_pending;
static _Atomic bool look_pending; /* at the directory */
static _Atomic int kick_fd = -1;  /* what tp_peer_kick writes to */
static _Atomic uint64_t attaching_until;
static void (*_Atomic reaper)(void);

void tp_peer_set_reaper(void (*reap)(void)) {
    atomic_store(&reaper, reap);
}

static void (*_Atomic looker)(void);

void tp_peer_set_look(void (*look)(void)) {
    atomic_store(&looker, look);
}

uint64_t tp_peer_attaching_until(void) {
    return atomic_load_explicit(&attaching_until, memory_order_acquire);
}

void tp_peer_kick(void) {
    atomic_store(&look_pending, true);
    tp_peer_wake();
}

void tp_peer_wake(void) {
    uint64_t one = 1;
    if (tp_inert() || atomic_load(&kick_fd) < 0 || atomic_exchange(&kick_pending, true))
        return;
    ssize_t written = write(atomic_load(&kick_fd), &one, sizeof(one));
    (void)written; /* it cannot be full: at most one wake is pending */
}

/* ---- the directory
 * ---------------------------------------------------------------------------------------------------
 */

static void dir_close(void) {
    if (finder.watch >= 0)
        (void)inotify_rm_watch(finder.watch_fd, finder.watch);
    finder.watch = -1;
    if (finder.dir_fd >= 0) {
        tp_fork_close_remove(finder.dir_fd);
        close(finder.dir_fd);
    }
    finder.dir_fd = -1;
}

/* Has the path come to mean another directory since it was opened? */
static bool dir_changed(void) {
    struct stat opened, named;
    return stat(finder.config->engine.socket_dir, &named) != 0 ||
           fstat(finder.dir_fd, &opened) != 0 || opened.st_dev != named.st_dev ||
           opened.st_ino != named.st_ino;
}

static void dir_open(void) {
    const char *path = finder.config->engine.socket_dir;
    char error[256] = "";
    int fd = tp_host_open_dir(path, false, finder.config, error, sizeof(error));
    if (fd < 0) {
        if (fd != -ENOENT && strncmp(error, finder.dir_error, sizeof(error) - 1) != 0) {
            snprintf(finder.dir_error, sizeof(finder.dir_error), "%s", error);
            tp_log(TP_LOG_WARN, "%s; transfers go through Mooncake until then", error);
        }
        return;
    }
    finder.dir_error[0] = 0;
    finder.dir_fd = fd;
    (void)tp_fork_close_add(fd);
    char watched[64];
    snprintf(watched, sizeof(watched), "/proc/self/fd/%d", fd);
    if (finder.watch_fd >= 0)
        finder.watch =
            inotify_add_watch(finder.watch_fd, watched, IN_CREATE | IN_MOVED_TO | IN_DELETE_SELF);
}

static void store_remember(struct store *store, const uint8_t instance[static 16]) {
    *store = (struct store){.state = STORE_WAITING};
    memcpy(store->instance, instance, sizeof(store->instance));
}

/* NULL: not known, and no place is left. */
static struct store *store_by_id(const uint8_t instance[static 16]) {
    struct store *unused = NULL;
    for (unsigned i = 0; i < STORES; i++) {
        struct store *store = &finder.stores[i];
        if (store->state == STORE_FREE)
            unused = unused ? unused : store;
        else if (memcmp(store->instance, instance, sizeof(store->instance)) == 0)
            return store;
    }
    if (unused)
        store_remember(unused, instance);
    return unused;
}

/* An entry that answered no connection; the search starts where the last one ended. */
static struct store *store_failed_once(void) {
    for (unsigned n = 0; n < STORES; n++) {
        struct store *store = &finder.stores[finder.victim++ % STORES];
        if (store->state == STORE_WAITING && store->failures > 0)
            return store;
    }
    return NULL;
}

/*
 * A directory that nobody may clean (read-only to engines) can hold more sockets of the dead than
 * are remembered, and a living store behind them. So names without a place take turns: they push
 * out entries that failed, and come back to the end of the line.
 */
struct line {
    unsigned length, tried;
};

static struct store *take_turn(struct line *line, const uint8_t instance[static 16]) {
    if (line->length++ < finder.turn || line->tried == TURNS)
        return NULL;
    struct store *store = store_failed_once();
    if (store) {
        store_remember(store, instance);
        line->tried++;
    }
    return store;
}

static void scan_entries(void) {
    int fd = openat(finder.dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (unsigned i = 0; i < STORES; i++)
        finder.stores[i].seen = false;
    struct line line = {0};
    struct dirent *entry;
    while ((entry = readdir(dir))) {
        uint8_t instance[16];
        if (tp_wire_parse_name(entry->d_name, instance) != 's')
            continue;
        struct store *store = store_by_id(instance);
        if (!store)
            store = take_turn(&line, instance);
        if (store)
            store->seen = true;
    }
    closedir(dir);
    finder.turn += line.tried;
    if (finder.turn >= line.length)
        finder.turn = 0;
    for (unsigned i = 0; i < STORES; i++) {
        struct store *store = &finder.stores[i];
        if (!store->seen && store->state != STORE_LINKED)
            store->state = STORE_FREE;
    }
}

/* ---- links
 * ------------------------------------------------------------------------------------------------------------
 */

static void store_failed(struct store *store, enum tp_link_end end, uint64_t now) {
    store->state = end == TP_LINK_REFUSED || end == TP_LINK_BROKEN ? STORE_SHUNNED : STORE_WAITING;
    store->next_try_ms = now + tp_backoff(BACKOFF_MS, store->failures++, BACKOFF_MAX);
}

static void link_ended(unsigned index, enum tp_link_end end, uint64_t now) {
    struct tp_link *link = &finder.links[index];
    if (end == TP_LINK_BROKEN) {
        tp_count(TP_PEERS_REFUSED, 1);
        tp_log(
            TP_LOG_WARN,
            "store %02x%02x%02x%02x (%s) does not keep to the protocol: not used; is it the same "
            "version of Tidepool?",
            link->instance[0], link->instance[1], link->instance[2], link->instance[3],
            link->name ? link->name->text : "unnamed");
    }
    for (unsigned i = 0; i < STORES; i++) {
        struct store *store = &finder.stores[i];
        if (store->state != STORE_LINKED || store->link != index)
            continue;
        if (link->state == TP_LINK_OPEN && end != TP_LINK_SILENT)
            store->failures = 0;
        store_failed(store, end, now);
    }
    tp_link_end(link);
}

/* Is the process behind this socket one that we talk to? */
static enum tp_link_end check_uid(int fd) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint32_t uid = 0;
    int error = tp_wire_check_peer(fd, finder.config, &uid, NULL);
    if (error == -EACCES) {
        tp_count(TP_PEERS_REFUSED, 1);
        if (tp_host_uid_is_ambiguous(uid))
            tp_log_once(&said, TP_LOG_WARN,
                        "a store of uid %u in %s is not used: the uid stands for every user that "
                        "is not mapped in this user namespace; map the store's user",
                        uid, finder.config->engine.socket_dir);
        else
            tp_log_once(&said, TP_LOG_WARN,
                        "a store of uid %u in %s is not used: its uid is neither root nor ours "
                        "(%u); TIDEPOOL_ALLOW_UIDS=%u allows it",
                        uid, finder.config->engine.socket_dir, (unsigned)geteuid(), uid);
        return TP_LINK_REFUSED;
    }
    return error ? TP_LINK_EOF : TP_LINK_LIVES;
}

static void store_connect(struct store *store, unsigned index, uint64_t now) {
    char name[64] = "s-";
    size_t used = 2;
    for (unsigned i = 0; i < 16; i++, used += 2)
        snprintf(name + used, sizeof(name) - used, "%02x", store->instance[i]);
    snprintf(name + used, sizeof(name) - used, ".sock");
    int fd = tp_wire_connect(finder.dir_fd, name);
    if (fd < 0) {
        store_failed(store, TP_LINK_SILENT, now);
        return;
    }
    enum tp_link_end end = check_uid(fd);
    if (end != TP_LINK_LIVES) {
        close(fd);
        store_failed(store, end, now);
        return;
    }
    struct tp_link *link = &finder.links[index];
    if (tp_link_begin(link, fd, store->instance, &finder.self, now) != 0) {
        store_failed(store, TP_LINK_SILENT, now);
        return;
    }
    link->first_try = store->failures == 0;
    store->state = STORE_LINKED;
    store->link = index;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = index};
    if (epoll_ctl(finder.epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0)
        link_ended(index, TP_LINK_SILENT, now);
}

static void connect_due(uint64_t now) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    unsigned index = 0;
    for (unsigned i = 0; i < STORES && finder.dir_fd >= 0; i++) {
        struct store *store = &finder.stores[i];
        if (store->state != STORE_WAITING || !store->seen || now < store->next_try_ms)
            continue;
        while (index < TP_PEERS && finder.links[index].state != TP_LINK_FREE)
            index++;
        if (index == TP_PEERS) {
            tp_log_once(&said, TP_LOG_WARN,
                        "%s has more than %d stores: the others are left to Mooncake",
                        finder.config->engine.socket_dir, TP_PEERS);
            return;
        }
        store_connect(store, index, now);
    }
}

static void scan(uint64_t now) {
    finder.next_scan_ms = now + RESCAN_MS;
    if (finder.dir_fd >= 0 && dir_changed())
        dir_close();
    if (finder.dir_fd < 0)
        dir_open();
    if (finder.dir_fd >= 0)
        scan_entries();
    void (*look)(void) = atomic_load(&looker);
    if (look)
        look();
    tp_names_show_missed();
}

static void take_imported(void) {
    struct tp_import_job job;
    while (tp_importer_take(&job))
        tp_link_imported(&finder.links[tp_peer_slot(job.peer)], &job);
}

/* After what has come was read: a store that has its name by now is found by it. */
static void note_attaching(void) {
    uint64_t until = 0;
    for (unsigned i = 0; i < TP_PEERS; i++) {
        const struct tp_link *link = &finder.links[i];
        bool unnamed = (link->state == TP_LINK_HELLO || link->state == TP_LINK_OPEN) && !link->name;
        uint64_t end = link->deadline_ms - TP_WIRE_HELLO_MS + ATTACHING_MS;
        if (unnamed && link->first_try && end > until)
            until = end;
    }
    atomic_store_explicit(&attaching_until, until, memory_order_release);
}

/* All links in turn. Returns how long to sleep at most. */
static int work(uint64_t now) {
    bool busy = false;
    bool held = false;
    take_imported();
    tp_import_turn(UNMAP_MS);
    int timeout = (int)(finder.next_scan_ms > now ? finder.next_scan_ms - now : 0);
    for (unsigned i = 0; i < TP_PEERS; i++) {
        struct tp_link *link = &finder.links[i];
        if (link->state == TP_LINK_HELLO || link->state == TP_LINK_OPEN) {
            enum tp_link_end end = tp_link_work(link, now, &busy);
            if (end != TP_LINK_LIVES)
                link_ended(i, end, now);
        }
        if (tp_link_held(link) && (link->state != TP_LINK_DRAIN || !tp_link_drain(link, &busy)))
            held = true;
    }
    void (*reap)(void) = atomic_load(&reaper);
    note_attaching();
    if (held && reap)
        reap();
    if (busy)
        return 0;
    return held && timeout > HELD_MS ? HELD_MS : timeout;
}

static void drain_fd(int fd) {
    char buffer[4096];
    while (read(fd, buffer, sizeof(buffer)) > 0)
        ;
}

static void *run(void *arg) {
    (void)arg;
    int timeout = 0;
    while (!atomic_load(&finder_stop)) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(finder.epoll_fd, events, EVENTS, timeout);
        uint64_t now = tp_now_ms();
        (void)tp_stall_look();
        bool look = now >= finder.next_scan_ms;
        for (int i = 0; i < count; i++) {
            uint32_t tag = events[i].data.u32;
            if (tag >= TP_PEERS) {
                drain_fd(tag == TAG_KICK ? finder.kick_fd : finder.watch_fd);
                if (tag == TAG_KICK)
                    atomic_store(&kick_pending, false);
                look = look || tag == TAG_WATCH || atomic_exchange(&look_pending, false);
                continue;
            }
            enum tp_link_end end = tp_link_read(&finder.links[tag], &finder.self);
            if (end != TP_LINK_LIVES)
                link_ended(tag, end, now);
        }
        if (look)
            scan(now);
        connect_due(now);
        timeout = work(now);
    }
    return NULL;
}

/* ---- start and stop
 * ---------------------------------------------------------------------------------------------------
 */

static void close_listed(int *fd) {
    if (*fd >= 0) {
        tp_fork_close_remove(*fd);
        close(*fd);
    }
    *fd = -1;
}

static int watch_fd_in_epoll(int fd, uint32_t tag) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = tag};
    (void)tp_fork_close_add(fd);
    return epoll_ctl(finder.epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -errno;
}

static void close_fds(void) {
    atomic_store(&kick_fd, -1);
    dir_close();
    close_listed(&finder.watch_fd);
    close_listed(&finder.kick_fd);
    close_listed(&finder.epoll_fd);
}

static int open_fds(void) {
    finder.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (finder.epoll_fd < 0)
        return -errno;
    (void)tp_fork_close_add(finder.epoll_fd);
    finder.kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (finder.kick_fd < 0)
        return -errno;
    int error = watch_fd_in_epoll(finder.kick_fd, TAG_KICK);
    if (error)
        return error;
    /* Instances of inotify are few (128 a user); without one the rescan finds stores a second
     * later. */
    finder.watch_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (finder.watch_fd >= 0 && watch_fd_in_epoll(finder.watch_fd, TAG_WATCH) != 0)
        close_listed(&finder.watch_fd);
    return 0;
}

static int learn_self(void) {
    static const uint8_t none[16];
    int page;
    finder.self.netns = tp_host_netns();
    (void)tp_stats_open(
        &page); /* makes the instance id that the counters, and HELLO, are known by */
    memcpy(finder.self.instance, tp_stats_page()->instance, sizeof(finder.self.instance));
    if (memcmp(finder.self.instance, none, sizeof(none)) == 0) {
        int error = tp_random_id(finder.self.instance);
        if (error)
            return error;
    }
    return tp_host_identity(finder.config->boot_id_only, finder.self.identity);
}

int tp_peer_start(const struct tp_config *config) {
    if (finder.running)
        return 0;
    finder.config = config;
    finder.next_scan_ms = 0;
    finder.dir_error[0] = 0;
    memset(finder.stores, 0, sizeof(finder.stores));
    for (unsigned i = 0; i < TP_PEERS; i++) {
        finder.links[i].peer = tp_peer_at(i);
        if (finder.links[i].state != TP_LINK_DRAIN) /* what an earlier stop had to leave */
            finder.links[i].state = TP_LINK_FREE;
    }
    atomic_store(&finder_stop, false);
    atomic_store(&kick_pending, false);
    int error = learn_self();
    if (!error)
        error = open_fds();
    if (!error)
        error = tp_thread_start("tidepool-peer", run, NULL, &finder.thread);
    if (error) {
        bool no_proc = error == -ENOENT && access("/proc/self", F_OK) != 0;
        tp_log(TP_LOG_ERROR, "cannot look for stores in %s: %s; transfers go through Mooncake",
               config->engine.socket_dir, no_proc ? "/proc is not mounted" : strerror(-error));
        close_fds();
        return error;
    }
    finder.running = true;
    atomic_store(&kick_fd, finder.kick_fd);
    return 0;
}

void tp_peer_stop(void) {
    if (!finder.running)
        return;
    atomic_store(&finder_stop, true);
    atomic_store(&kick_pending, false);
    tp_peer_kick();
    pthread_join(finder.thread, NULL);
    tp_importer_stop();
    take_imported();
    tp_import_turn(UINT_MAX); /* the last one */
    for (unsigned i = 0; i < TP_PEERS; i++) {
        struct tp_link *link = &finder.links[i];
        if (link->state == TP_LINK_HELLO || link->state == TP_LINK_OPEN)
            tp_link_end(link);
        if (link->state == TP_LINK_DRAIN)
            (void)tp_link_drain(link, &(bool){false});
    }
    close_fds();
    finder.running = false;
}
