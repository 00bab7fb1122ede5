/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store's side: memory that other processes of this host can map, the table of published
 * ranges, and the server that hands them out. The public header of segment/.
 *
 * It must not know: Mooncake's names, who calls it, or what engines do with the memory.
 *
 * Thread-safety: every function may be called from any thread; the table has one lock, never held
 * while memory is being populated, while anything is logged, or while CUDA is called.
 */
#ifndef TIDEPOOL_SEGMENT_H
#define TIDEPOOL_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tp_config;

/*
 * The page size of the memory that `config` asks for: what addresses given to tp_segment_overlay
 * must be multiples of. 4096 where it cannot be told; tp_segment_overlay says why. Makes the
 * segment directory when it is missing.
 */
size_t tp_segment_page_bytes(const struct tp_config *config);

/*
 * Lay shareable memory over [address, address + bytes): MAP_FIXED mappings of memfds or files
 * (config->store.kind), piece by piece, round-robin over the NUMA nodes, populated in parallel
 * before it returns. The mapping's owner stays whoever allocated it: malloc's header lies in the
 * page before and free() still works (UPSTREAM.md). For memory that exists already; CUDA memory
 * cannot be laid over it, and with TP_SEGMENT_CUMEM the pieces are memfds.
 *
 * `address` must be aligned to the page size of the backing memory (4 KiB for memfd and tmpfs, the
 * mount's for hugetlbfs), and no page of the range may be shared with anything else; -EINVAL
 * otherwise. Only whole pages are laid over and published: a partial last page stays what it was,
 * and requests that reach into it are left to Mooncake. With `keep_contents`, resident contents are
 * copied into the new memory first; nothing else may write meanwhile.
 *
 * 0 or -errno; on failure the range is as it was, one line was logged that says what failed, with
 * which value and what to do, and TP_SEGMENT_FAILURES was counted. -EADDRINUSE is neither logged
 * nor counted: a segment of an earlier store has had some of these addresses (addresses.h), and the
 * memory must not be published.
 */
int tp_segment_overlay(void *address, size_t bytes, bool keep_contents,
                       const struct tp_config *config);

/*
 * Make a segment at addresses of its own, which stands in for the caller's allocation: of CUDA VMM
 * host memory (`cumem`; config->store.kind is TP_SEGMENT_CUMEM), else of what an overlay is made
 * of. No segment has had these addresses before, in this process or in earlier stores of the
 * directory. `bytes` are rounded up to whole pages; `alignment` is a power of two. The rest is as
 * above; from then on everything below takes *ret_address like an overlay's. -EADDRNOTAVAIL,
 * neither logged nor counted, when the system gives no addresses for host memory.
 */
int tp_segment_allocate(size_t bytes, size_t alignment, bool cumem, const struct tp_config *config,
                        void **ret_address);

/*
 * Let the GPUs that this process uses by now reach what tp_segment_allocate has made: the host
 * process's own copies between the two need not succeed without (cuMemSetAccess in the CUDA driver
 * API; an H200 with driver 580 did them all the same). To be called when there may be more of
 * either. Makes no context; a few driver calls where there is nothing to do.
 */
void tp_segment_open_to_gpus(void);

/*
 * Give back memory that tp_segment_allocate has made, whoever asks with whatever function: true
 * when `address` was the start of such a segment, which is gone then (a forked child's stays). An
 * overlay that starts there is taken away first: false, the memory is its allocator's. Three
 * compares for all other addresses. Neither logs nor allocates; errno is preserved: usable in
 * `free`. While another thread takes this segment away it waits, as tp_segment_restore does: the
 * memory may be given back after that.
 */
bool tp_segment_free(void *address);

/*
 * Put anonymous memory back in place of the overlay that starts at `address` (contents are lost;
 * whoever calls this is about to free it), withdraw it if it is published, and forget it. 0, or
 * -ENOENT when there is no overlay at this address. What tp_segment_allocate has made is only
 * withdrawn: tp_segment_free ends it.
 */
int tp_segment_restore(void *address);

/*
 * The allocator has just handed out [address, address + bytes): overlays that are known there were
 * freed unseen. They are withdrawn and forgotten; the addresses are left as they are.
 */
void tp_segment_forget(const void *address, size_t bytes);

/* Is `address` inside an overlay? A lock-free look at the table: usable on every registration. */
bool tp_segment_contains(const void *address);

/*
 * Memory is about to be made known to peers: if a segment was withdrawn from there, wait until the
 * connected engines know, some seconds at most. False, with one line logged, when one of them still
 * does not: it may copy into the old pages whatever is told to be there now, so the memory must not
 * be made known. Publishing asks by itself; to be called for memory that is not ours, which
 * Mooncake would serve there. Any thread.
 */
bool tp_segment_settle(const void *address, size_t bytes);

/*
 * Publish the overlay that starts at `address`: from now on engines are told of it. The first call
 * starts the server. 0, -ENOENT (no overlay there), or -errno with one line logged: -EBUSY when
 * tp_segment_settle says no.
 */
int tp_segment_publish(void *address, const struct tp_config *config);

/* Withdraw a published overlay (the memory stays): connected engines are told. 0 or -ENOENT. */
int tp_segment_withdraw(void *address);

/*
 * The name by which peers open this process (Mooncake's endpoint). Told to connected engines at
 * once. `name` is copied; more than 255 characters: -ENAMETOOLONG.
 */
int tp_server_set_name(const char *name);

/*
 * Listen in the half's directory: for a store as s-<id>, for an engine alone as e-<id> (it then
 * serves its counters only). Idempotent; a store call after an engine call adds the store's socket.
 * Removes stale entries first. 0 or -errno with one line logged. A failure for an engine alone is
 * no error for its transfers: the engine is merely not visible to `tidepool status`. `config` is
 * copied by the call that starts the thread; what it says of sockets and peers holds until the
 * stop.
 */
int tp_server_start(bool store, const struct tp_config *config);

/* Close all connections, remove this process's entries from the directory, end the thread. Safe to
 * call twice, or never. */
void tp_server_stop(void);

/*
 * Remove from the directory what dead processes left there: entries whose lock can be taken, and
 * temporary names that nobody renamed. Never those of a live process. Returns how many names were
 * swept. tp_server_start does it; `tidepool status` too.
 */
unsigned tp_server_sweep(int dir_fd);

#endif
