/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: segment names, each kept once in the process and never freed, so that equal
 * names are equal pointers and a name can be read without a lock at any time.
 */
#ifndef TIDEPOOL_NAMES_H
#define TIDEPOOL_NAMES_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define TP_NAME_BYTES 255

struct tp_name {
    struct tp_name *next; /* the same hash chain */
    uint64_t hash;
    /* Where route.c found this name last, so that a batch does not search again: */
    _Atomic uint64_t peer;       /* a generation with its slot in the low bits, 0: none */
    _Atomic uint64_t miss_epoch; /* tp_peer_epoch() + 1 when there was no peer of this name, 0: not
                                    looked for yet */
    _Atomic uint64_t opened_ms;  /* CLOCK_MONOTONIC when an engine first opened it, 0: never */
    atomic_flag said;            /* that it is left to Mooncake */
    struct tp_history *history;  /* history.c's */
    /* Requests that fell back because no attached store bears this name, and their bytes: */
    _Atomic uint64_t missed_requests, missed_bytes;
    uint32_t row; /* of the page's misses, counted from 1; 0: none. For tp_names_show_missed */
    uint32_t bytes;
    char text[TP_NAME_BYTES + 1];
};

/*
 * The one object for this name. Leading slashes do not count: Mooncake's openSegment drops them.
 * NULL when the name is empty, longer than TP_NAME_BYTES, or when memory or the limit of names is
 * used up. A known name takes no lock. Any thread.
 */
struct tp_name *tp_name_intern(const char *text, size_t bytes);

/* A request of so many bytes for this name fell back. Any thread. */
static inline void tp_name_missed(struct tp_name *name, uint64_t bytes) {
    atomic_fetch_add_explicit(&name->missed_requests, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&name->missed_bytes, bytes, memory_order_relaxed);
}

/* Show the names with the most requests that fell back in this process's page (env/stats.h). For
 * one thread, once a second or so: it looks at all names. */
void tp_names_show_missed(void);

#endif
