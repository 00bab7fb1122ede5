/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of segment/ share. */
#include "segment_bench.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "env/stats.h"
#include "scratch.h"

struct tp_config *bench_config(uint64_t piece_bytes) {
    struct tp_config *config = calloc(1, sizeof *config);
    cr_assert_not_null(config);
    config->store.half = TP_HALF_ON;
    config->store.kind = TP_SEGMENT_MEMFD;
    config->store.piece_bytes = piece_bytes;
    config->boot_id_only = true;
    snprintf(config->store.socket_dir, sizeof config->store.socket_dir,
             "/tmp/tidepool-test-XXXXXX");
    cr_assert(scratch_directory(config->store.socket_dir));
    memcpy(config->engine.socket_dir, config->store.socket_dir, sizeof config->engine.socket_dir);
    return config;
}

unsigned bench_names(const struct tp_config *config) {
    unsigned count = 0;
    DIR *directory = opendir(config->store.socket_dir);
    cr_assert_not_null(directory);
    const struct dirent *entry;
    while ((entry = readdir(directory)) != NULL)
        count += strcmp(entry->d_name, "addresses") != 0;
    closedir(directory);
    return count - 2;
}

bool bench_config_free(struct tp_config *config) {
    char record[sizeof config->store.socket_dir + 16];
    snprintf(record, sizeof record, "%s/addresses", config->store.socket_dir);
    (void)unlink(record);
    bool empty = rmdir(config->store.socket_dir) == 0;
    free(config);
    return empty;
}

void *bench_allocate(uint64_t bytes) {
    void *address = aligned_alloc(16 * MIB, (bytes + 16 * MIB - 1) / (16 * MIB) * (16 * MIB));
    cr_assert_not_null(address);
    return address;
}

static uint64_t word(uint64_t index, unsigned seed) {
    return (index + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ ((uint64_t)seed << 32);
}

void bench_fill(void *address, uint64_t bytes, unsigned seed) {
    uint64_t *words = address;
    for (uint64_t i = 0; i < bytes / 8; i++)
        words[i] = word(i, seed);
}

bool bench_same(const void *address, uint64_t bytes, unsigned seed) {
    const uint64_t *words = address;
    for (uint64_t i = 0; i < bytes / 8; i++) {
        if (words[i] != word(i, seed))
            return false;
    }
    return true;
}

static pid_t dying_with(pid_t parent, pid_t child) {
    cr_assert_geq(child, 0);
    if (child == 0 && (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent))
        _exit(99);
    return child;
}

pid_t bench_fork(void) {
    pid_t parent = getpid();
    return dying_with(parent, fork());
}

pid_t bench_process(void) {
    pid_t parent = getpid();
    return dying_with(parent, (pid_t)syscall(SYS_fork));
}

unsigned bench_fds(void) {
    unsigned count = 0;
    int page;
    if (!tp_inert())
        cr_assert_eq(tp_stats_open(&page), 0); /* its fd is in every count */
    DIR *directory = opendir("/proc/self/fd");
    cr_assert_not_null(directory);
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    return count;
}

bool bench_fds_become(unsigned count) {
    for (unsigned i = 0; i < 200 && bench_fds() != count; i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    return bench_fds() == count;
}

unsigned bench_maps(void) {
    unsigned count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    cr_assert_not_null(file);
    for (int c = getc(file); c != EOF; c = getc(file))
        count += c == '\n';
    fclose(file);
    return count;
}

int bench_connect(const struct tp_config *config, char role) {
    int fd = -ENOENT;
    DIR *directory = opendir(config->store.socket_dir);
    if (directory == NULL)
        return -errno;
    const struct dirent *entry;
    while (fd == -ENOENT && (entry = readdir(directory)) != NULL) {
        uint8_t id[16];
        if (tp_wire_parse_name(entry->d_name, id) == role)
            fd = tp_wire_connect(dirfd(directory), entry->d_name);
    }
    closedir(directory);
    return fd;
}

void bench_hello(int fd, uint32_t purpose, const char *identity) {
    struct tp_msg message;
    memset(&message, 0, sizeof message);
    message.type = TP_MSG_HELLO;
    message.body.hello.purpose = purpose;
    snprintf(message.body.hello.program, sizeof message.body.hello.program, "test");
    if (identity != NULL)
        snprintf(message.body.hello.identity, sizeof message.body.hello.identity, "%s", identity);
    else
        cr_assert_eq(tp_host_identity(true, message.body.hello.identity), 0);
    cr_assert_eq(tp_wire_send(fd, &message, NULL, 0), 0);
}

int bench_receive(int fd, struct tp_msg *ret_message, int *ret_fds, unsigned *ret_fd_count,
                  int ms) {
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    if (poll(&wait, 1, ms) <= 0)
        return -ETIMEDOUT;
    return tp_wire_receive(fd, ret_message, ret_fds, ret_fds == NULL ? 0 : TP_WIRE_MAX_FDS,
                           ret_fd_count);
}

void bench_expect(int fd, uint16_t type, struct tp_msg *ret_message) {
    int fds[TP_WIRE_MAX_FDS];
    unsigned count = 0;
    int result = bench_receive(fd, ret_message, fds, &count, 5000);
    for (unsigned i = 0; i < count; i++)
        close(fds[i]);
    cr_assert_eq(result, 0, "no message of type %u: %s", type, strerror(-result));
    cr_assert_eq(ret_message->type, type, "message %u instead of %u", ret_message->type, type);
}

int bench_attach(const struct tp_config *config) {
    struct tp_msg message;
    int fd = bench_connect(config, 's');
    cr_assert_geq(fd, 0, "connect: %s", strerror(-fd));
    bench_hello(fd, TP_PURPOSE_ATTACH, NULL);
    bench_expect(fd, TP_MSG_WELCOME, &message);
    bench_expect(fd, TP_MSG_NAME, &message);
    return fd;
}

bool bench_ended(int fd, int ms) {
    struct tp_msg message;
    int fds[TP_WIRE_MAX_FDS];
    unsigned count;
    int result;
    do {
        count = 0;
        result = bench_receive(fd, &message, fds, &count, ms);
        for (unsigned i = 0; i < count; i++)
            close(fds[i]);
    } while (result == 0);
    return result == -ENODATA;
}

static bool map_pieces(int fd, const struct tp_msg_segment *segment, char *base, uint32_t first,
                       uint32_t count) {
    struct tp_msg message;
    int fds[TP_WIRE_MAX_FDS];
    unsigned got = 0;
    bool good = true;
    memset(&message, 0, sizeof message);
    message.type = TP_MSG_WANT;
    message.body.pieces = (struct tp_msg_pieces){segment->segment_id, first, count};
    if (tp_wire_send(fd, &message, NULL, 0) != 0 ||
        bench_receive(fd, &message, fds, &got, 5000) != 0 || message.type != TP_MSG_PIECES ||
        got != count || message.body.pieces.first != first)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        struct stat status;
        uint64_t bytes = tp_wire_piece_bytes(segment, first + i);
        int seals = fcntl(fds[i], F_GET_SEALS);
        good = good && fstat(fds[i], &status) == 0 && (uint64_t)status.st_size == bytes;
        /* Files of tmpfs and hugetlbfs answer with F_SEAL_SEAL alone: no seal can be put on them.
         */
        good = good && (seals == F_SEAL_SEAL || (seals & F_SEAL_SHRINK) != 0);
        good =
            good && mmap(base + (first + i) * segment->piece_bytes, bytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED, fds[i], 0) != MAP_FAILED;
        close(fds[i]);
    }
    return good;
}

void *bench_map(int fd, const struct tp_msg_segment *segment) {
    /* Aligned for huge pages of 2 MiB. */
    char *base = mmap(NULL, segment->map_bytes + 2 * MIB, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || tp_wire_check_segment(segment) != 0)
        return NULL;
    base += (2 * MIB - (uintptr_t)base % (2 * MIB)) % (2 * MIB);
    for (uint32_t first = 0; first < segment->piece_count; first += TP_WIRE_MAX_FDS) {
        uint32_t count = segment->piece_count - first;
        if (!map_pieces(fd, segment, base, first,
                        count < TP_WIRE_MAX_FDS ? count : TP_WIRE_MAX_FDS))
            return NULL;
    }
    return base;
}

bool bench_logged(const char *words) {
    const struct tp_stats_page *page = tp_stats_page();
    for (unsigned i = 0; i < TP_STATS_EVENTS; i++) {
        if (strstr(page->events[i].text, words) != NULL)
            return true;
    }
    return false;
}
