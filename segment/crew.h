/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: numbered work done by a few threads, with progress shown when it takes long. */
#ifndef TIDEPOOL_CREW_H
#define TIDEPOOL_CREW_H

#include <stdint.h>

struct tp_placement;

struct tp_crew_work {
    const char *verb[2]; /* "populating", "populated": of so many MiB of segment memory */
    uint64_t count;      /* numbers 0 to count - 1 */
    uint64_t bytes;      /* all of it, for the progress */
    const struct tp_placement *placement;
    /* Do `number`: how many bytes that was, or -errno. Each number is given to one thread, once. */
    int64_t (*run)(void *arg, uint64_t number);
    void *arg;
};

/*
 * Run all of it in threads of the library and wait for the end. 0, or the first error: numbers that
 * had not begun by then are left out. When no thread can be started, the calling one does it all
 * and keeps its memory policy; -EAGAIN when it could not keep it.
 */
int tp_crew_run(const struct tp_crew_work *work);

#endif
