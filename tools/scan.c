/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ask every process that has an entry in a directory for its counters: all connections at once, one
 * deadline for all.
 */
#include "tools/scan.h"

#include "env/env.h"
#include "segment/segment.h"
#include "segment/wire.h"
#include "tools/tool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* WELCOME, NAME and PAGE are three; a server that says more is not one. */
#define MESSAGES_MAX 8

const char *scan_state_word(enum scan_state state) {
    static const char *const words[] = {"live",  "not_answering", "refused",
                                        "stale", "starting",      "broken"};
    return words[state];
}

static void set_state(struct scan_entry *entry, enum scan_state state, const char *detail) {
    entry->state = state;
    text_clean(entry->detail, sizeof(entry->detail), detail);
}

static void entry_file(const struct scan_entry *entry, const char *suffix,
                       char ret_name[static 48]) {
    (void)snprintf(ret_name, 48, "%c-%s%s", entry->kind, entry->id, suffix);
}

/* ---- which entries there are ----------------------------------------------------------------- */

/* "<s|e>-<32 hex>" + suffix. The same rule as tp_wire_parse_name, which knows sockets only. */
static bool parse_entry(const char *name, const char *suffix, struct scan_entry *ret_entry) {
    uint8_t instance[16];
    char socket_name[48];
    size_t length = strlen(name);

    if (length != 34 + strlen(suffix) || strcmp(name + 34, suffix) != 0) {
        return false;
    }
    (void)snprintf(socket_name, sizeof(socket_name), "%.34s.sock", name);
    char kind = tp_wire_parse_name(socket_name, instance);
    if (!kind) {
        return false;
    }
    memset(ret_entry, 0, sizeof(*ret_entry));
    ret_entry->kind = kind;
    (void)snprintf(ret_entry->id, sizeof(ret_entry->id), "%.32s", name + 2);
    return true;
}

static int compare_entries(const void *left, const void *right) {
    const struct scan_entry *a = left;
    const struct scan_entry *b = right;

    if (a->kind != b->kind) {
        return a->kind == 's' ? -1 : 1;
    }
    return strcmp(a->id, b->id);
}

static int list_entries(int dir_fd, struct scan *scan) {
    int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *file;

    if (!dir) {
        int error = errno;
        if (fd >= 0) {
            (void)close(fd);
        }
        return -error;
    }
    while ((file = readdir(dir))) {
        struct scan_entry entry;
        char socket_name[48];
        bool lock = parse_entry(file->d_name, ".lock", &entry);

        if (!lock && !parse_entry(file->d_name, ".sock", &entry)) {
            continue;
        }
        entry_file(&entry, ".sock", socket_name);
        if (lock && faccessat(dir_fd, socket_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
            continue; /* listed by its socket */
        }
        if (scan->count == SCAN_MAX) {
            scan->left_out++;
            continue;
        }
        entry.state = lock ? SCAN_FRESH : SCAN_SILENT;
        scan->entries[scan->count++] = entry;
    }
    (void)closedir(dir);
    qsort(scan->entries, scan->count, sizeof(*scan->entries), compare_entries);
    return 0;
}

/* ---- dead processes -------------------------------------------------------------------------- */

static bool exists(int dir_fd, const char *name) {
    return faccessat(dir_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/* The lock is the life. Only asked when nobody listens: a shared lock of ours must not be in the
 * way of a process that starts. */
static bool lock_is_held(int dir_fd, const char *lock_name) {
    int fd = openat(dir_fd, lock_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    bool held = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0;

    if (fd >= 0) {
        (void)close(fd);
    }
    return held;
}

/* Entries behind which nobody listens (SCAN_FRESH until now): removed by the sweep, still held, or
 * in nobody's power to remove. */
static void settle_unanswered(int dir_fd, struct scan *scan) {
    bool swept = false;

    for (size_t i = 0; i < scan->count; i++) {
        struct scan_entry *entry = &scan->entries[i];
        char lock_name[48];
        char socket_name[48];

        if (entry->state != SCAN_FRESH) {
            continue;
        }
        if (!swept) {
            (void)tp_server_sweep(dir_fd);
            swept = true;
        }
        entry_file(entry, ".lock", lock_name);
        entry_file(entry, ".sock", socket_name);
        if (!exists(dir_fd, lock_name) && !exists(dir_fd, socket_name)) {
            entry->swept = true;
            set_state(entry, SCAN_STALE, "its process is dead");
        } else if (lock_is_held(dir_fd, lock_name)) {
            set_state(entry, SCAN_FRESH,
                      "it holds its lock but does not listen: starting, or ending");
        } else {
            set_state(entry, SCAN_STALE,
                      "its process is dead, and its files cannot be removed by this user");
        }
    }
}

/* ---- the conversation ------------------------------------------------------------------------ */

struct conversation {
    struct scan_entry *entry;
    int socket; /* -1: over */
    unsigned messages;
};

static void hang_up(struct conversation *talk) {
    if (talk->socket >= 0) {
        (void)close(talk->socket);
        talk->socket = -1;
    }
}

static void conclude(struct conversation *talk, enum scan_state state, const char *detail) {
    set_state(talk->entry, state, detail);
    hang_up(talk);
}

static void read_page(struct conversation *talk, int page_fd) {
    struct tp_stats_page *page = calloc(1, sizeof(*page));
    int error = page ? tp_stats_view(page_fd, page) : -ENOMEM;

    if (error) {
        free(page);
        conclude(
            talk, SCAN_BROKEN,
            error == -EPROTONOSUPPORT
                ? "its counters are of another version of the library: use the tool of that version"
            : error == -EPROTO ? "what it sent is not a page of counters"
                               : strerror(-error));
        return;
    }
    talk->entry->page = page;
    conclude(talk, SCAN_LIVE, "");
}

static void take_message(struct conversation *talk, const struct tp_msg *message, const int *fds,
                         unsigned fd_count) {
    bool page = message->type == TP_MSG_PAGE;

    if (++talk->messages > MESSAGES_MAX || fd_count != (page ? 1U : 0U)) {
        conclude(talk, SCAN_BROKEN, "it does not keep to the protocol");
    } else if (page) {
        read_page(talk, fds[0]);
    } else if (message->type == TP_MSG_REFUSED) {
        conclude(talk, SCAN_REFUSED, message->body.refused.text);
    }
}

static void listen_to(struct conversation *talk) {
    while (talk->socket >= 0) {
        struct tp_msg message;
        int fds[1];
        unsigned fd_count = 0;
        int error = tp_wire_receive(talk->socket, &message, fds, 1, &fd_count);

        if (error == -EAGAIN || error == -EINTR) {
            return;
        }
        if (error) {
            conclude(talk, SCAN_BROKEN,
                     error == -ENODATA
                         ? "it closed the connection without sending its counters: they "
                           "cannot be shared (its log says why; ulimit -n)"
                     : error == -EPROTONOSUPPORT
                         ? "it speaks another version of the protocol: use the tool of its version"
                     : error == -EPROTO ? "it does not keep to the protocol"
                                        : strerror(-error));
            return;
        }
        take_message(talk, &message, fds, fd_count);
        for (unsigned i = 0; i < fd_count; i++) {
            (void)close(fds[i]);
        }
    }
}

static void call(struct conversation *talk, int dir_fd, const struct tp_config *config,
                 struct tp_msg *hello) {
    struct scan_entry *entry = talk->entry;
    char name[48];
    uint32_t uid = 0;

    entry_file(entry, ".sock", name);
    talk->socket = tp_wire_connect(dir_fd, name);
    if (talk->socket < 0) {
        int error = -talk->socket;
        talk->socket = -1;
        /* A full backlog is EAGAIN: a process that is stopped and has been asked often. */
        bool nobody = error == ECONNREFUSED || error == ENOENT;
        set_state(entry,
                  error == EAGAIN ? SCAN_SILENT
                  : nobody        ? SCAN_FRESH
                                  : SCAN_BROKEN,
                  error == EAGAIN ? "its queue of connections is full" : strerror(error));
        return;
    }
    int refused = tp_wire_check_peer(talk->socket, config, &uid, &entry->pid);
    entry->known_owner = refused == 0 || refused == -EACCES;
    entry->uid = uid;
    /* root may look at everyone's; for others a foreign uid in this directory is a trap or a
     * mistake. */
    if (refused && (refused != -EACCES || geteuid() != 0)) {
        conclude(talk, SCAN_BROKEN,
                 "it runs as a user that is neither root nor you (TIDEPOOL_ALLOW_UIDS)");
        return;
    }
    int error = tp_wire_send(talk->socket, hello, NULL, 0);
    if (error && error != -EPIPE && error != -ECONNRESET) {
        conclude(talk, SCAN_BROKEN, strerror(-error));
    }
}

static struct tp_msg make_hello(const struct tp_config *config) {
    struct tp_msg hello = {.type = TP_MSG_HELLO};

    hello.body.hello.purpose = TP_PURPOSE_STATUS;
    hello.body.hello.netns = tp_host_netns();
    (void)tp_random_id(hello.body.hello.instance);
    (void)tp_host_identity(config->boot_id_only, hello.body.hello.identity);
    (void)snprintf(hello.body.hello.program, sizeof(hello.body.hello.program), "tidepool status");
    return hello;
}

/* Until every conversation is over or the time is up. */
static void listen_to_all(struct conversation *talks, struct pollfd *polled, size_t count,
                          uint64_t deadline) {
    for (;;) {
        size_t open = 0;
        uint64_t now = tp_now_ms();

        for (size_t i = 0; i < count; i++) {
            polled[i] = (struct pollfd){.fd = talks[i].socket, .events = POLLIN};
            open += talks[i].socket >= 0;
        }
        if (open == 0 || now >= deadline ||
            (poll(polled, count, (int)(deadline - now)) < 0 && errno != EINTR)) {
            return;
        }
        for (size_t i = 0; i < count; i++) {
            if (talks[i].socket >= 0 && polled[i].revents) {
                listen_to(&talks[i]);
            }
        }
    }
}

static int talk_to_all(int dir_fd, const struct tp_config *config, unsigned timeout_ms,
                       struct scan *scan) {
    struct conversation *talks = calloc(scan->count + 1, sizeof(*talks));
    struct pollfd *polled = calloc(scan->count + 1, sizeof(*polled));
    struct tp_msg hello = make_hello(config);
    int result = talks && polled ? 0 : -ENOMEM;

    if (result) {
        goto out;
    }
    for (size_t i = 0; i < scan->count; i++) {
        talks[i] = (struct conversation){.entry = &scan->entries[i], .socket = -1};
        if (scan->entries[i].state != SCAN_FRESH) {
            call(&talks[i], dir_fd, config, &hello);
        }
    }
    settle_unanswered(dir_fd, scan);
    listen_to_all(talks, polled, scan->count, tp_now_ms() + timeout_ms);
    for (size_t i = 0; i < scan->count; i++) {
        hang_up(&talks[i]);
        if (scan->entries[i].state == SCAN_SILENT && !scan->entries[i].detail[0]) {
            set_state(&scan->entries[i], SCAN_SILENT,
                      "it did not answer in time: stopped, or overloaded");
        }
    }
out:
    free(talks);
    free(polled);
    return result;
}

/* A process that is both answers on both sockets with the same page: show it once. */
static void drop_doubles(struct scan *scan) {
    size_t kept = 0;

    for (size_t i = 0; i < scan->count; i++) {
        bool again = false;
        for (size_t k = 0; k < kept && scan->entries[i].kind == 'e' && scan->entries[i].page; k++) {
            again |= scan->entries[k].page && strcmp(scan->entries[k].id, scan->entries[i].id) == 0;
        }
        if (again) {
            free(scan->entries[i].page);
        } else {
            scan->entries[kept++] = scan->entries[i];
        }
    }
    scan->count = kept;
}

int scan_directory(int dir_fd, const struct tp_config *config, unsigned timeout_ms,
                   struct scan *ret_scan) {
    struct scan scan = {.entries = calloc(SCAN_MAX, sizeof(*scan.entries))};
    int result = scan.entries ? list_entries(dir_fd, &scan) : -ENOMEM;

    if (!result) {
        result = talk_to_all(dir_fd, config, timeout_ms, &scan);
    }
    if (result) {
        scan_free(&scan);
        return result;
    }
    drop_doubles(&scan);
    *ret_scan = scan;
    return 0;
}

void scan_free(struct scan *scan) {
    for (size_t i = 0; i < scan->count; i++) {
        free(scan->entries[i].page);
    }
    free(scan->entries);
    memset(scan, 0, sizeof(*scan));
}
