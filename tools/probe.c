/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Run probe.py in a Python of the user's. Importing a native module runs foreign code: it may print, hang or crash, so it has a
 * process group of its own, a pipe of its own for answers, and a deadline.
 */
#include "tools/probe.h"

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
#include <time.h>
#include <unistd.h>

#define OUTPUT_MAX (1U << 20)

static const char script[] =
#include "probe.inc"
    ;

/* A pipe's read end and what came out of it. */
struct stream {
    int fd;
    char *text; /* OUTPUT_MAX + 1 bytes */
    size_t length;
};

static uint64_t now_ms(void) {
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* In the child: become the interpreter. The error of exec travels through `exec_error_fd`, which exec closes. */
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
    ssize_t n = read(stream->fd, room ? stream->text + stream->length : dropped, room ? room : sizeof(dropped));

    if (n > 0 && room) {
        stream->length += (size_t)n;
    }
    return n > 0 || (n < 0 && errno == EINTR);
}

/* Until both streams end. False when the time is up first. */
static bool collect(struct stream *streams, uint64_t deadline) {
    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
        struct pollfd polled[2] = {{.fd = streams[0].fd, .events = POLLIN}, {.fd = streams[1].fd, .events = POLLIN}};
        uint64_t now = now_ms();

        if (now >= deadline || (poll(polled, 2, (int)(deadline - now)) < 0 && errno != EINTR)) {
            return false;
        }
        for (int i = 0; i < 2; i++) {
            if (polled[i].revents && !drain(&streams[i])) {
                (void)close(streams[i].fd);
                streams[i].fd = -1;
            }
        }
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
        (void)snprintf(probe->problem, sizeof(probe->problem), "did not finish in time and was killed");
    } else if (WIFSIGNALED(status)) {
        (void)snprintf(probe->problem, sizeof(probe->problem), "killed by signal %d (%s)", WTERMSIG(status),
                       strsignal(WTERMSIG(status)));
    } else if (WEXITSTATUS(status) != 0) {
        (void)snprintf(probe->problem, sizeof(probe->problem), "exit status %d", WEXITSTATUS(status));
    }
}

/* The last line that says something: Python ends a traceback with the error. */
static void keep_last_words(struct stream *errors, struct probe *probe) {
    while (errors->length && strchr("\n\r ", errors->text[errors->length - 1])) {
        errors->length--;
    }
    errors->text[errors->length] = '\0';
    const char *line = strrchr(errors->text, '\n');
    (void)snprintf(probe->last_words, sizeof(probe->last_words), "%s", line ? line + 1 : errors->text);
}

static void close_if_open(int fd) {
    if (fd >= 0) {
        (void)close(fd);
    }
}

int probe_run(const char *python, const char *const *symbols, size_t symbol_count, unsigned timeout_ms,
              struct probe *ret_probe) {
    int pipes[3][2] = {{-1, -1}, {-1, -1}, {-1, -1}}; /* answers, standard error, errno of exec */
    struct stream streams[2] = {{.fd = -1}, {.fd = -1}};
    char **arguments = calloc(symbol_count + 5, sizeof(*arguments));
    char fd_text[16];
    struct probe probe = {0};
    int status = 0;
    int result = -ENOMEM;
    pid_t child = -1;

    streams[0].text = malloc(OUTPUT_MAX + 1);
    streams[1].text = malloc(OUTPUT_MAX + 1);
    if (!arguments || !streams[0].text || !streams[1].text) {
        goto out;
    }
    for (int i = 0; i < 3; i++) {
        if (pipe2(pipes[i], O_CLOEXEC) != 0) {
            result = -errno;
            goto out;
        }
    }
    (void)snprintf(fd_text, sizeof(fd_text), "%d", pipes[0][1]);
    arguments[0] = (char *)python;
    arguments[1] = (char *)"-c";
    arguments[2] = (char *)script;
    arguments[3] = fd_text;
    memcpy(&arguments[4], symbols, symbol_count * sizeof(*symbols));
    child = fork();
    if (child == 0) {
        become_python(arguments, pipes[0][1], pipes[1][1], pipes[2][1]);
    }
    if (child < 0) {
        result = -errno;
        goto out;
    }
    for (int i = 0; i < 3; i++) {
        (void)close(pipes[i][1]);
        pipes[i][1] = -1;
    }
    int exec_error = 0;
    bool started = read(pipes[2][0], &exec_error, sizeof(exec_error)) == 0;
    streams[0].fd = pipes[0][0];
    streams[1].fd = pipes[1][0];
    pipes[0][0] = pipes[1][0] = -1;
    bool in_time = collect(streams, now_ms() + timeout_ms);
    (void)kill(-child, SIGKILL); /* whatever it left behind, too */
    if (!in_time) {
        (void)kill(child, SIGKILL);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (!started) {
        result = -exec_error;
        goto out;
    }
    streams[0].text[streams[0].length] = '\0';
    probe.lines = parse_lines(streams[0].text);
    describe_end(status, in_time, &probe);
    keep_last_words(&streams[1], &probe);
    *ret_probe = probe;
    result = 0;
out:
    for (int i = 0; i < 3; i++) {
        close_if_open(pipes[i][0]);
        close_if_open(pipes[i][1]);
    }
    for (int i = 0; i < 2; i++) {
        close_if_open(streams[i].fd);
        free(streams[i].text);
    }
    free(arguments);
    return result;
}

void probe_free(struct probe *probe) {
    json_decref(probe->lines);
    probe->lines = NULL;
}
