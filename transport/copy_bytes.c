/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One contiguous copy, with the instructions that are fastest for its size.
 *
 * It must not know: jobs, threads, what the memory is.
 */
#include "transport/copy_host.h"

#include <string.h>

void tp_copy_bytes(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}
