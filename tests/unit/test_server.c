/* SPDX-License-Identifier: Apache-2.0 */
/* The server hands out pieces and counters, and no client can hurt another. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "env/stats.h"
#include "segment/segment.h"
#include "segment_bench.h"

#define BYTES (32 * MIB)

TestSuite(server, .timeout = 30);

__attribute__((unused)) static void pause_ms(long ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* A store with one published segment. */
struct store {
    struct tp_config *config;
    char *range;
};

static struct store start_store(void) {
    struct store store = {bench_config(2 * MIB), bench_allocate(BYTES)};
    cr_assert_eq(tp_segment_overlay(store.range, BYTES, false, store.config), 0);
    cr_assert_eq(tp_segment_publish(store.range, store.config), 0);
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
