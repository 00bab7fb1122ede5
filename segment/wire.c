/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between the processes of one host: sending, receiving and checking them. Both sides use
 * it.
 *
 * It must not know: what a segment is made of, who is connected, what a message leads to.
 *
 * Everything that arrives is hostile. A received message is either whole and plausible, with
 * exactly the fds that its type carries, or it is an error and no fd is left open.
 */
#include "segment/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "env/env.h"

#define ID_DIGITS 32

/* How many bytes of the body a type uses; the rest must be zero. 0: unknown type. PAGE has no body:
 * 1 byte, zero. */
static size_t body_bytes(uint16_t type) {
    switch (type) {
    case TP_MSG_HELLO:
        return sizeof(struct tp_msg_hello);
    case TP_MSG_WELCOME:
        return sizeof(struct tp_msg_welcome);
    case TP_MSG_REFUSED:
        return sizeof(struct tp_msg_refused);
    case TP_MSG_PAGE:
        return 1;
    case TP_MSG_NAME:
        return sizeof(struct tp_msg_name);
    case TP_MSG_SEGMENT:
        return sizeof(struct tp_msg_segment);
    case TP_MSG_WANT:
    case TP_MSG_PIECES:
        return sizeof(struct tp_msg_pieces);
    case TP_MSG_GONE:
        return sizeof(struct tp_msg_gone);
    default:
        return 0;
    }
}

int tp_wire_send(int socket_fd, struct tp_msg *message, const int *fds, unsigned fd_count) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * TP_WIRE_MAX_FDS)];
    } control;
    size_t used = body_bytes(message->type);
    if (used == 0 || fd_count > TP_WIRE_MAX_FDS)
        return -EINVAL;
    message->magic = TP_WIRE_MAGIC;
    message->version = TP_WIRE_VERSION;
    if (message->type == TP_MSG_PAGE)
        used = 0;
    memset(message->body.bytes + used, 0, sizeof message->body - used);

    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count > 0) {
        memset(&control, 0, sizeof control);
        packet.msg_control = control.bytes;
        packet.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    ssize_t sent;
    do {
        sent = sendmsg(socket_fd, &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0)
        return -errno;
    return sent == (ssize_t)sizeof *message ? 0 : -EIO;
}

static bool terminated(const char *text, size_t bytes) {
    return memchr(text, 0, bytes) != NULL;
}

static bool strings_end(const struct tp_msg *message) {
    switch (message->type) {
    case TP_MSG_HELLO:
        return terminated(message->body.hello.identity, sizeof message->body.hello.identity) &&
               terminated(message->body.hello.program, sizeof message->body.hello.program);
    case TP_MSG_WELCOME:
        return terminated(message->body.welcome.identity, sizeof message->body.welcome.identity);
    case TP_MSG_REFUSED:
        return terminated(message->body.refused.text, sizeof message->body.refused.text);
    case TP_MSG_NAME:
        return terminated(message->body.name.name, sizeof message->body.name.name);
    default:
        return true;
    }
}

/* A packet of `got` bytes lies in *message (as much of it as fits). */
static int check_message(const struct tp_msg *message, size_t got, bool cut, unsigned fd_count) {
    if (got < offsetof(struct tp_msg, body) || message->magic != TP_WIRE_MAGIC)
        return -EPROTO;
    /* Before the size: another version may have messages of another size. */
    if (message->version != TP_WIRE_VERSION)
        return -EPROTONOSUPPORT;
    size_t used = body_bytes(message->type);
    if (got != sizeof *message || cut || used == 0 || !strings_end(message))
        return -EPROTO;
    if (message->type == TP_MSG_PAGE)
        used = 0;
    for (size_t i = used; i < sizeof message->body; i++) {
        if (message->body.bytes[i] != 0)
            return -EPROTO;
    }
    /* WELCOME comes with the lease page for those who attach, and without for others. */
    if (message->type == TP_MSG_WELCOME)
        return fd_count <= 1 ? 0 : -EPROTO;
    unsigned expected = message->type == TP_MSG_PAGE ? 1 : 0;
    if (message->type == TP_MSG_WANT || message->type == TP_MSG_PIECES) {
        uint32_t count = message->body.pieces.count;
        if (count == 0 || count > TP_WIRE_MAX_FDS)
            return -EPROTO;
        if (message->type == TP_MSG_PIECES)
            expected = count;
    }
    return fd_count == expected ? 0 : -EPROTO;
}

/* Collect the fds of a packet; those that do not fit are closed and make it an error. */
static int collect_fds(struct msghdr *packet, int fds[static TP_WIRE_MAX_FDS], unsigned *count) {
    int result = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(packet); header != NULL;
         header = CMSG_NXTHDR(packet, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
            if (*count < TP_WIRE_MAX_FDS) {
                fds[(*count)++] = fd;
            } else {
                close(fd);
                result = -EPROTO;
            }
        }
    }
    /* Cut off with room left: this process could not take more fds (scm_detach_fds in
     * net/core/scm.c stops at the first that it cannot install), and the sender is not to blame. */
    if (result == 0 && (packet->msg_flags & MSG_CTRUNC) != 0)
        result = *count < TP_WIRE_MAX_FDS ? -EMFILE : -EPROTO;
    return result;
}

static ssize_t receive_packet(int socket_fd, struct msghdr *packet, size_t control_bytes) {
    ssize_t got;
    unsigned resets = 0;
    do {
        packet->msg_controllen = control_bytes;
        got = recvmsg(socket_fd, packet, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        /*
         * A peer that closes with something of ours unread leaves ECONNRESET in front of what it
         * had sent before (net/unix: unix_release_sock sets sk_err, and the error is taken first):
         * the next call has the message or the end.
         */
    } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    return got;
}

int tp_wire_receive(int socket_fd, struct tp_msg *ret_message, int *ret_fds, unsigned max_fds,
                    unsigned *ret_fd_count) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * TP_WIRE_MAX_FDS)];
    } control;
    struct tp_msg message;
    int fds[TP_WIRE_MAX_FDS];
    unsigned count = 0;
    struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes};

    ssize_t got = receive_packet(socket_fd, &packet, sizeof control.bytes);
    if (got < 0)
        return errno == ECONNRESET ? -ENODATA : -errno;
    int result = collect_fds(&packet, fds, &count);
    if (result == 0 && got == 0)
        result = -ENODATA;
    if (result == 0)
        result = check_message(&message, (size_t)got, (packet.msg_flags & MSG_TRUNC) != 0, count);
    if (result == 0 && count > max_fds)
        result = -EPROTO;
    if (result != 0) {
        for (unsigned i = 0; i < count; i++)
            close(fds[i]);
        return result;
    }
    *ret_message = message;
    if (count > 0)
        memcpy(ret_fds, fds, count * sizeof *fds);
    if (ret_fd_count != NULL)
        *ret_fd_count = count;
    return 0;
}

uint64_t tp_wire_piece_bytes(const struct tp_msg_segment *segment, uint32_t index) {
    if (index >= segment->piece_count)
        return 0;
    if (index + 1 < segment->piece_count)
        return segment->piece_bytes;
    return segment->map_bytes - segment->piece_bytes * (segment->piece_count - 1);
}

int tp_wire_check_segment(const struct tp_msg_segment *segment) {
    const uint64_t page = segment->page_bytes;
    const uint64_t piece = segment->piece_bytes;
    const uint64_t map = segment->map_bytes;
    const uint64_t user_top = UINT64_C(1)
                              << 56; /* 5-level page tables: no user address lies above */
    if (segment->segment_id == 0 || segment->piece_count == 0 ||
        segment->piece_count > TP_WIRE_MAX_PIECES)
        return -EPROTO;
    if (segment->kind != TP_WIRE_MMAP && segment->kind != TP_WIRE_CUMEM)
        return -EPROTO;
    if (page < 4096 || page > (UINT64_C(1) << 30) || (page & (page - 1)) != 0)
        return -EPROTO;
    if (segment->base == 0 || segment->base >= user_top || map == 0 || map > user_top ||
        segment->base + map > user_top || segment->bytes == 0)
        return -EPROTO;
    if (segment->base % page != 0 || map % page != 0 || piece == 0 || piece % page != 0)
        return -EPROTO;
    if (segment->bytes > map || map - segment->bytes >= page)
        return -EPROTO;
    if (segment->slot >= TP_WIRE_MAX_SEGMENTS || segment->pad != 0)
        return -EPROTO;
    /* No sum that could overflow: piece is anything up to 2^64. */
    if ((map - 1) / piece + 1 != segment->piece_count)
        return -EPROTO;
    return 0;
}

int tp_wire_connect(int dir_fd, const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (name[0] == 0 || strchr(name, '/') != NULL)
        return -EINVAL;
    int length =
        snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%s", dir_fd, name);
    if (length < 0 || (size_t)length >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int result;
    do {
        result = connect(fd, (const struct sockaddr *)&address, sizeof address) < 0 ? -errno : 0;
    } while (result == -EINTR);
    if (result < 0) {
        close(fd);
        return result;
    }
    return fd;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return -1;
}

char tp_wire_parse_name(const char *name, uint8_t ret_instance[static 16]) {
    uint8_t instance[16];
    if ((name[0] != 's' && name[0] != 'e') || name[1] != '-')
        return 0;
    const char *digits = name + 2;
    for (size_t i = 0; i < ID_DIGITS; i += 2) {
        /* The first digit's check stops at a NUL, so the second is read only when there is one. */
        int high = hex_digit(digits[i]);
        int low = high < 0 ? -1 : hex_digit(digits[i + 1]);
        if (low < 0)
            return 0;
        instance[i / 2] = (uint8_t)(high * 16 + low);
    }
    if (strcmp(digits + ID_DIGITS, ".sock") != 0)
        return 0;
    memcpy(ret_instance, instance, sizeof instance);
    return name[0];
}

bool tp_wire_unread(int socket_fd) {
    struct pollfd look = {.fd = socket_fd, .events = POLLIN};
    return poll(&look, 1, 0) > 0;
}

int tp_wire_check_peer(int socket_fd, const struct tp_config *config, uint32_t *ret_uid,
                       int32_t *ret_pid) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) < 0)
        return -errno;
    if (ret_uid != NULL)
        *ret_uid = peer.uid;
    if (ret_pid != NULL)
        *ret_pid = peer.pid;
    return tp_host_uid_is_trusted(peer.uid, config) ? 0 : -EACCES;
}
