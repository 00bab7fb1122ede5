/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the preload library that belongs to this tool lies. Found from the tool's own place, so
 * that a build folder, a DESTDIR and an unpacked archive all work without a setting.
 */
#include "tools/tool.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY "libtidepool.so"

int tool_own_dir(char *ret_dir, size_t bytes) {
    char path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);

    if (length < 0) {
        return -errno;
    }
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    if (!slash) {
        return -ENOENT;
    }
    *slash = '\0';
    if (strlen(path) >= bytes) {
        return -ENAMETOOLONG;
    }
    memcpy(ret_dir, path, strlen(path) + 1);
    return 0;
}

int tool_find_library(char *ret_path, size_t path_bytes, char *ret_looked, size_t looked_bytes) {
    /* TOOL_LIBDIR is meson's libdir seen from its bindir, such as "../lib/x86_64-linux-gnu" */
    static const char *const places[] = {".", TOOL_LIBDIR, "../lib/x86_64-linux-gnu", "../lib64",
                                         "../lib"};
    char dir[PATH_MAX];
    size_t used = 0;
    int error = tool_own_dir(dir, sizeof(dir));

    if (error) {
        (void)snprintf(ret_looked, looked_bytes, "/proc/self/exe (%s)", strerror(-error));
        return -ENOENT;
    }
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        char candidate[2 * PATH_MAX];
        char resolved[PATH_MAX];
        bool own = strcmp(places[i], ".") == 0;

        if (i > 1 && strcmp(places[i], TOOL_LIBDIR) == 0) {
            continue;
        }
        (void)snprintf(candidate, sizeof(candidate), "%s%s%s/" LIBRARY, dir, own ? "" : "/",
                       own ? "" : places[i]);
        if (realpath(candidate, resolved) && access(resolved, R_OK) == 0 &&
            strlen(resolved) < path_bytes) {
            memcpy(ret_path, resolved, strlen(resolved) + 1);
            return 0;
        }
        if (used < looked_bytes) {
            int n = snprintf(ret_looked + used, looked_bytes - used, "%s%s", used ? ", " : "",
                             candidate);
            used += n > 0 ? (size_t)n : 0;
        }
    }
    return -ENOENT;
}
