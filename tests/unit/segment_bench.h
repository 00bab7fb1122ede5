/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of segment/ share: a store's configuration, ranges as Mooncake allocates them, and
 * a plain client. */
#ifndef TIDEPOOL_SEGMENT_BENCH_H
#define TIDEPOOL_SEGMENT_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "env/env.h"
#include "segment/wire.h"

#define MIB (UINT64_C(1) << 20)

/* A memfd store that listens in a fresh directory under /tmp; `piece_bytes` 0: the default. Ends
 * the test on failure. */
struct tp_config *bench_config(uint64_t piece_bytes);
/* Remove the directory; false when something but the record of addresses was left in it. */
bool bench_config_free(struct tp_config *config);
/* How many names the store's directory holds, without the record of addresses. */
unsigned bench_names(const struct tp_config *config);

/* As Mooncake does it: aligned_alloc with 16 MiB alignment. */
void *bench_allocate(uint64_t bytes);
/* Different in every byte of every page. */
void bench_fill(void *address, uint64_t bytes, unsigned seed);
bool bench_same(const void *address, uint64_t bytes, unsigned seed);

/* fork(2); the child dies with the test, whatever becomes of that. */
pid_t bench_fork(void);
/* The same, but the child is no forked child to the library (no handlers run): it can be a store.
 */
pid_t bench_process(void);

unsigned bench_fds(void);
/* Other threads may still be closing: true when the count is reached within 2 s. */
bool bench_fds_become(unsigned count);
unsigned bench_maps(void);

/* The directory's first socket of this role, connected. -errno. */
int bench_connect(const struct tp_config *config, char role);
void bench_hello(int fd, uint32_t purpose, const char *identity);
/* Wait for a message, at most `ms`. 0 or what tp_wire_receive says; -ETIMEDOUT. */
int bench_receive(int fd, struct tp_msg *ret_message, int *ret_fds, unsigned *ret_fd_count, int ms);
/* Connect, say HELLO, expect WELCOME and NAME. The fd; ends the test on failure. */
int bench_attach(const struct tp_config *config);
/* The next message must be of this type. */
void bench_expect(int fd, uint16_t type, struct tp_msg *ret_message);
/* True when the connection ends within `ms`; other messages are skipped. */
bool bench_ended(int fd, int ms);
/* Ask for all pieces of a segment and map them in a row. NULL on failure. */
void *bench_map(int fd, const struct tp_msg_segment *segment);

/* Was a warning or an error with these words logged? */
bool bench_logged(const char *words);

#endif
