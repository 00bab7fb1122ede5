/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the small text files by which the kernel describes the host. Internal to env/.
 * It must not know: what the texts mean.
 */
#ifndef TIDEPOOL_ENV_HOST_FILES_H
#define TIDEPOOL_ENV_HOST_FILES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Put before every path that is read here; "" except in tests, which describe other hosts in a
 * directory. */
extern const char *tp_host_root;

/* The first bytes of a file as a string without trailing blanks. 0, -ENAMETOOLONG or -errno. */
int tp_host_read_text(const char *path, char *ret_text, size_t bytes);

/* A file that holds one decimal number. 0, -EINVAL or -errno. */
int tp_host_read_u64(const char *path, uint64_t *ret_value);

/*
 * A kernel list such as "0-1,4": calls `each` with every number in order, up to `limit` numbers.
 * Returns how many, or -EINVAL where the text is not a list.
 */
int tp_host_each_listed(const char *text, unsigned limit, void (*each)(unsigned number, void *arg),
                        void *arg);

#endif
