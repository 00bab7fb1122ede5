/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store in a process of its own that speaks the protocol, and can be told to speak it badly. Its
 * memory is shared with the test, so that the test sees every byte without the library.
 */
#ifndef TIDEPOOL_FAKE_STORE_H
#define TIDEPOOL_FAKE_STORE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "env/env.h"
#include "segment/wire.h"

#define FAKE_BASE UINT64_C(0x700000000000) /* where the store says its segment lies */
#define FAKE_PIECES_MAX 64
#define FAKE_SEGMENT 7 /* its id */
#define FAKE_SLOT 3
#define FAKE_SECOND_BASE (FAKE_BASE + (UINT64_C(2) << 30)) /* of segment FAKE_SEGMENT + 1 */

enum fake_manner {
    FAKE_GOOD,
    FAKE_SILENT,         /* accepts and says nothing */
    FAKE_OTHER_HOST,     /* another identity */
    FAKE_OTHER_INSTANCE, /* not the id of its socket */
    FAKE_NO_PIECES,      /* publishes, never answers WANT */
    FAKE_SMALL_PIECE,    /* a memfd shorter than promised */
    FAKE_UNSEALED,       /* a memfd that can be cut off */
    FAKE_UNSEALABLE,     /* a memfd that could never be sealed */
    FAKE_DISK_FILE,      /* a file that is no memory */
    FAKE_TMPFS_FILE,     /* what a store on tmpfs sends */
    FAKE_UNASKED,        /* PIECES that nobody wanted */
    FAKE_BAD_SEGMENT,    /* numbers that cannot be */
    FAKE_NOISE,          /* random bytes */
    FAKE_EARLY,          /* SEGMENT before WELCOME */
    FAKE_FULL,           /* refuses the first two as it is full, then is good */
    FAKE_RENAMES,        /* as many names as are free, then later one for each second */
    FAKE_NAME_FLOOD,     /* more names than anybody needs */
    FAKE_GONE,           /* withdraws its segment some time after the pieces went */
    FAKE_SEGMENT_FIRST,  /* says its name last */
    FAKE_NAMED_ANEW,     /* has another name until its pieces went */
    FAKE_HANGS_UP,       /* ends the first connection once the pieces went */
    FAKE_TWO_SEGMENTS,   /* the same memory once more, at FAKE_SECOND_BASE */
    FAKE_NO_LEASE,       /* no lease page with the welcome */
    FAKE_SHORT_LEASE,    /* a lease page that is none */
    FAKE_UNSEALED_LEASE, /* one that can be cut off */
};

struct fake_store {
    pid_t pid;
    uint8_t *memory; /* the test's view of all pieces in a row */
    uint64_t bytes, piece_bytes;
    uint32_t pieces;
    struct tp_lease_page *lease; /* the store's lease page: the test may withdraw without a word */
    char socket_path[256];
};

struct fake_options {
    const char *name;
    uint64_t bytes;       /* default 4 MiB */
    uint64_t piece_bytes; /* default: one piece */
    uint64_t base;        /* default FAKE_BASE */
    enum fake_manner manner;
    unsigned gone_ms;   /* FAKE_GONE: that time; default 200 */
    unsigned greet_ms;  /* how long its answer is waited for; default 0 */
    unsigned pieces_ms; /* how long pieces are waited for; default 0 */
};

/* A configuration whose engine half looks in a fresh directory. */
struct tp_config *fake_config(void);

void fake_start(struct fake_store *store, const struct tp_config *config,
                const struct fake_options *options);
/* SIGKILL; waits for the end. Its socket file stays, as after a crash. */
void fake_kill(struct fake_store *store);
/* Also remove the socket file and the test's view. */
void fake_end(struct fake_store *store);

#endif
