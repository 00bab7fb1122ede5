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
    uint32_t bytes;
    char text[TP_NAME_BYTES + 1];
};

/*
 * The one object for this name. Leading slashes do not count: Mooncake's openSegment drops them.
 * NULL when the name is empty, longer than TP_NAME_BYTES, or when memory or the limit of names is
 * used up. A known name takes no lock. Any thread.
 */
struct tp_name *tp_name_intern(const char *text, size_t bytes);

#endif
