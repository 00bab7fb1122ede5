/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Run probe.py in a Python of the user's and collect what it says. It must not know what the
 * answers mean.
 */
#ifndef TIDEPOOL_PROBE_H
#define TIDEPOOL_PROBE_H

#include <jansson.h>
#include <stddef.h>

struct probe {
    json_t *lines;        /* owned: an array of the objects that it wrote, as far as it came */
    char problem[256];    /* how it ended, when not well: "killed by signal 11"; otherwise empty */
    char last_words[512]; /* the end of its standard error */
};

/* Takes at most `timeout_ms`, then kills it. 0 or -errno (-ENOENT: no such program). */
int probe_run(const char *python, const char *const *symbols, size_t symbol_count,
              unsigned timeout_ms, struct probe *ret_probe);
void probe_free(struct probe *probe);

#endif
