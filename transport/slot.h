/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: what a peer's slot holds. The peer thread (finder.c) is the only writer;
 * peer.c and route.c read from any thread, under a reference.
 *
 * | field                           | written                                                |
 * |---------------------------------|--------------------------------------------------------|
 * | generation                      | last when a peer attaches, first (0) when it is lost   |
 * | alive                           | before the generation; false at once at end of file    |
 * | name, self, lease               | before the generation; lease is unmapped without       |
 * |                                 | references                                             |
 * | segments[].state                | LIVE after the entry's other fields; GONE at once when |
 * |                                 | withdrawn; DROPPED without references; EMPTY when      |
 * |                                 | unmapped                                               |
 * | segments[].opened[i], mapped[i] | after piece i is mapped, in this order                 |
 * | segments[].open_to_all          | when all are mapped, and again when one was opened     |
 * | refs, missed[i], tickets        | by any thread                                          |
 */
#ifndef TIDEPOOL_SLOT_H
#define TIDEPOOL_SLOT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "segment/wire.h"
#include "transport/names.h"
#include "transport/peer.h"

enum tp_segment_state {
    TP_SEGMENT_EMPTY,
    TP_SEGMENT_LIVE,
    TP_SEGMENT_GONE,
    TP_SEGMENT_DROPPED, /* being unmapped: nobody looks at it any more */
};

enum tp_piece_stage {
    TP_PIECE_ABSENT,
    TP_PIECE_ASKED, /* for its fd, or being mapped */
    TP_PIECE_MAPPED,
    TP_PIECE_OPENING, /* to more GPUs */
    TP_PIECE_FAILED,  /* could not be mapped; absent again at the next retry */
    TP_PIECE_LOST,    /* could not be mapped, and its addresses may be somebody else's now */
};

struct tp_peer_segment {
    _Atomic uint32_t state; /* enum tp_segment_state */
    _Atomic uint32_t mapped_count;
    atomic_uchar *mapped; /* one a piece */
    /* Requests that missed a piece take a ticket for it, the first one only: pieces come in the
     * order of first use. */
    _Atomic uint32_t tickets;
    _Atomic uint32_t *missed;     /* one a piece: its ticket, 0: none */
    _Atomic uint64_t *opened;     /* CUDA memory, one a piece: GPUs that may reach it, a bit each */
    _Atomic uint64_t open_to_all; /* GPUs that may reach every piece */
    char *_Atomic address;        /* where the store's `base` lies here; NULL: nowhere yet */
    struct tp_msg_segment message;
    struct tp_chunks *_Atomic chunks; /* registered with CUDA or to be (registrar.h); NULL: never */

    /* The peer thread's own: */
    char *reserved; /* the whole reservation; `address` is its first aligned byte */
    uint64_t reserved_bytes;
    uint32_t next_piece;     /* to ask for, when nothing is wanted */
    uint32_t prefault_piece; /* where the background work on page tables is */
    uint64_t prefault_offset;
    uint32_t tickets_seen; /* no piece with a ticket up to this one waits */
    uint32_t next_open;    /* CUDA memory: pieces before it are open to all of peer->opening */
    uint8_t *stages;       /* one a piece: enum tp_piece_stage */
    unsigned drop_tries;   /* CUDA memory: times that the driver has refused to unmap it */
    uint32_t drop_next;    /* CUDA memory: the piece that is unmapped next */
    bool drop_refused;     /* CUDA memory: the driver refused to unmap a piece before it */
};

struct tp_peer {
    _Alignas(64) _Atomic uint64_t generation; /* 0: not to be used */
    _Atomic bool alive;
    bool self;
    bool retry;           /* the peer thread's: something failed, and is tried again at retry_ms */
    uint8_t retry_wait_s; /* the peer thread's: the last wait */
    struct tp_name *_Atomic name;
    const struct tp_lease_page *lease; /* the store's, mapped read-only; what it says is hostile */
    _Atomic uint32_t segment_high;     /* entries beyond it were never used */
    unsigned jobs;                     /* the peer thread's: with the import threads */
    _Atomic uint64_t devices_wanted;   /* by any thread: GPUs that were asked about, a bit each */
    /* The peer thread's own: */
    uint64_t opening; /* GPUs that get access to every piece */
    uint64_t shut;    /* GPUs that the driver refused; none any more at the next retry */
    _Alignas(64) _Atomic uint32_t refs;
    uint64_t retry_ms; /* the peer thread's */
    _Alignas(64) struct tp_peer_segment segments[TP_WIRE_MAX_SEGMENTS];
};

extern struct tp_peer tp_peers[TP_PEERS];

/* For the peer thread: give every live peer a new generation and raise the epoch, so that all names
 * are looked up again. */
void tp_peer_names_changed(void);

/* For the peer thread: let the slot be found / no longer be used by anyone new. */
void tp_peer_publish(struct tp_peer *peer, struct tp_name *name, bool self);
void tp_peer_kill(struct tp_peer *peer);

/* ---- import.c: the mappings of a segment; the peer thread only ---- */

/* Put a checked segment into an empty entry. Its addresses come later (tp_import_ready). 0 or
 * -ENOMEM. */
int tp_import_begin(struct tp_peer_segment *segment, const struct tp_msg_segment *message);

/*
 * Map piece `index` from `fd` (which stays the caller's): at once, or for CUDA memory by an import
 * thread. -EPROTO: the fd is not what the store promised. Or -errno: the piece is asked for anew
 * later.
 */
int tp_import_piece(struct tp_peer *peer, struct tp_peer_segment *segment, uint32_t index, int fd);

/*
 * Have what has failed of this peer asked for anew, once it has waited long enough: pieces,
 * addresses, GPUs' access. After 1 s, then ever later, after 30 s at most; what fails after a long
 * time without failures begins at 1 s again.
 */
void tp_import_retry(struct tp_peer *peer, uint64_t now_ms);

/* Take what an import thread has done. */
struct tp_import_job;
void tp_import_ended(const struct tp_import_job *job);

/*
 * The pieces to ask the store for next: those that requests have missed, in the order of first
 * use, then, unless `missed_only`, the others in theirs. *ret_count 0: none. They count as asked.
 */
void tp_import_next(struct tp_peer *peer, struct tp_peer_segment *segment, bool missed_only,
                    uint32_t most, uint32_t *ret_first, uint32_t *ret_count);

/*
 * Have a mapped piece of CUDA memory opened to the GPUs that this process uses, or has asked
 * about, and that may not reach it yet; order as above. false: there is none.
 */
bool tp_import_open(struct tp_peer *peer, struct tp_peer_segment *segment, bool missed_only);

/* Fill page tables of mapped pieces ahead of use, one bounded slice a call. true: there is more to
 * do now. */
bool tp_import_prefault(struct tp_peer_segment *segment);

/*
 * May pieces of this segment be asked for? Not before there are addresses for it, for which this
 * looks, and looks again later where there were none. CUDA memory waits until the process has
 * initialised CUDA, or until a request has missed a piece: then CUDA is initialised here. Looks
 * which GPUs the process uses.
 */
bool tp_import_ready(struct tp_peer *peer, struct tp_peer_segment *segment);

/*
 * Unmap and free everything; nothing may refer to it. The entry is empty then, or it is not yet:
 * what is registered with CUDA is let go in bounded slices, CUDA memory is unmapped in what is left
 * of this turn, what the driver refuses is tried again, and one more call is needed. *ret_busy is
 * set when that may come at once.
 */
void tp_import_drop(struct tp_peer_segment *segment, bool *ret_busy);

/* A turn of the peer thread begins: the time in which it may unmap CUDA memory, of all stores
 * together. One piece is unmapped in any case. */
void tp_import_turn(unsigned unmap_ms);

#endif
