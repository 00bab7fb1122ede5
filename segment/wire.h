/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The protocol between the processes of one host, and the names in the directory that they share.
 * Both segment/ and transport/ include it, and so does tools/; it is all that they share.
 *
 * Directory. Each process listens on a SOCK_SEQPACKET socket in the directory:
 *   s-<id>.sock  a process that publishes segments (it may be an engine as well)
 *   e-<id>.sock  an engine only: serves nothing but its counters
 *   <s|e>-<id>.lock  an empty file with an exclusive flock(2) for as long as the process lives
 * <id> is the instance id, 32 lower-case hex digits: random, since pids collide between containers.
 * A socket is bound under a temporary name (".<id>.tmp") and renamed once it listens, so a visible
 * socket answers. Whoever can take the lock of an entry removes it: lock, compare the inode with
 * the path's, unlink the socket, unlink the lock file. Sockets are reached as
 * /proc/self/fd/<dirfd>/<name>, so a path's length does not matter and the directory that was
 * checked is the one used.
 *
 * Messages. One struct tp_msg a packet, always whole, always this size, unused bytes zero. At least
 * these bytes travel with fds. A server never blocks: a client that does not read loses its
 * connection. A message of another size, magic, version or an unknown type, a range that does not
 * fit, or fds where none belong end the connection: the client loses its own lease and nothing else
 * happens.
 *
 *   client                                   server
 *   HELLO (version, identity, purpose)  ->
 *                                       <-   WELCOME (instance, name, roles) or REFUSED (reason,
 * text) purpose STATUS:                     <-   PAGE + 1 fd of the counters; then the server
 * closes purpose ATTACH:                     (WELCOME comes with 1 fd of the lease page)
 *                                       <-   NAME (again whenever the name becomes known or
 * changes)
 *                                       <-   SEGMENT for each published segment, also later ones
 *   WANT (segment, first, count)        ->
 *                                       <-   PIECES (segment, first, count) + count fds, in the
 * order of the pieces
 *                                       <-   GONE (segment) when it is taken back
 *   The connection is the lease. End of file, either way, ends it.
 *
 * Lease page. A client may read these messages late, for instance after it was stopped. So the
 * store also says in shared memory, which a client can look at without a system call, whether it
 * lives and which segments it publishes (struct tp_lease_page).
 */
#ifndef TIDEPOOL_WIRE_H
#define TIDEPOOL_WIRE_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define TP_WIRE_MAGIC UINT32_C(0x4c504454) /* "TDPL" */
#define TP_WIRE_VERSION 2
#define TP_WIRE_MAX_FDS 16       /* a message */
#define TP_WIRE_MAX_SEGMENTS 64  /* a store */
#define TP_WIRE_MAX_PIECES 65536 /* a segment */
#define TP_WIRE_HELLO_MS 2000    /* a connection that has not said HELLO by then is closed */

enum tp_msg_type {
    TP_MSG_HELLO = 1,
    TP_MSG_WELCOME,
    TP_MSG_REFUSED,
    TP_MSG_PAGE,
    TP_MSG_NAME,
    TP_MSG_SEGMENT,
    TP_MSG_WANT,
    TP_MSG_PIECES,
    TP_MSG_GONE,
};

enum tp_purpose { TP_PURPOSE_ATTACH = 1, TP_PURPOSE_STATUS };

enum tp_refusal {
    TP_REFUSED_UID = 1,
    TP_REFUSED_IDENTITY,
    TP_REFUSED_VERSION,
    TP_REFUSED_FULL,
    TP_REFUSED_ROLE
};

/* How the fds of a segment are mapped by the receiver. */
enum tp_wire_kind {
    TP_WIRE_MMAP = 1,  /* mmap(MAP_SHARED) at offset 0 of each piece's fd */
    TP_WIRE_CUMEM = 2, /* cuMemImportFromShareableHandle, cuMemMap */
};

struct tp_msg_hello {
    uint32_t purpose, pad;
    uint64_t netns; /* inode of the sender's network namespace, 0 unknown */
    uint8_t instance[16];
    char identity[96]; /* tp_host_identity of the sender */
    char program[64];
};
struct tp_msg_welcome {
    uint8_t instance[16];
    uint32_t roles, pad; /* TP_ROLE_* */
    uint64_t netns;
    char identity[96];
};
struct tp_msg_refused {
    uint32_t reason, pad;
    char text[256]; /* what the user can do */
};
struct tp_msg_name {
    char name[256]; /* NUL-terminated; empty: not known yet */
};
struct tp_msg_segment {
    uint64_t segment_id;  /* unique within the instance, never reused */
    uint64_t base;        /* first address in the store: what Mooncake's target_offset counts in */
    uint64_t bytes;       /* the published length */
    uint64_t page_bytes;  /* of the backing memory */
    uint64_t piece_bytes; /* all pieces but the last; a multiple of page_bytes */
    uint32_t piece_count;
    uint32_t kind;      /* enum tp_wire_kind */
    uint64_t map_bytes; /* sum of all pieces: bytes rounded up to page_bytes */
    uint32_t slot, pad; /* where the lease page says whether it is still published */
};
struct tp_msg_pieces { /* WANT and PIECES */
    uint64_t segment_id;
    uint32_t first, count;
};
struct tp_msg_gone {
    uint64_t segment_id;
};

/*
 * | field   | who writes it | value                     |
 * |---------|---------------|---------------------------|
 * | magic   | both          | TP_WIRE_MAGIC             |
 * | version | both          | TP_WIRE_VERSION           |
 * | type    | both          | enum tp_msg_type          |
 * | body    | both          | the struct of that type   |
 */
struct tp_msg {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    union {
        struct tp_msg_hello hello;
        struct tp_msg_welcome welcome;
        struct tp_msg_refused refused;
        struct tp_msg_name name;
        struct tp_msg_segment segment;
        struct tp_msg_pieces pieces;
        struct tp_msg_gone gone;
        uint8_t bytes[504];
    } body;
};
static_assert(sizeof(struct tp_msg) == 512, "a message is 512 bytes");
static_assert(sizeof(struct tp_msg_segment) == 64, "no padding in the wire structs");
static_assert(sizeof(struct tp_msg_hello) == 192, "no padding in the wire structs");

#define TP_LEASE_BYTES 4096 /* the size of the file */

/*
 * The lease page of a store, which engines map read-only.
 *
 * | field    | written                                                                      |
 * |----------|------------------------------------------------------------------------------|
 * | owner    | by the store's server thread while it runs: its thread id, and 0 at its end. |
 * |          | By the kernel when it has died: TP_LEASE_OWNER_DIED (segment/lease.c)        |
 * | segments | the id of the segment that is published in each slot of the store's table;   |
 * |          | 0 before anything else when it is withdrawn                                  |
 *
 * A copy into or out of a segment counts only if the page says, after the copy has ended, that the
 * store lives and publishes this segment: memory that comes to the same addresses later is
 * published only after the 0 was written, so whoever was given a place in it sees the 0.
 */
struct tp_lease_page {
    _Atomic uint32_t owner;
    uint32_t reserved[31]; /* the rest of the store's mutex */
    _Atomic uint64_t segments[TP_WIRE_MAX_SEGMENTS];
};
static_assert(sizeof(struct tp_lease_page) <= TP_LEASE_BYTES, "the page is one page");

#define TP_LEASE_OWNER_DIED UINT32_C(0x40000000) /* FUTEX_OWNER_DIED of linux/futex.h */

/*
 * Send one message with `fd_count` fds (at most TP_WIRE_MAX_FDS): MSG_NOSIGNAL, MSG_DONTWAIT.
 * `message` needs type and body only. 0, -EAGAIN when the peer does not read, or -errno. The fds
 * stay the caller's.
 */
int tp_wire_send(int socket_fd, struct tp_msg *message, const int *fds, unsigned fd_count);

/*
 * Receive one message: MSG_CMSG_CLOEXEC, never blocking. Returns 0 with *ret_message checked (size,
 * magic, version, known type, NUL-terminated strings) and up to `max_fds` fds in ret_fds, which the
 * caller then owns. Excess fds are closed and make it -EPROTO; so does truncation.
 * -EPROTONOSUPPORT: another version. -ENODATA: end of file. -EAGAIN: nothing there. -EMFILE: the
 * message's fds did not fit into this process; the message is lost.
 */
int tp_wire_receive(int socket_fd, struct tp_msg *ret_message, int *ret_fds, unsigned max_fds,
                    unsigned *ret_fd_count);

/* The size that piece `index` of this segment must have, 0 when there is no such piece. */
uint64_t tp_wire_piece_bytes(const struct tp_msg_segment *segment, uint32_t index);

/* Are all numbers of this segment possible (sizes, overflow, counts)? 0 or -EPROTO. */
int tp_wire_check_segment(const struct tp_msg_segment *segment);

/* Connect to `name` in the directory `dir_fd`; the socket is CLOEXEC and non-blocking. fd or
 * -errno. */
int tp_wire_connect(int dir_fd, const char *name);

/* Parse a directory entry: returns 's' or 'e' and the instance id for "<s|e>-<32 hex>.sock", 0 for
 * anything else. */
char tp_wire_parse_name(const char *name, uint8_t ret_instance[static 16]);

/* Has a message come that nobody has read yet, or the end? One system call. */
bool tp_wire_unread(int socket_fd);

/*
 * May this uid be our peer? root, our own, or listed in TIDEPOOL_ALLOW_UIDS. Reads SO_PEERCRED of
 * the socket. 0, -EACCES, or -errno; *ret_uid and *ret_pid (either may be NULL) are set whenever
 * the credentials could be read.
 */
struct tp_config;
int tp_wire_check_peer(int socket_fd, const struct tp_config *config, uint32_t *ret_uid,
                       int32_t *ret_pid);

#endif
