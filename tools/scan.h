/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ask every process that has an entry in a directory for its counters.
 *
 * It must not know what the counters mean or how they are shown. Everything that comes back is
 * hostile: sizes are checked by segment/wire and env/stats, and strings are cleaned here or by
 * whoever prints them.
 */
#ifndef TIDEPOOL_SCAN_H
#define TIDEPOOL_SCAN_H

#include "env/stats.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct tp_config;

/* Entries beyond this many are counted, not asked. */
#define SCAN_MAX 1024

enum scan_state {
    SCAN_LIVE,    /* `page` holds its counters */
    SCAN_SILENT,  /* it holds its socket but did not answer in time: stopped, or overloaded */
    SCAN_REFUSED, /* it refused us; `detail` is its text */
    SCAN_STALE,   /* the process is dead; `swept` when its files were removed */
    SCAN_FRESH,   /* a lock that is held, and nobody listens: starting or ending */
    SCAN_BROKEN,  /* it broke the protocol, or we may not connect; `detail` says what */
};

struct scan_entry {
    char kind;   /* 's' or 'e' */
    char id[33]; /* the instance in hex: safe to print */
    enum scan_state state;
    bool swept;
    bool known_owner; /* uid and pid are those that the kernel reported */
    uid_t uid;
    int32_t pid;
    char detail[256];           /* cleaned */
    struct tp_stats_page *page; /* owned; SCAN_LIVE only */
};

struct scan {
    struct scan_entry *entries; /* stores first, then by id */
    size_t count, left_out;
};

/*
 * Ask all at once, and return after at most `timeout_ms` (plus the time for opening them). Entries
 * of dead processes are removed when their lock can be taken. 0 or -errno.
 */
int scan_directory(int dir_fd, const struct tp_config *config, unsigned timeout_ms,
                   struct scan *ret_scan);
void scan_free(struct scan *scan);

const char *scan_state_word(enum scan_state state);

#endif
