/* SPDX-License-Identifier: Apache-2.0 */
/* A message arrives whole and plausible with exactly its fds, or not at all and no fd is left open.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "segment_bench.h"

TestSuite(wire, .timeout = 20);

static void make_pair(int pair[2]) {
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
}

/* Send bytes and fds as they are, past tp_wire_send's checks. */
static void send_raw(int fd, const void *bytes, size_t length, const int *fds, size_t count) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * 64)];
    } control;
    struct iovec part = {(void *)bytes, length};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > 0) {
        memset(&control, 0, sizeof control);
        packet.msg_control = control.bytes;
        packet.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * count);
    }
    cr_assert_eq(sendmsg(fd, &packet, 0), (ssize_t)length);
}

static struct tp_msg message_of(uint16_t type) {
    struct tp_msg message;
    memset(&message, 0, sizeof message);
    message.magic = TP_WIRE_MAGIC;
    message.version = TP_WIRE_VERSION;
    message.type = type;
    return message;
}

/* What the receiver makes of a packet; fds it got are closed. */
static int received(const void *bytes, size_t length, size_t fd_count, unsigned max_fds) {
    int pair[2];
    int fds[64];
    int got_fds[TP_WIRE_MAX_FDS];
    unsigned got = 0;
    struct tp_msg message = message_of(99);
    make_pair(pair);
    unsigned before = bench_fds();
    for (size_t i = 0; i < fd_count; i++)
        fds[i] = 0;
    send_raw(pair[0], bytes, length, fds, fd_count);
    int result = tp_wire_receive(pair[1], &message, got_fds, max_fds, &got);
    if (result != 0) {
        cr_assert_eq(got, 0);
        cr_assert_eq(message.type, 99, "an out-parameter was touched");
    }
    for (unsigned i = 0; i < got; i++) {
        cr_assert_neq(fcntl(got_fds[i], F_GETFD) & FD_CLOEXEC, 0);
        close(got_fds[i]);
    }
    cr_assert_eq(bench_fds(), before);
    close(pair[0]);
    close(pair[1]);
    return result;
}

Test(wire, messages_arrive_as_sent) {
    static const uint16_t types[] = {TP_MSG_HELLO,   TP_MSG_WELCOME, TP_MSG_REFUSED, TP_MSG_NAME,
                                     TP_MSG_SEGMENT, TP_MSG_WANT,    TP_MSG_GONE};
    int pair[2];
    make_pair(pair);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct tp_msg sent = message_of(types[i]);
        struct tp_msg got;
        unsigned fds = 99;
        if (types[i] == TP_MSG_WANT)
            sent.body.pieces = (struct tp_msg_pieces){7, 3, 16};
        memset(sent.body.bytes + sizeof sent.body - 8, 0xff, 8); /* left-overs of the sender */
        cr_assert_eq(tp_wire_send(pair[0], &sent, NULL, 0), 0);
        cr_assert_eq(tp_wire_receive(pair[1], &got, NULL, 0, &fds), 0);
        cr_assert_eq(fds, 0);
        cr_assert_eq(memcmp(&sent, &got, sizeof got), 0);
    }
    struct tp_msg got;
    cr_assert_eq(tp_wire_receive(pair[1], &got, NULL, 0, NULL), -EAGAIN);
    close(pair[0]);
    cr_assert_eq(tp_wire_receive(pair[1], &got, NULL, 0, NULL), -ENODATA);
    struct tp_msg lost = message_of(TP_MSG_HELLO);
    cr_assert_eq(tp_wire_send(pair[1], &lost, NULL, 0), -EPIPE);
}

Test(wire, fds_arrive_with_pieces_page_and_welcome_only) {
    struct tp_msg pieces = message_of(TP_MSG_PIECES);
    pieces.body.pieces = (struct tp_msg_pieces){1, 0, 16};
    struct tp_msg page = message_of(TP_MSG_PAGE);
    struct tp_msg name = message_of(TP_MSG_NAME);
    struct tp_msg welcome = message_of(TP_MSG_WELCOME);
    cr_assert_eq(received(&pieces, 512, 16, 16), 0);
    cr_assert_eq(received(&pieces, 512, 15, 16), -EPROTO);
    cr_assert_eq(received(&pieces, 512, 17, 16), -EPROTO);
    cr_assert_eq(received(&pieces, 512, 60, 16), -EPROTO);
    cr_assert_eq(received(&pieces, 512, 16, 15), -EPROTO);
    cr_assert_eq(received(&pieces, 512, 0, 16), -EPROTO);
    cr_assert_eq(received(&page, 512, 1, 16), 0);
    cr_assert_eq(received(&page, 512, 0, 16), -EPROTO);
    cr_assert_eq(received(&page, 512, 2, 16), -EPROTO);
    cr_assert_eq(received(&welcome, 512, 0, 16), 0);
    cr_assert_eq(received(&welcome, 512, 1, 16), 0);
    cr_assert_eq(received(&welcome, 512, 1, 0), -EPROTO);
    cr_assert_eq(received(&welcome, 512, 2, 16), -EPROTO);
    cr_assert_eq(received(&name, 512, 1, 16), -EPROTO);
    cr_assert_eq(received(&name, 512, 1, 0), -EPROTO);
}

Test(wire, packets_of_other_shapes_are_refused) {
    struct tp_msg good = message_of(TP_MSG_NAME);
    struct tp_msg bad = good;
    char large[600] = {0};
    cr_assert_eq(received(&good, 512, 0, 0), 0);
    for (size_t length = 1; length < 512; length += 73)
        cr_assert_eq(received(&good, length, 0, 0), -EPROTO);
    memcpy(large, &good, sizeof good);
    cr_assert_eq(received(large, sizeof large, 0, 0), -EPROTO);
    cr_assert_eq(received(large, sizeof large, 3, 16), -EPROTO);
    cr_assert_eq(received("", 0, 0, 0), -ENODATA);
    bad.magic++;
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
    bad = good;
    bad.version++;
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTONOSUPPORT);
    cr_assert_eq(received(&bad, 100, 0, 0), -EPROTONOSUPPORT);
    cr_assert_eq(received(&bad, 512, 5, 16), -EPROTONOSUPPORT);
    for (unsigned type = 0; type < 65536; type += type < 12 ? 1 : 6553) {
        bad = message_of((uint16_t)type);
        if (type == 0 || type > TP_MSG_GONE)
            cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
    }
    bad = good;
    memset(bad.body.name.name, 'x', sizeof bad.body.name.name);
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
    bad = good;
    bad.body.bytes[503] = 1; /* padding is checked */
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
    bad = message_of(TP_MSG_HELLO);
    memset(bad.body.hello.identity, 'x', sizeof bad.body.hello.identity);
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
    bad = message_of(TP_MSG_WANT);
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
    bad.body.pieces.count = 17;
    cr_assert_eq(received(&bad, 512, 0, 0), -EPROTO);
}

Test(wire, fds_that_this_process_cannot_take_are_not_the_senders_fault) {
    int pair[2];
    int fds[8] = {0};
    int got_fds[TP_WIRE_MAX_FDS];
    unsigned got = 0;
    struct rlimit limit;
    struct tp_msg message = message_of(TP_MSG_PIECES);
    message.body.pieces = (struct tp_msg_pieces){1, 0, 8};
    make_pair(pair);
    cr_assert_eq(tp_wire_send(pair[0], &message, fds, 8), 0);
    cr_assert_eq(tp_wire_send(pair[0], &message, fds, 8), 0);
    unsigned before = bench_fds();
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit small = {(rlim_t)pair[1] + 4, limit.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &small), 0);
    int result = tp_wire_receive(pair[1], &message, got_fds, TP_WIRE_MAX_FDS, &got);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_assert_eq(result, -EMFILE);
    cr_assert_eq(got, 0);
    cr_assert_eq(bench_fds(), before, "those that fitted are closed");
    cr_assert_eq(tp_wire_receive(pair[1], &message, got_fds, TP_WIRE_MAX_FDS, &got), 0);
    cr_assert_eq(got, 8);
}

Test(wire, a_last_word_is_read_after_a_reset) {
    int pair[2];
    struct tp_msg message = message_of(TP_MSG_REFUSED);
    make_pair(pair);
    struct tp_msg unread = message_of(TP_MSG_HELLO);
    cr_assert_eq(tp_wire_send(pair[1], &unread, NULL, 0), 0);
    cr_assert_eq(tp_wire_send(pair[0], &message, NULL, 0), 0);
    close(pair[0]);
    message.type = 0;
    cr_assert_eq(tp_wire_receive(pair[1], &message, NULL, 0, NULL), 0);
    cr_assert_eq(message.type, TP_MSG_REFUSED);
    cr_assert_eq(tp_wire_receive(pair[1], &message, NULL, 0, NULL), -ENODATA);
}

Test(wire, a_full_socket_is_no_wait) {
    int pair[2];
    make_pair(pair);
    struct tp_msg message = message_of(TP_MSG_NAME);
    int result = 0;
    for (unsigned i = 0; i < 100000 && result == 0; i++)
        result = tp_wire_send(pair[0], &message, NULL, 0);
    cr_assert_eq(result, -EAGAIN);
    message.type = 77;
    cr_assert_eq(tp_wire_send(pair[0], &message, NULL, 0), -EINVAL);
    message.type = TP_MSG_PIECES;
    cr_assert_eq(tp_wire_send(pair[0], &message, NULL, 17), -EINVAL);
}

static struct tp_msg_segment good_segment(void) {
    return (struct tp_msg_segment){.segment_id = 1,
                                   .base = UINT64_C(0x7f0000000000),
                                   .bytes = 5 * MIB,
                                   .page_bytes = 4096,
                                   .piece_bytes = 2 * MIB,
                                   .piece_count = 3,
                                   .kind = TP_WIRE_MMAP,
                                   .map_bytes = 5 * MIB};
}

Test(wire, possible_segments_pass) {
    struct tp_msg_segment s = good_segment();
    cr_assert_eq(tp_wire_check_segment(&s), 0);
    cr_assert_eq(tp_wire_piece_bytes(&s, 0), 2 * MIB);
    cr_assert_eq(tp_wire_piece_bytes(&s, 2), MIB);
    cr_assert_eq(tp_wire_piece_bytes(&s, 3), 0);
    s.bytes -= 4095;
    cr_assert_eq(tp_wire_check_segment(&s), 0);
    s.piece_bytes = UINT64_C(1) << 60;
    s.piece_count = 1;
    cr_assert_eq(tp_wire_check_segment(&s), 0);
    cr_assert_eq(tp_wire_piece_bytes(&s, 0), 5 * MIB);
}

Test(wire, impossible_segments_are_refused) {
#define BAD(field, value)                                                                          \
    do {                                                                                           \
        struct tp_msg_segment s = good_segment();                                                  \
        s.field = (value);                                                                         \
        cr_assert_eq(tp_wire_check_segment(&s), -EPROTO, #field " = " #value);                     \
    } while (0)
    BAD(segment_id, 0);
    BAD(base, 0);
    BAD(base, 4095);
    BAD(base, UINT64_MAX - 4095);
    BAD(base, (UINT64_C(1) << 56) - 4096);
    BAD(bytes, 0);
    BAD(bytes, 5 * MIB + 1);
    BAD(bytes, 5 * MIB - 4096);
    BAD(bytes, UINT64_MAX);
    BAD(page_bytes, 0);
    BAD(page_bytes, 2048);
    BAD(page_bytes, 4097);
    BAD(page_bytes, UINT64_C(1) << 31);
    BAD(piece_bytes, 0);
    BAD(piece_bytes, MIB);
    BAD(piece_bytes, 4 * MIB);
    BAD(piece_bytes, 2 * MIB + 1);
    BAD(piece_count, 0);
    BAD(piece_count, 2);
    BAD(piece_count, 4);
    BAD(piece_count, TP_WIRE_MAX_PIECES + 1);
    BAD(kind, 0);
    BAD(kind, 3);
    BAD(map_bytes, 0);
    BAD(map_bytes, 5 * MIB + 4096);
    BAD(map_bytes, UINT64_MAX);
    BAD(slot, TP_WIRE_MAX_SEGMENTS);
    BAD(pad, 1);
#undef BAD
}

Test(wire, names_of_sockets) {
    uint8_t id[16] = {0};
    cr_assert_eq(tp_wire_parse_name("s-00112233445566778899aabbccddeeff.sock", id), 's');
    cr_assert_eq(id[1], 0x11);
    cr_assert_eq(id[15], 0xff);
    cr_assert_eq(tp_wire_parse_name("e-00112233445566778899aabbccddeeff.sock", id), 'e');
    static const char *const bad[] = {"",
                                      "s",
                                      "s-",
                                      "s-0",
                                      "x-00112233445566778899aabbccddeeff.sock",
                                      "s-00112233445566778899AABBCCDDEEFF.sock",
                                      "s-00112233445566778899aabbccddeef.sock",
                                      "s-00112233445566778899aabbccddeeff0.sock",
                                      "s-00112233445566778899aabbccddeeff.lock",
                                      "s-00112233445566778899aabbccddeeff.sockx",
                                      "s_00112233445566778899aabbccddeeff.sock",
                                      ".00112233445566778899aabbccddeeff.tmp"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(tp_wire_parse_name(bad[i], id), 0, "%s", bad[i]);
}

Test(wire, connecting_needs_a_plain_name) {
    int dir = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert_eq(tp_wire_connect(dir, ""), -EINVAL);
    cr_assert_eq(tp_wire_connect(dir, "../tmp/x"), -EINVAL);
    cr_assert_eq(tp_wire_connect(dir, "no-such-socket-here"), -ENOENT);
    char name[200];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = 0;
    cr_assert_eq(tp_wire_connect(dir, name), -ENAMETOOLONG);
    close(dir);
}

Test(wire, peers_by_uid) {
    struct tp_config *config = bench_config(0);
    uint32_t uid = 99;
    int32_t pid = 0;
    int pair[2];
    make_pair(pair);
    cr_assert_eq(tp_wire_check_peer(pair[0], config, &uid, &pid), 0);
    cr_assert_eq(uid, geteuid());
    cr_assert_eq(pid, getpid());
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    cr_assert_eq(tp_wire_check_peer(file, config, NULL, NULL), -ENOTSOCK);
    if (geteuid() == 0) {
        cr_assert_eq(seteuid(12345), 0);
        int other[2];
        make_pair(other);
        cr_assert_eq(seteuid(0), 0);
        cr_assert_eq(tp_wire_check_peer(other[0], config, &uid, &pid), -EACCES);
        cr_assert_eq(uid, 12345);
        config->allow_uids[0] = 12345;
        config->allow_uid_count = 1;
        cr_assert_eq(tp_wire_check_peer(other[0], config, NULL, NULL), 0);
    }
    bench_config_free(config);
}
