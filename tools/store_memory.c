/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `tidepool run` makes a store's segments of when its user has not said: CUDA host memory
 * where the driver can make it, since GPUs copy it at the speed of the link, else memfd.
 *
 * It must not know: how the choice becomes environment variables.
 */
#include "tools/tool.h"

#include "env/cuda.h"
#include "env/env.h"
#include "segment/cumem.h"
#include "segment/placement.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* cuInit takes seconds on machines with many GPUs and without nvidia-persistenced. */
#define PROBE_MS 30000
#define END_TRIES 100 /* a killed child may be kept in the kernel by the driver: 10 ms each */

static bool has_value(const char *name) {
    const char *value = getenv(name);

    return value && *value && strcmp(value, "0") != 0;
}

/* What the user's environment says against CUDA memory. NULL: nothing. */
static const char *objection(void) {
    const char *platform = getenv("MC_TENT_PLATFORM");
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");

    if (platform && strcmp(platform, "cpu") == 0) {
        return "MC_TENT_PLATFORM=cpu is set";
    }
    if (visible && !*visible) {
        return "CUDA_VISIBLE_DEVICES is empty";
    }
    if (has_value("TIDEPOOL_HUGEPAGES")) {
        return "TIDEPOOL_HUGEPAGES is set";
    }
    return has_value("MC_STORE_USE_HUGEPAGE") ? "MC_STORE_USE_HUGEPAGE is set" : NULL;
}

/*
 * CUDA memory is given back through free(), which must be the library's. This program runs under
 * the LD_PRELOAD that it was given: when the library is in there, the first free() here is the one
 * that the command will call. Returns the file of another allocator that comes first, or NULL.
 */
static const char *allocator_before(const char *library) {
    const char *preload = getenv("LD_PRELOAD");
    char path[PATH_MAX];
    Dl_info first = {0};

    if (!preload || !strstr(preload, library) || !dladdr(dlsym(RTLD_DEFAULT, "free"), &first) ||
        !first.dli_fname || !realpath(first.dli_fname, path) || strcmp(path, library) == 0) {
        return NULL;
    }
    return first.dli_fname;
}

/* In the child: one page of such memory, made and given back. Empty text: it can be made. */
static void try_to_make(char *ret_why, size_t bytes) {
    static struct tp_config config;
    struct tp_placement placement;
    uint64_t page = 0;
    int devices = 0;
    bool unusable = false;
    const struct tp_cuda *cuda = tp_cuda(true, &unusable);

    if (!cuda || !tp_cuda_has(TP_CUDA_VMM) || !cuda->init) {
        (void)snprintf(ret_why, bytes, "%s",
                       cuda || unusable ? "the CUDA driver is older than 12.2"
                                        : "no CUDA driver: libcuda.so.1 cannot be loaded");
        return;
    }
    tp_cu_result result = cuda->init(0);
    if (result != TP_CUDA_SUCCESS || cuda->device_get_count(&devices) != TP_CUDA_SUCCESS ||
        devices == 0) {
        (void)snprintf(ret_why, bytes, "no GPU can be used: cuInit: %s", tp_cuda_error(result));
        return;
    }
    (void)tp_config_parse(tool_getenv, NULL, &config);
    tp_placement_choose(&config, &placement);
    result = TP_CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned i = 0; i < placement.count; i++) {
        result = tp_cumem_probe_node(cuda, placement.nodes[i], &page);
        if (result == TP_CUDA_SUCCESS) {
            return;
        }
    }
    (void)snprintf(ret_why, bytes,
                   "the CUDA driver gives no host memory: %s; containers may need --cap-add "
                   "SYS_NICE",
                   tp_cuda_error(result));
}

/* Read until the end of the pipe, or until the time is up. False: it was up. */
static bool read_answer(int fd, char *ret_text, size_t bytes) {
    uint64_t end = tp_now_ms() + PROBE_MS;
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    size_t length = 0;
    ssize_t n = 1;

    while (n > 0 && length + 1 < bytes) {
        uint64_t now = tp_now_ms();
        if (now >= end || poll(&polled, 1, (int)(end - now)) == 0) {
            return false;
        }
        n = read(fd, ret_text + length, bytes - 1 - length);
        length += n > 0 ? (size_t)n : 0;
        ret_text[length] = '\0';
    }
    return true;
}

/* The driver is asked in a child, so that nothing of it is left in this process or the command. */
static bool driver_can(char *ret_why, size_t bytes) {
    int ends[2];
    int status = 0;
    pid_t child = -1;

    if (pipe2(ends, O_CLOEXEC) != 0 || (child = fork()) < 0) {
        (void)snprintf(ret_why, bytes, "the CUDA driver cannot be asked: no process or pipe");
        return false;
    }
    if (child == 0) {
        try_to_make(ret_why, bytes);
        (void)!write(ends[1], ret_why, strlen(ret_why));
        _exit(*ret_why != '\0');
    }
    (void)close(ends[1]);
    bool answered = read_answer(ends[0], ret_why, bytes);
    (void)close(ends[0]);
    if (!answered) {
        (void)kill(child, SIGKILL);
    }
    bool ended = false;
    for (int i = 0; i < END_TRIES && !ended; i++) {
        ended = waitpid(child, &status, WNOHANG) != 0;
        if (!ended) {
            (void)usleep(10000);
        }
    }
    if (!*ret_why && (!answered || !ended || status != 0)) {
        (void)snprintf(ret_why, bytes, "the CUDA driver %s",
                       answered ? "crashed when it was asked" : "did not answer in 30 s");
    }
    return !*ret_why;
}

bool tool_choose_cuda(const char *library, char *ret_why, size_t bytes) {
    const char *against = objection();
    const char *allocator = against ? NULL : allocator_before(library);

    *ret_why = '\0';
    if (against) {
        (void)snprintf(ret_why, bytes, "%s", against);
    } else if (allocator) {
        (void)snprintf(ret_why, bytes, "free() is that of %s, which comes before the library",
                       allocator);
    } else if (driver_can(ret_why, bytes)) {
        (void)snprintf(ret_why, bytes, "the CUDA driver here can make it");
        return true;
    }
    return false;
}
