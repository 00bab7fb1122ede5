/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory that goes when the process that made it ends, however it ends: a test that fails or
 * is killed leaves nothing in /tmp. A small process of its own waits for that, and shares no fd
 * with the test, whose fds are counted.
 */
#ifndef TIDEPOOL_SCRATCH_H
#define TIDEPOOL_SCRATCH_H

#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Make the directory, as mkdtemp(3) does. false with errno set. */
static inline bool scratch_directory(char *path_template) {
    static char shell[] = "/bin/sh", option[] = "-c", path[] = "PATH=/usr/bin:/bin";
    static char script[] = "while kill -0 \"$1\"; do sleep 0.3; done; rm -rf -- \"$2\"";
    char pid[16];
    char *arguments[] = {shell, option, script, shell, pid, path_template, NULL};
    char *environment[] = {path, NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    pid_t watcher;
    if (mkdtemp(path_template) == NULL)
        return false;
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    posix_spawn_file_actions_init(&files);
    for (int fd = 0; fd < 3; fd++)
        posix_spawn_file_actions_addopen(&files, fd, "/dev/null", O_RDWR, 0);
    posix_spawn_file_actions_addclosefrom_np(&files, 3);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    /* Without a watcher the directory merely stays. */
    (void)posix_spawn(&watcher, shell, &files, &attributes, arguments, environment);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    return true;
}

#endif
