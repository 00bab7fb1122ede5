/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces that are files of a directory. */
#include <errno.h>

#include "env/env.h"
#include "segment/backing.h"

static int files_open(const struct tp_config *config, const struct tp_need *need,
                      struct tp_backing *ret_backing) {
    (void)need;
    (void)ret_backing;
    tp_log(TP_LOG_ERROR, "MC_STORE_SHM_SEGMENT_DIR=%s: segments in files are not available yet",
           config->store.segment_dir);
    return -ENOTSUP;
}

const struct tp_backing_ops tp_backing_files = {.wire_kind = TP_WIRE_MMAP, .open = files_open};
