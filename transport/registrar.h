/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: a store's memory that is mapped here (memfd, tmpfs, hugetlbfs; not CUDA VMM
 * memory) registered with CUDA, chunk by chunk, so that copies run at the speed of the link.
 *
 * A chunk is held from the plan of a copy to its end, whether it is registered or not: what is held
 * is never unregistered, so a copy is what it was planned as until it has ended. A copy lies within
 * one chunk, since no copy may cross the end of a registration.
 */
#ifndef TIDEPOOL_REGISTRAR_H
#define TIDEPOOL_REGISTRAR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tp_msg_segment;
struct tp_gpu;
struct tp_chunk;
struct tp_chunks; /* those of one mapped segment */

/* Is the peer's memory to be registered (register_peer_memory)? Two loads; any thread. */
bool tp_registrar_on(void);

/*
 * The chunks of a segment that is mapped from `address` on, piece by piece (`mapped`: one flag a
 * piece, borrowed until the end); none is registered yet. NULL: off, or no
 * memory. The peer thread.
 */
struct tp_chunks *tp_chunks_new(char *address, const struct tp_msg_segment *message,
                                const atomic_uchar *mapped);

/*
 * Unregister all, a bounded slice (20 ms) a call; nothing may hold or look up its chunks any more,
 * and its memory must still be mapped. True: `chunks` is freed. *ret_stuck is then true when the
 * driver has kept a registration: the addresses must never be used for other memory, since copies
 * would go to the old pages. The peer thread; a driver call may be under way elsewhere meanwhile.
 */
bool tp_chunks_drop(struct tp_chunks *chunks, bool *ret_stuck);

/* After a tp_chunks_drop that was not the last: has only its slice ended, so that the next may
 * follow at once? The peer thread. */
bool tp_chunks_drop_goes_on(const struct tp_chunks *chunks);

/* The chunk that `address` lies in, and how many bytes from there belong to it. Any thread, while
 * the peer is held. */
struct tp_chunk *tp_chunk_at(struct tp_chunks *chunks, const void *address, uint64_t *ret_bytes);

/*
 * A submit is about to move this stretch: threads of the library begin to register its chunks while
 * there is room, all but the first, which the caller is going to hold next. Any thread.
 */
void tp_chunks_expect(struct tp_chunks *chunks, struct tp_gpu *gpu, const void *address,
                      uint64_t run_bytes);

/*
 * Hold a chunk for a copy by `gpu`. True: it is registered. False: the copy must treat it as plain
 * memory (and must not leave it either). `run_bytes`: how much of the chunk this submit is going to
 * move, as far as is known. Where there is room and that pays at once the chunk is registered in
 * this thread, which then waits for the driver, never longer than the copy of plain memory would
 * take; otherwise a thread of the library does it, later. Any thread, no lock held. One atomic add
 * when it is registered.
 */
bool tp_chunk_hold(struct tp_chunk *chunk, struct tp_gpu *gpu, uint64_t run_bytes);

/* Is a chunk that is held registered by now, so that `gpu` may use it until it is released? */
bool tp_chunk_registered(const struct tp_chunk *chunk);

/* Hold once more what is held. */
void tp_chunk_hold_again(struct tp_chunk *chunk);
void tp_chunk_release(struct tp_chunk *chunk);

/* May a kernel of this GPU use a registered chunk's addresses as they are? */
bool tp_registrar_kernel_may(struct tp_gpu *gpu);

/*
 * Pinned memory counts within register_max_bytes. share: how much of it there should be at most.
 * keep: chunks leave room for so much more, within that share. take: so much is made, if it has
 * room; chunks that are not in use may have to make it, so no lock is held. give: it is not there
 * any more.
 */
uint64_t tp_registrar_pinned_share(void);
void tp_registrar_keep_pinned(uint64_t bytes);
bool tp_registrar_take_pinned(uint64_t bytes);
void tp_registrar_give_pinned(uint64_t bytes);

/* For tests: what "about two seconds" is (chunks.c). */
void tp_registrar_set_idle_ms(unsigned ms);

/* End the threads. What is registered stays so. For tp_transport_stop. */
void tp_registrar_stop(void);

#endif
