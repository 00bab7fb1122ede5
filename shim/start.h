/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the library begins to act: at the first hook of a process that is configured. Before that,
 * and in every other process, hooks only pass calls on.
 */
#ifndef TIDEPOOL_START_H
#define TIDEPOOL_START_H

#include "env/env.h"

/*
 * The settings, or NULL when this process has nothing to do: nothing configured, a forked child, or
 * too few file descriptors left for Mooncake and us (one warning was logged).
 * Reads the settings on the first call. Any thread.
 */
const struct tp_config *tp_shim_config(void);

/* A transfer engine is about to start here: start the halves that are configured. Idempotent. Any
 * thread. */
void tp_shim_start(const struct tp_config *config);

/* The same for the store's half alone, in programs whose transfers nobody sees. Idempotent. Any
 * thread. */
void tp_shim_start_store(const struct tp_config *config);

/* The name by which peers open this process is known: `store`, they will open it for its segments;
 * else only for people. */
void tp_shim_set_name(const char *name, bool store);

#endif
