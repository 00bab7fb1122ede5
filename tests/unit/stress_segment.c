/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments come, are published, withdrawn and go in two threads while clients attach, map, ask and
 * leave in two others, and one looks addresses up. Made for ThreadSanitizer (and so without
 * Criterion), useful everywhere: in the end nothing is left.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <dirent.h>
#include <fcntl.h>

#include "env/env.h"
#include "scratch.h"
#include "segment/segment.h"
#include "segment/wire.h"

#define BYTES (UINT64_C(4) << 20)
#define ROUNDS 40

static struct tp_config config;
static atomic_bool stop;
static atomic_uint mapped;

static void require(bool right, const char *what) {
    if (right)
        return;
    fprintf(stderr, "stress_segment: not true: %s\n", what);
    exit(1);
}

static void *own_segments(void *arg) {
    char *range = aligned_alloc(16 << 20, 16 << 20);
    (void)arg;
    require(range != NULL, "memory");
    for (unsigned i = 0; i < ROUNDS; i++) {
        char name[32];
        require(tp_segment_overlay(range, BYTES, i % 2 == 0, &config) == 0, "overlay");
        require(tp_segment_contains(range + BYTES - 1), "contains");
        require(tp_segment_publish(range, &config) == 0, "publish");
        snprintf(name, sizeof name, "name-%u", i);
        require(tp_server_set_name(name) == 0, "name");
        range[0] = 1;
        usleep(5000);
        if (i % 3 == 0)
            require(tp_segment_withdraw(range) == 0, "withdraw");
        require(tp_segment_restore(range) == 0, "restore");
    }
    free(range);
    return NULL;
}

static void *look_up(void *arg) {
    static char here;
    (void)arg;
    while (!atomic_load(&stop))
        require(!tp_segment_contains(&here), "not contained");
    return NULL;
}

static int connect_any(void) {
    int fd = -ENOENT;
    DIR *directory = opendir(config.store.socket_dir);
    const struct dirent *entry;
    while (directory != NULL && fd < 0 && (entry = readdir(directory)) != NULL) {
        uint8_t id[16];
        if (tp_wire_parse_name(entry->d_name, id) == 's')
            fd = tp_wire_connect(dirfd(directory), entry->d_name);
    }
    if (directory != NULL)
        closedir(directory);
    return fd;
}

static void take(int fd, const struct tp_msg *message, int *fds, unsigned count) {
    struct tp_msg want;
    memset(&want, 0, sizeof want);
    if (message->type == TP_MSG_SEGMENT) {
        want.type = TP_MSG_WANT;
        want.body.pieces.segment_id = message->body.segment.segment_id;
        want.body.pieces.count = message->body.segment.piece_count;
        (void)tp_wire_send(fd, &want, NULL, 0);
    }
    for (unsigned i = 0; i < count; i++) {
        void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fds[i], 0);
        require(map != MAP_FAILED, "a piece maps");
        munmap(map, 4096);
        close(fds[i]);
        atomic_fetch_add(&mapped, 1);
    }
}

static void *be_client(void *arg) {
    (void)arg;
    while (!atomic_load(&stop)) {
        struct tp_msg message;
        int fd = connect_any();
        if (fd < 0)
            continue;
        memset(&message, 0, sizeof message);
        message.type = TP_MSG_HELLO;
        message.body.hello.purpose = TP_PURPOSE_ATTACH;
        require(tp_host_identity(true, message.body.hello.identity) == 0, "identity");
        (void)tp_wire_send(fd, &message, NULL, 0);
        for (unsigned i = 0; i < 20 && !atomic_load(&stop); i++) {
            int fds[TP_WIRE_MAX_FDS];
            unsigned count = 0;
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            if (poll(&wait, 1, 50) <= 0)
                continue;
            if (tp_wire_receive(fd, &message, fds, TP_WIRE_MAX_FDS, &count) < 0)
                break;
            take(fd, &message, fds, count);
        }
        close(fd);
    }
    return NULL;
}

int main(void) {
    pthread_t owners[2];
    pthread_t clients[2];
    pthread_t looker;
    config.store.half = TP_HALF_ON;
    config.store.kind = TP_SEGMENT_MEMFD;
    config.store.piece_bytes = UINT64_C(1) << 20;
    config.boot_id_only = true;
    snprintf(config.store.socket_dir, sizeof config.store.socket_dir,
             "/tmp/tidepool-stress-XXXXXX");
    require(scratch_directory(config.store.socket_dir), "a directory");
    require(pthread_create(&looker, NULL, look_up, NULL) == 0, "a thread");
    for (unsigned i = 0; i < 2; i++)
        require(pthread_create(&owners[i], NULL, own_segments, NULL) == 0 &&
                    pthread_create(&clients[i], NULL, be_client, NULL) == 0,
                "threads");
    for (unsigned i = 0; i < 2; i++)
        pthread_join(owners[i], NULL);
    atomic_store(&stop, true);
    for (unsigned i = 0; i < 2; i++)
        pthread_join(clients[i], NULL);
    pthread_join(looker, NULL);
    tp_server_stop();
    char record[sizeof config.store.socket_dir + 16];
    snprintf(record, sizeof record, "%s/addresses", config.store.socket_dir);
    require(unlink(record) == 0 && rmdir(config.store.socket_dir) == 0,
            "nothing is left but the record of addresses");
    require(atomic_load(&mapped) > 0, "clients mapped pieces");
    printf("%u pieces mapped\n", atomic_load(&mapped));
    return 0;
}
