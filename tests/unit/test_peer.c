/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: engines attach to stores that keep to the protocol, to no others, and let go of dead ones.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "rig.h"
#include "transport/history.h"
#include "transport/link.h"
#include "transport/peer.h"

#define MIB (UINT64_C(1) << 20)

static struct tp_config *config;
static struct tp_engine *engine;
static int engine_key;

static void start_with(struct tp_config *made) {
    config = made;
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    cr_assert_not_null(engine);
}

static void start(void) {
    start_with(fake_config());
}

/* Each store at addresses that none of this name has had. */
static bool attaches(enum fake_manner manner, unsigned timeout_ms) {
    static uint64_t base = FAKE_BASE + (UINT64_C(1) << 40);
    struct fake_store store;
    base += 1 << 30;
    fake_start(&store, config,
               &(struct fake_options){.name = "127.0.0.1:1", .base = base, .manner = manner});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    bool local = rig_wait(engine, 1, base, timeout_ms);
    fake_end(&store);
    while (rig_wait(engine, 1, base, 5)) /* until its end is seen */
        usleep(1000);
    return local;
}

static unsigned mappings_of(const char *what) {
    char line[512];
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof(line), maps))
        count += strstr(line, what) != NULL;
    fclose(maps);
    return count;
}

static unsigned open_fds(void) {
    unsigned count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

Test(peer, a_good_store_is_attached, .timeout = 30) {
    start();
    cr_assert(attaches(FAKE_GOOD, 5000));
    cr_assert_eq(rig_counter(TP_PEERS_ATTACHED), 1);
}

Test(peer, a_store_that_was_there_first_is_found, .timeout = 30) {
    config = fake_config();
    struct fake_store store;
    fake_start(&store, config, &(struct fake_options){.name = "127.0.0.1:1"});
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    tp_engine_open(engine, 9, "///127.0.0.1:1", 14);
    cr_assert(rig_wait(engine, 9, FAKE_BASE, 5000));
    fake_end(&store);
}

Test(peer, hostile_stores_are_left_alone, .timeout = 60) {
    static const enum fake_manner manners[] = {
        FAKE_OTHER_HOST, FAKE_OTHER_INSTANCE, FAKE_SMALL_PIECE, FAKE_UNSEALED,      FAKE_UNSEALABLE,
        FAKE_DISK_FILE,  FAKE_UNASKED,        FAKE_BAD_SEGMENT, FAKE_NOISE,         FAKE_EARLY,
        FAKE_NO_PIECES,  FAKE_NO_LEASE,       FAKE_SHORT_LEASE, FAKE_UNSEALED_LEASE};
    start();
    cr_assert(attaches(FAKE_GOOD, 5000)); /* the directory is open now */
    unsigned fds = open_fds();
    for (unsigned i = 0; i < sizeof(manners) / sizeof(manners[0]); i++)
        cr_expect(!attaches(manners[i], 300), "manner %d", manners[i]);
    cr_expect_geq(rig_counter(TP_PEERS_REFUSED), 13);
    cr_assert(attaches(FAKE_GOOD, 5000), "a good store after them is attached");
    for (uint64_t end = tp_now_ms() + 5000; open_fds() != fds && tp_now_ms() < end;)
        usleep(10000);
    cr_expect_eq(open_fds(), fds, "%u fds, %u before", open_fds(), fds);
}

Test(peer, files_of_tmpfs_are_taken_though_nobody_can_seal_them, .timeout = 30) {
    start();
    cr_assert(attaches(FAKE_TMPFS_FILE, 5000));
}

/* As a process that closes and sets up its store over and over: 66 times here, the last three
 * later. */
Test(peer, a_store_that_is_set_up_again_keeps_its_engines, .timeout = 30) {
    struct fake_store store;
    start();
    fake_start(&store, config,
               &(struct fake_options){.name = "127.0.0.1:1", .manner = FAKE_RENAMES});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000), "64 names at once are not too many");
    usleep(4000000);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 1000), "one a second is not too many");
    cr_assert_eq(rig_counter(TP_PEERS_ATTACHED), 1);
    cr_assert_eq(rig_counter(TP_PEERS_LOST), 0);
    fake_end(&store);
}

Test(peer, a_store_that_floods_with_names_is_left_alone, .timeout = 30) {
    start();
    cr_assert_not(attaches(FAKE_NAME_FLOOD, 1000));
    cr_assert_eq(rig_counter(TP_PEERS_REFUSED), 1);
}

/* The lines that this process says from here on. */
static int take_stderr(void) {
    int fd = memfd_create("stderr", MFD_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_geq(dup2(fd, STDERR_FILENO), 0);
    return fd;
}

static unsigned said(int fd, const char *words) {
    char text[16384];
    unsigned count = 0;
    ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
    cr_assert_geq(length, 0);
    text[length] = 0;
    for (const char *at = text; (at = strstr(at, words)); at++)
        count++;
    return count;
}

Test(peer, a_full_store_is_said_once_and_tried_again, .timeout = 30) {
    int lines = take_stderr();
    start();
    cr_assert(attaches(FAKE_FULL, 5000), "a place became free");
    cr_assert_eq(rig_counter(TP_PEERS_REFUSED), 2);
    cr_assert_eq(said(lines, "as many engines as it takes"), 1);
}

/* An engine that has many files open: the store is not to blame, and not given up. */
Test(peer, a_store_is_not_given_up_when_this_process_is_out_of_fds, .timeout = 30) {
    struct rlimit limit;
    struct fake_store store;
    int lines = take_stderr();
    start();
    cr_assert(attaches(FAKE_GOOD, 5000)); /* the directory is open, the thread in its stride */
    usleep(200000);                       /* its fds are mapped and closed by then */
    fake_start(
        &store, config,
        &(struct fake_options){
            .name = "127.0.0.1:1", .bytes = 16 << 20, .piece_bytes = 1 << 20, .greet_ms = 300});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    int highest = fcntl(0, F_DUPFD_CLOEXEC, 0);
    close(highest);
    /* Room for the connection and a few pieces, not for the sixteen of one message. */
    struct rlimit small = {(rlim_t)highest + 6, limit.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &small), 0);
    cr_expect_not(rig_wait(engine, 1, FAKE_BASE + store.bytes - 1, 1000));
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_assert(rig_wait(engine, 1, FAKE_BASE + store.bytes - 1, 10000));
    cr_assert_eq(rig_counter(TP_PEERS_REFUSED), 0);
    cr_assert_eq(said(lines, "ulimit -n"), 1);
    fake_end(&store);
}

/* While the piece is on its way: room for its fd, not for that of what it is compared with. */
Test(peer, a_piece_that_cannot_be_mapped_once_is_tried_again, .timeout = 30) {
    struct rlimit limit;
    struct fake_store store;
    int lines = take_stderr();
    start();
    fake_start(&store, config,
               &(struct fake_options){
                   .name = "127.0.0.1:1", .manner = FAKE_TMPFS_FILE, .pieces_ms = 1000});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    for (uint64_t end = tp_now_ms() + 5000;
         !rig_counter(TP_FALLBACK_NOT_IMPORTED) && tp_now_ms() < end;)
        cr_assert_not(rig_wait(engine, 1, FAKE_BASE, 5));
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    int highest = fcntl(0, F_DUPFD_CLOEXEC, 0);
    close(highest);
    struct rlimit small = {(rlim_t)highest + 1, limit.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &small), 0);
    for (uint64_t end = tp_now_ms() + 5000; !rig_counter(TP_IMPORT_FAILURES) && tp_now_ms() < end;)
        usleep(5000);
    cr_expect_not(rig_wait(engine, 1, FAKE_BASE, 100));
    cr_expect_eq(rig_counter(TP_IMPORT_FAILURES), 1);
    cr_expect_eq(said(lines, "cannot map piece 0"), 1);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    fake_end(&store);
}

Test(peer, a_silent_store_stops_nobody, .timeout = 30) {
    struct fake_store silent;
    start();
    fake_start(&silent, config, &(struct fake_options){.name = "x", .manner = FAKE_SILENT});
    usleep(100000);
    cr_assert(attaches(FAKE_GOOD, 5000));
    fake_end(&silent);
}

/* The engine's thread stood still between two looks. */
Test(peer, an_answer_that_came_in_time_is_read_late, .timeout = 30) {
    struct tp_link link = {.peer = tp_peer_at(0)};
    struct tp_link_self self = {.identity = "here"};
    struct tp_msg message = {.type = TP_MSG_WELCOME};
    bool busy = false;
    int pair[2];
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    cr_assert_eq(tp_link_begin(&link, pair[0], self.instance, &self, 1000), 0);
    cr_assert_eq(tp_link_work(&link, 1000 + TP_WIRE_HELLO_MS, &busy), TP_LINK_SILENT);
    cr_assert_eq(tp_wire_send(pair[1], &message, NULL, 0), 0);
    cr_assert_eq(tp_link_work(&link, 1000 + TP_WIRE_HELLO_MS, &busy), TP_LINK_LIVES);
    close(pair[0]);
    close(pair[1]);
}

Test(peer, a_stopped_store_stops_nobody, .timeout = 30) {
    struct fake_store stopped;
    start();
    fake_start(&stopped, config, &(struct fake_options){.name = "127.0.0.1:5"});
    kill(stopped.pid, SIGSTOP);
    usleep(100000);
    cr_assert(attaches(FAKE_GOOD, 5000));
    fake_end(&stopped);
}

Test(peer, a_piece_that_has_not_come_is_not_used, .timeout = 30) {
    struct fake_store store;
    start();
    fake_start(&store, config,
               &(struct fake_options){.name = "127.0.0.1:1",
                                      .bytes = 9 << 12,
                                      .piece_bytes = 4096,
                                      .manner = FAKE_NO_PIECES});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    cr_assert_not(rig_wait(engine, 1, FAKE_BASE, 300));
    cr_assert_gt(rig_counter(TP_FALLBACK_NOT_IMPORTED), 0);
    fake_end(&store);
}

Test(peer, many_pieces_are_contiguous, .timeout = 30) {
    struct fake_store store;
    start();
    fake_start(&store, config,
               &(struct fake_options){
                   .name = "127.0.0.1:1", .bytes = (16 << 20) - 4096, .piece_bytes = 1 << 20});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    cr_assert(rig_wait(engine, 1, FAKE_BASE + store.bytes - 1, 5000));
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    unsigned char *buffer = malloc(store.bytes);
    for (uint64_t i = 0; i < store.bytes; i++)
        store.memory[i] = (unsigned char)(i * 31 + i / 4096);
    struct rig_request r = rig_make(TP_OP_READ, buffer, 1, FAKE_BASE, store.bytes);
    struct tp_submit submit;
    cr_assert_eq(rig_begin(engine, 5, 1, &r, 1, &submit), TP_PLAN_ALL);
    tp_submit_commit(&submit);
    cr_assert_eq(rig_finish(5, NULL), TP_TASK_COMPLETED);
    cr_assert_eq(memcmp(buffer, store.memory, store.bytes), 0);
    cr_assert_eq(rig_free(5), 0);
    fake_end(&store);
}

Test(peer, a_dead_store_is_let_go_and_its_heir_found, .timeout = 60) {
    start();
    for (int round = 0; round < 5; round++) {
        struct fake_store store;
        uint64_t base = FAKE_BASE + ((uint64_t)round << 30);
        fake_start(&store, config, &(struct fake_options){.name = "127.0.0.1:1", .base = base});
        tp_engine_open(engine, 1, "127.0.0.1:1", 11);
        cr_assert(rig_wait(engine, 1, base, 5000), "round %d", round);
        fake_kill(&store);
        uint64_t end = tp_now_ms() + 1000;
        while (mappings_of("memfd:fake") > 1 && tp_now_ms() < end)
            usleep(5000);
        cr_assert_eq(mappings_of("memfd:fake"), 1, "only the test's own view is left");
        cr_assert_not(rig_wait(engine, 1, base, 20));
        fake_end(&store);
    }
    cr_assert_eq(rig_counter(TP_PEERS_LOST), 5);
    cr_assert_gt(rig_counter(TP_FALLBACK_PEER_GONE), 0);
}

static void wait_until_attached(uint64_t count) {
    for (uint64_t end = tp_now_ms() + 10000;
         rig_counter(TP_PEERS_ATTACHED) < count && tp_now_ms() < end;)
        usleep(1000);
    cr_assert_eq(rig_counter(TP_PEERS_ATTACHED), count);
}

/* The master goes on speaking of a dead store's memory for seconds, by its name and addresses. */
static void check_heirs_of_addresses(enum fake_manner manner) {
    struct fake_store store;
    int lines = take_stderr();
    start();
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    fake_start(&store, config, &(struct fake_options){.name = "127.0.0.1:1"});
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    fake_end(&store);
    for (uint64_t heir = 1; heir <= 2; heir++) {
        uint64_t base = FAKE_BASE + heir * MIB; /* it shares some addresses only */
        fake_start(&store, config,
                   &(struct fake_options){.name = "127.0.0.1:1", .base = base, .manner = manner});
        wait_until_attached(1 + heir);
        cr_assert_not(rig_wait(engine, 1, base + 2 * MIB, 200), "heir %d", (int)heir);
        cr_assert_not(rig_wait(engine, 1, base + 4 * MIB - 1, 50), "heir %d", (int)heir);
        fake_end(&store);
    }
    cr_assert_eq(said(lines, "an earlier instance of this name had one"), 1);
    cr_assert_gt(rig_counter(TP_FALLBACK_OUT_OF_RANGE), 0);
    fake_start(&store, config,
               &(struct fake_options){
                   .name = "127.0.0.1:1", .base = FAKE_BASE + 6 * MIB, .manner = manner});
    cr_assert(rig_wait(engine, 1, FAKE_BASE + 6 * MIB, 5000), "at addresses of its own it is used");
    cr_assert_eq(mappings_of("memfd:fake"), 2, "nothing of the others is left");
    fake_end(&store);
}

Test(peer, a_store_at_the_addresses_of_one_before_it_is_not_used, .timeout = 30) {
    check_heirs_of_addresses(FAKE_GOOD);
}

Test(peer, a_store_at_such_addresses_that_says_its_name_last_is_not_used, .timeout = 30) {
    check_heirs_of_addresses(FAKE_SEGMENT_FIRST);
}

Test(peer, a_store_at_such_addresses_that_takes_the_name_later_is_not_used, .timeout = 30) {
    check_heirs_of_addresses(FAKE_NAMED_ANEW);
}

Test(peer, a_store_is_used_again_when_its_connection_was_lost, .timeout = 30) {
    struct fake_store store;
    start();
    fake_start(&store, config,
               &(struct fake_options){.name = "127.0.0.1:1", .manner = FAKE_HANGS_UP});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    wait_until_attached(2);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    cr_assert_eq(rig_counter(TP_PEERS_LOST), 1);
    fake_end(&store);
}

Test(peer, what_is_remembered_of_a_name_is_bounded) {
    struct tp_name *name = tp_name_intern("a", 1), *other = tp_name_intern("b", 1);
    uint8_t one[16] = {1}, two[16] = {2};
    for (uint64_t i = 0; i < 1000; i++)
        cr_assert_eq(tp_history_add(name, one, FAKE_BASE + i * 2 * MIB, MIB), 0);
    cr_assert_eq(tp_history_add(name, one, FAKE_BASE + 999 * 2 * MIB, MIB), 0, "its own");
    cr_assert_eq(tp_history_add(other, two, FAKE_BASE + 999 * 2 * MIB, MIB), 0, "another name");
    cr_assert_not(tp_history_warn(tp_name_intern("c", 1)));
    for (uint64_t i = 744; i < 1000; i++)
        cr_assert_eq(tp_history_add(name, one, FAKE_BASE + i * 2 * MIB, MIB), 0);
    cr_assert_eq(tp_history_add(name, two, FAKE_BASE + 745 * 2 * MIB - 1, 1), 0, "beside it");
    cr_assert_eq(tp_history_add(name, two, FAKE_BASE, 2 * MIB), 0, "the oldest is forgotten");
    cr_assert_eq(tp_history_add(name, two, FAKE_BASE + 999 * 2 * MIB + MIB - 1, 1), -EADDRINUSE);
    cr_assert_eq(tp_history_add(name, two, FAKE_BASE, UINT64_C(1) << 40), -EADDRINUSE);
    cr_assert(tp_history_warn(name));
    cr_assert_not(tp_history_warn(name));
}

#ifndef __SANITIZE_THREAD__ /* it has most addresses to itself */
static struct tp_peer_segment *publish_tib(uint32_t slot, uint32_t index, uint64_t tib) {
    struct tp_peer_segment *segment = &tp_peer_at(slot)->segments[index];
    struct tp_msg_segment message = {.segment_id = index + 1,
                                     .base = FAKE_BASE,
                                     .bytes = tib << 40,
                                     .page_bytes = 1 << 30,
                                     .piece_bytes = 1 << 30,
                                     .piece_count = (uint32_t)(tib << 10),
                                     .kind = TP_WIRE_MMAP,
                                     .map_bytes = tib << 40};
    cr_assert_eq(tp_wire_check_segment(&message), 0);
    cr_assert_eq(tp_import_begin(segment, &message), 0);
    atomic_store(&segment->state, TP_SEGMENT_LIVE);
    atomic_store(&tp_peer_at(slot)->segment_high, index + 1);
    return segment;
}

Test(peer, stores_do_not_use_up_the_addresses_of_this_process) {
    int lines = take_stderr();
    bool busy = false;
    cr_assert_not(tp_import_ready(tp_peer_at(0), publish_tib(0, 0, 17)), "too much for one store");
    cr_assert(tp_import_ready(tp_peer_at(0), publish_tib(0, 1, 15)));
    cr_assert_not(tp_import_ready(tp_peer_at(0), publish_tib(0, 2, 1)),
                  "there are margins as well");
    for (uint32_t slot = 1; slot < 4; slot++)
        cr_assert(tp_import_ready(tp_peer_at(slot), publish_tib(slot, 0, 15)));
    struct tp_peer_segment *late = publish_tib(4, 0, 8);
    cr_assert_not(tp_import_ready(tp_peer_at(4), late), "all stores together");
    cr_assert(tp_import_ready(tp_peer_at(5), publish_tib(5, 0, 3)), "what fits is mapped");
    cr_assert_eq(said(lines, "more than this process has addresses for"), 1);
    tp_import_drop(&tp_peer_at(0)->segments[1], &busy);
    tp_import_retry(tp_peer_at(4), tp_now_ms());
    cr_assert_not(tp_import_ready(tp_peer_at(4), late), "not tried again at once");
    tp_import_retry(tp_peer_at(4), tp_now_ms() + 1000);
    cr_assert(tp_import_ready(tp_peer_at(4), late), "others are gone");
}
#endif

/* How long the first request to a name takes that is opened for it, in ms. */
static uint64_t first_request(uint64_t handle, const char *name, enum tp_plan *ret_plan) {
    static unsigned char byte;
    struct rig_request r = rig_make(TP_OP_READ, &byte, handle, FAKE_BASE, 1);
    struct tp_submit submit;
    uint64_t start_ms = tp_now_ms();
    tp_engine_open(engine, handle, name, strlen(name));
    *ret_plan = rig_begin(engine, 0x2222, 1, &r, 1, &submit);
    uint64_t took_ms = tp_now_ms() - start_ms;
    if (*ret_plan != TP_PLAN_NONE)
        tp_submit_abort(&submit);
    return took_ms;
}

/* False when the store was attached before this thread saw that it is being attached. */
static bool wait_until_answered(void) {
    uint64_t before = rig_counter(TP_PEERS_ATTACHED);
    uint64_t end = tp_now_ms() + 10000;
    while (!tp_peer_attaching_until() && rig_counter(TP_PEERS_ATTACHED) == before) {
        cr_assert_lt(tp_now_ms(), end);
        usleep(100);
    }
    return tp_peer_attaching_until() != 0;
}

/* The bound is 50 ms: on a busy machine some rounds need longer. */
Test(peer, the_first_request_waits_for_a_store_that_is_being_attached, .timeout = 60) {
    unsigned local = 0;
    start();
    for (unsigned round = 0; round < 60 && local < 10; round++) {
        struct fake_store store;
        enum tp_plan plan;
        char name[32];
        snprintf(name, sizeof(name), "127.0.0.1:%u", 1000 + round);
        fake_start(&store, config,
                   &(struct fake_options){.name = name, .greet_ms = 5, .pieces_ms = 5});
        if (wait_until_answered()) {
            uint64_t took_ms = first_request(round, name, &plan);
            cr_assert(plan == TP_PLAN_ALL || took_ms >= 49, "%d after %d ms", plan, (int)took_ms);
            local += plan == TP_PLAN_ALL;
        }
        fake_end(&store);
    }
    cr_assert_eq(local, 10);
}

/* The shortest of some: on a busy machine any may take long. */
Test(peer, requests_wait_for_nobody_who_does_not_come, .timeout = 60) {
    struct fake_store store;
    enum tp_plan plan;
    uint64_t shortest_ms = UINT64_MAX;
    start();
    fake_start(&store, config,
               &(struct fake_options){.name = "127.0.0.1:1", .manner = FAKE_NO_PIECES});
    for (uint64_t end = tp_now_ms() + 10000;
         (!rig_counter(TP_PEERS_ATTACHED) || tp_peer_attaching_until()) && tp_now_ms() < end;)
        usleep(1000);
    for (unsigned i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof(name), "10.0.0.1:%u", 1000 + i);
        uint64_t took_ms = first_request(100 + i, name, &plan);
        cr_assert_eq(plan, TP_PLAN_NONE);
        shortest_ms = took_ms < shortest_ms ? took_ms : shortest_ms;
    }
    cr_assert_lt(shortest_ms, 25, "names of other hosts");
    cr_assert_geq(first_request(1, "127.0.0.1:1", &plan), 49);
    cr_assert_eq(plan, TP_PLAN_NONE);
    shortest_ms = UINT64_MAX;
    for (unsigned i = 0; i < 20; i++) {
        uint64_t took_ms = first_request(1, "127.0.0.1:1", &plan);
        cr_assert_eq(plan, TP_PLAN_NONE);
        shortest_ms = took_ms < shortest_ms ? took_ms : shortest_ms;
    }
    cr_assert_lt(shortest_ms, 25, "once a name");
    fake_end(&store);
}

Test(peer, two_stores_of_one_name_are_neither, .timeout = 30) {
    struct fake_store one, two;
    start();
    fake_start(&one, config, &(struct fake_options){.name = "127.0.0.1:1"});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    fake_start(&two, config,
               &(struct fake_options){.name = "127.0.0.1:1", .base = FAKE_BASE + (1 << 30)});
    usleep(500000);
    cr_assert_not(rig_wait(engine, 1, FAKE_BASE, 50));
    fake_end(&one);
    cr_assert(rig_wait(engine, 1, FAKE_BASE + (1 << 30), 5000),
              "the other is meant once one is gone");
    fake_end(&two);
}

Test(peer, a_withdrawn_segment_is_out_of_range, .timeout = 30) {
    struct fake_store store;
    start();
    fake_start(&store, config, &(struct fake_options){.name = "127.0.0.1:1", .manner = FAKE_GONE});
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 5000));
    usleep(600000);
    cr_assert_not(rig_wait(engine, 1, FAKE_BASE, 50));
    cr_assert_gt(rig_counter(TP_FALLBACK_OUT_OF_RANGE), 0);
    cr_assert_eq(mappings_of("memfd:fake"), 1, "only the test's own view is left");
    fake_end(&store);
}

Test(peer, more_stores_than_slots_harm_nothing, .timeout = 60) {
    enum { MANY = 70 };
    static struct fake_store stores[MANY], late;
    start();
    for (int i = 0; i < MANY; i++) {
        char name[32];
        snprintf(name, sizeof(name), "127.0.0.1:%d", 100 + i);
        fake_start(&stores[i], config, &(struct fake_options){.name = name, .bytes = 65536});
        tp_engine_open(engine, (uint64_t)i, name, strlen(name));
    }
    uint64_t end = tp_now_ms() + 20000;
    while (rig_counter(TP_PEERS_ATTACHED) < 64 && tp_now_ms() < end)
        usleep(10000);
    cr_assert_eq(rig_counter(TP_PEERS_ATTACHED), 64);
    /* Which 64 are attached is the directory's order: of seven that end, one is. */
    for (int i = 0; i < MANY - 63; i++)
        fake_end(&stores[i]);
    fake_start(&late, config, &(struct fake_options){.name = "127.0.0.1:99", .bytes = 65536});
    end = tp_now_ms() + 20000;
    while (rig_counter(TP_PEERS_ATTACHED) < 65 && tp_now_ms() < end)
        usleep(10000);
    cr_assert_geq(rig_counter(TP_PEERS_ATTACHED), 65, "a slot that is free again is used");
    fake_end(&late);
    for (int i = MANY - 63; i < MANY; i++)
        fake_end(&stores[i]);
}

/* Sockets that nobody listens on, as kill -9 leaves them. */
static void leave_dead_sockets(unsigned count) {
    char here[4096];
    cr_assert_not_null(getcwd(here, sizeof(here)));
    cr_assert_eq(chdir(config->engine.socket_dir), 0);
    for (unsigned i = 0; i < count; i++) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        snprintf(address.sun_path, sizeof(address.sun_path), "s-%032x.sock", i * 2654435761u);
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        cr_assert_eq(bind(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
        close(fd);
    }
    cr_assert_eq(chdir(here), 0);
}

static void remove_dead_sockets(unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        char path[4200];
        snprintf(path, sizeof(path), "%s/s-%032x.sock", config->engine.socket_dir, i * 2654435761u);
        cr_assert_eq(unlink(path), 0);
    }
}

/* The store comes first and last, since where its name is read depends on the file system. */
Test(peer, a_store_is_found_behind_thousands_of_dead_ones, .timeout = 60) {
    enum { DEAD = 4000 };
    struct fake_store first, last;
    config = fake_config();
    fake_start(&first, config, &(struct fake_options){.name = "127.0.0.1:1"});
    leave_dead_sockets(DEAD);
    fake_start(&last, config, &(struct fake_options){.name = "127.0.0.1:2"});
    start_with(config);
    tp_engine_open(engine, 1, "127.0.0.1:1", 11);
    tp_engine_open(engine, 2, "127.0.0.1:2", 11);
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 20000));
    cr_assert(rig_wait(engine, 2, FAKE_BASE, 20000));
    sleep(3); /* and neither gives way to the dead again */
    cr_assert(rig_wait(engine, 1, FAKE_BASE, 100));
    cr_assert(rig_wait(engine, 2, FAKE_BASE, 100));
    cr_assert_eq(rig_counter(TP_PEERS_ATTACHED), 2);
    tp_transport_stop();
    fake_end(&first);
    fake_end(&last);
    remove_dead_sockets(DEAD);
}

Test(peer, stop_and_start_again, .timeout = 30) {
    start();
    unsigned fds = 0;
    for (int i = 0; i < 3; i++) {
        cr_assert(attaches(FAKE_GOOD, 5000));
        tp_transport_stop();
        tp_transport_stop();
        cr_assert_not(tp_transport_on());
        cr_assert(fds == 0 || open_fds() == fds);
        fds = open_fds();
        cr_assert_eq(tp_transport_start(config), 0);
    }
}

Test(peer, a_missing_directory_is_looked_for, .timeout = 30) {
    config = fake_config();
    cr_assert_eq(rmdir(config->engine.socket_dir), 0);
    cr_assert_eq(tp_transport_start(config), 0);
    engine = tp_engine_find(&engine_key, true);
    usleep(100000);
    cr_assert_eq(mkdir(config->engine.socket_dir, 0700), 0);
    cr_assert(attaches(FAKE_GOOD, 5000));
}
