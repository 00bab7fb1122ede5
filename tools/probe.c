/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Run probe.py in a Python of the user's. Importing a native module runs foreign code: it may
 * print, hang or crash, so it has a process group of its own, a pipe of its own for answers, and a
 * deadline.
 */
#include "tools/probe.h"

#include "env/env.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define OUTPUT_MAX (1U << 20)
#define LOOK_MS 100 /* between looks at whether a quiet child has ended */

static const char script[] =
#include "probe.inc"
    ;

/* A pipe's read end and what came out of it. */
struct stream {
    int fd;
    char *text; /* OUTPUT_MAX + 1 bytes */
    size_t length;
};

/* In the child: become the interpreter. The error of exec travels through `exec_error_fd`, which
 * exec closes. */
static void become_python(char **arguments, int answer_fd, int error_fd, int exec_error_fd) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    (void)setpgid(0, 0);
    (void)dup2(null, STDIN_FILENO);
    (void)dup2(null, STDOUT_FILENO);
    (void)dup2(error_fd, STDERR_FILENO);
    (void)fcntl(answer_fd, F_SETFD, 0);
    (void)execvp(arguments[0], arguments);
    int error = errno;
    (void)!write(exec_error_fd, &error, sizeof(error));
    _exit(127);
}

/* Returns false at the end of the stream. More than OUTPUT_MAX is read and dropped. */
static bool drain(struct stream *stream) {
    char dropped[4096];
    size_t room = OUTPUT_MAX - stream->length;
    ssize_t n = read(stream->fd, room ? stream->text + stream->length : dropped,
                     room ? room : sizeof(dropped));

    if (n > 0 && room) {
        stream->length += (size_t)n;
    }
    return n > 0 || (n < 0 && errno == EINTR);
}

/* The child is kept for waitpid; what it left running may hold the pipes open for ever. */
static bool has_ended(pid_t child) {
    siginfo_t info = {0};

    return waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == child;
}

/* Until both streams end, or the child has ended and what it wrote is read. False when the time is
 * up first. */
static bool collect(struct stream *streams, pid_t child, uint64_t deadline) {
    bool ended = false;

    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
        struct pollfd polled[2] = {{.fd = streams[0].fd, .events = POLLIN},
                                   {.fd = streams[1].fd, .events = POLLIN}};
        int ready = poll(polled, 2, ended ? 0 : LOOK_MS);

        if (tp_now_ms() >= deadline || (ready < 0 && errno != EINTR)) {
            return false;
        }
        if (ready == 0 && ended) {
            return true;
        }
        for (int i = 0; i < 2 && ready > 0; i++) {
            if (polled[i].revents && !drain(&streams[i])) {
                (void)close(streams[i].fd);
                streams[i].fd = -1;
            }
        }
        ended = ready == 0 ? has_ended(child) : ended;
    }
    return true;
}

static json_t *parse_lines(char *text) {
    json_t *lines = json_array();
    char *rest = NULL;

    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *value = json_loads(line, 0, NULL);
        if (json_is_object(value)) {
            (void)json_array_append(lines, value);
        }
        json_decref(value);
    }
    return lines;
}

static void describe_end(int status, bool in_time, struct probe *probe) {
    if (!in_time) {
        (void)snprintf(probe->problem, sizeof(probe->problem),
                       "did not finish in time and was killed");
    } else if (WIFSIGNALED(status)) {
        (void)snprintf(probe->problem, sizeof(probe->problem), "killed by signal %d (%s)",
                       WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else if (WEXITSTATUS(status) != 0) {
        (void)snprintf(probe->problem, sizeof(probe->problem), "exit status %d",
                       WEXITSTATUS(status));
    }
}

/* The last line that says something: Python ends a traceback with the error. */
static void keep_last_words(struct stream *errors, struct probe *probe) {
    while (errors->length && strchr("\n\r ", errors->text[errors->length - 1])) {
        errors->length--;
    }
    errors->text[errors->length] = '\0';
    const char *line = strrchr(errors->text, '\n');
    (void)snprintf(probe->last_words, sizeof(probe->last_words), "%s",
                   line ? line + 1 : errors->text);
}

static void close_end(int *fd) {
    if (*fd >= 0) {
        (void)close(*fd);
    }
    *fd = -1;
}

enum { ANSWERS, ERRORS, EXEC_ERROR, PIPES };

/* Start the interpreter; the write ends of the pipes are its own afterwards. 0 or -errno. */
static int start(char **arguments, int pipes[PIPES][2], pid_t *ret_child) {
    int exec_error = 0;
    pid_t child = fork();

    if (child == 0) {
        become_python(arguments, pipes[ANSWERS][1], pipes[ERRORS][1], pipes[EXEC_ERROR][1]);
    }
    if (child < 0) {
        return -errno;
    }
    for (int i = 0; i < PIPES; i++) {
        close_end(&pipes[i][1]);
    }
    if (read(pipes[EXEC_ERROR][0], &exec_error, sizeof(exec_error)) == sizeof(exec_error)) {
        (void)waitpid(child, NULL, 0);
        return -exec_error;
    }
    *ret_child = child;
    return 0;
}

/* Read until it ends or the time is up, then end it and whatever it left running. */
static int finish(struct stream *streams, pid_t child, unsigned timeout_ms,
                  struct probe *ret_probe) {
    struct probe probe = {0};
    bool in_time = collect(streams, child, tp_now_ms() + timeout_ms);
    int status = 0;

    (void)kill(-child, SIGKILL);
    (void)kill(child, SIGKILL);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    streams[ANSWERS].text[streams[ANSWERS].length] = '\0';
    probe.lines = parse_lines(streams[ANSWERS].text);
    if (!probe.lines) {
        return -ENOMEM;
    }
    describe_end(status, in_time, &probe);
    keep_last_words(&streams[ERRORS], &probe);
    *ret_probe = probe;
    return 0;
}

int probe_run(const char *python, const char *const *symbols, size_t symbol_count,
              unsigned timeout_ms, struct probe *ret_probe) {
    int pipes[PIPES][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
    struct stream streams[2] = {{.fd = -1}, {.fd = -1}};
    const char **arguments = calloc(symbol_count + 5, sizeof(*arguments));
    char fd_text[16];
    int result = 0;
    pid_t child = -1;

    streams[ANSWERS].text = malloc(OUTPUT_MAX + 1);
    streams[ERRORS].text = malloc(OUTPUT_MAX + 1);
    if (!arguments || !streams[ANSWERS].text || !streams[ERRORS].text) {
        result = -ENOMEM;
        goto out;
    }
    for (int i = 0; i < PIPES; i++) {
        if (pipe2(pipes[i], O_CLOEXEC) != 0) {
            result = -errno;
            goto out;
        }
    }
    (void)snprintf(fd_text, sizeof(fd_text), "%d", pipes[ANSWERS][1]);
    arguments[0] = python;
    arguments[1] = "-c";
    arguments[2] = script;
    arguments[3] = fd_text;
    memcpy(&arguments[4], symbols, symbol_count * sizeof(*symbols));
    result = start((char **)arguments, pipes, &child);
    if (!result) {
        streams[ANSWERS].fd = pipes[ANSWERS][0];
        streams[ERRORS].fd = pipes[ERRORS][0];
        pipes[ANSWERS][0] = pipes[ERRORS][0] = -1;
        result = finish(streams, child, timeout_ms, ret_probe);
    }
out:
    for (int i = 0; i < PIPES; i++) {
        close_end(&pipes[i][0]);
        close_end(&pipes[i][1]);
    }
    for (int i = 0; i < 2; i++) {
        close_end(&streams[i].fd);
        free(streams[i].text);
    }
    free(arguments);
    return result;
}

void probe_free(struct probe *probe) {
    json_decref(probe->lines);
    probe->lines = NULL;
}
