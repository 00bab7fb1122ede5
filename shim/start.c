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

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_once_t start_once = PTHREAD_ONCE_INIT;
static pthread_once_t prepare_once = PTHREAD_ONCE_INIT;

const struct tp_config *tp_shim_config(void) {
    const struct tp_config *config;

    if (tp_inert()) {
        return NULL;
    }
    config = tp_config();
    return config->store.half == TP_HALF_OFF && config->engine.half != TP_HALF_ON ? NULL : config;
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
