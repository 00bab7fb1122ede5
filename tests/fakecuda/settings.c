/* SPDX-License-Identifier: Apache-2.0 */
/* The double's environment variables, read at the first call. Knows nothing of what they mean to
 * the rest. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static struct fc_settings settings;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static long number(const char *name, long fallback, long most) {
    const char *text = getenv(name);
    char *end = NULL;
    long value;

    if (!text || !*text)
        return fallback;
    value = strtol(text, &end, 10);
    return *end || value < 0 || value > most ? fallback : value;
}

static int machine_nodes(void) {
    char path[64];
    int nodes = 0;

    for (nodes = 0; nodes < 64; nodes++) {
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d", nodes);
        if (access(path, F_OK))
            break;
    }
    return nodes ? nodes : 1;
}

static void read_settings(void) {
    settings.devices = (int)number("FAKECUDA_DEVICES", 2, FC_MAX_DEVICES);
    settings.numa_nodes = (int)number("FAKECUDA_NUMA_NODES", machine_nodes(), 64);
    settings.driver_version =
        (int)number("FAKECUDA_DRIVER_VERSION", FAKECUDA_DEFAULT_VERSION, 99999);
    settings.memory_bytes = (size_t)number("FAKECUDA_MEMORY_MB", 4096, 1 << 20) << 20;
    settings.delay_ns = (uint64_t)number("FAKECUDA_DELAY_US", 200, 60000000) * 1000;
    settings.hmm = number("FAKECUDA_HMM", 0, 1) == 1;
    settings.touching = number("FAKECUDA_TOUCHING", 0, 1) == 1;
    settings.host_pointers = number("FAKECUDA_HOST_POINTERS", 1, 1) == 1;
}

const struct fc_settings *fc_settings(void) {
    pthread_once(&once, read_settings);
    return &settings;
}
