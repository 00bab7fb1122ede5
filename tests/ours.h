/* SPDX-License-Identifier: Apache-2.0 */
/* For the preloads of tests: is a caller in libtidepool.so? */
#ifndef TIDEPOOL_TESTS_OURS_H
#define TIDEPOOL_TESTS_OURS_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static uintptr_t ours_low, ours_high;

static int find_library(struct dl_phdr_info *info, size_t bytes, void *arg) {
    (void)bytes;
    (void)arg;
    if (strstr(info->dlpi_name, "libtidepool.so") == NULL)
        return 0;
    ours_low = ours_high = info->dlpi_addr;
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && ours_low + header->p_vaddr + header->p_memsz > ours_high)
            ours_high = ours_low + header->p_vaddr + header->p_memsz;
    }
    return 1;
}

/* Once, before the first question. */
static void find_ours(void) {
    dl_iterate_phdr(find_library, NULL);
}

static bool is_ours(const void *caller) {
    return (uintptr_t)caller >= ours_low && (uintptr_t)caller < ours_high;
}

#endif
