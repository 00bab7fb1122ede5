/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One line at a time to standard error, and errors and warnings into the page that `tidepool
 * status` shows. It must not know: what the lines are about.
 */
#include "env/env.h"
#include "env/stats.h"
#include "env/text.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 1024
#define LEVEL_UNREAD (-1)

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static _Atomic int print_level = LEVEL_UNREAD;

/* Read TIDEPOOL_LOG. *ret_wrong is the value if it is not a level, otherwise NULL. */
static int read_level(const char **ret_wrong) {
    const char *value = getenv("TIDEPOOL_LOG");

    *ret_wrong = NULL;
    if (!value || !*value)
        return TP_LOG_WARN;
    for (int i = TP_LOG_ERROR; i <= TP_LOG_DEBUG; i++) {
        if (!strcmp(value, level_names[i]))
            return i;
    }
    *ret_wrong = value;
    return TP_LOG_WARN;
}

static int current_level(void) {
    int level = atomic_load_explicit(&print_level, memory_order_relaxed);
    int unread = LEVEL_UNREAD;
    const char *wrong;

    if (level != LEVEL_UNREAD)
        return level;
    level = read_level(&wrong);
    if (atomic_compare_exchange_strong(&print_level, &unread, level) && wrong)
        tp_log(TP_LOG_WARN,
               "TIDEPOOL_LOG: \"%.64s\" is not a level (expected error, warn, info or debug); "
               "using warn",
               wrong);
    return level;
}

bool tp_log_on(enum tp_log_level level) {
    return (int)level <= current_level();
}

/*
 * Standard error may be a pipe without a reader or one that is full. Neither may hurt the host
 * process: the signal of the first is taken back here, and a line that would block is dropped (the
 * page's events keep errors and warnings).
 */
static void write_line(const char *line, size_t bytes) {
    struct pollfd target = {.fd = STDERR_FILENO, .events = POLLOUT};
    const struct timespec now = {0};
    sigset_t pipe_signal, old_mask, pending;
    bool was_pending;

    if (poll(&target, 1, 0) != 1 || !(target.revents & (POLLOUT | POLLERR)))
        return;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    sigemptyset(&pending);
    sigpending(&pending);
    was_pending = sigismember(&pending, SIGPIPE) == 1;
    if (pthread_sigmask(SIG_BLOCK, &pipe_signal, &old_mask) != 0)
        return;
    if (write(STDERR_FILENO, line, bytes) < 0 && errno == EPIPE && !was_pending)
        sigtimedwait(&pipe_signal, NULL, &now);
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
}

static void log_args(enum tp_log_level level, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));

static void log_args(enum tp_log_level level, const char *format, va_list args) {
    char line[LINE_BYTES];
    int saved_errno = errno;
    bool print;
    size_t head, length;

    if (tp_inert() || level > TP_LOG_DEBUG)
        return;
    print = tp_log_on(level);
    if (!print && level > TP_LOG_WARN)
        return;
    tp_text_format(line, sizeof(line), "tidepool[%d] %s: ", (int)getpid(), level_names[level]);
    head = strlen(line);
    errno = saved_errno; /* for %m */
    tp_text_vformat(line + head, sizeof(line) - head - 1, format, args);
    if (level <= TP_LOG_WARN)
        tp_stats_event(line + head);
    length = strlen(line);
    line[length++] = '\n';
    if (print)
        write_line(line, length);
    errno = saved_errno;
}

void tp_log(enum tp_log_level level, const char *format, ...) {
    va_list args;

    va_start(args, format);
    log_args(level, format, args);
    va_end(args);
}

void tp_log_once(atomic_flag *flag, enum tp_log_level level, const char *format, ...) {
    va_list args;

    if (atomic_flag_test_and_set_explicit(flag, memory_order_relaxed))
        return;
    va_start(args, format);
    log_args(level, format, args);
    va_end(args);
}
