/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that `tidepool status` can look at: the library's own server and counters, without
 * Mooncake.
 *
 *   tool-test-process store|engine     the directory comes from the environment, as for any other
 * process
 *
 * Prints "ready", then waits for the end of its standard input and ends in order.
 */
#include "env/env.h"
#include "env/stats.h"
#include "segment/segment.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SEGMENT_BYTES ((size_t)8 << 20)

static int start_store(const struct tp_config *config) {
    void *memory =
        mmap(NULL, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int result =
        memory == MAP_FAILED ? -1 : tp_segment_overlay(memory, SEGMENT_BYTES, false, config);

    atomic_fetch_or(&tp_stats_page()->roles, TP_ROLE_STORE);
    return result ? result : tp_segment_publish(memory, config);
}

static int start_engine(const struct tp_config *config) {
    atomic_fetch_or(&tp_stats_page()->roles, TP_ROLE_ENGINE);
    tp_count(TP_LOCAL_READ_BYTES, (uint64_t)3 << 30);
    return tp_server_start(false, config);
}

int main(int argc, char **argv) {
    const struct tp_config *config = tp_config();
    bool store = argc > 1 && strcmp(argv[1], "store") == 0;
    int page;
    char byte;

    if (tp_stats_open(&page) != 0) {
        return 1;
    }
    (void)snprintf(tp_stats_page()->name, sizeof(tp_stats_page()->name), "test-%s:1",
                   store ? "store" : "engine");
    if ((store ? start_store(config) : start_engine(config)) != 0) {
        return 1;
    }
    (void)tp_server_set_name(tp_stats_page()->name);
    tp_stats_event("started for a test");
    (void)puts("ready");
    (void)fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0) {
    }
    tp_server_stop();
    return 0;
}
