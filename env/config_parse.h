/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parsers of the environment and of MC_TENT_CONF share: where findings go. Internal to
 * env/.
 *
 * It must not know: a setting's name or meaning.
 */
#ifndef TIDEPOOL_ENV_CONFIG_PARSE_H
#define TIDEPOOL_ENV_CONFIG_PARSE_H

#include "env/env.h"

enum { TP_STORE_HALF = 1, TP_ENGINE_HALF = 2 };

/* How much of a value, and of a file's name, a message shows. */
#define TP_SHOWN "\"%.64s%s\""
#define TP_SHOW(text) (text), strlen(text) > 64 ? "..." : ""

struct tp_parse {
    const char *(*getenv_fn)(const char *name, void *arg);
    void *arg;
    struct tp_config *config;
};

/* The value of a variable; NULL when it is unset or empty. */
const char *tp_parse_variable(const struct tp_parse *parse, const char *name);

/* Append a line to the notices; the last place is kept for "more". */
void tp_parse_notice(struct tp_config *config, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/*
 * A wrong value of a setting of `halves`: those that are configured become invalid (the first
 * finding stays); when none is, the line is a notice.
 */
void tp_parse_wrong(struct tp_config *config, unsigned halves, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A directory for sockets or segments must be an absolute path that fits. False after a finding. */
bool tp_parse_directory(struct tp_config *config, unsigned halves, const char *name,
                        const char *value, char ret_dir[static PATH_MAX]);

/* MC_TENT_CONF: engine.half and everything under transports.shm. `value` is not empty. */
void tp_parse_tent_conf(struct tp_config *config, const char *value);

#endif
