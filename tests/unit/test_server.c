/* SPDX-License-Identifier: Apache-2.0 */
/* The server hands out pieces and counters, and no client can hurt another. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "env/stats.h"
#include "segment/segment.h"
#include "segment/session.h"
#include "segment/table.h"
#include "segment_bench.h"

#define BYTES (32 * MIB)

TestSuite(server, .timeout = 30);

static void pause_ms(long ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* A store with one published segment. */
struct store {
    struct tp_config *config;
    char *range;
};

/* With settings that are gone once the calls return, as those are that one mode of Mooncake's
 * wants. */
static struct store start_store(void) {
    struct store store = {bench_config(2 * MIB), bench_allocate(BYTES)};
    struct tp_config *own = malloc(sizeof(*own));
    cr_assert(own);
    *own = *store.config;
    cr_assert_eq(tp_segment_overlay(store.range, BYTES, false, own), 0);
    cr_assert_eq(tp_segment_publish(store.range, own), 0);
    explicit_bzero(own, sizeof(*own)); /* not left out before free, as memset is */
    free(own);
    return store;
}

static void end_store(struct store *store) {
    tp_server_stop();
    cr_assert_eq(bench_names(store->config), 0);
    cr_assert_eq(tp_segment_restore(store->range), 0);
    free(store->range);
    cr_assert(bench_config_free(store->config));
}

Test(server, a_client_sees_the_same_bytes_both_ways) {
    struct store store = start_store();
    bench_fill(store.range, BYTES, 1);
    pid_t child = bench_fork();
    if (child == 0) {
        struct tp_msg message;
        int fd = bench_attach(store.config);
        bench_expect(fd, TP_MSG_SEGMENT, &message);
        char *map = bench_map(fd, &message.body.segment);
        bool good = map != NULL && bench_same(map, BYTES, 1);
        if (good)
            bench_fill(map, BYTES, 2);
        _exit(good ? 0 : 1);
    }
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    cr_assert(bench_same(store.range, BYTES, 2));
    end_store(&store);
}

Test(server, segments_and_names_are_told_as_they_come_and_go) {
    struct store store = start_store();
    struct tp_msg message;
    int fd = bench_attach(store.config);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    uint64_t first = message.body.segment.segment_id;
    cr_assert_eq(message.body.segment.base, (uintptr_t)store.range);
    cr_assert_eq(message.body.segment.bytes, BYTES);
    cr_assert_eq(tp_server_set_name("127.0.0.1:15000"), 0);
    bench_expect(fd, TP_MSG_NAME, &message);
    cr_assert_str_eq(message.body.name.name, "127.0.0.1:15000");
    cr_assert_eq(tp_segment_withdraw(store.range), 0);
    bench_expect(fd, TP_MSG_GONE, &message);
    cr_assert_eq(message.body.gone.segment_id, first);
    cr_assert_eq(tp_segment_publish(store.range, store.config), 0);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    cr_assert_neq(message.body.segment.segment_id, first);
    close(fd);
    end_store(&store);
}

Test(server, status_gets_the_counters_and_the_end) {
    struct store store = start_store();
    struct tp_msg message;
    static struct tp_stats_page page;
    int fds[TP_WIRE_MAX_FDS];
    unsigned count = 0;
    int fd = bench_connect(store.config, 's');
    bench_hello(fd, TP_PURPOSE_STATUS, "another host");
    bench_expect(fd, TP_MSG_WELCOME, &message);
    cr_assert_eq(message.body.welcome.roles, TP_ROLE_STORE);
    cr_assert_eq(bench_receive(fd, &message, fds, &count, 5000), 0);
    cr_assert_eq(message.type, TP_MSG_PAGE);
    cr_assert_eq(tp_stats_view(fds[0], &page), 0);
    cr_assert_eq(page.segments[0].bytes, BYTES);
    cr_assert_eq(atomic_load(&page.counters[TP_SEGMENT_BYTES]), BYTES);
    cr_assert(bench_ended(fd, 5000));
    close(fd);
    end_store(&store);
}

/* Attach as engines do. Returns the lease page that came with the welcome, mapped, and its fd. */
static struct tp_lease_page *attach_for_page(const struct tp_config *config, int *ret_fd,
                                             int *ret_page) {
    struct tp_msg message;
    int fds[TP_WIRE_MAX_FDS];
    unsigned count = 0;
    *ret_fd = bench_connect(config, 's');
    cr_assert_geq(*ret_fd, 0);
    bench_hello(*ret_fd, TP_PURPOSE_ATTACH, NULL);
    cr_assert_eq(bench_receive(*ret_fd, &message, fds, &count, 5000), 0);
    cr_assert_eq(message.type, TP_MSG_WELCOME);
    cr_assert_eq(count, 1);
    struct tp_lease_page *page = mmap(NULL, TP_LEASE_BYTES, PROT_READ, MAP_SHARED, fds[0], 0);
    cr_assert_neq(page, MAP_FAILED);
    *ret_page = fds[0];
    bench_expect(*ret_fd, TP_MSG_NAME, &message);
    return page;
}

static bool is_thread_of_ours(uint32_t owner) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%u", owner);
    return access(path, F_OK) == 0;
}

Test(server, the_lease_page_says_what_is_published_and_who_serves) {
    struct store store = start_store();
    struct tp_msg message;
    int fd;
    int page_fd;
    struct tp_lease_page *page = attach_for_page(store.config, &fd, &page_fd);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    uint32_t slot = message.body.segment.slot;
    uint64_t first = message.body.segment.segment_id;
    cr_assert_eq(atomic_load(&page->segments[slot]), first);
    cr_assert(is_thread_of_ours(atomic_load(&page->owner)));
    cr_assert_eq(tp_segment_withdraw(store.range), 0);
    cr_assert_eq(atomic_load(&page->segments[slot]), 0, "before it returns");
    bench_expect(fd, TP_MSG_GONE, &message);
    cr_assert_eq(tp_segment_publish(store.range, store.config), 0);
    cr_assert_gt(atomic_load(&page->segments[slot]), first);
    cr_assert_lt(ftruncate(page_fd, 0), 0);
    cr_assert_eq(mmap(NULL, TP_LEASE_BYTES, PROT_WRITE, MAP_SHARED, page_fd, 0), MAP_FAILED);
    close(fd);
    tp_server_stop();
    cr_assert_eq(atomic_load(&page->owner), 0);
    cr_assert_eq(tp_server_start(true, store.config), 0);
    int again_fd;
    struct tp_lease_page *again = attach_for_page(store.config, &fd, &again_fd);
    cr_assert(is_thread_of_ours(atomic_load(&again->owner)));
    close(fd);
    close(page_fd);
    close(again_fd);
    end_store(&store);
}

Test(server, a_killed_process_is_dead_by_its_lease_page) {
    struct tp_config *config = bench_config(MIB);
    pid_t child = bench_process();
    if (child == 0) {
        void *range = bench_allocate(BYTES);
        bool good = tp_segment_overlay(range, BYTES, false, config) == 0 &&
                    tp_segment_publish(range, config) == 0;
        pause();
        _exit(good ? 0 : 1);
    }
    int fd = -ENOENT;
    int page_fd;
    for (int i = 0; i < 500 && fd < 0; i++) {
        usleep(10000);
        fd = bench_connect(config, 's');
    }
    cr_assert_geq(fd, 0);
    close(fd);
    struct tp_lease_page *page = attach_for_page(config, &fd, &page_fd);
    cr_assert_eq(atomic_load(&page->owner) & TP_LEASE_OWNER_DIED, 0);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    cr_assert_neq(atomic_load(&page->owner) & TP_LEASE_OWNER_DIED, 0);
    close(fd);
    close(page_fd);
}

static uint64_t elapsed_ms(const struct timespec *since) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)((now.tv_sec - since->tv_sec) * 1000 +
                      (now.tv_nsec - since->tv_nsec) / 1000000);
}

static uint64_t counted(enum tp_counter counter) {
    return atomic_load(&tp_stats_page()->counters[counter]);
}

static unsigned shown_clients(void) {
    unsigned count = 0;
    for (unsigned i = 0; i < TP_STATS_CLIENTS; i++)
        count += atomic_load(&tp_stats_page()->clients[i].state) == TP_SLOT_LIVE;
    return count;
}

static struct tp_msg want_of(uint64_t segment_id, uint32_t first, uint32_t count) {
    struct tp_msg message;
    memset(&message, 0, sizeof message);
    message.type = TP_MSG_WANT;
    message.body.pieces = (struct tp_msg_pieces){segment_id, first, count};
    return message;
}

/* An attached client gets its pieces promptly: nobody else has hurt it. */
static void expect_served(int fd, const struct tp_msg_segment *segment) {
    struct timespec start;
    struct tp_msg message = want_of(segment->segment_id, 0, 16);
    int fds[TP_WIRE_MAX_FDS];
    unsigned count = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    cr_assert_eq(tp_wire_send(fd, &message, NULL, 0), 0);
    cr_assert_eq(bench_receive(fd, &message, fds, &count, 5000), 0);
    cr_assert_eq(message.type, TP_MSG_PIECES);
    cr_assert_eq(count, 16);
    for (unsigned i = 0; i < count; i++)
        close(fds[i]);
    cr_assert_lt(elapsed_ms(&start), 1000);
}

Test(server, garbage_ends_the_connection_that_sent_it) {
    struct store store = start_store();
    struct tp_msg segment;
    int good = bench_attach(store.config);
    bench_expect(good, TP_MSG_SEGMENT, &segment);
    unsigned fds = bench_fds();
    for (unsigned i = 0; i < 6; i++) {
        struct tp_msg message;
        int null_fd = 0;
        memset(&message, 0, sizeof message);
        int fd = i < 3 ? bench_connect(store.config, 's') : bench_attach(store.config);
        cr_assert_geq(fd, 0);
        switch (i) {
        case 0: /* noise */
            memset(&message, 0x5a, sizeof message);
            cr_assert_eq(send(fd, &message, sizeof message, 0), 512);
            break;
        case 1: /* half a message */
            message.magic = TP_WIRE_MAGIC;
            message.version = TP_WIRE_VERSION;
            message.type = TP_MSG_HELLO;
            cr_assert_eq(send(fd, &message, 100, 0), 100);
            break;
        case 2: /* a message of the other side */
            message.type = TP_MSG_WELCOME;
            cr_assert_eq(tp_wire_send(fd, &message, NULL, 0), 0);
            break;
        case 3: /* HELLO again */
            bench_hello(fd, TP_PURPOSE_ATTACH, NULL);
            break;
        case 4: /* fds */
            message.type = TP_MSG_PAGE;
            cr_assert_eq(tp_wire_send(fd, &message, &null_fd, 1), 0);
            break;
        default: /* pieces that are not there */
            message = want_of(segment.body.segment.segment_id, 15, 2);
            cr_assert_eq(tp_wire_send(fd, &message, NULL, 0), 0);
            break;
        }
        cr_assert(bench_ended(fd, 5000), "case %u", i);
        close(fd);
    }
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), 6);
    cr_assert(bench_fds_become(fds));
    expect_served(good, &segment.body.segment);
    close(good);
    end_store(&store);
}

/* At once: a connection that only says nothing useful ends after TP_WIRE_HELLO_MS, or never. */
Test(server, every_message_out_of_turn_ends_the_connection_at_once) {
    struct store store = start_store();
    uint64_t misbehaved = 0;
    for (uint16_t type = TP_MSG_HELLO; type <= TP_MSG_GONE; type++) {
        for (int attached = 0; attached < 2; attached++) {
            struct tp_msg message = want_of(1, 0, 1);
            int null_fd = 0;
            unsigned fds = type == TP_MSG_PAGE || type == TP_MSG_PIECES ? 1 : 0;
            if (type == (attached ? TP_MSG_WANT : TP_MSG_HELLO))
                continue;
            int fd = attached ? bench_attach(store.config) : bench_connect(store.config, 's');
            message.type = type;
            cr_assert_eq(tp_wire_send(fd, &message, &null_fd, fds), 0);
            cr_assert(bench_ended(fd, TP_WIRE_HELLO_MS / 2), "type %u, attached %d", type,
                      attached);
            close(fd);
            misbehaved++;
        }
    }
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), misbehaved);
    end_store(&store);
}

Test(server, wrong_wants_and_purposes) {
    struct store store = start_store();
    struct tp_msg segment;
    const struct tp_msg_pieces bad[] = {{0, 0, 1},  {77, 0, 1},          {1, 16, 1},
                                        {1, 0, 17}, {1, UINT32_MAX, 1},  {1, 1, 16},
                                        {1, 0, 0},  {UINT64_MAX, 0, 16}, {1, UINT32_MAX, 16}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = bench_attach(store.config);
        bench_expect(fd, TP_MSG_SEGMENT, &segment);
        struct tp_msg message = want_of(bad[i].segment_id, bad[i].first, bad[i].count);
        cr_assert_eq(tp_wire_send(fd, &message, NULL, 0), 0);
        cr_assert(bench_ended(fd, 5000), "case %zu", i);
        close(fd);
    }
    int fd = bench_connect(store.config, 's');
    bench_hello(fd, 3, NULL);
    cr_assert(bench_ended(fd, 5000));
    close(fd);
    end_store(&store);
}

Test(server, a_want_that_crosses_a_withdrawal_is_no_offence) {
    struct store store = start_store();
    struct tp_msg message;
    int fd = bench_attach(store.config);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    struct tp_msg want = want_of(message.body.segment.segment_id, 0, 1);
    cr_assert_eq(tp_segment_withdraw(store.range), 0);
    cr_assert_eq(tp_wire_send(fd, &want, NULL, 0), 0);
    bench_expect(fd, TP_MSG_GONE, &message);
    cr_assert_eq(bench_receive(fd, &message, NULL, NULL, 100), -ETIMEDOUT);
    close(fd);
    end_store(&store);
}

static void expect_refused(int fd, enum tp_refusal reason, const char *part_of_text) {
    struct tp_msg message;
    bench_expect(fd, TP_MSG_REFUSED, &message);
    cr_assert_eq(message.body.refused.reason, reason);
    cr_assert_not_null(strstr(message.body.refused.text, part_of_text), "%s",
                       message.body.refused.text);
    cr_assert(bench_ended(fd, 5000));
    close(fd);
}

Test(server, refusals_say_what_to_do) {
    struct store store = start_store();
    struct tp_msg message;
    int fd = bench_connect(store.config, 's');
    bench_hello(fd, TP_PURPOSE_ATTACH, "another host");
    expect_refused(fd, TP_REFUSED_IDENTITY, "MC_TENT_MACHINE_ID=boot_id");
    fd = bench_connect(store.config, 's');
    memset(&message, 0, sizeof message);
    message.magic = TP_WIRE_MAGIC;
    message.version = TP_WIRE_VERSION + 1;
    message.type = TP_MSG_HELLO;
    cr_assert_eq(send(fd, &message, sizeof message, 0), 512);
    expect_refused(fd, TP_REFUSED_VERSION, "version");
    cr_assert_eq(counted(TP_CLIENTS_REFUSED), 2);
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), 0);
    end_store(&store);
}

/* Connect as another user, in a process of its own (glibc changes the uid of all threads). The
 * reason of the refusal, 0 when attached, or the error of connecting. */
static int attach_as(const struct tp_config *config, uid_t uid) {
    int status;
    pid_t child = bench_fork();
    if (child == 0) {
        struct tp_msg message = {.type = 0};
        int fds[TP_WIRE_MAX_FDS];
        int fd = seteuid(uid) < 0 ? -errno : bench_connect(config, 's');
        if (fd < 0)
            _exit(-fd);
        bench_hello(fd, TP_PURPOSE_ATTACH, NULL);
        if (bench_receive(fd, &message, fds, NULL, 5000) < 0)
            _exit(99);
        _exit(message.type == TP_MSG_REFUSED &&
                      strstr(message.body.refused.text, "TIDEPOOL_ALLOW_UIDS")
                  ? 200 + (int)message.body.refused.reason
                  : 0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status);
}

Test(server, other_uids_are_refused) {
    if (geteuid() != 0)
        cr_skip("CONFIG: needs root");
    struct tp_config *config = bench_config(0);
    config->allow_uid_count = 1;
    config->allow_uids[0] = 23456;
    cr_assert_eq(chmod(config->store.socket_dir, 0755), 0);
    cr_assert_eq(tp_server_start(true, config), 0);
    cr_assert_eq(attach_as(config, 12345), 200 + TP_REFUSED_UID);
    cr_assert_eq(attach_as(config, 23456), 0);
    tp_server_stop();
    config->allow_uid_count = 0; /* without a list the socket itself is closed to others */
    cr_assert_eq(tp_server_start(true, config), 0);
    cr_assert_eq(attach_as(config, 12345), EACCES);
    tp_server_stop();
    cr_assert(bench_config_free(config));
}

/* Become another user, or root again. That takes back the signal which ends us with our parent. */
static void become(uid_t uid) {
    if (seteuid(uid) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        _exit(99);
}

static struct tp_config *open_to_others(void) {
    struct tp_config *config = bench_config(0);
    config->allow_uid_count = 1;
    config->allow_uids[0] = 11111;
    cr_assert_eq(chmod(config->store.socket_dir, 0755), 0);
    cr_assert_eq(tp_server_start(true, config), 0);
    return config;
}

/* Connects as fast as it can and never speaks, with 256 connections at a time. */
static _Noreturn void flood(const struct tp_config *config) {
    int held[256];
    memset(held, -1, sizeof held);
    for (unsigned i = 0;; i = (i + 1) % 256) {
        char byte;
        if (held[i] >= 0 && recv(held[i], &byte, 1, 0) < 0 && errno == EAGAIN)
            continue; /* the server has not ended it yet */
        if (held[i] >= 0)
            close(held[i]);
        held[i] = bench_connect(config, 's');
    }
}

Test(server, a_flood_by_an_unlisted_uid_delays_nobody) {
    if (geteuid() != 0)
        cr_skip("CONFIG: needs root");
    struct tp_config *config = open_to_others();
    pid_t child = bench_fork();
    if (child == 0) {
        become(23456);
        flood(config);
    }
    while (counted(TP_CLIENTS_REFUSED) + counted(TP_CLIENTS_MISBEHAVED) < 1000)
        pause_ms(1);
    for (unsigned i = 0; i < 20; i++) {
        struct timespec start;
        clock_gettime(CLOCK_MONOTONIC, &start);
        close(bench_attach(config)); /* at the first attempt */
        cr_expect_lt(elapsed_ms(&start), 1000);
    }
    cr_assert_eq(kill(child, SIGKILL), 0);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    tp_server_stop();
    cr_assert(bench_config_free(config));
}

/* `count` connections one after another, as a user. */
static bool connect_as(const struct tp_config *config, uid_t uid, int *ret_fds, unsigned count) {
    become(uid);
    for (unsigned i = 0; i < count; i++) {
        ret_fds[i] = bench_connect(config, 's');
    }
    become(0);
    return ret_fds[count - 1] >= 0;
}

/* The server does not look before all have connected; ours speak after the others have been sent
 * away, but for a few that may stay. */
static int stay_in_a_crowd(pid_t server, const struct tp_config *config, uid_t uid) {
    enum { OURS = 6, OTHERS = 200 };
    struct tp_msg hello = {.type = TP_MSG_HELLO, .body.hello.purpose = TP_PURPOSE_ATTACH};
    int status;
    cr_assert_eq(tp_host_identity(true, hello.body.hello.identity), 0);
    pid_t child = bench_fork();
    if (child == 0) {
        struct tp_msg message;
        int ours[OURS];
        int others[2 * OTHERS];
        (void)kill(server, SIGSTOP);
        bool good = connect_as(config, uid, others, OTHERS) && connect_as(config, 0, ours, OURS) &&
                    connect_as(config, uid, others + OTHERS, OTHERS);
        (void)kill(server, SIGCONT);
        if (!good)
            _exit(96);
        for (unsigned i = 2; i < 2 * OTHERS - 10; i++) {
            if (!bench_ended(others[i], 5000))
                _exit(98);
        }
        for (unsigned i = 0; i < OURS; i++) {
            if (tp_wire_send(ours[i], &hello, NULL, 0) < 0)
                _exit(97);
            bench_expect(ours[i], TP_MSG_WELCOME, &message);
        }
        _exit(0);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status);
}

Test(server, a_crowd_of_other_uids_pushes_nobody_out) {
    if (geteuid() != 0)
        cr_skip("CONFIG: needs root");
    struct tp_config *config = open_to_others();
    cr_assert_eq(stay_in_a_crowd(getpid(), config, 23456), 0);
    cr_assert_eq(stay_in_a_crowd(getpid(), config, 11111), 0, "a listed user");
    tp_server_stop();
    cr_assert(bench_config_free(config));
}

Test(server, an_engine_alone_shows_its_counters_only) {
    struct tp_config *config = bench_config(0);
    struct tp_msg message;
    cr_assert_eq(tp_server_start(false, config), 0);
    cr_assert_eq(tp_server_start(false, config), 0);
    cr_assert_eq(bench_names(config), 2);
    cr_assert_eq(bench_connect(config, 's'), -ENOENT);
    int fd = bench_connect(config, 'e');
    bench_hello(fd, TP_PURPOSE_ATTACH, NULL);
    expect_refused(fd, TP_REFUSED_ROLE, "segments");
    cr_assert_eq(tp_server_start(true, config), 0);
    cr_assert_eq(bench_names(config), 4);
    close(bench_attach(config));
    fd = bench_connect(config, 'e');
    bench_hello(fd, TP_PURPOSE_STATUS, NULL);
    bench_expect(fd, TP_MSG_WELCOME, &message);
    cr_assert_eq(message.body.welcome.roles, TP_ROLE_STORE | TP_ROLE_ENGINE);
    close(fd);
    tp_server_stop();
    tp_server_stop();
    cr_assert_eq(bench_names(config), 0);
    cr_assert(bench_config_free(config));
}

Test(server, two_hundred_silent_connections_keep_nobody_out) {
    struct store store = start_store();
    struct tp_msg message;
    struct timespec start;
    int silent[200];
    unsigned fds = bench_fds();
    for (unsigned i = 0; i < 200; i++) {
        do {
            silent[i] = bench_connect(store.config, 's'); /* EAGAIN: the backlog is full just now */
        } while (silent[i] == -EAGAIN);
        cr_assert_geq(silent[i], 0, "%s", strerror(-silent[i]));
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    int fd = bench_attach(store.config);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    cr_assert_lt(elapsed_ms(&start), 1000);
    expect_served(fd, &message.body.segment);
    for (unsigned i = 0; i < 200; i++) {
        cr_assert(bench_ended(silent[i], TP_WIRE_HELLO_MS + 3000));
        close(silent[i]);
    }
    cr_assert_geq(elapsed_ms(&start), TP_WIRE_HELLO_MS - 500);
    expect_served(fd, &message.body.segment);
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), 200);
    close(fd);
    pause_ms(100);
    cr_assert(bench_fds_become(fds + 1), "the lease page stays");
    end_store(&store);
}

/* The server's thread stood still between two looks. */
Test(server, a_greeting_that_came_in_time_is_read_late) {
    struct tp_config *config = bench_config(0);
    struct tp_server_facts facts = {.config = config, .identity = "here", .roles = TP_ROLE_STORE};
    struct tp_session session;
    struct tp_msg message;
    int pair[2];
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    tp_session_begin(&session, pair[0], &facts, 1000);
    cr_assert_eq(tp_session_tick(&session, 1001 + TP_WIRE_HELLO_MS), -ETIME);
    bench_hello(pair[1], TP_PURPOSE_ATTACH, "here");
    cr_assert_eq(tp_session_tick(&session, 1001 + TP_WIRE_HELLO_MS), 0);
    cr_assert_eq(tp_session_read(&session, &facts, false, 1001 + TP_WIRE_HELLO_MS), 0);
    bench_expect(pair[1], TP_MSG_WELCOME, &message);
    cr_assert_eq(tp_session_tick(&session, 1002 + TP_WIRE_HELLO_MS), 0);
    tp_session_end(&session, 0);
    close(pair[1]);
    cr_assert(bench_config_free(config));
}

/* All have connected and spoken before the server looks: none of them is a silent one. */
Test(server, sixty_engines_that_start_at_once_are_all_heard) {
    enum { ENGINES = 60 };
    struct store store = start_store();
    pid_t server = getpid();
    pid_t child = bench_fork();
    if (child == 0) {
        struct tp_msg message;
        int fds[ENGINES];
        (void)kill(server, SIGSTOP);
        for (unsigned i = 0; i < ENGINES; i++) {
            fds[i] = bench_connect(store.config, 's');
            bench_hello(fds[i], TP_PURPOSE_ATTACH, NULL);
        }
        (void)kill(server, SIGCONT);
        for (unsigned i = 0; i < ENGINES; i++)
            bench_expect(fds[i], TP_MSG_WELCOME, &message);
        _exit(0);
    }
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    /* Each is counted after it was welcomed. */
    for (uint64_t end = tp_now_ms() + 5000;
         counted(TP_CLIENTS_ACCEPTED) != ENGINES && tp_now_ms() < end;)
        usleep(1000);
    cr_assert_eq(counted(TP_CLIENTS_ACCEPTED), ENGINES);
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), 0);
    end_store(&store);
}

Test(server, no_more_clients_than_it_takes) {
    struct store store = start_store();
    int attached[64];
    for (unsigned i = 0; i < 64; i++)
        attached[i] = bench_attach(store.config);
    cr_assert_eq(shown_clients(), 64);
    int fd = bench_connect(store.config, 's');
    bench_hello(fd, TP_PURPOSE_ATTACH, NULL);
    expect_refused(fd, TP_REFUSED_FULL, "clients");
    fd = bench_connect(store.config, 's'); /* the counters can be read all the same */
    bench_hello(fd, TP_PURPOSE_STATUS, NULL);
    struct tp_msg message;
    bench_expect(fd, TP_MSG_WELCOME, &message);
    close(fd);
    close(attached[0]);
    pause_ms(100);
    cr_assert_eq(shown_clients(), 63);
    attached[0] = bench_attach(store.config);
    for (unsigned i = 0; i < 64; i++)
        close(attached[i]);
    end_store(&store);
}

Test(server, a_flood_of_wants_waits_until_it_is_read) {
    struct store store = start_store();
    struct tp_msg segment;
    struct tp_msg message;
    int good = bench_attach(store.config);
    bench_expect(good, TP_MSG_SEGMENT, &segment);
    int flood = bench_attach(store.config);
    bench_expect(flood, TP_MSG_SEGMENT, &message);
    unsigned sent = 0;
    for (unsigned i = 0; i < 2000; i++) {
        message = want_of(segment.body.segment.segment_id, 0, 16);
        if (tp_wire_send(flood, &message, NULL, 0) == 0)
            sent++;
    }
    cr_assert_gt(sent, 100);
    pause_ms(200);
    for (unsigned i = 0; i < 20; i++)
        expect_served(good, &segment.body.segment);
    for (unsigned i = 0; i < sent; i++) { /* every question gets its answer in the end */
        int fds[TP_WIRE_MAX_FDS];
        unsigned count = 0;
        cr_assert_eq(bench_receive(flood, &message, fds, &count, 5000), 0);
        cr_assert_eq(message.type, TP_MSG_PIECES);
        for (unsigned k = 0; k < count; k++)
            close(fds[k]);
    }
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), 0);
    close(flood);
    close(good);
    end_store(&store);
}

Test(server, a_client_that_never_reads_is_dropped) {
    struct store store = start_store();
    struct tp_msg segment;
    int good = bench_attach(store.config);
    bench_expect(good, TP_MSG_SEGMENT, &segment);
    int deaf = bench_attach(store.config);
    for (unsigned i = 0; i < 2000 && shown_clients() == 2; i++) {
        struct tp_msg message;
        char name[32];
        snprintf(name, sizeof name, "name-%u", i);
        cr_assert_eq(tp_server_set_name(name), 0);
        while (bench_receive(good, &message, NULL, NULL, 1) == 0) {
        }
    }
    cr_assert_eq(shown_clients(), 1);
    cr_assert_eq(counted(TP_CLIENTS_MISBEHAVED), 1);
    expect_served(good, &segment.body.segment);
    close(deaf);
    close(good);
    end_store(&store);
}

Test(server, a_stopped_and_a_killed_client_stall_nobody) {
    struct store store = start_store();
    struct tp_msg message;
    int good = bench_attach(store.config);
    bench_expect(good, TP_MSG_SEGMENT, &message);
    int ready[2];
    cr_assert_eq(pipe(ready), 0);
    pid_t child = bench_fork();
    if (child == 0) {
        int fd = bench_attach(store.config);
        struct tp_msg want = want_of(message.body.segment.segment_id, 0, 16);
        for (unsigned i = 0; i < 100; i++)
            (void)tp_wire_send(fd, &want, NULL, 0);
        if (write(ready[1], "y", 1) == 1)
            pause();
        _exit(1);
    }
    char c;
    cr_assert_eq(read(ready[0], &c, 1), 1);
    cr_assert_eq(kill(child, SIGSTOP), 0);
    cr_assert_eq(shown_clients(), 2);
    for (unsigned i = 0; i < 10; i++)
        expect_served(good, &message.body.segment);
    cr_assert_eq(kill(child, SIGKILL), 0);
    cr_assert_eq(waitpid(child, NULL, 0), child);
    for (unsigned i = 0; i < 100 && shown_clients() == 2; i++)
        pause_ms(10);
    cr_assert_eq(shown_clients(), 1);
    expect_served(good, &message.body.segment);
    close(good);
    end_store(&store);
}

/* It would copy into the old pages whatever is told to be at these addresses now. */
Test(server, addresses_that_a_client_has_not_let_go_of_are_not_published_again) {
    struct store store = start_store();
    struct tp_msg message;
    uint64_t ids[TP_WIRE_MAX_SEGMENTS];
    int fd = bench_attach(store.config);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    cr_assert_eq(tp_segment_restore(store.range), 0);
    cr_assert_eq(tp_segment_overlay(store.range, BYTES, false, store.config), 0);
    cr_assert_eq(tp_segment_publish(store.range, store.config), -EBUSY);
    cr_assert_not(tp_segment_settle(store.range + BYTES - 1, 1), "it was forgotten");
    tp_table_published(ids);
    cr_assert_eq(ids[0], 0);
    cr_assert(tp_segment_settle(store.range + BYTES, BYTES), "nothing was there");
    bench_expect(fd, TP_MSG_GONE, &message);
    cr_assert_eq(tp_segment_publish(store.range, store.config), 0);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    close(fd);
    end_store(&store);
}

/* A store in a process of its own, which says when it is ready and then waits. Told through
 * *ret_go, it forks a child that outlives it. */
static pid_t other_store(struct tp_config *config, int *ret_go, int *ret_ready) {
    int ready[2];
    int go[2];
    char c;
    cr_assert_eq(pipe(ready), 0);
    cr_assert_eq(pipe(go), 0);
    pid_t child = bench_process();
    if (child == 0) {
        void *range = NULL;
        if (tp_segment_allocate(BYTES, 16 * MIB, false, config, &range) != 0 ||
            tp_segment_publish(range, config) != 0 || write(ready[1], "y", 1) != 1)
            _exit(1);
        close(go[1]);
        if (read(go[0], &c, 1) == 1 && bench_fork() == 0) {
            (void)prctl(PR_SET_PDEATHSIG, 0);
            (void)!write(ready[1], "f", 1);
            sleep(5);
            _exit(0);
        }
        pause();
        _exit(0);
    }
    cr_assert_eq(read(ready[0], &c, 1), 1);
    close(ready[1]);
    close(go[0]);
    *ret_go = go[1];
    *ret_ready = ready[0];
    return child;
}

Test(server, the_dead_are_swept_and_the_living_are_not) {
    struct tp_config *config = bench_config(0);
    int pipes[4];
    pid_t dead = other_store(config, &pipes[0], &pipes[1]);
    pid_t alive = other_store(config, &pipes[2], &pipes[3]);
    cr_assert_eq(bench_names(config), 4);
    kill(dead, SIGKILL);
    cr_assert_eq(waitpid(dead, NULL, 0), dead);
    cr_assert_eq(bench_names(config), 4);
    cr_assert_eq(tp_server_start(true, config), 0);
    cr_assert_eq(bench_names(config), 4); /* ours and the living one's */
    tp_server_stop();
    cr_assert_eq(bench_names(config), 2);
    close(bench_attach(config));
    kill(alive, SIGKILL);
    cr_assert_eq(waitpid(alive, NULL, 0), alive);
    int dir = open(config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert_eq(tp_server_sweep(dir), 1);
    cr_assert_eq(bench_names(config), 0);
    close(dir);
    cr_assert(bench_config_free(config));
}

static void touch(int dir, const char *name) {
    int fd = openat(dir, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    close(fd);
}

Test(server, a_sweep_takes_nothing_else) {
    struct tp_config *config = bench_config(0);
    int dir = open(config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    touch(dir, "notes.lock");
    touch(dir, "s-00112233445566778899aabbccddeeff.sock.bak");
    touch(dir, ".00112233445566778899aabbccddeeff.tmp"); /* too young */
    cr_assert_eq(symlinkat("/etc/passwd", dir, "s-00112233445566778899aabbccddeef0.lock"), 0);
    cr_assert_eq(mkdirat(dir, "s-00112233445566778899aabbccddeef1.lock", 0700), 0);
    cr_assert_eq(tp_server_sweep(dir), 0);
    cr_assert_eq(bench_names(config), 5);
    touch(dir, "s-00112233445566778899aabbccddeeff.lock"); /* nobody's lock: the entry goes, and its
                                                              .tmp */
    touch(dir, "s-00112233445566778899aabbccddeeff.sock");
    cr_assert_eq(tp_server_sweep(dir), 1);
    cr_assert_eq(bench_names(config), 4);
    unlinkat(dir, "notes.lock", 0);
    unlinkat(dir, "s-00112233445566778899aabbccddeeff.sock.bak", 0);
    unlinkat(dir, "s-00112233445566778899aabbccddeef0.lock", 0);
    unlinkat(dir, "s-00112233445566778899aabbccddeef1.lock", AT_REMOVEDIR);
    close(dir);
    cr_assert(bench_config_free(config));
}

Test(server, thousands_of_the_dead_are_swept_at_once) {
    enum { DEAD = 5000 };
    struct tp_config *config = bench_config(0);
    int dir = open(config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    unsigned swept = 0;
    unsigned sweeps = 0;
    for (unsigned i = 0; i < DEAD; i++) {
        char name[64];
        snprintf(name, sizeof(name), "s-%032x.lock", i);
        touch(dir, name);
        snprintf(name, sizeof(name), "junk-%u", i);
        touch(dir, name);
    }
    /* A slow machine needs a second look; each one makes progress, whatever else lies there. */
    for (unsigned found = 1; found > 0; sweeps++)
        swept += found = tp_server_sweep(dir);
    cr_assert_eq(swept, DEAD);
    cr_assert_leq(sweeps, 5);
    cr_assert_eq(bench_names(config), DEAD);
    for (unsigned i = 0; i < DEAD; i++) {
        char name[64];
        snprintf(name, sizeof(name), "junk-%u", i);
        cr_assert_eq(unlinkat(dir, name, 0), 0);
    }
    close(dir);
    cr_assert(bench_config_free(config));
}

Test(server, a_forked_child_does_not_keep_the_lease) {
    struct tp_config *config = bench_config(2 * MIB);
    struct timespec start;
    struct tp_msg message;
    int go;
    int ready;
    char c;
    pid_t store = other_store(config, &go, &ready);
    int fd = bench_attach(config);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    cr_assert_eq(write(go, "g", 1), 1);
    cr_assert_eq(read(ready, &c, 1), 1);
    clock_gettime(CLOCK_MONOTONIC, &start);
    kill(store, SIGKILL); /* its child lives on for seconds */
    cr_assert(bench_ended(fd, 5000));
    cr_assert_lt(elapsed_ms(&start), 1000);
    cr_assert_eq(waitpid(store, NULL, 0), store);
    int dir = open(config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert_eq(tp_server_sweep(dir), 1);
    close(fd);
    close(dir);
    cr_assert(bench_config_free(config));
}

Test(server, stopping_ends_leases_and_starting_again_works) {
    struct store store = start_store();
    struct tp_msg message;
    for (unsigned i = 0; i < 5; i++) {
        int fd = bench_attach(store.config);
        bench_expect(fd, TP_MSG_SEGMENT, &message);
        tp_server_stop();
        cr_assert(bench_ended(fd, 1000));
        close(fd);
        cr_assert_eq(bench_names(store.config), 0);
        cr_assert_eq(tp_server_start(true, store.config), 0);
    }
    end_store(&store);
}

Test(server, out_of_fds_is_not_the_end) {
    struct store store = start_store();
    struct tp_msg message;
    struct rlimit limit;
    int taken[256];
    unsigned count = 0;
    int fd =
        bench_connect(store.config, 's'); /* before the limit: the server accepts it or later */
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    struct rlimit small = {bench_fds() + 8, limit.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &small), 0);
    int second = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    while (count < 256 && (taken[count] = dup(0)) >= 0)
        count++;
    close(taken[--count]);
    int dir_taken = open(store.config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert_geq(dir_taken, 0);
    close(second);
    int late =
        bench_connect(store.config, 's'); /* no fd left to accept it with, or none to connect */
    pause_ms(100);
    close(dir_taken);
    while (count > 0)
        close(taken[--count]);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    if (late >= 0)
        close(late);
    close(fd);
    fd = bench_attach(store.config);
    bench_expect(fd, TP_MSG_SEGMENT, &message);
    expect_served(fd, &message.body.segment);
    close(fd);
    end_store(&store);
}

Test(server, a_directory_that_others_may_write_is_refused) {
    struct tp_config *config = bench_config(0);
    cr_assert_eq(chmod(config->store.socket_dir, 0777), 0);
    cr_assert_lt(tp_server_start(true, config), 0);
    tp_server_stop();
    cr_assert_eq(bench_names(config), 0);
    cr_assert(bench_config_free(config));
}

/* Remove what the directory holds; `ending`: only names that end so. */
static void clean(const struct tp_config *config, const char *ending) {
    int fd = open(config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = fdopendir(fd);
    const struct dirent *entry;
    while ((entry = readdir(directory)) != NULL) {
        size_t length = strlen(entry->d_name);
        if (entry->d_name[0] != '.' && length > strlen(ending) &&
            strcmp(entry->d_name + length - strlen(ending), ending) == 0)
            cr_assert_eq(unlinkat(fd, entry->d_name, 0), 0);
    }
    closedir(directory);
}

static bool names_become(const struct tp_config *config, unsigned count, long ms) {
    for (long waited = 0; waited < ms; waited += 50) {
        if (access(config->store.socket_dir, F_OK) == 0 && bench_names(config) == count)
            return true;
        pause_ms(50);
    }
    return false;
}

static unsigned said(int fd, const char *words) {
    static char text[65536];
    ssize_t bytes = pread(fd, text, sizeof text - 1, 0);
    unsigned count = 0;
    text[bytes < 0 ? 0 : bytes] = 0;
    for (const char *at = text; (at = strstr(at, words)) != NULL; at++)
        count++;
    return count;
}

/* Standard error goes to a file from now on. */
static int take_stderr(void) {
    int fd = memfd_create("stderr", MFD_CLOEXEC);
    cr_assert_geq(dup2(fd, 2), 0);
    return fd;
}

Test(server, an_entry_that_somebody_removes_is_put_back) {
    static const char *const endings[] = {".sock", ".lock", ""};
    int log = take_stderr();
    struct store store = start_store();
    struct tp_msg message;
    int first = bench_attach(store.config);
    bench_expect(first, TP_MSG_SEGMENT, &message);
    unsigned fds = bench_fds();
    for (unsigned i = 0; i < 3; i++) {
        clean(store.config, endings[i]);
        cr_assert_lt(bench_names(store.config), 2);
        cr_assert(names_become(store.config, 2, 5000), "%s", endings[i]);
        int fd = bench_attach(store.config);
        struct tp_msg again;
        bench_expect(fd, TP_MSG_SEGMENT, &again);
        close(fd);
        cr_assert(bench_fds_become(fds));
        expect_served(first, &message.body.segment);
        int dir = open(store.config->store.socket_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        cr_assert_eq(tp_server_sweep(dir), 0, "its lock is not held");
        close(dir);
    }
    cr_assert_eq(said(log, "put back"), 1);
    close(first);
    end_store(&store);
}

Test(server, a_directory_that_somebody_removes_is_made_again_as_it_was) {
    struct store store = start_store();
    struct tp_msg message;
    struct stat status;
    const char *path = store.config->store.socket_dir;
    cr_assert_eq(chmod(path, 0750), 0);
    int first = bench_attach(store.config);
    bench_expect(first, TP_MSG_SEGMENT, &message);
    clean(store.config, "");
    cr_assert_eq(rmdir(path), 0);
    cr_assert(names_become(store.config, 2, 5000));
    cr_assert_eq(stat(path, &status), 0);
    cr_assert_eq(status.st_mode & 07777, 0750);
    expect_served(first, &message.body.segment);
    close(first);
    first = bench_attach(store.config);
    close(first);
    end_store(&store);
}

/* The directory is the store's to make: an engine of another user would lock it out. */
Test(server, an_engines_entry_is_put_back_once_there_is_a_directory) {
    struct tp_config *config = bench_config(0);
    const char *path = config->engine.socket_dir;
    cr_assert_eq(tp_server_start(false, config), 0);
    clean(config, "");
    cr_assert(names_become(config, 2, 5000));
    clean(config, "");
    cr_assert_eq(rmdir(path), 0);
    cr_assert_not(names_become(config, 2, 2500));
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_assert(names_become(config, 2, 5000));
    tp_server_stop();
    cr_assert(bench_config_free(config));
}

Test(server, an_entry_is_not_put_into_a_directory_that_others_may_write) {
    int log = take_stderr();
    struct store store = start_store();
    struct tp_msg message;
    int first = bench_attach(store.config);
    bench_expect(first, TP_MSG_SEGMENT, &message);
    cr_assert_eq(chmod(store.config->store.socket_dir, 0777), 0);
    clean(store.config, "");
    cr_assert_not(names_become(store.config, 2, 2500));
    cr_assert_eq(said(log, "cannot be put back"), 1);
    expect_served(first, &message.body.segment);
    cr_assert_eq(chmod(store.config->store.socket_dir, 0700), 0);
    cr_assert(names_become(store.config, 2, 5000));
    close(first);
    end_store(&store);
}

Test(server, names_that_are_too_long) {
    char name[257];
    memset(name, 'x', sizeof name);
    name[256] = 0;
    cr_assert_eq(tp_server_set_name(name), -ENAMETOOLONG);
    name[255] = 0;
    cr_assert_eq(tp_server_set_name(name), 0);
}
