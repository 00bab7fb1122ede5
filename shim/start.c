/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts the halves on first need, and stops the server at exit so that the directory is left
 * clean. It must not know a hook.
 */
#include "shim/start.h"

#include "env/stats.h"
#include "segment/segment.h"
#include "shim/overlays.h"
#include "transport/transport.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

static pthread_once_t start_once = PTHREAD_ONCE_INIT;
static pthread_once_t prepare_once = PTHREAD_ONCE_INIT;

/*
 * File descriptors that must be free when the library begins to act, or else it does not: a store
 * of Mooncake 0.3.13 opens 12 after that, both halves of this library together as many. The rest is
 * for connections.
 */
#define FREE_FILES 40

static bool files_short; /* written once, by count_files */

static void count_files(void) {
    struct rlimit limit;
    unsigned free_files = 0;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return;
    }
    int error = errno;
    for (rlim_t fd = 0; fd < limit.rlim_cur && free_files < FREE_FILES; fd++) {
        free_files += fcntl((int)fd, F_GETFD) < 0;
    }
    errno = error;
    files_short = free_files < FREE_FILES;
    if (files_short) {
        tp_log(TP_LOG_WARN,
               "%u file descriptors are free (ulimit -n is %lu), and %d are needed: Tidepool stays "
               "off in this process and Mooncake runs as stock; raise ulimit -n",
               free_files, (unsigned long)limit.rlim_cur, FREE_FILES);
    }
}

const struct tp_config *tp_shim_config(void) {
    static pthread_once_t counted = PTHREAD_ONCE_INIT;
    const struct tp_config *config;

    if (tp_inert()) {
        return NULL;
    }
    config = tp_config();
    if (config->store.half == TP_HALF_OFF && config->engine.half != TP_HALF_ON) {
        return NULL;
    }
    (void)pthread_once(&counted, count_files);
    /* A wrong setting makes a store's setup fail whatever is left. */
    return files_short && config->store.half != TP_HALF_INVALID ? NULL : config;
}

static void stop_at_exit(void) {
    if (!tp_inert()) {
        tp_server_stop();
    }
}

static void prepare(void) {
    tp_fork_guard();
    tp_modes_say(tp_config());
    if (atexit(stop_at_exit) != 0) {
        tp_log(
            TP_LOG_DEBUG,
            "atexit failed: the socket stays in its directory until the next process removes it");
    }
}

void tp_shim_start_store(const struct tp_config *config) {
    pthread_once(&prepare_once, prepare);
    if (config->store.half == TP_HALF_ON) {
        atomic_fetch_or(&tp_stats_page()->roles, TP_ROLE_STORE);
    }
}

static void start(void) {
    const struct tp_config *config = tp_config();

    tp_shim_start_store(config);
    if (config->store.kind == TP_SEGMENT_CUMEM && !config->platform_cpu) {
        tp_transport_set_look(tp_segment_open_to_gpus);
    }
    if (config->engine.half == TP_HALF_ON && tp_transport_start(config) == 0) {
        atomic_fetch_or(&tp_stats_page()->roles, TP_ROLE_ENGINE);
        (void)tp_server_start(false,
                              config); /* only for `tidepool status`; a failure has its own line */
    }
}

void tp_shim_start(const struct tp_config *config) {
    if (config) {
        pthread_once(&start_once, start);
    }
}

void tp_shim_set_name(const char *name, bool store) {
    struct tp_stats_page *page = tp_stats_page();

    if (store || page->name[0] == '\0') {
        (void)snprintf(page->name, sizeof(page->name), "%s", name);
    }
    if (store) {
        tp_stats_condition(TP_CONDITION_UNNAMED, false);
    }
    if (store && tp_server_set_name(name) != 0) {
        tp_stats_condition(TP_CONDITION_UNNAMED, true);
        tp_log(TP_LOG_WARN,
               "the endpoint name \"%s\" is longer than 255 characters: engines will not find this "
               "store",
               name);
    }
}
