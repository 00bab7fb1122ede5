/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One batched call of Mooncake's client, carried out in parts by several threads: while the copies
 * of one part are under way, Mooncake asks its master for the next.
 *
 * The keys of a call do not depend on each other, and Mooncake's client may be called from any
 * number of threads. It must not know: which call it is, types of keys and results, transfers.
 */
#ifndef TIDEPOOL_PARTS_H
#define TIDEPOOL_PARTS_H

#include "shim/abi.h"
#include "shim/modules.h"

#include <stdint.h>

struct tp_parts {
    /* Carry out `count` keys from `first`; *ret is the vector of their results, made by the
     * module's operator new. Called by several threads at once; may throw. */
    void (*run)(void *context, size_t first, size_t count, struct cxx_vector *ret);
    void *context;
    const struct tp_module *module;
    size_t keys;
    uint64_t bytes;   /* about as many as the call moves */
    unsigned threads; /* at most so many, the caller's among them; 0: sized to the machine */
};

/* Into how many parts the call may be divided, by its size; 1: it is too small. */
size_t tp_parts_allowed(const struct tp_parts *parts);

/*
 * Carry out the call; *ret gets the results of all keys in order. Small calls, calls from within a
 * part, and calls that find no idle thread are one run() of all keys on the caller's thread.
 * Otherwise run() is called once a part. An exception leaves this function on the caller's thread,
 * after every part has ended: a part that threw is run once more there. Any thread.
 */
void tp_parts_run(const struct tp_parts *parts, struct cxx_vector *ret);

#endif
