/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: threads that call the CUDA driver to map and open pieces. The driver takes
 * tens of milliseconds for a piece of 2 GiB, and longer while copies run, and the peer thread has
 * connections to look after. Jobs go in and come back; who they are for is the peer thread's
 * business. All functions: the peer thread, or after its end.
 */
#ifndef TIDEPOOL_IMPORTER_H
#define TIDEPOOL_IMPORTER_H

#include <stdbool.h>
#include <stdint.h>

/* What is worth having under way at once: while one piece waits for the driver's lock on a GPU,
 * the next one's pages are mapped for the CPU. */
#define TP_IMPORT_THREADS 2

struct tp_peer;
struct tp_peer_segment;

struct tp_import_job {
    struct tp_import_job *next;
    /* The asker's. The segment is not dropped while jobs of its peer are out. */
    struct tp_peer *peer;
    struct tp_peer_segment *segment;
    uint32_t piece;

    char *address;
    uint64_t bytes;
    int fd; /* owned; -1: the piece is mapped, open it only */
    uint64_t devices;
    /* Answers: */
    int error;       /* of the mapping: 0, -EREMOTEIO with one line logged, -ECANCELED */
    uint64_t opened; /* of `devices`: those that may reach it now */
};

/* Hand a job over, which is copied. 0, or -errno: the fd stays the caller's. */
int tp_importer_put(const struct tp_import_job *job);

/* A job that has ended. false: none. */
bool tp_importer_take(struct tp_import_job *ret_job);

/* End the threads; jobs that had not begun come back with -ECANCELED. */
void tp_importer_stop(void);

#endif
