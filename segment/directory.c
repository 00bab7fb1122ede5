/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entries in the directory that the processes of a host share: making one, putting it back when
 * somebody has removed it, removing it, and removing those of the dead.
 *
 * It must not know: what is said over the sockets.
 *
 * The lock is the life: an exclusive flock(2) that the kernel drops when the last fd of the
 * process's open file is gone. Order matters: an entry has its lock before its socket, and loses
 * its socket before its lock file, so a socket without a lock file belongs to nobody.
 */
#include "segment/directory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/segment.h"
#include "segment/wire.h"

#define BACKLOG 4096 /* the kernel makes it net.core.somaxconn if that is less */
#define LOCK_TRIES 16
#define ORPHAN_S 10 /* a temporary name lives for microseconds */
#define SWEEP_MS                                                                                   \
    500 /* a start that finds tens of thousands of the dead leaves the rest to the next */

/* What say_failed names when the lock file was made and could not be locked. */
static const char lock_call[] = "lock (flock)";

/* "s-<32 hex>" and what is made of it. */
struct names {
    char socket_name[48], lock_name[48], temporary[48];
};

static void fill_names(char role, const char *digits, struct names *ret_names) {
    snprintf(ret_names->socket_name, sizeof ret_names->socket_name, "%c-%.32s.sock", role, digits);
    snprintf(ret_names->lock_name, sizeof ret_names->lock_name, "%c-%.32s.lock", role, digits);
    snprintf(ret_names->temporary, sizeof ret_names->temporary, ".%.32s.tmp", digits);
}

/* Do the fd and the name mean the same file? */
static bool same_file(int dir_fd, const char *name, int fd) {
    struct stat held;
    struct stat named;
    return fstat(fd, &held) == 0 && fstatat(dir_fd, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

/*
 * A sweeper may take the lock of a file that was just created, before its maker does, and remove
 * the file: then the maker holds a file without a name, or no lock, and starts again. A file that
 * cannot be locked at all is removed, since a sweeper elsewhere would take its maker for dead;
 * *ret_what is then what failed.
 */
static int make_lock(int dir_fd, const char *name, const char **ret_what) {
    for (unsigned i = 0; i < LOCK_TRIES; i++) {
        int fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0)
            return -errno;
        int error = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
        if (error == 0 && same_file(dir_fd, name, fd)) {
            (void)tp_fork_close_add(fd);
            return fd;
        }
        close(fd);
        if (error != 0 && error != EWOULDBLOCK && error != EINTR) {
            (void)unlinkat(dir_fd, name, 0);
            *ret_what = lock_call;
            return -error;
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return -EBUSY;
}

static int path_of(int dir_fd, const char *name, struct sockaddr_un *ret_address) {
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length = snprintf(ret_address->sun_path, sizeof ret_address->sun_path,
                          "/proc/self/fd/%d/%s", dir_fd, name);
    return length < 0 || (size_t)length >= sizeof ret_address->sun_path ? -ENAMETOOLONG : 0;
}

/* A socket that listens under the temporary name, then gets its own: whoever sees it can connect.
 */
static int make_socket(int dir_fd, const struct names *names, bool others) {
    struct sockaddr_un address;
    int result = path_of(dir_fd, names->temporary, &address);
    if (result < 0)
        return result;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    (void)tp_fork_close_add(fd);
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) < 0) {
        result = -errno;
    } else {
        /* The umask decided so far. Others need write permission to connect; SO_PEERCRED decides
         * then. */
        if (fchmodat(dir_fd, names->temporary, others ? 0666 : 0600, 0) < 0 ||
            listen(fd, BACKLOG) < 0 ||
            renameat(dir_fd, names->temporary, dir_fd, names->socket_name) < 0) {
            result = -errno;
            (void)unlinkat(dir_fd, names->temporary, 0);
        }
    }
    if (result < 0) {
        tp_fork_close_remove(fd);
        close(fd);
        return result;
    }
    return fd;
}

static void close_listed(int fd) {
    tp_fork_close_remove(fd);
    close(fd);
}

/* An engine's entry is there for `tidepool status` alone. */
static void say_failed(char role, const char *what, const char *path, int error) {
    enum tp_log_level level = role == 's' ? TP_LOG_ERROR : TP_LOG_WARN;
    const char *then = role == 's' ? "" : "; transfers work, but tidepool status does not show us";
    if (what == lock_call)
        tp_log(level,
               "flock(2) is refused in %s (%s): by its file system, or by a seccomp profile, which "
               "has to allow it; else set TIDEPOOL_SOCKET_DIR to a directory on tmpfs, for stores "
               "and engines alike%s",
               path, strerror(-error), then);
    else if (error == -EOPNOTSUPP || error == -EPERM || error == -EINVAL || error == -ENOSYS)
        tp_log(level,
               "the file system of %s takes no %s (%s): set TIDEPOOL_SOCKET_DIR to a directory on "
               "another one, for stores and engines alike%s",
               path, what, strerror(-error), then);
    else if (error == -ENOENT && access("/proc/self/fd", X_OK) != 0)
        tp_log(level, "cannot make a %s in %s: /proc is not mounted%s", what, path, then);
    else
        tp_log(level, "cannot make a %s in %s: %s%s", what, path, strerror(-error), then);
}

int tp_entry_make(char role, const uint8_t id[static 16], int dir_fd, const char *path, bool others,
                  struct tp_entry *ret_entry) {
    struct tp_entry entry = {.open = true, .dir_fd = dir_fd, .lock_fd = -1, .listen_fd = -1};
    struct names names;
    char digits[33];
    for (unsigned i = 0; i < 16; i++)
        snprintf(digits + 2 * (size_t)i, 3, "%02x", id[i]);
    fill_names(role, digits, &names);
    memcpy(entry.socket_name, names.socket_name, sizeof entry.socket_name);
    memcpy(entry.lock_name, names.lock_name, sizeof entry.lock_name);

    const char *what = "lock file";
    int result = make_lock(dir_fd, names.lock_name, &what);
    if (result < 0) {
        say_failed(role, what, path, result);
        close(dir_fd);
        return result;
    }
    entry.lock_fd = result;
    result = make_socket(dir_fd, &names, others);
    if (result < 0) {
        say_failed(role, "socket", path, result);
        (void)unlinkat(dir_fd, names.lock_name, 0);
        close_listed(entry.lock_fd);
        close(dir_fd);
        return result;
    }
    entry.listen_fd = result;
    (void)tp_fork_close_add(dir_fd);
    *ret_entry = entry;
    return 0;
}

void tp_entry_remove(struct tp_entry *entry) {
    if (!entry->open)
        return;
    (void)unlinkat(entry->dir_fd, entry->socket_name, 0);
    (void)shutdown(entry->listen_fd, SHUT_RDWR); /* a child forked just now may have the fd */
    close_listed(entry->listen_fd);
    (void)unlinkat(entry->dir_fd, entry->lock_name, 0);
    close_listed(entry->lock_fd);
    close_listed(entry->dir_fd);
    entry->open = false;
}

/* ---- an entry that somebody else removed: cleaners of /tmp and /run, a rm -rf ---- */

static bool is_gone(const char *path, const char *name) {
    struct stat status;
    char full[PATH_MAX];
    int length = snprintf(full, sizeof full, "%s/%s", path, name);
    if (length < 0 || (size_t)length >= sizeof full)
        return false;
    return lstat(full, &status) < 0 && (errno == ENOENT || errno == ENOTDIR);
}

/* By the path, as others look for it: the directory may have been removed, or mounted over. */
bool tp_entry_is_lost(const struct tp_entry *entry, const char *path) {
    return entry->open && (is_gone(path, entry->socket_name) || is_gone(path, entry->lock_name));
}

/* The removed directory can still be asked by its fd. */
static void restore_mode(int fd, int old_fd) {
    struct stat old;
    if (fstat(old_fd, &old) < 0)
        return;
    mode_t mode = old.st_mode & 07777 & ~(mode_t)S_IWOTH;
    if (fchown(fd, old.st_uid, old.st_gid) < 0)
        mode &= ~(mode_t)S_IWGRP; /* the group is another one */
    (void)fchmod(fd, mode);
}

static int open_again(const struct tp_entry *entry, const char *path,
                      const struct tp_config *config, char *ret_error, size_t error_bytes) {
    bool made = entry->socket_name[0] == 's' && mkdir(path, 0700) == 0;
    int fd = tp_host_open_dir(path, false, config, ret_error, error_bytes);
    if (fd < 0)
        return fd;
    if (made)
        restore_mode(fd, entry->dir_fd);
    (void)tp_fork_close_add(fd);
    return fd;
}

static int renew(struct tp_entry *entry, const char *path, const struct tp_config *config,
                 char *ret_error, size_t error_bytes) {
    struct names names;
    struct tp_entry renewed = *entry;
    fill_names(entry->socket_name[0], entry->socket_name + 2, &names);
    renewed.dir_fd = open_again(entry, path, config, ret_error, error_bytes);
    if (renewed.dir_fd < 0)
        return renewed.dir_fd;
    const char *what = "";
    bool locked = same_file(renewed.dir_fd, names.lock_name, entry->lock_fd);
    if (!locked)
        renewed.lock_fd = make_lock(renewed.dir_fd, names.lock_name, &what);
    int result = renewed.lock_fd < 0
                     ? renewed.lock_fd
                     : make_socket(renewed.dir_fd, &names, config->allow_uid_count > 0);
    if (result < 0) {
        snprintf(ret_error, error_bytes, "%s%s%s", what, what[0] ? ": " : "", strerror(-result));
        if (!locked && renewed.lock_fd >= 0) {
            (void)unlinkat(renewed.dir_fd, names.lock_name, 0);
            close_listed(renewed.lock_fd);
        }
        close_listed(renewed.dir_fd);
        return result;
    }
    renewed.listen_fd = result;
    (void)shutdown(entry->listen_fd, SHUT_RDWR);
    close_listed(entry->listen_fd);
    if (!locked)
        close_listed(entry->lock_fd);
    close_listed(entry->dir_fd);
    *entry = renewed;
    return 0;
}

int tp_entry_renew(struct tp_entry *entry, const char *path, const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char error[512] = "";
    bool store = entry->socket_name[0] == 's';
    int result = renew(entry, path, config, error, sizeof error);
    if (result == 0) {
        entry->lost = false;
        tp_log_once(&said, TP_LOG_WARN,
                    "somebody removed the entry of this process from %s: put back; keep what "
                    "cleans up there (tmpfiles.d, tmpwatch) off that directory",
                    path);
    } else if (!entry->lost && (store || result != -ENOENT)) {
        entry->lost = true;
        tp_log(TP_LOG_WARN,
               "somebody removed the entry of this process from %s, and it cannot be put back: %s; "
               "%s until it can",
               path, error,
               store ? "connected engines are served, others go through Mooncake"
                     : "transfers work, but tidepool status does not show us");
    }
    return result;
}

/* "<s|e>-<32 hex>.lock", by way of the one parser of names. */
static char parse_lock_name(const char *name, struct names *ret_names) {
    char as_socket[48];
    uint8_t id[16];
    size_t length = strlen(name);
    if (length != strlen("s-") + 32 + strlen(".lock") || strcmp(name + length - 5, ".lock") != 0)
        return 0;
    snprintf(as_socket, sizeof as_socket, "%.34s.sock", name);
    char role = tp_wire_parse_name(as_socket, id);
    if (role != 0)
        fill_names(role, name + 2, ret_names);
    return role;
}

/* Remove an entry whose lock can be taken. True when it was removed. */
static bool sweep_entry(int dir_fd, const struct names *names) {
    struct stat status;
    bool swept = false;
    int fd = openat(dir_fd, names->lock_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && flock(fd, LOCK_EX | LOCK_NB) == 0 &&
        same_file(dir_fd, names->lock_name, fd)) {
        (void)unlinkat(dir_fd, names->temporary, 0);
        (void)unlinkat(dir_fd, names->socket_name, 0);
        swept = unlinkat(dir_fd, names->lock_name, 0) == 0;
    }
    close(fd);
    return swept;
}

/* A socket whose lock file somebody removed: nobody's, unless it still answers. */
static bool sweep_socket(int dir_fd, const struct names *names) {
    if (faccessat(dir_fd, names->lock_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT)
        return false;
    int fd = tp_wire_connect(dir_fd, names->socket_name);
    if (fd >= 0)
        close(fd);
    return fd == -ECONNREFUSED && unlinkat(dir_fd, names->socket_name, 0) == 0;
}

/* A temporary name whose maker died between bind and rename, and whose lock file is gone. */
static bool sweep_temporary(int dir_fd, const char *name) {
    struct stat status;
    struct names names;
    char as_socket[48];
    uint8_t id[16];
    if (name[0] != '.' || strlen(name) != 1 + 32 + strlen(".tmp") || strcmp(name + 33, ".tmp") != 0)
        return false;
    snprintf(as_socket, sizeof as_socket, "s-%.32s.sock", name + 1);
    if (tp_wire_parse_name(as_socket, id) == 0)
        return false;
    if (fstatat(dir_fd, name, &status, AT_SYMLINK_NOFOLLOW) < 0 ||
        time(NULL) - status.st_ctime < ORPHAN_S)
        return false;
    for (const char *role = "se"; *role != 0; role++) {
        fill_names(*role, name + 1, &names);
        if (faccessat(dir_fd, names.lock_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
            return false; /* sweep_entry's */
    }
    return unlinkat(dir_fd, name, 0) == 0;
}

static bool sweep_name(int dir_fd, const char *name) {
    struct names names;
    uint8_t id[16];
    if (name[0] == '.')
        return sweep_temporary(dir_fd, name);
    if (parse_lock_name(name, &names) != 0)
        return sweep_entry(dir_fd, &names);
    char role = tp_wire_parse_name(name, id);
    if (role == 0)
        return false;
    fill_names(role, name + 2, &names);
    return sweep_socket(dir_fd, &names);
}

unsigned tp_server_sweep(int dir_fd) {
    unsigned swept = 0;
    uint64_t end = tp_now_ms() + SWEEP_MS;
    /* An open file of its own: the position of dir_fd belongs to others. */
    int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (directory == NULL) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    const struct dirent *entry;
    while (tp_now_ms() < end && (entry = readdir(directory)) != NULL) {
        if (sweep_name(dir_fd, entry->d_name))
            swept++;
    }
    (void)closedir(directory);
    return swept;
}
