/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The addresses that the instances of each segment name have published: an array for each name,
 * which grows up to RANGES entries and then drops the oldest.
 *
 * It must not know: connections, mappings, what follows from a conflict.
 */
#include "transport/history.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define RANGES_AT_FIRST 4
#define RANGES 256 /* of one name */
/* Of all names together, 40 MiB: they come from other processes, which must not fill this one's
 * memory. */
#define RANGES_IN_ALL (UINT32_C(1) << 20)

struct range {
    uint8_t instance[16];
    uint64_t base, bytes;
};

struct tp_history {
    uint32_t count, room;
    uint32_t oldest; /* the entry that is overwritten next, once there are RANGES */
    bool warned;
    struct range ranges[];
};

static uint32_t ranges_in_all; /* that memory is allocated for */

static bool overlap(const struct range *a, const struct range *b) {
    return a->base < b->base + b->bytes && b->base < a->base + a->bytes;
}

static bool contains(const struct range *a, const struct range *b) {
    return a->base <= b->base && b->base + b->bytes <= a->base + a->bytes;
}

/* Makes sure that one more range can be stored. Returns 0 or -ENOMEM. */
static int make_room(struct tp_name *name) {
    struct tp_history *history = name->history;
    uint32_t room = history ? history->room : 0;
    uint32_t wanted = room ? 2 * room : RANGES_AT_FIRST;
    if (history && (history->count < room || room == RANGES))
        return 0;
    if (ranges_in_all + (wanted - room) > RANGES_IN_ALL)
        return -ENOMEM;
    history = realloc(history, sizeof(*history) + wanted * sizeof(history->ranges[0]));
    if (!history)
        return -ENOMEM;
    if (!name->history)
        memset(history, 0, sizeof(*history));
    ranges_in_all += wanted - room;
    history->room = wanted;
    name->history = history;
    return 0;
}

static void store(struct tp_history *history, const struct range *range) {
    if (history->count < history->room) {
        history->ranges[history->count++] = *range;
        return;
    }
    history->ranges[history->oldest] = *range;
    history->oldest = (history->oldest + 1) % RANGES;
}

int tp_history_add(struct tp_name *name, const uint8_t instance[static 16], uint64_t base,
                   uint64_t bytes) {
    struct range range = {.base = base, .bytes = bytes};
    memcpy(range.instance, instance, sizeof(range.instance));
    const struct tp_history *history = name->history;
    bool conflict = false;
    bool known = false;
    for (uint32_t i = 0; history && i < history->count; i++) {
        const struct range *other = &history->ranges[i];
        bool same = memcmp(other->instance, instance, sizeof(other->instance)) == 0;
        conflict = conflict || (!same && overlap(other, &range));
        known = known || (same && contains(other, &range));
    }
    if (!known) {
        int error = make_room(name);
        if (error)
            return error;
        store(name->history, &range);
    }
    return conflict ? -EADDRINUSE : 0;
}

bool tp_history_warn(struct tp_name *name) {
    bool first = name->history && !name->history->warned;
    if (first)
        name->history->warned = true;
    return first;
}
