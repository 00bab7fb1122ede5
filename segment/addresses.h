/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside segment/: which addresses segments have had, and where the next one goes.
 *
 * An engine may hold the address of an object in a store that has died since. When another store
 * comes back under the same name, that address must lie in nothing that the new one publishes: the
 * engine would read other bytes there and take them for the object. So each segment gets addresses
 * at random that no segment of an earlier store in the shared directory has had, nor an earlier one
 * of this process. They are recorded in the file `addresses` of that directory.
 */
#ifndef TIDEPOOL_ADDRESSES_H
#define TIDEPOOL_ADDRESSES_H

#include <stdbool.h>
#include <stdint.h>

struct tp_config;

/*
 * Choose addresses for a segment at random, a multiple of `alignment` (a power of two), and record
 * them. *ret_base is 0 where the kernel or the driver has to choose (tp_addresses_take follows
 * then): builds with a sanitizer, which has the middle of the address space to itself. 0, or
 * -ENOMEM when so many bytes have no place at all. Any thread; waits a second at most.
 */
int tp_addresses_draw(const struct tp_config *config, uint64_t bytes, uint64_t alignment,
                      uint64_t *ret_base);

/*
 * Record addresses that somebody else chose. False, and nothing is recorded, when a segment of an
 * earlier store has had any of them, unless `anyway`. Earlier segments of this process do not
 * count: tp_segment_settle takes care of them. Any thread; waits a second at most.
 */
bool tp_addresses_take(const struct tp_config *config, const void *base, uint64_t bytes,
                       bool anyway);

/*
 * Draw addresses and reserve them: nothing can be read or written there until something is mapped
 * over. 0, -EADDRNOTAVAIL when the system gives no such addresses, or -errno of mmap.
 */
int tp_addresses_reserve(const struct tp_config *config, uint64_t bytes, uint64_t alignment,
                         void **ret_base);

#endif
