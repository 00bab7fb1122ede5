/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The findings of `tidepool doctor`, and the parts that make them.
 */
#ifndef TIDEPOOL_DOCTOR_H
#define TIDEPOOL_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>

struct tp_config;

enum finding_level { FINDING_OK, FINDING_WARN, FINDING_FAIL };

struct finding {
    enum finding_level level;
    char what[64];
    char value[384];
    char advice[384]; /* empty when there is nothing to do */
};

struct findings {
    struct finding *list; /* owned */
    size_t count, room;
};

/*
 * Add one. `value` is a format; the text is cleaned, since much of it comes from files, environment
 * and Python. `advice` may be NULL.
 */
void finding_add(struct findings *findings, enum finding_level level, const char *what,
                 const char *advice, const char *value, ...) __attribute__((format(printf, 5, 6)));

/* The machine: CPU, kernel, memory, limits, identity. `config` says what is needed of it. */
void doctor_host(const struct tp_config *config, struct findings *findings);

/* The CUDA driver and its GPUs; makes no context. */
void doctor_gpu(const struct tp_config *config, struct findings *findings);

/* What this environment tells the library: settings, directories, LD_PRELOAD. */
void doctor_settings(const struct tp_config *config, struct findings *findings);

/* The Mooncake that `python` imports, looked at in a child process. `chosen`: the user named it, so
 * a Python without Mooncake is a failure. */
void doctor_mooncake(const char *python, bool chosen, struct findings *findings);

#endif
