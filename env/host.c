/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where this process runs and whom it may trust with a directory.
 * It must not know: what is put into the directory, who asks for the identity.
 */
#include "env/env.h"
#include "env/host_files.h"
#include "env/text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a line of text may show of a path: enough to recognise it, short enough for a line. */
#define SHOWN_PATH "%.96s%s"
#define SHOW_PATH(path) (path), strlen(path) > 96 ? "..." : ""

int tp_host_identity(bool boot_id_only, char ret_identity[static 96]) {
    char boot_id[40], machine_id[56];
    int rc = tp_host_read_text("/proc/sys/kernel/random/boot_id", boot_id, sizeof(boot_id));

    if (rc < 0)
        return rc;
    if (!boot_id[0])
        return -ENODATA;
    if (!boot_id_only)
        rc = tp_host_read_text("/etc/machine-id", machine_id, sizeof(machine_id));
    /* One that is there and could not be read would make this another host. */
    if (rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM)
        return rc;
    /* Without a machine-id TENT's form is the boot_id alone; containers often have none. */
    if (boot_id_only || rc < 0)
        machine_id[0] = '\0';
    tp_text_format(ret_identity, 96, "%s%s%s", boot_id, machine_id[0] ? ":" : "", machine_id);
    return 0;
}

int tp_random_id(uint8_t ret_id[static 16]) {
    uint8_t id[16];

    for (size_t done = 0; done < sizeof(id);) {
        ssize_t got = getrandom(id + done, sizeof(id) - done, 0);

        if (got < 0 && errno != EINTR)
            return -errno;
        if (got > 0)
            done += (size_t)got;
    }
    memcpy(ret_id, id, sizeof(id));
    return 0;
}

uint64_t tp_host_netns(void) {
    static atomic_flag logged = ATOMIC_FLAG_INIT;
    struct stat status;

    if (stat("/proc/self/ns/net", &status) == 0)
        return (uint64_t)status.st_ino;
    tp_log_once(&logged, TP_LOG_WARN,
                "cannot look at /proc/self/ns/net (%s): stores named by loopback addresses are not "
                "used through shared memory; mount /proc, or name stores by another address",
                strerror(errno));
    return 0;
}

/* Does this process's user namespace know every uid of the machine? (user_namespaces(7)) */
static bool all_uids_are_mapped(void) {
    char text[4096];
    uint64_t mapped = 0;

    if (tp_host_read_text("/proc/self/uid_map", text, sizeof(text)) < 0)
        return false;
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        uint64_t count = 0;

        line += *line == '\n';
        if (sscanf(line, "%*u %*u %" SCNu64, &count) == 1)
            mapped += count;
    }
    return mapped >= UINT32_MAX;
}

bool tp_host_uid_is_ambiguous(uid_t uid) {
    char text[32];
    unsigned overflow = 65534;

    if (uid == 0)
        return false;
    if (tp_host_read_text("/proc/sys/kernel/overflowuid", text, sizeof(text)) == 0)
        (void)sscanf(text, "%u", &overflow);
    return uid == overflow && !all_uids_are_mapped();
}

bool tp_host_uid_is_trusted(uid_t uid, const struct tp_config *config) {
    bool known = uid == 0 || uid == geteuid();

    for (unsigned i = 0; config && i < config->allow_uid_count && i < TP_MAX_UIDS; i++)
        known = known || config->allow_uids[i] == uid;
    return known && !tp_host_uid_is_ambiguous(uid);
}

/* The line for an open that failed; the directory's owner and mode where they can be seen. */
static void describe_failure(const char *path, int error, char *ret_error, size_t error_bytes) {
    struct stat status;
    const char *text = strerrordesc_np(error);

    if (!text)
        text = "unknown error";
    if (error == ENOENT)
        tp_text_format(
            ret_error, error_bytes,
            "directory " SHOWN_PATH
            ": no such directory (our uid %u); create it, or mount it into this container",
            SHOW_PATH(path), geteuid());
    else if (error == ENOTDIR)
        tp_text_format(ret_error, error_bytes, SHOWN_PATH " is not a directory; name a directory",
                       SHOW_PATH(path));
    else if (error == EMFILE || error == ENFILE)
        tp_text_format(ret_error, error_bytes,
                       "directory " SHOWN_PATH " cannot be opened: %s; raise ulimit -n%s",
                       SHOW_PATH(path), text, error == ENFILE ? " and fs.file-max" : "");
    else if (stat(path, &status) == 0)
        tp_text_format(
            ret_error, error_bytes,
            "directory " SHOWN_PATH
            " (owner uid %u, mode %04o) as uid %u: %s; chown it to uid %u or run as its owner",
            SHOW_PATH(path), status.st_uid, status.st_mode & 07777U, geteuid(), text, geteuid());
    else
        tp_text_format(ret_error, error_bytes,
                       "directory " SHOWN_PATH
                       " as uid %u: %s; allow this uid to pass and read its parent directories",
                       SHOW_PATH(path), geteuid(), text);
}

static int check_status(const char *path, const struct stat *status, const struct tp_config *config,
                        char *ret_error, size_t error_bytes) {
    unsigned mode = status->st_mode & 07777U;

    if (tp_host_uid_is_ambiguous(status->st_uid)) {
        tp_text_format(
            ret_error, error_bytes,
            "directory " SHOWN_PATH
            " (mode %04o) belongs to uid %u, which stands for every user that is not mapped in "
            "this user namespace (our uid is %u); map the owner of the directory, and run as a "
            "mapped user",
            SHOW_PATH(path), mode, status->st_uid, geteuid());
        return -EPERM;
    }
    if (!tp_host_uid_is_trusted(status->st_uid, config)) {
        tp_text_format(
            ret_error, error_bytes,
            "directory " SHOWN_PATH
            " belongs to uid %u (mode %04o), not to root or our uid %u; chown it, or list "
            "that uid in TIDEPOOL_ALLOW_UIDS",
            SHOW_PATH(path), status->st_uid, mode, geteuid());
        return -EPERM;
    }
    if (mode & S_IWOTH) {
        tp_text_format(
            ret_error, error_bytes,
            "directory " SHOWN_PATH
            " (owner uid %u, mode %04o) may be written by every user, our uid is %u; chmod "
            "o-w it, or name a sub-directory",
            SHOW_PATH(path), status->st_uid, mode, geteuid());
        return -EPERM;
    }
    return 0;
}

int tp_host_open_dir(const char *path, bool create, const struct tp_config *config, char *ret_error,
                     size_t error_bytes) {
    struct stat status;
    int fd, rc;

    if (path[0] != '/') {
        tp_text_format(ret_error, error_bytes,
                       "directory \"" SHOWN_PATH "\" is not an absolute path", SHOW_PATH(path));
        return -EINVAL;
    }
    if (create && mkdir(path, 0700) != 0 && errno != EEXIST) {
        rc = -errno;
        tp_text_format(ret_error, error_bytes,
                       "cannot create directory " SHOWN_PATH
                       " as uid %u: %s; create it first, mode 0700",
                       SHOW_PATH(path), geteuid(),
                       strerrordesc_np(-rc) ? strerrordesc_np(-rc) : "unknown error");
        return rc;
    }
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        rc = -errno;
        describe_failure(path, -rc, ret_error, error_bytes);
        return rc;
    }
    rc = fstat(fd, &status) == 0 ? 0 : -errno;
    if (rc < 0)
        describe_failure(path, -rc, ret_error, error_bytes);
    else
        rc = check_status(path, &status, config, ret_error, error_bytes);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    return fd;
}
