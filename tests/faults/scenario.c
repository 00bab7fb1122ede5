/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a store and an engine, with one call that fails: the store starts and publishes its
 * segment, the engine attaches, puts and gets; the store is killed, another one starts, the engine
 * lets go of the first and uses the second; both end. Run by sweep.py with the preload of faults.h.
 *
 *   scenario DIRECTORY SEGMENTS(memfd|cumem|gpu|a directory) VICTIM(store|engine|none) CALL NTH
 * ERROR
 *
 * gpu: segments of CUDA memory, and the engine's buffers are a GPU's (tests/fakecuda).
 * CALL is a number of faults.h, or the name of a CUDA driver call, which then gives ERROR. With
 * VICTIM none and CALL "counts", the calls of both are counted: lines "ROLE CALL COUNT". Prints
 * what is wrong and ends with 1, or prints how it went ("ok", "refused", "stock") and ends with 0.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/env.h"
#include "env/stats.h"
#include "segment/segment.h"
#include "tests/faults/faults.h"
#include "tests/unit/rig.h"

#define MIB (UINT64_C(1) << 20)
#define SEGMENT (4 * MIB)
#define BLOCK (MIB + 4096)
#define ATTACH_MS 12000 /* what fails once is tried again within seconds */
#define GONE_MS 3000

enum state { STARTING, UP, REFUSED, END, WRONG };

struct side {
    _Atomic enum state state;
    _Atomic uint64_t base;
    atomic_bool stop, same, happened, said, stock;
    atomic_uint checked; /* for which phase `same` is the answer */
};

static struct {
    struct side store[2], engine;
    atomic_uint phase;
} * shared;

static const char *directory, *segments, *victim, *call_name;
static unsigned call_number, call_nth;
static int call_error;
static struct tp_config config;
static void *driver; /* the double, where this process's buffers are a GPU's */
static int engine_key;

static bool on_gpu(void) {
    return strcmp(segments, "gpu") == 0;
}

static void wrong(const char *role, const char *what) {
    printf("%s: %s\n", role, what);
    fflush(stdout);
    _exit(1);
}

static uint64_t pattern(uint64_t index, uint64_t seed) {
    return (index + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ (seed << 40);
}

static void fill(void *memory, uint64_t bytes, uint64_t seed) {
    for (uint64_t i = 0; i < bytes / 8; i++)
        ((uint64_t *)memory)[i] = pattern(i, seed);
}

static bool same(const void *memory, uint64_t bytes, uint64_t seed) {
    for (uint64_t i = 0; i < bytes / 8; i++) {
        if (((const uint64_t *)memory)[i] != pattern(i, seed))
            return false;
    }
    return true;
}

static unsigned open_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    unsigned count = 0;
    while (dir != NULL && readdir(dir) != NULL)
        count++;
    if (dir != NULL)
        closedir(dir);
    return count;
}

/* What stays open: the page of counters, a store's lease page, and the double's log. */
static bool more_fds_than(unsigned before) {
    unsigned most = before + 2 + (getenv("FAKECUDA_LOG") != NULL);
    for (unsigned i = 0; open_fds() > most; i++) {
        if (i == 200)
            return true;
        usleep(5000); /* threads may still be closing */
    }
    return false;
}

/* Warnings and errors are kept in the process's own page. */
static bool said_something(void) {
    const struct tp_stats_page *page = tp_stats_page();
    return page != NULL && page->events[0].text[0] != 0;
}

static void configure(void) {
    memset(&config, 0, sizeof config);
    config.boot_id_only = true;
    config.store.half = config.engine.half = TP_HALF_ON;
    config.store.kind = TP_SEGMENT_MEMFD;
    config.store.piece_bytes = 2 * MIB;
    config.engine.copy_threads = 2;
    if (strcmp(segments, "cumem") == 0 || on_gpu()) {
        config.store.kind = TP_SEGMENT_CUMEM;
        config.engine.device_copy = true;
        config.engine.copy_engine = TP_COPY_DMA;
    } else if (strcmp(segments, "memfd") != 0) {
        config.store.kind = TP_SEGMENT_FILES;
        snprintf(config.store.segment_dir, sizeof config.store.segment_dir, "%s", segments);
    }
    snprintf(config.store.socket_dir, sizeof config.store.socket_dir, "%s", directory);
    snprintf(config.engine.socket_dir, sizeof config.engine.socket_dir, "%s", directory);
}

/* From here on the library's calls of this process are counted, and the chosen one fails. */
static void arm(const char *role) {
    bool chosen = strcmp(role, victim) == 0;
    if (strncmp(call_name, "cu", 2) == 0 && chosen) {
        char rule[128];
        snprintf(rule, sizeof rule, "%s:%u=%d", call_name, call_nth, call_error);
        setenv("FAKECUDA_FAIL", rule, 1); /* read at the double's first call */
        int (*set_failures)(const char *) = dlsym(driver, "fakecuda_set_failures");
        if (driver != NULL && set_failures(rule) != 0)
            wrong(role, "the double does not know such a rule");
    } else {
        faults_arm(call_number, chosen ? call_nth : 0, call_error);
    }
}

static void say_counts(const char *role) {
    for (unsigned i = 0; strcmp(call_name, "counts") == 0 && i < FAULTS_FUNCTIONS; i++)
        printf("%s %u %u\n", role, i, faults_count(i));
    fflush(stdout);
}

/* ---- the store */

static void wait_for(atomic_bool *flag) {
    while (!atomic_load(flag))
        usleep(1000);
}

static int make_segment(char **range) {
    int error = tp_server_start(true, &config);
    if (error != 0)
        return error;
    return tp_segment_allocate(SEGMENT, 16 * MIB, config.store.kind == TP_SEGMENT_CUMEM, &config,
                               (void **)range);
}

static void be_store(unsigned index) {
    struct side *me = &shared->store[index];
    char name[32], *range = NULL;
    unsigned fds = open_fds();

    snprintf(name, sizeof name, "127.0.0.1:%u", index + 1);
    arm(index == 0 ? "store" : "second");
    int error = make_segment(&range);
    if (error == 0)
        error = tp_server_set_name(name);
    if (error == 0)
        error = tp_segment_publish(range, &config);
    if (error != 0 && !said_something())
        wrong("store", "it fails without a line");
    atomic_store(&me->base, (uint64_t)range);
    atomic_store(&me->state, error == 0 ? UP : REFUSED);
    for (unsigned phase = 0; error == 0 && !atomic_load(&me->stop); usleep(500)) {
        /* What the engine has put is there, to be seen without the library. */
        unsigned now = atomic_load(&shared->phase);
        atomic_store(&me->said, said_something());
        if (now != phase) {
            atomic_store(&me->same, same(range, BLOCK, 100 + now));
            atomic_store(&me->checked, now);
            phase = now;
        }
    }
    (void)tp_segment_withdraw(range);
    (void)tp_segment_restore(range);
    (void)tp_segment_free(range);
    tp_server_stop();
    say_counts("store");
    atomic_store(&me->said, said_something());
    atomic_store(&me->happened, faults_happened());
    faults_arm(0, 0, 0);
    if (config.store.kind != TP_SEGMENT_CUMEM && more_fds_than(fds)) /* the double keeps some */
        wrong("store", "it has more fds than before");
    _exit(0);
}

/* ---- the engine */

static uint64_t host_source[BLOCK / 8], host_target[BLOCK / 8];
static void *source = host_source, *target = host_target;

/* What an application has done before it uses Mooncake. */
static void use_gpu(void) {
    static const char conf[] = "{\"transports\":{\"shm\":{\"enable\":true,\"socket_dir\":\"/x\","
                               "\"copy_engine\":\"dma\"}}}";
    setenv("MC_TENT_CONF", conf, 1);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    int (*retain)(void **, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*enter)(void *) = dlsym(driver, "cuCtxSetCurrent");
    int (*allocate)(void **, size_t) = dlsym(driver, "cuMemAlloc_v2");
    void *context;
    if (init(0) != 0 || retain(&context, 0) != 0 || enter(context) != 0 ||
        allocate(&source, BLOCK) != 0 || allocate(&target, BLOCK) != 0)
        wrong("engine", "the double does not work");
    tp_register_range(source, BLOCK, "cuda:0");
    tp_register_range(target, BLOCK, "cuda:0");
}

/* Between this process's own memory and the buffers that requests name. */
static void give(void *buffer, const void *bytes) {
    int (*poke)(void *, const void *, size_t) = driver ? dlsym(driver, "fakecuda_poke") : NULL;
    if (poke == NULL)
        memcpy(buffer, bytes, BLOCK);
    else if (poke(buffer, bytes, BLOCK) != 0)
        wrong("engine", "the double does not write");
}

static void take(void *bytes, const void *buffer) {
    int (*peek)(void *, const void *, size_t) = driver ? dlsym(driver, "fakecuda_peek") : NULL;
    if (peek == NULL)
        memcpy(bytes, buffer, BLOCK);
    else if (peek(bytes, buffer, BLOCK) != 0)
        wrong("engine", "the double does not read");
}

static enum tp_task_state move(int opcode, void *memory, uint64_t handle, uint64_t base) {
    static uint64_t id = 0x100000;
    struct tp_engine *engine = tp_engine_find(&engine_key, true);
    char name[32];

    if (engine == NULL)
        return TP_TASK_WAITING; /* Mooncake's own transport would carry it out */
    int length = snprintf(name, sizeof name, "127.0.0.1:%" PRIu64, handle);
    tp_engine_open(engine, handle, name, (size_t)length);
    struct rig_request request = rig_make(opcode, memory, handle, base, BLOCK);
    struct tp_submit submit;
    uint64_t bytes = 0;

    id += 64;
    if (rig_begin(engine, id, 1, &request, 1, &submit) == TP_PLAN_NONE)
        return TP_TASK_WAITING;
    tp_submit_commit(&submit);
    enum tp_task_state state = rig_finish(id, &bytes);
    if (state != TP_TASK_COMPLETED && state != TP_TASK_FAILED)
        wrong("engine", "a transfer does not end");
    while (rig_free(id) == -EBUSY)
        usleep(100);
    return state;
}

/* Put and get until both go through shared memory. False: they never do. The store is opened for
 * every object, as Mooncake does. */
static bool put_and_get(uint64_t handle, struct side *store, unsigned phase) {
    static uint64_t sent[BLOCK / 8], got[BLOCK / 8];
    uint64_t base = atomic_load(&store->base);

    fill(sent, BLOCK, 100 + phase);
    give(source, sent);
    for (uint64_t end = tp_now_ms() + ATTACH_MS; tp_now_ms() < end; usleep(2000)) {
        if (move(TP_OP_WRITE, source, handle, base) != TP_TASK_COMPLETED)
            continue;
        atomic_store(&shared->phase, phase);
        while (atomic_load(&store->checked) != phase)
            usleep(1000);
        if (!atomic_load(&store->same))
            wrong("engine", "a put is reported that the store does not hold");
        memset(got, 0x5a, BLOCK);
        give(target, got);
        for (; tp_now_ms() < end; usleep(2000)) {
            if (move(TP_OP_READ, target, handle, base) != TP_TASK_COMPLETED)
                continue;
            take(got, target);
            if (memcmp(sent, got, BLOCK) != 0)
                wrong("engine", "other bytes were read");
            return true;
        }
    }
    if (!said_something() && !atomic_load(&store->said))
        wrong("engine", "it does not attach, and no line says why");
    return false;
}

static void be_engine(void) {
    struct side *me = &shared->engine;
    if (on_gpu())
        use_gpu();
    unsigned fds = open_fds();

    arm("engine");
    if (tp_transport_start(&config) != 0) {
        if (!said_something())
            wrong("engine", "it does not start, and no line says why");
        atomic_store(&me->state, REFUSED);
    } else {
        atomic_store(&me->stock, !put_and_get(1, &shared->store[0], 1));
        atomic_store(&me->state, UP);
        wait_for(&me->stop); /* the first store is dead, the second is there */
        uint64_t end = tp_now_ms() + GONE_MS;
        while (move(TP_OP_READ, target, 1, atomic_load(&shared->store[0].base)) ==
               TP_TASK_COMPLETED) {
            if (tp_now_ms() > end)
                wrong("engine", "a dead store's memory is still read");
        }
        if (!put_and_get(2, &shared->store[1], 2))
            atomic_store(&me->stock, true);
    }
    tp_engine_forget(&engine_key);
    tp_transport_stop();
    say_counts("engine");
    atomic_store(&me->said, said_something());
    atomic_store(&me->happened, faults_happened());
    faults_arm(0, 0, 0);
    if (strncmp(call_name, "cuMem", 5) != 0 && more_fds_than(fds)) /* what it does not give back */
        wrong("engine", "it has more fds than before");
    atomic_store(&me->state, END);
    _exit(0);
}

/* ---- the case */

static pid_t start(void (*run)(unsigned), unsigned index) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        configure();
        run(index);
    }
    return child;
}

static void run_engine(unsigned index) {
    (void)index;
    be_engine();
}

/* Waits until it has ended, `limit_ms` at most. */
static void ends_well(pid_t child, const char *role, unsigned limit_ms) {
    int status = 0;
    for (unsigned ms = 0; waitpid(child, &status, WNOHANG) == 0; ms++) {
        if (ms > limit_ms)
            wrong(role, "it does not end");
        usleep(1000);
    }
    if (WIFSIGNALED(status)) {
        printf("%s: it is ended by signal %d\n", role, WTERMSIG(status));
        _exit(1);
    }
    if (WEXITSTATUS(status) != 0)
        _exit(1); /* it has said why */
}

/* Until it is up, refuses, or has ended. */
static enum state settles(struct side *side, pid_t child, const char *role) {
    for (unsigned ms = 0; atomic_load(&side->state) == STARTING; ms++) {
        int status;
        if (waitpid(child, &status, WNOHANG) != 0) {
            if (WIFSIGNALED(status))
                printf("%s: it is ended by signal %d\n", role, WTERMSIG(status));
            _exit(1);
        }
        if (ms > 40000)
            wrong(role, "it hangs");
        usleep(1000);
    }
    return atomic_load(&side->state);
}

int main(int argc, char **argv) {
    if (argc != 7)
        return 2;
    directory = argv[1], segments = argv[2], victim = argv[3], call_name = argv[4];
    call_number = (unsigned)strtoul(argv[4], NULL, 10);
    call_nth = (unsigned)strtoul(argv[5], NULL, 10);
    call_error = (int)strtol(argv[6], NULL, 10);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pid_t first = start(be_store, 0);
    if (settles(&shared->store[0], first, "store") == REFUSED) {
        ends_well(first, "store", 10000);
        puts("refused");
        return 0;
    }
    pid_t engine = start(run_engine, 0);
    if (settles(&shared->engine, engine, "engine") == REFUSED) {
        ends_well(engine, "engine", 10000);
        puts("stock");
        return 0;
    }
    if (strcmp(victim, "engine") == 0 || atomic_load(&shared->store[0].state) != UP) {
        kill(first, SIGKILL);
        waitpid(first, NULL, 0);
    } else { /* a store that has met a failure ends in order, and nothing of it stays */
        atomic_store(&shared->store[0].stop, true);
        ends_well(first, "store", 10000);
    }
    pid_t second = start(be_store, 1);
    if (settles(&shared->store[1], second, "second") == REFUSED)
        wrong("second", "a store after the first one does not start");
    atomic_store(&shared->engine.stop, true);
    ends_well(engine, "engine", 40000);
    atomic_store(&shared->store[1].stop, true);
    ends_well(second, "second", 10000);
    puts(atomic_load(&shared->engine.stock) ? "stock" : "ok");
    return 0;
}
