/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forms that values of settings take: texts to numbers and lists. Internal to env/.
 * Each returns 0, or -EINVAL (not of that form) or -ERANGE; the result counts for nothing then.
 *
 * It must not know: which setting a value belongs to.
 */
#ifndef TIDEPOOL_ENV_VALUES_H
#define TIDEPOOL_ENV_VALUES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* The largest size taken: 64 TiB, above any host's memory and far from overflow in sums. */
#define TP_VALUE_MAX_BYTES (UINT64_C(1) << 46)

/* 0, 1, true or false. */
int tp_value_bool(const char *text, bool *ret_value);

/* Decimal digits only. */
int tp_value_u64(const char *text, uint64_t max, uint64_t *ret_value);

/* Bytes: decimal digits, then optionally K, M, G or T (powers of 1024), also written KiB and so on;
 * case does not matter. */
int tp_value_bytes(const char *text, uint64_t *ret_bytes);

/*
 * Numbers and ranges ("0,2-3") in the order given, each once, into `ret_numbers` (room for
 * `limit`). -ERANGE for a number above `max` and for more than `limit` different ones.
 */
int tp_value_list(const char *text, uint64_t max, unsigned limit, uint64_t *ret_numbers,
                  unsigned *ret_count);

#endif
