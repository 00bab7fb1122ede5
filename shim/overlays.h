/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which Mooncake allocation is overlaid with shareable memory, by whom it is registered, and when
 * the overlay ends.
 *
 * Life of an overlay: made when Mooncake allocates a segment or the buffer of its SSD tier, at
 * addresses of its own where it can be, and never over memory that comes from elsewhere; published
 * when it is registered; withdrawn when it is unregistered, its contents staying, since Mooncake
 * may still serve them over TCP; taken away when Mooncake frees the memory through a function that
 * we see, or, if it was laid over Mooncake's own, when the engine that registered it has been
 * destroyed, which comes before a plain free() of the segments
 * (RealClient::tearDownAll_internal).
 */
#ifndef TIDEPOOL_OVERLAYS_H
#define TIDEPOOL_OVERLAYS_H

#include <stdbool.h>
#include <stddef.h>

struct tp_config;

/* Mooncake's own way to get memory and to give it back; `arg` is passed to both. */
struct tp_allocator {
    void *(*allocate)(void *arg, size_t alignment, size_t bytes);
    void (*release)(void *arg, void *address);
    void *arg;
    bool host_memory; /* never CUDA memory in its stead */
};

/*
 * A segment of a store: memory at addresses of its own, which free() and its like give back; where
 * free() does not come to this library, `next`'s memory, overlaid. The store half is on, and its
 * server is started. NULL: one line was logged, and the caller fails the allocation.
 */
void *tp_overlays_allocate(const struct tp_allocator *next, size_t alignment, size_t bytes,
                           const struct tp_config *config);

/*
 * `address` is about to be registered as remotely accessible by a store, from the code at `caller`.
 * Returns 0 when the registration may go on: memory that is no overlay stays Mooncake's, and one
 * line says so. Returns a negative value when the configuration says that segments must be shared
 * and this one could not be: the caller fails the registration. One line was logged.
 */
int tp_overlays_prepare(const void *caller, void *address, size_t bytes,
                        const struct tp_config *config);

/* Is this the buffer of an SSD tier that could not be made shared memory, with its line logged? Its
 * registration must fail. (hooks_restore.c) */
bool tp_restore_refused(const void *address);

/* Memory of this size is registered that was not made here. Returns true when it is the buffer of
 * an SSD tier, allocated by another library's posix_memalign(): one warning was logged.
 * (hooks_restore.c) */
bool tp_restore_missed(size_t bytes, const struct tp_config *config);

/* `engine` has registered it: publish, and remember whose it is. */
void tp_overlays_publish(const void *engine, void *address, const struct tp_config *config);

/* The same for the main program, whose registrations nobody sees: publish it under the program's
 * name, now and for good. (hooks_program.c) */
void tp_overlays_publish_program(void *address, const struct tp_config *config);

/* `engine` is another object from now on, at `now`: what it has published is that one's. */
void tp_overlays_move(const void *engine, const void *now);

/* Withdraw all that `engine` has published. */
void tp_overlays_withdraw(const void *engine);

/* Say once, in a line each, what becomes of Mooncake's modes that do not go with ours
 * (hooks_modes.c). */
void tp_modes_say(const struct tp_config *config);

/* `engine` is gone: take its overlays away. */
void tp_overlays_end(const void *engine);

#endif
