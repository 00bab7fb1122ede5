/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: copies between GPU memory and host memory of this process, on streams of the
 * library's own.
 *
 * It must not know: batches, peers, Mooncake. Copies of one device, direction and method (copy
 * engine or kernel) gather in a wave; a wave goes out as one call when it is full, when somebody
 * asks for one of its copies, 2 ms after it was opened, or at once unless submits are being
 * deferred. A wave lives until every group that has copies in it has let go.
 */
#ifndef TIDEPOOL_COPY_DEVICE_H
#define TIDEPOOL_COPY_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "env/cuda.h"
#include "transport/copy_host.h"
#include "transport/staging.h"

#define TP_DEVICES TP_CUDA_DEVICES
#define TP_DEVICE_GROUPS                                                                           \
    4 /* devices x directions x kinds of host memory in one submit; nearly always one */

struct tp_wave;
struct tp_chunk;

/* Copies of one submit that go the same way. */
struct tp_device_group {
    int device;
    bool to_device;
    bool host_mapped; /* the GPU can read and write the host side by itself (CUDA VMM or registered
                         memory) */
    struct tp_copy_op *ops;
    struct tp_chunk **chunks; /* of the host side, one an op; NULL: none. One hold for neighbours
                                 in the same */
    uint32_t op_count, op_room;
    struct tp_wave **waves; /* after start */
    uint32_t wave_count, wave_room;
    struct tp_stage_job staged; /* copies that go by way of pinned slots instead */
    bool failed;                /* some copies found no wave */
};

struct tp_device_job {
    struct tp_device_group groups[TP_DEVICE_GROUPS];
    uint32_t group_count;
    /* Where the allocation of GPU memory begins in which copies lie that are added from now on, as
     * far as the caller knows; 0: they lie in one. A copy is merged only with what lies behind
     * this: the driver refuses copies that go on beyond an allocation's end, though another one
     * begins there (seen with 580.159 on an H200: INVALID_VALUE). */
    uintptr_t gpu_start;
    uint64_t submitted_ms; /* copies from a GPU that start late are refused (stall.h); 0: none is */
    uint32_t hits, misses; /* requests whose host memory is in chunks, all registered or not */
};

enum tp_device_state { TP_DEVICE_RUNNING, TP_DEVICE_DONE, TP_DEVICE_FAILED };

/*
 * Append a copy; `device` is the GPU of the device side. *ret_group is the group it lies in. Merged
 * with the copy before when it continues that at both ends. 0, -ENODEV (this GPU cannot be used: no
 * active primary context, or the driver lacks what is needed), -ENOSPC (too many groups) or
 * -ENOMEM; the job is then unchanged. Takes no lock once the device is known.
 */
int tp_device_add(struct tp_device_job *job, int device, bool to_device, bool host_mapped, void *to,
                  const void *from, size_t bytes, uint8_t *ret_group);

/*
 * The same for host memory in chunks (registrar.h): `chunk` is where the host side lies in, all of
 * it, and is held until the copy has ended; the caller keeps a hold of its own. tp_device_reserve
 * makes room beforehand, so that `count` of them cannot fail.
 */
int tp_device_reserve(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                      uint32_t count);
int tp_device_add_chunk(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                        struct tp_chunk *chunk, void *to, const void *from, size_t bytes,
                        uint8_t *ret_group);

/*
 * The same for host memory that the GPU shall not reach by itself: staged (tp_stage_ready has said
 * yes). Nothing is held. reserve: for `count` copies of so many bytes.
 */
int tp_device_reserve_staged(struct tp_device_job *job, int device, bool to_device,
                             bool host_mapped, uint64_t bytes, uint32_t count);
int tp_device_add_staged(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                         char *host, char *here, uint64_t bytes, uint8_t *ret_group);

/* Is this chunk held by the copy that was added last of those that go this way? Then another one
 * needs no hold by the caller. */
bool tp_device_holds(struct tp_device_job *job, int device, bool to_device, bool host_mapped,
                     const struct tp_chunk *chunk);

/* Hand all copies to their waves. Calls the driver when a wave goes out; no lock is held meanwhile.
 */
void tp_device_start(struct tp_device_job *job);

/* The state of a group (of all: TP_DEVICE_GROUPS) as far as it is known: two loads a wave, no
 * driver call. */
enum tp_device_state tp_device_look(const struct tp_device_job *job, unsigned group);

/* Ask the driver, and send waves out that are still gathering. At most one query every few
 * microseconds a wave. */
void tp_device_poll(struct tp_device_job *job);

/*
 * Ask the driver about all waves that were sent, so that what has ended lets go of its chunks
 * though nobody polls. How many have ended. Any thread.
 */
unsigned tp_device_sweep(void);

/* Let go of the waves and forget the copies; only when tp_device_look no longer says RUNNING. Keeps
 * the arrays. */
void tp_device_reset(struct tp_device_job *job);
void tp_device_release(struct tp_device_job *job);

/* What the first copies of a GPU need (pinned memory, events, and the thread that sends waves out
 * after a bounded time), made in the background. */
struct tp_gpu;
void tp_device_prepare(struct tp_gpu *gpu);

/* Between begin and end, submits of this thread gather in waves; end sends out what has gathered.
 * Nest. */
void tp_device_defer_begin(void);
void tp_device_defer_end(void);

#endif
