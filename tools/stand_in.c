/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stand-ins for CUDA's libraries (stubs/): which of them a program needs here, and where they
 * lie.
 *
 * LD_LIBRARY_PATH comes before the system's libraries (ld.so(8)), so a folder is only named when
 * its library is not to be had at all. It must not know what the stand-ins answer.
 */
#include "tools/tool.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct stand_in {
    const char *library, *folder;
} stand_ins[] = {
    {"libcuda.so.1", "cuda-1"},
    {"libcudart.so.12", "cudart-12"},
    {"libcudart.so.13", "cudart-13"},
};

/* Asked of the loader itself, in a child: a driver's constructors have no business in this process.
 * A child that cannot be made leaves everything as it is. */
static bool loadable(const char *library) {
    int status = 0;
    pid_t child = fork();

    if (child == 0) {
        _exit(dlopen(library, RTLD_LAZY | RTLD_LOCAL) ? 0 : 1);
    }
    if (child < 0) {
        return true;
    }
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) {
            return true;
        }
    }
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

/* Beside the preload library in a build folder, below it in an installation. */
static bool find_folder(const char *preload, const char *folder, const char *library,
                        char ret_path[static PATH_MAX]) {
    static const char *const places[] = {"stubs", "tidepool/stubs"};
    const char *slash = strrchr(preload, '/');

    for (size_t i = 0; slash && i < sizeof(places) / sizeof(*places); i++) {
        char file[PATH_MAX];
        int length = snprintf(file, sizeof(file), "%.*s/%s/%s/%s", (int)(slash - preload), preload,
                              places[i], folder, library);
        if (length > 0 && (size_t)length < sizeof(file) && access(file, R_OK) == 0) {
            *strrchr(file, '/') = '\0';
            memcpy(ret_path, file, strlen(file) + 1);
            return true;
        }
    }
    return false;
}

int tool_stand_ins(const char *preload, char **ret_library_path) {
    const char *before = getenv("LD_LIBRARY_PATH");
    char *path = strdup(before ? before : "");

    for (size_t i = 0; path && i < sizeof(stand_ins) / sizeof(*stand_ins); i++) {
        char folder[PATH_MAX];
        char *longer = NULL;

        if (loadable(stand_ins[i].library)) {
            continue;
        }
        if (!find_folder(preload, stand_ins[i].folder, stand_ins[i].library, folder)) {
            tool_error(
                "run",
                "MC_TENT_PLATFORM=cpu: %s is missing here, and so is its stand-in beside %s: "
                "a program that needs it will not start",
                stand_ins[i].library, preload);
            continue;
        }
        if (asprintf(&longer, "%s%s%s", path, *path ? ":" : "", folder) < 0) {
            longer = NULL;
        }
        free(path);
        path = longer;
    }
    if (!path) {
        return -ENOMEM;
    }
    if (strcmp(path, before ? before : "") == 0) {
        free(path);
        path = NULL;
    }
    *ret_library_path = path;
    return 0;
}
