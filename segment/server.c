/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server: one thread that accepts connections in the shared directory and runs their sessions.
 *
 * It must not know: what is said in a session (session.c), how segments are made.
 *
 * It never waits for anybody: all sockets are non-blocking, and a client gets a few messages' worth
 * of attention before the next one. The number of clients is bounded; of those that have said
 * nothing yet, the oldest of the user that has most of them gives way to a new one, so that
 * connections that do nothing cannot keep out an engine that speaks at once. Users that may not be
 * our clients get a few places only, in which they are told so; further ones are closed at once.
 */
#include "segment/server.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <linux/sockios.h>

#include "env/env.h"
#include "env/stats.h"
#include "segment/directory.h"
#include "segment/lease.h"
#include "segment/segment.h"
#include "segment/session.h"

#define MAX_ATTACHED 64
#define MAX_GREETING 16
#define MAX_UNWELCOME 2 /* of MAX_GREETING */
#define SESSIONS (MAX_ATTACHED + MAX_GREETING)
#define ACCEPT_AT_ONCE 256 /* before others get their turn */
#define EVENTS 32
#define RETRY_MS 20      /* between tries of an answer that has to wait */
#define TICK_MS 250      /* while somebody has not said HELLO */
#define EXHAUSTED_MS 500 /* pause of accepting when this process is out of fds */
#define LOOK_MS 2000     /* between looks whether our entries are still in their directories */
#define SETTLE_MS 2 /* between looks whether clients have read; and what they get to act on it */

enum { STORE, ENGINE, ENTRIES };

/* epoll data: the wake fd, a listener, or a session. */
enum { TAG_WAKE, TAG_LISTENER, TAG_SESSION = TAG_LISTENER + ENTRIES };

static struct {
    pthread_mutex_t lock;         /* entries, name, running; never held while logging or sending */
    pthread_mutex_t control_lock; /* one start, look or stop at a time; taken before `lock` */
    struct tp_entry entries[ENTRIES]; /* written under both locks */
    char name[256];
    uint64_t name_version;
    struct tp_config config; /* a copy: callers' may be short-lived; fixed while running */
    bool running;
    pthread_t thread;
    int epoll_fd;
    int wake_fd; /* under lock; -1: no server */
    uint8_t instance[16];
    atomic_bool stop;
    _Atomic uint64_t settle_wanted; /* tickets: see tp_server_settle */
    _Atomic uint64_t settled;
} server = {.lock = PTHREAD_MUTEX_INITIALIZER,
            .control_lock = PTHREAD_MUTEX_INITIALIZER,
            .epoll_fd = -1,
            .wake_fd = -1};

/* Everything the thread owns: no lock. */
struct loop {
    struct tp_server_facts facts;
    struct tp_session sessions[SESSIONS];
    bool watched[SESSIONS];   /* EPOLLIN is armed */
    uint64_t order[SESSIONS]; /* `accepted` when it began: many begin within a millisecond */
    uint64_t accepted;
    uint64_t exhausted_until_ms;
    uint64_t next_look_ms;
    bool announce;
};

void tp_server_wake(void) {
    uint64_t one = 1;
    /* Under the lock, so that the fd cannot be closed and its number be somebody else's. The write
     * never blocks. */
    pthread_mutex_lock(&server.lock);
    /* Fails only when the counter is full: then a wake is pending anyway. */
    ssize_t written = server.wake_fd < 0 ? 0 : write(server.wake_fd, &one, sizeof one);
    (void)written;
    pthread_mutex_unlock(&server.lock);
}

static void drain_wakes(void) {
    uint64_t drained;
    pthread_mutex_lock(&server.lock);
    while (read(server.wake_fd, &drained, sizeof drained) > 0) {
    }
    pthread_mutex_unlock(&server.lock);
}

/* ---- the thread
 * ---------------------------------------------------------------------------------- */

/* fds and memory run out and come back. */
static void learn_identity(struct loop *loop) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    int error = tp_host_identity(server.config.boot_id_only, loop->facts.identity);
    if (error < 0)
        tp_log_once(&said, TP_LOG_WARN,
                    "cannot tell which host this is: %s; engines use Mooncake's transport until it "
                    "can be told",
                    strerror(-error));
}

static void refresh_facts(struct loop *loop) {
    if (loop->facts.identity[0] == 0)
        learn_identity(loop);
    pthread_mutex_lock(&server.lock);
    loop->facts.config = &server.config;
    loop->facts.roles = (server.entries[STORE].open ? TP_ROLE_STORE : 0u) |
                        (server.entries[ENGINE].open ? TP_ROLE_ENGINE : 0u);
    memcpy(loop->facts.name, server.name, sizeof loop->facts.name);
    loop->facts.name_version = server.name_version;
    pthread_mutex_unlock(&server.lock);
    loop->facts.roles |= atomic_load(&tp_stats_page()->roles);
}

static unsigned count_state(const struct loop *loop, enum tp_session_state state) {
    unsigned count = 0;
    for (unsigned i = 0; i < SESSIONS; i++)
        count += loop->sessions[i].state == state ? 1 : 0;
    return count;
}

static void end_session(struct loop *loop, unsigned index, int reason) {
    tp_session_end(&loop->sessions[index], reason); /* closing takes the fd out of epoll */
}

static void watch_session(struct loop *loop, unsigned index, int operation, bool input) {
    struct epoll_event event = {.events = EPOLLRDHUP | (input ? EPOLLIN : 0u),
                                .data.u32 = TAG_SESSION + index};
    loop->watched[index] = input;
    if (epoll_ctl(server.epoll_fd, operation, loop->sessions[index].fd, &event) < 0)
        end_session(loop, index, -errno);
}

static void run_session(struct loop *loop, unsigned index, uint32_t events, uint64_t now) {
    struct tp_session *session = &loop->sessions[index];
    if (session->state == TP_SESSION_FREE)
        return; /* ended earlier in this round */
    int result = 0;
    if (session->waiting && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0)
        result = -ENODATA; /* nobody will read the answer */
    else if (!session->waiting)
        result = tp_session_read(session, &loop->facts,
                                 count_state(loop, TP_SESSION_ATTACHED) >= MAX_ATTACHED, now);
    if (result < 0)
        end_session(loop, index, result);
    else if (session->waiting == loop->watched[index])
        watch_session(loop, index, EPOLL_CTL_MOD, !session->waiting);
}

static unsigned count_silent(const struct loop *loop, uint32_t uid) {
    unsigned count = 0;
    for (unsigned i = 0; i < SESSIONS; i++)
        count += loop->sessions[i].state == TP_SESSION_GREETING && loop->sessions[i].uid == uid;
    return count;
}

/*
 * A free slot, or else SESSIONS when there are as many silent sessions as there may be. Of these
 * the oldest one of the user that has most of them.
 */
static unsigned look_for_slot(const struct loop *loop, unsigned *ret_oldest) {
    unsigned silent = 0;
    unsigned most = 0;
    unsigned oldest = SESSIONS;
    unsigned slot = SESSIONS;
    for (unsigned i = 0; i < SESSIONS; i++) {
        const struct tp_session *session = &loop->sessions[i];
        if (session->state == TP_SESSION_FREE) {
            slot = i;
        } else if (session->state == TP_SESSION_GREETING) {
            unsigned held = count_silent(loop, session->uid);
            silent++;
            if (held > most || (held == most && loop->order[i] < loop->order[oldest])) {
                most = held;
                oldest = i;
            }
        }
    }
    *ret_oldest = oldest;
    return silent < MAX_GREETING ? slot : SESSIONS;
}

/*
 * A slot for a new connection; an old silent one gives way. It is heard first: when many engines
 * start at once, their greetings have come and nobody has read them.
 */
static unsigned free_slot(struct loop *loop, uint64_t now) {
    unsigned oldest;
    unsigned slot = look_for_slot(loop, &oldest);
    while (slot == SESSIONS) {
        run_session(loop, oldest, 0, now);
        if (loop->sessions[oldest].state == TP_SESSION_GREETING)
            end_session(loop, oldest, -ETIME);
        slot = look_for_slot(loop, &oldest);
    }
    return slot;
}

/* Is this the connection of a user that will be refused, and are enough of those here already? */
static bool is_one_too_many(const struct loop *loop, int fd) {
    unsigned count = 0;
    if (tp_wire_check_peer(fd, loop->facts.config, NULL, NULL) == 0)
        return false;
    for (unsigned i = 0; i < SESSIONS; i++)
        count += loop->sessions[i].unwelcome;
    return count >= MAX_UNWELCOME;
}

static void accept_one(struct loop *loop, int fd, uint64_t now) {
    if (is_one_too_many(loop, fd)) {
        tp_count(TP_CLIENTS_REFUSED, 1);
        (void)shutdown(fd, SHUT_RDWR); /* a child forked just now may have the fd */
        close(fd);
        return;
    }
    unsigned index = free_slot(loop, now);
    loop->order[index] = ++loop->accepted;
    tp_session_begin(&loop->sessions[index], fd, &loop->facts, now);
    watch_session(loop, index, EPOLL_CTL_ADD, true);
}

static void arm_listeners(bool armed) {
    pthread_mutex_lock(&server.lock);
    for (unsigned i = 0; i < ENTRIES; i++) {
        struct epoll_event event = {.events = armed ? EPOLLIN : 0u, .data.u32 = TAG_LISTENER + i};
        if (server.entries[i].open)
            (void)epoll_ctl(server.epoll_fd, EPOLL_CTL_MOD, server.entries[i].listen_fd, &event);
    }
    pthread_mutex_unlock(&server.lock);
}

static void accept_some(struct loop *loop, unsigned which, uint64_t now) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    pthread_mutex_lock(&server.lock);
    int listen_fd = server.entries[which].open ? server.entries[which].listen_fd : -1;
    pthread_mutex_unlock(&server.lock);
    for (unsigned i = 0; i < ACCEPT_AT_ONCE && listen_fd >= 0; i++) {
        int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            accept_one(loop, fd, now);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            /* The connection stays in the backlog and keeps the listener readable: look away for a
             * while. */
            tp_log_once(&said, TP_LOG_WARN, "cannot accept clients: %s (ulimit -n)",
                        strerror(errno));
            arm_listeners(false);
            loop->exhausted_until_ms = now + EXHAUSTED_MS;
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

static void run_events(struct loop *loop, const struct epoll_event *events, int count) {
    uint64_t now = tp_now_ms();
    for (int i = 0; i < count; i++) {
        uint32_t tag = events[i].data.u32;
        if (tag == TAG_WAKE) {
            drain_wakes();
            loop->announce = true;
        } else if (tag < TAG_SESSION) {
            refresh_facts(loop); /* the entry may be newer than the last wake */
            accept_some(loop, tag - TAG_LISTENER, now);
        } else {
            run_session(loop, tag - TAG_SESSION, events[i].events, now);
        }
    }
}

static const char *directory_of(unsigned which, const struct tp_config *config) {
    return which == STORE ? config->store.socket_dir : config->engine.socket_dir;
}

static void look_after_entry(unsigned which) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = TAG_LISTENER + which};
    const char *path = directory_of(which, &server.config);
    struct tp_entry entry = server.entries[which];
    if (!tp_entry_is_lost(&entry, path))
        return;
    int result = tp_entry_renew(&entry, path, &server.config);
    if (result == 0 && epoll_ctl(server.epoll_fd, EPOLL_CTL_ADD, entry.listen_fd, &event) < 0)
        (void)unlinkat(entry.dir_fd, entry.socket_name, 0); /* the next look tries again */
    pthread_mutex_lock(&server.lock);
    server.entries[which] = entry;
    pthread_mutex_unlock(&server.lock);
}

/* Whoever starts or stops the server meanwhile is not waited for: the next look will do. */
static void look_after_entries(struct loop *loop, uint64_t now) {
    if (now < loop->next_look_ms)
        return;
    loop->next_look_ms = now + LOOK_MS;
    if (pthread_mutex_trylock(&server.control_lock) != 0)
        return;
    for (unsigned i = 0; i < ENTRIES; i++)
        look_after_entry(i);
    pthread_mutex_unlock(&server.control_lock);
}

static bool all_have_read(const struct loop *loop) {
    for (unsigned i = 0; i < SESSIONS; i++) {
        int unread = 0;
        if (loop->sessions[i].state == TP_SESSION_ATTACHED &&
            ioctl(loop->sessions[i].fd, SIOCOUTQ, &unread) == 0 && unread > 0)
            return false;
    }
    return true;
}

static void tick(struct loop *loop) {
    uint64_t now = tp_now_ms();
    uint64_t wanted = atomic_load(&server.settle_wanted);
    loop->announce |= wanted != atomic_load(&server.settled);
    look_after_entries(loop, now);
    if (loop->exhausted_until_ms != 0 && now >= loop->exhausted_until_ms) {
        loop->exhausted_until_ms = 0;
        arm_listeners(true);
    }
    if (loop->announce)
        refresh_facts(loop);
    for (unsigned i = 0; i < SESSIONS; i++) {
        struct tp_session *session = &loop->sessions[i];
        int result = 0;
        if (session->state == TP_SESSION_FREE)
            continue;
        if (loop->announce && session->state == TP_SESSION_ATTACHED)
            result = tp_session_announce(session, &loop->facts);
        if (result == 0)
            result = tp_session_tick(session, now);
        if (result < 0)
            end_session(loop, i, result);
        else if (session->waiting == loop->watched[i])
            watch_session(loop, i, EPOLL_CTL_MOD, !session->waiting);
    }
    loop->announce = false;
    if (wanted != atomic_load(&server.settled) && all_have_read(loop))
        atomic_store(&server.settled, wanted);
}

static int next_timeout(const struct loop *loop) {
    uint64_t now = tp_now_ms();
    int timeout = loop->next_look_ms > now ? (int)(loop->next_look_ms - now) : 0;
    if (atomic_load(&server.settled) != atomic_load(&server.settle_wanted))
        return timeout < SETTLE_MS ? timeout : SETTLE_MS;
    if (loop->exhausted_until_ms != 0 && timeout > TICK_MS)
        timeout = TICK_MS;
    for (unsigned i = 0; i < SESSIONS; i++) {
        if (loop->sessions[i].state != TP_SESSION_FREE && loop->sessions[i].waiting)
            return timeout < RETRY_MS ? timeout : RETRY_MS;
        if (loop->sessions[i].state == TP_SESSION_GREETING && timeout > TICK_MS)
            timeout = TICK_MS;
    }
    return timeout;
}

static void init_loop(struct loop *loop) {
    memset(loop, 0, sizeof *loop);
    for (unsigned i = 0; i < SESSIONS; i++)
        loop->sessions[i] =
            (struct tp_session){.state = TP_SESSION_FREE, .fd = -1, .stats_slot = -1};
    refresh_facts(loop);
    memcpy(loop->facts.instance, server.instance, sizeof loop->facts.instance);
    loop->facts.netns = tp_host_netns();
}

static void *run(void *arg) {
    static struct loop loop; /* one server at a time; too large for a small stack */
    struct epoll_event events[EVENTS];
    (void)arg;
    init_loop(&loop);
    while (!atomic_load(&server.stop)) {
        int count = epoll_wait(server.epoll_fd, events, EVENTS, next_timeout(&loop));
        if (count < 0 && errno != EINTR)
            break;
        run_events(&loop, events, count < 0 ? 0 : count);
        tick(&loop);
    }
    for (unsigned i = 0; i < SESSIONS; i++) {
        if (loop.sessions[i].state != TP_SESSION_FREE)
            end_session(&loop, i, 0);
    }
    tp_lease_end();
    return NULL;
}

bool tp_server_settle(unsigned limit_ms) {
    pthread_mutex_lock(&server.lock);
    bool running = server.wake_fd >= 0;
    pthread_mutex_unlock(&server.lock);
    if (!running)
        return true; /* no clients */
    uint64_t end = tp_now_ms() + limit_ms;
    uint64_t ticket = atomic_fetch_add(&server.settle_wanted, 1) + 1;
    const struct timespec pause = {.tv_nsec = SETTLE_MS * 1000000L};
    bool settled = false;
    tp_server_wake();
    while (!settled && tp_now_ms() < end) {
        nanosleep(&pause, NULL);
        settled = atomic_load(&server.settled) >= ticket;
    }
    return settled;
}

/* ---- start and stop
 * ------------------------------------------------------------------------------ */

static void close_listed(int fd) {
    if (fd < 0)
        return;
    tp_fork_close_remove(fd);
    close(fd);
}

static void close_loop_fds(void) {
    pthread_mutex_lock(&server.lock);
    close_listed(server.wake_fd);
    server.wake_fd = -1;
    pthread_mutex_unlock(&server.lock);
    close_listed(server.epoll_fd);
    server.epoll_fd = -1;
}

static int make_loop_fds(void) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = TAG_WAKE};
    server.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (server.epoll_fd < 0)
        return -errno;
    (void)tp_fork_close_add(server.epoll_fd);
    int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd < 0)
        return -errno;
    (void)tp_fork_close_add(wake_fd);
    pthread_mutex_lock(&server.lock);
    server.wake_fd = wake_fd;
    pthread_mutex_unlock(&server.lock);
    return epoll_ctl(server.epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) < 0 ? -errno : 0;
}

/* The id of the counters' page, so that what status shows and what engines see are one. */
static int choose_instance(void) {
    static const uint8_t none[16];
    int page;
    (void)tp_stats_open(&page);
    memcpy(server.instance, tp_stats_page()->instance, sizeof server.instance);
    return memcmp(server.instance, none, sizeof none) == 0 ? tp_random_id(server.instance) : 0;
}

static const char *remedy(int error) {
    if (error == -EAGAIN)
        return " (ulimit -u, the cgroup's pids.max)";
    return error == -EMFILE || error == -ENFILE ? " (ulimit -n)" : "";
}

/* An engine's server is there for `tidepool status` alone. */
static void say_not_started(bool store, int error) {
    tp_log(store ? TP_LOG_ERROR : TP_LOG_WARN, "cannot start the server thread: %s%s%s",
           strerror(-error), remedy(error),
           store ? "" : "; transfers work, but tidepool status does not show us");
}

/* Under control_lock. The thread runs before there is anything to listen on. */
static int start_thread(bool store, const struct tp_config *config) {
    if (server.running)
        return 0;
    tp_fork_guard();
    server.config = *config;
    atomic_store(&server.stop, false);
    int result = choose_instance();
    if (result == 0)
        result = make_loop_fds();
    if (result == 0)
        result = tp_thread_start("tidepool-server", run, NULL, &server.thread);
    if (result < 0) {
        say_not_started(store, result);
        close_loop_fds();
        return result;
    }
    server.running = true;
    return 0;
}

static int make_entry(unsigned which, const struct tp_config *config, struct tp_entry *ret_entry) {
    const char *path = directory_of(which, config);
    char error[512] = "";
    int dir_fd = tp_host_open_dir(path, true, config, error, sizeof error);
    if (dir_fd < 0) {
        bool store = which == STORE;
        tp_log(store ? TP_LOG_ERROR : TP_LOG_WARN, "%s%s", error,
               store ? "" : "; tidepool status does not show us");
        return dir_fd;
    }
    unsigned swept = tp_server_sweep(dir_fd);
    if (swept > 0)
        tp_log(TP_LOG_INFO, "removed %u stale entries from %s", swept, path);
    return tp_entry_make(which == STORE ? 's' : 'e', server.instance, dir_fd, path,
                         config->allow_uid_count > 0, ret_entry);
}

static int add_entry(unsigned which, const struct tp_config *config) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = TAG_LISTENER + which};
    struct tp_entry entry;
    int result = make_entry(which, config, &entry);
    if (result < 0)
        return result;
    pthread_mutex_lock(&server.lock);
    server.entries[which] = entry;
    pthread_mutex_unlock(&server.lock);
    if (epoll_ctl(server.epoll_fd, EPOLL_CTL_ADD, entry.listen_fd, &event) == 0)
        return 0;
    result = -errno;
    tp_log(TP_LOG_ERROR, "cannot listen in the shared directory: %s", strerror(-result));
    pthread_mutex_lock(&server.lock);
    server.entries[which].open = false;
    pthread_mutex_unlock(&server.lock);
    tp_entry_remove(&entry);
    return result;
}

int tp_server_start(bool store, const struct tp_config *config) {
    unsigned which = store ? STORE : ENGINE;
    if (tp_inert())
        return -ECHILD;
    pthread_mutex_lock(&server.control_lock);
    int result = start_thread(store, config);
    if (result == 0 && !server.entries[which].open)
        result = add_entry(which, config);
    pthread_mutex_unlock(&server.control_lock);
    return result;
}

void tp_server_stop(void) {
    struct tp_entry entries[ENTRIES];
    if (tp_inert())
        return;
    pthread_mutex_lock(&server.control_lock);
    if (server.running) {
        atomic_store(&server.stop, true);
        tp_server_wake();
        pthread_join(server.thread, NULL);
        server.running = false;
        pthread_mutex_lock(&server.lock);
        memcpy(entries, server.entries, sizeof entries);
        memset(server.entries, 0, sizeof server.entries);
        pthread_mutex_unlock(&server.lock);
        for (unsigned i = 0; i < ENTRIES; i++)
            tp_entry_remove(&entries[i]);
        close_loop_fds();
    }
    pthread_mutex_unlock(&server.control_lock);
}

int tp_server_set_name(const char *name) {
    size_t length = strlen(name);
    if (length >= sizeof server.name)
        return -ENAMETOOLONG;
    if (tp_inert())
        return -ECHILD;
    pthread_mutex_lock(&server.lock);
    memset(server.name, 0, sizeof server.name);
    memcpy(server.name, name, length);
    server.name_version++;
    pthread_mutex_unlock(&server.lock);
    tp_server_wake();
    return 0;
}
