/* SPDX-License-Identifier: Apache-2.0 */
/* What hooks_client.c stands on, for bracket.cpp: the originals are its own, gathering is counted.
 */
#include "env/env.h"
#include "shim/modules.h"
#include "shim/start.h"
#include "transport/transport.h"

#include <stdatomic.h>

int gathering, gathered;
extern void *originals[];

static struct tp_config config;

void set_batched(bool get, bool put);
void set_batched(bool get, bool put) {
    config.engine.batched_get = get;
    config.engine.batched_put = put;
}

void tp_gather_begin(void) {
    gathering = 1;
    gathered++;
}

void tp_gather_end(void) {
    gathering = 0;
}

bool tp_transport_on(void) {
    return true;
}

const struct tp_config *tp_shim_config(void) {
    return &config;
}

struct tp_module *tp_module_of(const void *return_address) {
    return NULL;
}

void *tp_next(enum tp_hook hook, struct tp_module *module) {
    return originals[hook - TP_HOOK_client_get];
}

void tp_log_once(atomic_flag *said, enum tp_log_level level, const char *format, ...) {
}
