/* SPDX-License-Identifier: Apache-2.0 */
/* Inside segment/: one process's entry in the directory that the processes of a host share (wire.h
 * has the rules). */
#ifndef TIDEPOOL_DIRECTORY_H
#define TIDEPOOL_DIRECTORY_H

#include <stdbool.h>
#include <stdint.h>

struct tp_config;

struct tp_entry {
    bool open;
    bool lost; /* and said so */
    int dir_fd, lock_fd, listen_fd;
    char socket_name[48], lock_name[48];
};

/*
 * Make the entry `<role>-<id>`: lock file, lock, a listening socket (non-blocking) under a
 * temporary name, rename. Takes over `dir_fd` in any case. `others`: peers of other uids may
 * connect (the server checks them). `path` is for messages. 0 or -errno with one line logged; all
 * fds are listed with tp_fork_close_add.
 */
int tp_entry_make(char role, const uint8_t id[static 16], int dir_fd, const char *path, bool others,
                  struct tp_entry *ret_entry);

/*
 * Has somebody removed the entry, or the directory `path`, under a running process? Then engines
 * and `tidepool status` do not find it, and tp_entry_renew is to be called.
 */
bool tp_entry_is_lost(const struct tp_entry *entry, const char *path);

/*
 * Put a lost entry back, with a new listening socket; the lock is kept where its file is still
 * there. A store's directory that is gone is made again with the owner and mode that it had; an
 * engine's is the store's to make. 0, or -errno with the entry as it was and still listening: the
 * caller may try again at any time. One line for the first success and for the first failure after
 * each success. Serialize with all that makes or removes entries.
 */
int tp_entry_renew(struct tp_entry *entry, const char *path, const struct tp_config *config);

/* Remove the entry from the directory and close everything. */
void tp_entry_remove(struct tp_entry *entry);

#endif
