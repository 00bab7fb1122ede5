/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: the addresses that the instances of each segment name have published to this
 * process. The peer thread only.
 *
 * Mooncake names memory by segment name and address. A store that is started again under its old
 * name has other bytes, but the master goes on handing out the addresses of the old ones until it
 * has noticed. A request for those must never reach the new instance's memory.
 */
#ifndef TIDEPOOL_HISTORY_H
#define TIDEPOOL_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "transport/names.h"

/*
 * Remembers that `instance` publishes [base, base + bytes) under this name, for as long as the
 * process lives; of very many ranges of one name the oldest are forgotten. Returns 0, -EADDRINUSE
 * if another instance of the name has published an address of the range before (this one is
 * remembered all the same), or -ENOMEM.
 */
int tp_history_add(struct tp_name *name, const uint8_t instance[static 16], uint64_t base,
                   uint64_t bytes);

/* Returns true once for each name: the caller is to warn about it. */
bool tp_history_warn(struct tp_name *name);

#endif
