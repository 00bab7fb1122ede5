/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log of calls and of broken rules. One write per line with O_APPEND, so that processes can
 * share a file. It must not know what a call means, and takes no lock: it is also used in a forked
 * child, where fc_lock may be held by nobody alive.
 */
#include "state.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_ulong sequence, violations;
static char last_violation[320];
static int log_fd = -1;
static pthread_once_t once = PTHREAD_ONCE_INIT;

uint64_t fc_now_ns(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void open_log(void) {
    const char *path = getenv("FAKECUDA_LOG");

    if (path && *path)
        log_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
}

/* Text as the inside of a JSON string. */
static void quote(char *to, size_t room, const char *from) {
    size_t at = 0;

    for (; *from && at + 2 < room; from++) {
        if (*from == '"' || *from == '\\')
            to[at++] = '\\';
        to[at] = *from;
        if ((unsigned char)to[at] < 0x20)
            to[at] = ' ';
        at++;
    }
    to[at] = 0;
}

static void write_line(const char *name, const char *args, int result, bool injected,
                       const char *violation, uint64_t start_ns) {
    char line[1600], quoted_args[640], quoted_violation[640];
    uint64_t now = fc_now_ns();
    int length;

    pthread_once(&once, open_log);
    if (*violation) {
        atomic_fetch_add(&violations, 1);
        snprintf(last_violation, sizeof last_violation, "%s: %s", name, violation);
        if (log_fd < 0)
            fprintf(stderr, "fakecuda: violation: %s(%s) -> %d: %s\n", name, args, result,
                    violation);
    }
    if (log_fd < 0)
        return;
    quote(quoted_args, sizeof quoted_args, args);
    quote(quoted_violation, sizeof quoted_violation, violation);
    length = snprintf(line, sizeof line,
                      "{\"seq\":%lu,\"t_ns\":%llu,\"dt_ns\":%llu,\"pid\":%d,\"tid\":%ld,\"call\":"
                      "\"%s\",\"args\":\"%s\","
                      "\"result\":%d,\"injected\":%s,\"violation\":%s%s%s}\n",
                      atomic_fetch_add(&sequence, 1), (unsigned long long)start_ns,
                      (unsigned long long)(now - start_ns), getpid(), syscall(SYS_gettid), name,
                      quoted_args, result, injected ? "true" : "false", *violation ? "\"" : "",
                      *violation ? quoted_violation : "null", *violation ? "\"" : "");
    if (write(log_fd, line, (size_t)length) != length)
        fprintf(stderr, "fakecuda: cannot write the log (FAKECUDA_LOG)\n");
}

void fc_log(const struct fc_call *call) {
    write_line(call->name, call->args, (int)call->result, call->injected, call->violation,
               call->start_ns);
}

void fc_log_worker_violation(const char *where, CUresult result, const char *format, ...) {
    char text[320];
    va_list list;

    va_start(list, format);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false alarm of clang-tidy 14 */
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    write_line(where, "", (int)result, false, text, fc_now_ns());
}

unsigned long fakecuda_violations(void) {
    return atomic_load(&violations);
}

const char *fakecuda_last_violation(void) {
    return last_violation;
}

void fakecuda_note(const char *text) {
    write_line("note", text, 0, false, "", fc_now_ns());
}

void fakecuda_log_runtime(const char *name, int result, const char *args) {
    write_line(name, args, result, false, "", fc_now_ns());
}
