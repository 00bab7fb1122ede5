/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The counters of this process in one shared page (a sealed memfd) that `tidepool status` reads
 * from outside. The fd travels over the process's socket, so containers need to share nothing but
 * the directory.
 *
 * It must not know: how the page travels, Mooncake, CUDA.
 *
 * The page's layout is shared between versions of the library: magic, version and size come first
 * and are checked by readers (tp_stats_view). Everything in it is written by its own process and
 * hostile to a reader: strings may lack a NUL, counts may be out of range; tp_stats_view copies and
 * bounds all of them.
 *
 * | field            | written by            | when                                     |
 * |------------------|-----------------------|------------------------------------------|
 * | header, instance | tp_stats_page         | once, before the fd can be seen          |
 * | roles, name      | shim                  | when a half starts, when the name is known |
 * | conditions       | any thread            | tp_stats_condition                       |
 * | counters         | any thread            | relaxed atomic adds                      |
 * | segments[]       | segment               | under its lock; `state` is written last  |
 * | clients[]        | segment's server      | its thread only; `state` is written last |
 * | peers[]          | transport's peer      | its thread only; `state` is written last |
 * | events[]         | tp_stats_event        | a ring of the last messages              |
 * | misses[]         | transport's peer      | its thread only; `state` is written last |
 */
#ifndef TIDEPOOL_STATS_H
#define TIDEPOOL_STATS_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TP_STATS_MAGIC UINT64_C(0x3153544154535054) /* "TPSTATS1", little-endian */
#define TP_STATS_VERSION 2
#define TP_STATS_SEGMENTS 64
#define TP_STATS_CLIENTS 64
#define TP_STATS_PEERS 64
#define TP_STATS_EVENTS 16
#define TP_STATS_MISSES 64

enum tp_counter {
#define TP_COUNTER(identifier, json_name, unit, meaning) TP_##identifier,
#include "counters.def"
#undef TP_COUNTER
    TP_COUNTER_COUNT
};

enum { TP_ROLE_STORE = 1, TP_ROLE_ENGINE = 2 };

/* What is wrong in a process as a whole, a bit each. */
enum tp_condition {
    TP_CONDITION_UNNAMED = 1,        /* publishes memory, and peers' name for it is not known */
    TP_CONDITION_SEVERAL_STORES = 2, /* several stores with memory, and one name for all */
    TP_CONDITION_LENDS_UNSHARED = 4, /* lends memory to Mooncake, and is no store of Tidepool's */
};

enum tp_slot_state { TP_SLOT_EMPTY, TP_SLOT_STARTING, TP_SLOT_LIVE, TP_SLOT_GONE };

struct tp_stats_segment {
    _Atomic uint32_t state; /* enum tp_slot_state: STARTING allocated, LIVE published */
    uint32_t kind;          /* enum tp_segment_kind */
    uint64_t base, bytes, page_bytes, piece_bytes;
    uint32_t pieces, nodes; /* nodes: how many NUMA nodes the pieces are spread over */
    char detail[64];        /* "memfd, THP", "hugetlbfs /dev/hugepages" */
};

struct tp_stats_client {
    _Atomic uint32_t state;
    uint32_t uid;
    int32_t pid; /* as SO_PEERCRED shows it here: a hint */
    uint32_t pieces_sent;
    uint64_t since_s; /* CLOCK_REALTIME seconds */
};

struct tp_stats_peer {
    _Atomic uint32_t state;
    uint32_t pieces, pieces_mapped, segments;
    _Atomic uint64_t read_bytes, write_bytes;
    uint64_t since_s;
    uint8_t instance[16];
    char name[128]; /* the endpoint by which Mooncake opens it */
    char path[128]; /* the chosen path in words: "shared memory (memfd)" */
};

struct tp_stats_event {
    _Atomic uint64_t time_s; /* 0: empty */
    char text[248];
};

/* A name whose requests fell back because no attached store bears it (TP_FALLBACK_NO_PEER). */
struct tp_stats_miss {
    _Atomic uint32_t state; /* TP_SLOT_EMPTY or TP_SLOT_LIVE */
    uint32_t unused;
    _Atomic uint64_t requests, bytes;
    char name[128]; /* the endpoint by which Mooncake opened it */
};

struct tp_stats_page {
    uint64_t magic;
    uint32_t version, size_bytes;
    uint8_t instance[16];
    int32_t pid;
    uint32_t uid;
    uint64_t start_s; /* CLOCK_REALTIME seconds */
    _Atomic uint32_t roles;
    uint32_t counter_count;
    char library_version[16];
    char program[64];  /* comm or script, for people */
    char hostname[64]; /* the container's, for people */
    char name[128];    /* the endpoint by which peers open this process, once known */
    _Atomic uint64_t counters[128];
    struct tp_stats_segment segments[TP_STATS_SEGMENTS];
    struct tp_stats_client clients[TP_STATS_CLIENTS];
    struct tp_stats_peer peers[TP_STATS_PEERS];
    struct tp_stats_event events[TP_STATS_EVENTS];
    struct tp_stats_miss misses[TP_STATS_MISSES];
    _Atomic uint32_t conditions; /* enum tp_condition */
};
static_assert(TP_COUNTER_COUNT <= 128, "the page has room for 128 counters");
static_assert(offsetof(struct tp_stats_page, counters) ==
                  8 + 4 + 4 + 16 + 4 + 4 + 8 + 4 + 4 + 16 + 64 + 64 + 128,
              "the layout is shared between versions: no padding before the counters");

/*
 * This process's page. Before tp_stats_open it is a private static page, so counting always works
 * and never allocates. Never NULL. Any thread. A forked child gets a page of its own that nobody
 * reads.
 */
struct tp_stats_page *tp_stats_page(void);

/*
 * Move the page into a memfd (once, in place: pointers into the page stay right, and no count is
 * lost) and return an fd of it, owned by the library, for passing to readers; sealed against
 * resizing and against new writable mappings. 0 or -errno, on which counting goes on privately. Any
 * thread, but not while another writes slots (segments, clients, peers) or the name for the first
 * time: a write during the move itself may be lost. So: open first, then fill.
 */
int tp_stats_open(int *ret_fd);

/* Add to a counter: one relaxed atomic add. Any thread, any time (also inside hooks of libc). */
void tp_count(enum tp_counter counter, uint64_t amount);

/* Set or clear a condition. Any thread. */
void tp_stats_condition(enum tp_condition condition, bool holds);

/* Record a message for `tidepool status` (the last 16 are kept). tp_log calls it for errors and
 * warnings. Any thread. */
void tp_stats_event(const char *text);

/* json_name, unit and meaning of a counter; static storage. */
struct tp_counter_info {
    const char *name, *unit, *meaning;
};
extern const struct tp_counter_info tp_counter_infos[TP_COUNTER_COUNT];

/*
 * For readers: check that `fd` is a memfd and its size, magic and version, and copy the page to
 * *ret_page with every string terminated and every count bounded. It is read, never mapped: no
 * truncation can raise SIGBUS. 0, -EPROTO for a page that is not one, -EPROTONOSUPPORT for another
 * version, or -errno.
 */
int tp_stats_view(int fd, struct tp_stats_page *ret_page);

#endif
