/* SPDX-License-Identifier: Apache-2.0 */
/* Handles: numbers that cannot be addresses (non-canonical), never used twice. It must not know
 * what they stand for. */
#include "state.h"

#include <stdlib.h>

#define TAG ((uintptr_t)0xFC << 56)
#define KINDS 8

static struct {
    void **objects;
    size_t count, room;
} tables[KINDS];

uintptr_t fc_handle_new(enum fc_kind kind, void *object) {
    if (tables[kind].count == tables[kind].room) {
        size_t room = tables[kind].room ? tables[kind].room * 2 : 64;
        void **grown = realloc(tables[kind].objects, room * sizeof *grown);

        if (!grown)
            return 0;
        tables[kind].objects = grown;
        tables[kind].room = room;
    }
    tables[kind].objects[tables[kind].count++] = object;
    return TAG | (uintptr_t)kind << 48 | tables[kind].count << 4;
}

void *fc_handle_get(enum fc_kind kind, uintptr_t handle) {
    uintptr_t low = handle & (((uintptr_t)1 << 48) - 1);

    if (handle >> 48 != (TAG >> 48 | kind) || (low & 15) || !low || low >> 4 > tables[kind].count)
        return NULL;
    return tables[kind].objects[(low >> 4) - 1];
}

void *fc_handle_at(enum fc_kind kind, size_t index) {
    return index < tables[kind].count ? tables[kind].objects[index] : NULL;
}
