/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_store.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "scratch.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "fake store, line %d: %s\n", __LINE__, #condition);                    \
            _exit(99);                                                                             \
        }                                                                                          \
    } while (0)

struct fake {
    struct fake_options options;
    struct tp_msg_segment segment;
    uint8_t instance[16];
    int fds[FAKE_PIECES_MAX];
    int listener;
    int lease_fd;
    pthread_mutex_t *alive; /* at the start of the lease page */
};

struct tp_config *fake_config(void) {
    struct tp_config *config = calloc(1, sizeof(*config));
    CHECK(config);
    config->engine.half = TP_HALF_ON;
    config->engine.copy_threads = 1;
    config->boot_id_only = true;
    snprintf(config->engine.socket_dir, sizeof(config->engine.socket_dir), "/tmp/tp-peer-XXXXXX");
    CHECK(scratch_directory(config->engine.socket_dir));
    return config;
}

static void say(int fd, struct tp_msg *message, const int *fds, unsigned count) {
    (void)tp_wire_send(fd, message, fds, count);
}

/* What a store says that was set up many times in its process: a name each time, the last counts.
 */
static void say_names(const struct fake *fake, int client, unsigned count) {
    for (unsigned i = 1; i <= count; i++) {
        struct tp_msg message = {.type = TP_MSG_NAME};
        char *name = message.body.name.name;
        int used = snprintf(name, 128, "%s", fake->options.name);
        if (i < count)
            snprintf(name + used, 16, "-%u", i);
        say(client, &message, NULL, 0);
    }
}

/* true: this client was turned away. */
static bool turned_away(const struct fake *fake, int client) {
    static unsigned refused;
    if (fake->options.manner != FAKE_FULL || refused == 2)
        return false;
    struct tp_msg message = {.type = TP_MSG_REFUSED, .body.refused.reason = TP_REFUSED_FULL};
    refused++;
    say(client, &message, NULL, 0);
    return true;
}

static void say_name_and_segment(const struct fake *fake, int client) {
    enum fake_manner manner = fake->options.manner;
    struct tp_msg message = {.type = TP_MSG_SEGMENT, .body.segment = fake->segment};
    unsigned names = manner == FAKE_RENAMES ? 64 : manner == FAKE_NAME_FLOOD ? 66 : 1;
    if (manner == FAKE_BAD_SEGMENT)
        message.body.segment.bytes = UINT64_MAX;
    if (manner == FAKE_SEGMENT_FIRST)
        say(client, &message, NULL, 0);
    if (manner == FAKE_NAMED_ANEW) {
        struct tp_msg other = {.type = TP_MSG_NAME};
        snprintf(other.body.name.name, 64, "127.0.0.1:%d", (int)getpid() + 65536);
        say(client, &other, NULL, 0);
    } else {
        say_names(fake, client, names);
    }
    if (manner != FAKE_SEGMENT_FIRST)
        say(client, &message, NULL, 0);
    if (manner == FAKE_TWO_SEGMENTS) {
        message = (struct tp_msg){.type = TP_MSG_SEGMENT, .body.segment = fake->segment};
        message.body.segment.segment_id++;
        message.body.segment.slot++;
        message.body.segment.base = FAKE_SECOND_BASE;
        say(client, &message, NULL, 0);
    }
}

static void greet(const struct fake *fake, int client) {
    struct tp_msg message = {.type = TP_MSG_WELCOME};
    usleep(fake->options.greet_ms * 1000);
    memcpy(message.body.welcome.instance, fake->instance, 16);
    if (fake->options.manner == FAKE_OTHER_INSTANCE)
        message.body.welcome.instance[0] ^= 1;
    message.body.welcome.netns = tp_host_netns();
    CHECK(tp_host_identity(true, message.body.welcome.identity) == 0);
    if (fake->options.manner == FAKE_OTHER_HOST)
        message.body.welcome.identity[0] ^= 1;
    say(client, &message, &fake->lease_fd, fake->options.manner != FAKE_NO_LEASE);
    say_name_and_segment(fake, client);
    if (fake->options.manner == FAKE_UNASKED) {
        message = (struct tp_msg){.type = TP_MSG_PIECES,
                                  .body.pieces = {fake->segment.segment_id + 1, 0, 1}};
        say(client, &message, fake->fds, 1);
    }
}

static void answer(const struct fake *fake, int client, const struct tp_msg *message) {
    enum fake_manner manner = fake->options.manner;
    if (message->type == TP_MSG_HELLO) {
        if (manner == FAKE_NOISE) {
            uint8_t noise[512];
            for (unsigned i = 0; i < sizeof(noise); i++)
                noise[i] = (uint8_t)(i * 37);
            (void)!send(client, noise, sizeof(noise), MSG_NOSIGNAL);
        } else if (manner == FAKE_EARLY) {
            struct tp_msg early = {.type = TP_MSG_SEGMENT, .body.segment = fake->segment};
            say(client, &early, NULL, 0);
        } else if (manner != FAKE_SILENT && !turned_away(fake, client)) {
            greet(fake, client);
        }
        return;
    }
    if (message->type != TP_MSG_WANT || manner == FAKE_NO_PIECES)
        return;
    struct tp_msg_pieces want = message->body.pieces;
    struct tp_msg pieces = {.type = TP_MSG_PIECES, .body.pieces = want};
    CHECK(want.first + want.count <= fake->segment.piece_count);
    usleep(fake->options.pieces_ms * 1000);
    say(client, &pieces, fake->fds + want.first, want.count);
    if (manner == FAKE_RENAMES) {
        usleep(3200000);
        say_names(fake, client, 3);
    }
    if (manner == FAKE_NAMED_ANEW)
        say_names(fake, client, 1);
    static bool hung_up;
    if (manner == FAKE_HANGS_UP && !hung_up) {
        hung_up = true;
        shutdown(client, SHUT_RDWR);
    }
    if (manner == FAKE_GONE) {
        usleep((fake->options.gone_ms ? fake->options.gone_ms : 200) * 1000);
        struct tp_msg gone = {.type = TP_MSG_GONE, .body.gone = {fake->segment.segment_id}};
        say(client, &gone, NULL, 0);
    }
}

static void serve(const struct fake *fake) {
    struct pollfd polled[9] = {{.fd = fake->listener, .events = POLLIN}};
    nfds_t count = 1;
    for (;;) {
        (void)poll(polled, count, -1);
        if (polled[0].revents && count < 9) {
            int client = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
            if (client >= 0)
                polled[count++] = (struct pollfd){.fd = client, .events = POLLIN};
        }
        for (nfds_t i = 1; i < count; i++) {
            struct tp_msg message;
            unsigned fds = 0;
            if (!polled[i].revents)
                continue;
            int error = tp_wire_receive(polled[i].fd, &message, NULL, 0, &fds);
            if (error == 0)
                answer(fake, polled[i].fd, &message);
            if (error == 0 || error == -EAGAIN)
                continue;
            close(polled[i].fd);
            polled[i--] = polled[--count];
        }
    }
}

/* A file without a name. /tmp may be a tmpfs, the program's own folder hardly is. */
static int make_file(const char *directory) {
    int fd = open(directory, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    return fd;
}

static int make_piece(enum fake_manner manner) {
    if (manner == FAKE_DISK_FILE)
        return make_file(".");
    if (manner == FAKE_TMPFS_FILE)
        return make_file("/dev/shm");
    int fd =
        memfd_create("fake", MFD_CLOEXEC | (manner == FAKE_UNSEALABLE ? 0 : MFD_ALLOW_SEALING));
    CHECK(fd >= 0);
    return fd;
}

static bool seals(enum fake_manner manner) {
    return manner != FAKE_UNSEALED && manner != FAKE_UNSEALABLE && manner != FAKE_DISK_FILE &&
           manner != FAKE_TMPFS_FILE;
}

static void make_memory(struct fake *fake, struct fake_store *store) {
    store->memory = mmap(NULL, store->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(store->memory != MAP_FAILED);
    for (uint32_t i = 0; i < store->pieces; i++) {
        uint64_t bytes = tp_wire_piece_bytes(&fake->segment, i);
        uint64_t real = fake->options.manner == FAKE_SMALL_PIECE ? bytes - 4096 : bytes;
        fake->fds[i] = make_piece(fake->options.manner);
        CHECK(ftruncate(fake->fds[i], (off_t)real) == 0);
        if (seals(fake->options.manner))
            CHECK(fcntl(fake->fds[i], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
        CHECK(mmap(store->memory + i * store->piece_bytes, real, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_FIXED, fake->fds[i], 0) != MAP_FAILED);
    }
}

/* As segment/lease.c makes it. */
static void make_lease(struct fake *fake, struct fake_store *store) {
    enum fake_manner manner = fake->options.manner;
    pthread_mutexattr_t attributes;
    fake->lease_fd = memfd_create("lease", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fake->lease_fd >= 0);
    CHECK(ftruncate(fake->lease_fd, TP_LEASE_BYTES - (manner == FAKE_SHORT_LEASE)) == 0);
    store->lease =
        mmap(NULL, TP_LEASE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fake->lease_fd, 0);
    CHECK(store->lease != MAP_FAILED);
    if (manner != FAKE_UNSEALED_LEASE)
        CHECK(fcntl(fake->lease_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    fake->alive = (pthread_mutex_t *)store->lease;
    CHECK(pthread_mutexattr_init(&attributes) == 0);
    CHECK(pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0);
    CHECK(pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0);
    CHECK(pthread_mutex_init(fake->alive, &attributes) == 0);
    atomic_store(&store->lease->segments[FAKE_SLOT], FAKE_SEGMENT);
    atomic_store(&store->lease->segments[FAKE_SLOT + 1], FAKE_SEGMENT + 1);
}

static void make_socket(struct fake *fake, struct fake_store *store, const char *directory) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char name[64] = "s-";
    CHECK(tp_random_id(fake->instance) == 0);
    for (unsigned i = 0; i < 16; i++)
        snprintf(name + 2 + (size_t)2 * i, 3, "%02x", fake->instance[i]);
    snprintf(store->socket_path, sizeof(store->socket_path), "%.64s/%s.sock", directory, name);
    snprintf(address.sun_path, sizeof(address.sun_path), "%.100s.x", store->socket_path);
    fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fake->listener >= 0);
    CHECK(bind(fake->listener, (struct sockaddr *)&address, sizeof(address)) == 0);
    CHECK(listen(fake->listener, 8) == 0);
    CHECK(rename(address.sun_path, store->socket_path) == 0);
}

void fake_start(struct fake_store *store, const struct tp_config *config,
                const struct fake_options *options) {
    struct fake fake = {.options = *options};
    store->bytes = options->bytes ? options->bytes : UINT64_C(4) << 20;
    store->piece_bytes = options->piece_bytes ? options->piece_bytes : store->bytes;
    store->pieces = (uint32_t)((store->bytes + store->piece_bytes - 1) / store->piece_bytes);
    CHECK(store->pieces <= FAKE_PIECES_MAX);
    fake.segment = (struct tp_msg_segment){.segment_id = FAKE_SEGMENT,
                                           .base = options->base ? options->base : FAKE_BASE,
                                           .bytes = store->bytes,
                                           .page_bytes = 4096,
                                           .piece_bytes = store->piece_bytes,
                                           .piece_count = store->pieces,
                                           .kind = TP_WIRE_MMAP,
                                           .map_bytes = store->bytes,
                                           .slot = FAKE_SLOT};
    make_lease(&fake, store);
    make_memory(&fake, store);
    make_socket(&fake, store, config->engine.socket_dir);
    store->pid = fork();
    CHECK(store->pid >= 0);
    if (store->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        CHECK(pthread_mutex_lock(fake.alive) == 0);
        serve(&fake);
        _exit(0);
    }
    close(fake.listener);
    close(fake.lease_fd);
    for (uint32_t i = 0; i < store->pieces; i++)
        close(fake.fds[i]);
}

void fake_kill(struct fake_store *store) {
    kill(store->pid, SIGKILL);
    waitpid(store->pid, NULL, 0);
    store->pid = 0;
}

void fake_end(struct fake_store *store) {
    if (store->pid)
        fake_kill(store);
    munmap(store->memory, store->bytes);
    munmap(store->lease, TP_LEASE_BYTES);
    unlink(store->socket_path);
}
