/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this environment tells the library: are the settings right, can processes meet in the
 * directories, does the library load.
 */
#include "tools/doctor.h"

#include "env/env.h"
#include "tools/tool.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

static void check_half(const char *what, enum tp_half half, const char *error,
                       const char *socket_dir, const char *effect, struct findings *findings) {
    switch (half) {
    case TP_HALF_OFF:
        finding_add(findings, FINDING_OK, what, NULL, "not configured: this half does nothing");
        break;
    case TP_HALF_ON:
        finding_add(findings, FINDING_OK, what, NULL, "configured, in %s", socket_dir);
        break;
    case TP_HALF_INVALID:
        finding_add(findings, FINDING_FAIL, what, effect, "%s", error);
        break;
    }
}

/*
 * Sockets are what a shared directory is for, and not every file system takes them. The name is one
 * that neither engines nor stores look at.
 */
static int try_socket(int dir_fd) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char name[32];
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int error = 0;

    if (fd < 0) {
        return -errno;
    }
    (void)snprintf(name, sizeof(name), ".doctor-%d.tmp", (int)getpid());
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s", dir_fd, name);
    if (bind(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        error = -errno;
    } else {
        (void)unlinkat(dir_fd, name, 0);
    }
    (void)close(fd);
    return error;
}

static void check_socket_dir(const char *what, const char *path, const struct tp_config *config,
                             struct findings *findings) {
    char problem[512] = "";
    struct stat about;

    if (stat(path, &about) != 0 && errno == ENOENT) {
        finding_add(findings, FINDING_OK, what, NULL,
                    "%s does not exist yet: the first process makes it, mode 0700", path);
        return;
    }
    int fd = tp_host_open_dir(path, false, config, problem, sizeof(problem));
    if (fd < 0) {
        finding_add(findings, FINDING_FAIL, what, NULL, "%s", problem[0] ? problem : strerror(-fd));
        return;
    }
    int error = try_socket(fd);
    if (error) {
        finding_add(findings, FINDING_FAIL, what,
                    "set TIDEPOOL_SOCKET_DIR to a directory on tmpfs or a local disk",
                    "%s takes no sockets: %s", path, strerror(-error));
    } else if (fstat(fd, &about) == 0) {
        finding_add(findings, FINDING_OK, what, NULL, "%s, uid %u, mode %04o, takes sockets", path,
                    about.st_uid, about.st_mode & 07777);
    }
    (void)close(fd);
}

static void check_segment_dir(const char *path, struct findings *findings) {
    struct statfs about;
    char room[16];
    char pages[16];

    if (statfs(path, &about) != 0) {
        finding_add(findings, FINDING_FAIL, "segment directory",
                    "mount hugetlbfs or tmpfs there, or use memfd", "%s: %s", path,
                    strerror(errno));
        return;
    }
    bool huge = about.f_type == HUGETLBFS_MAGIC;
    bool shared = huge || about.f_type == TMPFS_MAGIC;
    /* A hugetlbfs mount without a size of its own reports 0 or -1 blocks: its pool is shown above.
     */
    bool sized = about.f_blocks > 0 && about.f_blocks < UINT64_MAX / 2;
    uint64_t free_bytes = (uint64_t)about.f_bavail * (uint64_t)about.f_bsize;
    finding_add(
        findings, shared ? FINDING_OK : FINDING_FAIL, "segment directory",
        shared
            ? NULL
            : "segments would be written to a disk: expected a hugetlbfs or tmpfs mount, or memfd",
        "%s is %s, %s pages, %s%s", path,
        huge     ? "hugetlbfs"
        : shared ? "tmpfs"
                 : "neither hugetlbfs nor tmpfs",
        text_bytes((uint64_t)about.f_bsize, pages),
        sized ? text_bytes(free_bytes, room) : "room not limited by the mount",
        sized ? " free" : "");
}

/*
 * Start this very program with the library preloaded: a missing dependency of the library would
 * stop every program that it is preloaded into, with the dynamic linker's message.
 */
static bool library_loads(const char *library) {
    char self[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    int status = -1;
    pid_t child;

    if (length < 0) {
        return false;
    }
    self[length] = '\0';
    child = fork();
    if (child == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        (void)dup2(null, STDOUT_FILENO);
        (void)dup2(null, STDERR_FILENO);
        (void)setenv("LD_PRELOAD", library, 1);
        (void)execl(self, "tidepool", "--version", (char *)NULL);
        _exit(127);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

static void check_library(const char *preloaded, struct findings *findings) {
    char found[PATH_MAX] = "";
    char looked[4 * PATH_MAX] = "";
    const char *library = preloaded;

    if (!library) {
        if (tool_find_library(found, sizeof(found), looked, sizeof(looked)) != 0) {
            finding_add(findings, FINDING_FAIL, "library",
                        "install it beside this tool, or use --lib with 'tidepool run'",
                        "libtidepool.so is in none of: %s", looked);
            return;
        }
        library = found;
    }
    if (!library_loads(library)) {
        finding_add(findings, FINDING_FAIL, "library",
                    "LD_PRELOAD=... /bin/true shows the dynamic linker's message",
                    "%s cannot be loaded", library);
        return;
    }
    finding_add(findings, FINDING_OK, "library", NULL, "%s loads%s", library,
                preloaded ? ", and is preloaded here"
                          : "; not preloaded here ('tidepool run' does that)");
}

static bool is_allocator(const char *name) {
    return strstr(name, "jemalloc") || strstr(name, "tcmalloc") || strstr(name, "mimalloc");
}

/*
 * An allocator before the library answers the host's free() and aligned_alloc(): CUDA memory cannot
 * be given back then, and the segments of mooncake_client are not seen.
 */
static void check_other_library(const char *entry, const char *name, bool before_ours,
                                const struct tp_store_config *store, struct findings *findings) {
    bool cuda = store->half == TP_HALF_ON && store->kind == TP_SEGMENT_CUMEM;

    if (strchr(entry, '/') && access(entry, R_OK) != 0) {
        finding_add(findings, FINDING_WARN, "LD_PRELOAD",
                    "the dynamic linker ignores it in every program", "%s: %s", entry,
                    strerror(errno));
    } else if (is_allocator(name) && before_ours) {
        finding_add(findings, cuda ? FINDING_FAIL : FINDING_WARN, "LD_PRELOAD",
                    "name libtidepool.so first in LD_PRELOAD",
                    "%s: an allocator before libtidepool.so: segments of CUDA memory fail, and "
                    "those of mooncake_client fall back to Mooncake's transport",
                    entry);
    } else {
        finding_add(findings, FINDING_OK, "LD_PRELOAD", NULL, "%s: %s", entry,
                    is_allocator(name) ? "an allocator; fine after libtidepool.so"
                                       : "another library");
    }
}

static void check_preload(const struct tp_store_config *store, struct findings *findings) {
    const char *value = getenv("LD_PRELOAD");
    char *copy = value ? strdup(value) : NULL;
    bool preloaded = value && strstr(value, "libtidepool.so");
    char *ours = NULL;
    char *rest = NULL;

    /* ld.so separates at spaces and colons. Without our entry, `tidepool run` will put it first. */
    for (char *entry = copy ? strtok_r(copy, " :", &rest) : NULL; entry;
         entry = strtok_r(NULL, " :", &rest)) {
        const char *name = strrchr(entry, '/') ? strrchr(entry, '/') + 1 : entry;
        if (strncmp(name, "libtidepool.so", 14) == 0) {
            ours = entry;
        } else {
            check_other_library(entry, name, preloaded && !ours, store, findings);
        }
    }
    check_library(ours, findings);
    free(copy);
}

/*
 * A switch of Mooncake's own that looks as if it did the same; Mooncake looks only whether it is
 * set, so "0" turns it on as well. (env/ knows those that make Tidepool impossible.)
 */
static void check_rivals(const struct tp_config *config, struct findings *findings) {
    if (config->force_shm) {
        finding_add(findings, FINDING_WARN, "MC_FORCE_SHM",
                    "unset it: any value turns it on, and the store's data still goes by TCP with "
                    "it",
                    "set to \"%s\"", getenv("MC_FORCE_SHM"));
    }
}

void doctor_settings(const struct tp_config *config, struct findings *findings) {
    const struct tp_store_config *store = &config->store;
    const struct tp_engine_config *engine = &config->engine;

    check_half("store settings", store->half, store->error, store->socket_dir,
               "with this, the store's setup fails", findings);
    check_half("engine settings", engine->half, engine->error, engine->socket_dir,
               "with this, Mooncake runs as stock", findings);
    for (unsigned i = 0; i < config->notice_count; i++) {
        finding_add(findings, FINDING_WARN, "settings", NULL, "%s", config->notices[i]);
    }
    if (store->half == TP_HALF_ON) {
        check_socket_dir("store directory", store->socket_dir, config, findings);
        if (store->kind == TP_SEGMENT_FILES) {
            check_segment_dir(store->segment_dir, findings);
        }
    }
    if (engine->half == TP_HALF_ON &&
        (store->half != TP_HALF_ON || strcmp(engine->socket_dir, store->socket_dir) != 0)) {
        check_socket_dir("engine directory", engine->socket_dir, config, findings);
    }
    check_rivals(config, findings);
    check_preload(store, findings);
}
