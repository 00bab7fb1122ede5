/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A preload for tests: ends or stops its process at one chosen step of Tidepool's protocol.
 *
 * STEPS_AT=CALL:N:SIGNAL, where CALL is one of the names below, N counts such calls in this process
 * from 1, and SIGNAL is a number. Only calls of the library's own threads and on its own kind of
 * socket (SOCK_SEQPACKET) count, so the numbers do not depend on Mooncake.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum step {
    STEP_CONNECT, /* connected, HELLO not sent */
    STEP_ACCEPT,  /* accepted, nothing read */
    STEP_SEND,    /* about to send */
    STEP_SENT,    /* has sent */
    STEP_RECEIVE, /* has received and not looked at it */
    STEP_BIND,    /* the socket has its temporary name */
    STEP_UNLINK,  /* one name of an entry was removed */
    STEPS
};

static const char *const names[STEPS] = {"connect", "accept", "send",  "sent",
                                         "receive", "bind",   "unlink"};
static atomic_uint counts[STEPS];

static void *original(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

static void step(enum step which) {
    const char *at = getenv("STEPS_AT");
    size_t length = strlen(names[which]);
    unsigned number;
    int signal_number;
    if (at == NULL || strncmp(at, names[which], length) != 0 ||
        sscanf(at + length, ":%u:%d", &number, &signal_number) != 2)
        return;
    if (atomic_fetch_add(&counts[which], 1) + 1 == number)
        (void)kill(getpid(), signal_number);
}

static bool ours(int fd) {
    int type = 0;
    socklen_t bytes = sizeof type;
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_SEQPACKET;
}

int connect(int fd, const struct sockaddr *address, socklen_t bytes) {
    int (*real)(int, const struct sockaddr *, socklen_t) = original("connect");
    int result = real(fd, address, bytes);
    if (result == 0 && ours(fd))
        step(STEP_CONNECT);
    return result;
}

int accept4(int fd, struct sockaddr *address, socklen_t *bytes, int flags) {
    int (*real)(int, struct sockaddr *, socklen_t *, int) = original("accept4");
    int result = real(fd, address, bytes, flags);
    if (result >= 0 && ours(result))
        step(STEP_ACCEPT);
    return result;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    ssize_t (*real)(int, const struct msghdr *, int) = original("sendmsg");
    bool counted = ours(fd);
    if (counted)
        step(STEP_SEND);
    ssize_t result = real(fd, message, flags);
    if (result >= 0 && counted)
        step(STEP_SENT);
    return result;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t (*real)(int, struct msghdr *, int) = original("recvmsg");
    ssize_t result = real(fd, message, flags);
    if (result > 0 && ours(fd))
        step(STEP_RECEIVE);
    return result;
}

int bind(int fd, const struct sockaddr *address, socklen_t bytes) {
    int (*real)(int, const struct sockaddr *, socklen_t) = original("bind");
    int result = real(fd, address, bytes);
    if (result == 0 && ours(fd))
        step(STEP_BIND);
    return result;
}

int unlinkat(int dir_fd, const char *name, int flags) {
    int (*real)(int, const char *, int) = original("unlinkat");
    int result = real(dir_fd, name, flags);
    if (result == 0)
        step(STEP_UNLINK);
    return result;
}
