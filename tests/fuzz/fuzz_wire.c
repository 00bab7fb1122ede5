/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the protocol: the input is a talk, packet by packet, as a server would hear it
 * from a client (first byte even) or a client from a server (odd). A packet is 5 bytes - flags,
 * number of fds, type, length (2, little-endian) - and its bytes. FLAG_WELL_FORMED: they are a
 * message's body, and header, size and padding are made right, so that mutations reach what lies
 * behind those checks. FLAG_OUR_HOST: HELLO names this host.
 *
 * What must hold: nothing but an error comes of a bad message, no fd is left open, and what is
 * accepted is plausible.
 *
 * With clang, from the top of the tree:
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. tests/fuzz/fuzz_wire.c
 * segment/[a-z]*.c env/[a-z]*.c -ljansson -o fuzz
 *   ./fuzz -max_len=8192 corpus-of-your-own tests/fuzz/corpus-wire
 * Elsewhere -DREPLAY gives a program that runs the files and directories of its arguments.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/segment.h"
#include "segment/session.h"
#include "segment/wire.h"
#include "tests/unit/scratch.h"

#define FLAG_WELL_FORMED 1
#define FLAG_OUR_HOST 2
#define SEGMENT_BYTES (UINT64_C(1) << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static struct tp_server_facts facts;
static struct tp_config config;

static void require(bool right, const char *what) {
    if (right)
        return;
    fprintf(stderr, "fuzz_wire: not true: %s\n", what);
    abort();
}

static void end_server(void) {
    char record[sizeof config.store.socket_dir + 16];
    tp_server_stop();
    (void)snprintf(record, sizeof record, "%s/addresses", config.store.socket_dir);
    (void)unlink(record);
    (void)rmdir(config.store.socket_dir);
}

/* The number that the next fd gets: the same before and after when none was left open. */
static int next_fd(void) {
    int fd = dup(STDERR_FILENO);
    close(fd);
    return fd;
}

/* The server's thread opens and closes fds of its own while it starts: until they stay the same. */
static void wait_for_quiet(void) {
    int fd = next_fd();
    for (int same = 0; same < 10; same++) {
        usleep(10000);
        int now = next_fd();
        if (now != fd)
            same = 0;
        fd = now;
    }
}

/* A published segment of 16 pieces, id 1. The server that comes with it is left alone: sessions are
 * driven here. */
static void start(void) {
    config.store.half = TP_HALF_ON;
    config.store.kind = TP_SEGMENT_MEMFD;
    config.store.piece_bytes = SEGMENT_BYTES / 16;
    snprintf(config.store.socket_dir, sizeof config.store.socket_dir, "/tmp/tidepool-fuzz-XXXXXX");
    require(scratch_directory(config.store.socket_dir), "a directory");
    char *range = aligned_alloc(16 << 20, 16 << 20);
    require(range != NULL && tp_segment_overlay(range, SEGMENT_BYTES, false, &config) == 0 &&
                tp_segment_publish(range, &config) == 0,
            "a segment");
    wait_for_quiet();
    atexit(end_server);
    facts.config = &config;
    facts.roles = 1;
    require(tp_host_identity(true, facts.identity) == 0, "an identity");
}

/* Send the packet at the head of the input. How many bytes it took; 0 at the end. */
static size_t send_packet(int fd, const uint8_t *data, size_t bytes) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * 255)];
    } control;
    struct tp_msg message;
    if (bytes < 5)
        return 0;
    size_t length = data[3] | (size_t)data[4] << 8;
    if (length > bytes - 5)
        length = bytes - 5;
    struct iovec part = {(void *)(data + 5), length};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if ((data[0] & FLAG_WELL_FORMED) != 0) {
        memset(&message, 0, sizeof message);
        message.magic = TP_WIRE_MAGIC;
        message.version = TP_WIRE_VERSION;
        message.type = data[2];
        memcpy(message.body.bytes, data + 5,
               length < sizeof message.body ? length : sizeof message.body);
        if ((data[0] & FLAG_OUR_HOST) != 0)
            memcpy(message.body.hello.identity, facts.identity, sizeof facts.identity);
        part = (struct iovec){&message, sizeof message};
    }
    size_t fds = data[1] % 64;
    if (fds > 0) {
        memset(&control, 0, sizeof control);
        packet.msg_control = control.bytes;
        packet.msg_controllen = CMSG_SPACE(sizeof(int) * fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fds);
        for (size_t i = 0; i < fds; i++)
            memcpy(CMSG_DATA(header) + i * sizeof(int), &(int){STDERR_FILENO}, sizeof(int));
    }
    (void)sendmsg(fd, &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    return 5 + length;
}

static void check_accepted(const struct tp_msg *message, unsigned fd_count) {
    const struct tp_msg_segment *segment = &message->body.segment;
    require(message->magic == TP_WIRE_MAGIC && message->version == TP_WIRE_VERSION, "a header");
    if (message->type == TP_MSG_PIECES)
        require(fd_count == message->body.pieces.count && fd_count > 0, "an fd a piece");
    else if (message->type == TP_MSG_WELCOME)
        require(fd_count <= 1, "the lease page or nothing");
    else
        require(fd_count == (message->type == TP_MSG_PAGE ? 1 : 0), "fds where they belong");
    if (message->type == TP_MSG_NAME)
        require(strnlen(message->body.name.name, 256) < 256, "names end");
    if (message->type != TP_MSG_SEGMENT || tp_wire_check_segment(segment) != 0)
        return;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < segment->piece_count; i++) {
        uint64_t piece = tp_wire_piece_bytes(segment, i);
        require(piece > 0 && piece % segment->page_bytes == 0, "pieces are whole pages");
        sum += piece;
    }
    require(sum == segment->map_bytes, "pieces add up");
}

/* Take everything that lies there. False at the end of file or at an error. */
static bool drain(int fd, bool trusted) {
    for (;;) {
        struct tp_msg message;
        int fds[TP_WIRE_MAX_FDS];
        unsigned count = 0;
        int result = tp_wire_receive(fd, &message, fds, TP_WIRE_MAX_FDS, &count);
        require(!trusted || result == 0 || result == -EAGAIN || result == -ENODATA,
                "our own messages are right");
        if (result != 0)
            return result == -EAGAIN;
        check_accepted(&message, count);
        for (unsigned i = 0; i < count; i++)
            close(fds[i]);
    }
}

static void talk_to_server(int pair[2], const uint8_t *data, size_t bytes) {
    struct tp_session session;
    uint64_t now = 1000;
    int result = 0;
    tp_session_begin(&session, pair[1], &facts, now);
    for (size_t used; result == 0 && (used = send_packet(pair[0], data, bytes)) > 0;) {
        result = tp_session_read(&session, &facts, (bytes & 1023) == 7, ++now);
        if (result == 0)
            result = tp_session_tick(&session, now);
        (void)drain(pair[0], true);
        data += used;
        bytes -= used;
    }
    tp_session_end(&session, result);
    (void)drain(pair[0], true);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    int pair[2];
    if (facts.config == NULL)
        start();
    if (bytes < 1 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return 0;
    if ((data[0] & 1) == 0) {
        talk_to_server(pair, data + 1, bytes - 1);
    } else {
        const uint8_t *at = data + 1;
        size_t left = bytes - 1;
        for (size_t used; (used = send_packet(pair[0], at, left)) > 0 && drain(pair[1], false);) {
            at += used;
            left -= used;
        }
        close(pair[1]);
    }
    close(pair[0]);
    require(next_fd() == pair[0], "no fd is left open");
    return 0;
}

#ifdef REPLAY
#include <dirent.h>
#include <limits.h>

#define MAX_INPUT_BYTES ((size_t)1 << 20)

static unsigned replayed;

static void replay_path(const char *path) {
    char entry_path[PATH_MAX];
    DIR *dir = opendir(path);
    if (dir == NULL) {
        FILE *file = fopen(path, "rbe");
        uint8_t *data = malloc(MAX_INPUT_BYTES);
        require(file != NULL && data != NULL, "the named file opens");
        size_t bytes = fread(data, 1, MAX_INPUT_BYTES, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, bytes);
        free(data);
        replayed++;
        return;
    }
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(entry_path, sizeof entry_path, "%s/%s", path, entry->d_name);
        replay_path(entry_path);
    }
    closedir(dir);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        replay_path(argv[i]);
    printf("%u inputs\n", replayed);
    return replayed > 0 ? 0 : 1;
}
#endif
