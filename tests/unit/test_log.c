/* SPDX-License-Identifier: Apache-2.0 */
/* A log line is one whole line, errno survives it, and standard error in any state cannot hurt the
 * host process. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"

static int reader = -1; /* of the pipe that is standard error */
static char text[1 << 16];

static void take_stderr(void) {
    int ends[2];
    cr_assert_eq(pipe2(ends, O_CLOEXEC), 0);
    cr_assert_geq(dup2(ends[1], STDERR_FILENO), 0);
    close(ends[1]);
    reader = ends[0];
    cr_assert_eq(fcntl(reader, F_SETFL, O_NONBLOCK), 0);
    unsetenv("TIDEPOOL_LOG");
}

TestSuite(log, .timeout = 30, .init = take_stderr);

static const char *written(void) {
    ssize_t got = read(reader, text, sizeof text - 1);
    text[got > 0 ? got : 0] = '\0';
    return text;
}

Test(log, a_line_has_program_process_level_and_text) {
    char expected[64];
    snprintf(expected, sizeof expected, "tidepool[%d] warn: piece 7 of 9\n", (int)getpid());
    tp_log(TP_LOG_WARN, "piece %d of %d", 7, 9);
    cr_assert_str_eq(written(), expected);
}

Test(log, warn_is_the_default) {
    cr_assert(tp_log_on(TP_LOG_ERROR) && tp_log_on(TP_LOG_WARN));
    cr_assert_not(tp_log_on(TP_LOG_INFO));
    tp_log(TP_LOG_INFO, "quiet");
    cr_assert_str_eq(written(), "");
}

Test(log, level_is_read_from_the_environment) {
    setenv("TIDEPOOL_LOG", "debug", 1);
    cr_assert(tp_log_on(TP_LOG_DEBUG));
    tp_log(TP_LOG_DEBUG, "loud");
    cr_assert(strstr(written(), " debug: loud\n"));
}

Test(log, errors_alone) {
    setenv("TIDEPOOL_LOG", "error", 1);
    tp_log(TP_LOG_WARN, "only an event");
    cr_assert_str_eq(written(), "");
    cr_assert_str_eq(tp_stats_page()->events[0].text, "only an event");
    tp_log(TP_LOG_ERROR, "both");
    cr_assert(strstr(written(), " error: both\n"));
}

Test(log, a_wrong_level_is_said_once) {
    setenv("TIDEPOOL_LOG", "lo\033ud\n", 1);
    cr_assert_not(tp_log_on(TP_LOG_INFO));
    tp_log(TP_LOG_INFO, "quiet");
    written();
    cr_assert(strstr(text, "TIDEPOOL_LOG: \"lo?ud?\""), "%s", text);
    cr_assert(strstr(text, "error, warn, info or debug"));
    cr_assert_eq(strchr(text, '\n'), strrchr(text, '\n'));
}

Test(log, control_characters_cannot_break_the_line) {
    tp_log(TP_LOG_WARN, "%s", "a\nb\r\033[2Jc\177\302\233d \346\265\267");
    cr_assert(strstr(written(), "warn: a?b??[2Jc???d \346\265\267\n"), "%s", text);
}

Test(log, a_line_has_at_most_1023_bytes) {
    char long_text[5000];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    tp_log(TP_LOG_WARN, "%s", long_text);
    cr_assert_eq(strlen(written()), 1023);
    cr_assert_eq(text[1022], '\n');
}

Test(log, errno_is_kept_and_can_be_printed) {
    errno = ENOSPC;
    tp_log(TP_LOG_WARN, "full: %m");
    cr_assert_eq(errno, ENOSPC);
    cr_assert(strstr(written(), "full: No space left on device\n"));
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    cr_assert_geq(dup2(full, STDERR_FILENO), 0);
    errno = EBUSY;
    tp_log(TP_LOG_WARN, "cannot be written");
    cr_assert_eq(errno, EBUSY);
    close(STDERR_FILENO);
    tp_log(TP_LOG_WARN, "nobody listens");
    cr_assert_eq(errno, EBUSY);
}

Test(log, once_is_once_a_flag) {
    static atomic_flag one = ATOMIC_FLAG_INIT, two = ATOMIC_FLAG_INIT;
    for (int i = 0; i < 3; i++) {
        tp_log_once(&one, TP_LOG_WARN, "one");
        tp_log_once(&two, TP_LOG_WARN, "two");
    }
    written();
    cr_assert_not(strstr(strstr(text, "one") + 1, "one"));
    cr_assert_not(strstr(strstr(text, "two") + 1, "two"));
}

Test(log, a_closed_pipe_raises_no_sigpipe) {
    sigset_t pending;
    signal(SIGPIPE, SIG_DFL);
    close(reader);
    tp_log(TP_LOG_ERROR, "to nobody");
    cr_assert_eq(sigpending(&pending), 0);
    cr_assert_not(sigismember(&pending, SIGPIPE));
    sigset_t mask;
    cr_assert_eq(pthread_sigmask(SIG_SETMASK, NULL, &mask), 0);
    cr_assert_not(sigismember(&mask, SIGPIPE));
}

Test(log, a_full_pipe_does_not_block) {
    char block[4096] = {0};
    int flags = fcntl(STDERR_FILENO, F_GETFL);
    cr_assert_eq(fcntl(STDERR_FILENO, F_SETFL, flags | O_NONBLOCK), 0);
    while (write(STDERR_FILENO, block, sizeof block) > 0)
        ;
    cr_assert_eq(fcntl(STDERR_FILENO, F_SETFL, flags), 0);
    tp_log(TP_LOG_ERROR, "dropped"); /* a blocking write would run into the time limit */
    cr_assert_str_eq(tp_stats_page()->events[0].text, "dropped");
}

#define THREADS 4
#define LINES 20

static void *log_lines(void *arg) {
    char filler[200];
    memset(filler, 'a' + *(int *)arg, sizeof filler - 1);
    filler[sizeof filler - 1] = '\0';
    for (int i = 0; i < LINES; i++)
        tp_log(TP_LOG_WARN, "%s", filler);
    return NULL;
}

Test(log, lines_of_threads_do_not_mix) {
    pthread_t threads[THREADS];
    int numbers[THREADS];
    unsigned lines = 0;
    char *save = NULL;
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        cr_assert_eq(pthread_create(&threads[i], NULL, log_lines, &numbers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    written();
    for (char *line = strtok_r(text, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save), lines++) {
        const char *filler = strstr(line, "warn: ") + strlen("warn: ");
        cr_assert_eq(strlen(filler), 199);
        cr_assert_eq(strspn(filler, (const char[]){filler[0], '\0'}), 199);
    }
    cr_assert_eq(lines, THREADS * LINES);
}

Test(log, a_forked_child_is_silent) {
    int status;
    tp_fork_guard();
    pid_t child = fork();
    if (child == 0) {
        tp_log(TP_LOG_ERROR, "from the child");
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_str_eq(written(), "");
}

Test(log, wrong_settings_are_logged_once_for_each_half) {
    setenv("MC_STORE_SHM_SEGMENT_DIR", "relative", 1);
    setenv("MC_TENT_CONF", "/nonexistent/tent.json", 1);
    const struct tp_config *config = tp_config();
    setenv("MC_STORE_SHM_SEGMENT_DIR", "memfd", 1);
    cr_assert_eq(tp_config(), config);
    cr_assert_eq(config->store.half, TP_HALF_INVALID);
    cr_assert_eq(config->engine.half, TP_HALF_INVALID);
    written();
    unsigned lines = 0;
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        lines++;
    cr_assert_eq(lines, 2, "%s", text);
    cr_assert(strstr(text, " error: MC_STORE_SHM_SEGMENT_DIR: \"relative\""));
    cr_assert(strstr(text, " error: MC_TENT_CONF: cannot read /nonexistent/tent.json"));
}
