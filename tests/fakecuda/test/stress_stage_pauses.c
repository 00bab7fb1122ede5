/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: whichever thread stands still at whichever step of staging, and whatever the driver
 * refuses, each job ends without anybody polling it; one that is done has its bytes, and only what
 * was refused has failed. Where the library's threads end or cannot be started, polling one job
 * ends it, whatever others do.
 *
 * Both directions, several GPUs. Arguments: register_max_bytes, and what happens meanwhile:
 * - memory: the driver refuses pinned memory and events, for a while;
 * - calls: copies, launches, events and queries;
 * - lost: one GPU after the other is lost;
 * - stops: the library's threads end now and then; alone: none can be started.
 * A plain program, so that it also runs under the thread sanitizer.
 */
#include "device_rig.h"
#include "refused_threads.h"
#include "transport/stage_slot.h"

#include <limits.h>

#define DEVICES 3
#define THREADS 6
#define ROOM (5 * MIB) /* each thread, each direction */
#define SECONDS 2

static _Atomic bool over;
static pthread_barrier_t rounds;
static _Atomic unsigned done, failed;
static const char *happens;

static bool is(const char *what) {
    return strcmp(happens, what) == 0;
}

/* Nobody else sees to it, or not always: whoever waits polls to the end. */
static bool polled(void) {
    return is("stops") || is("alone");
}

/* ---- threads that stand still, where one file calls another ---- */

static void pause_now_and_then(void) {
    static _Thread_local uint64_t seed;
    if (seed == 0)
        seed = tp_now_ns() ^ (uintptr_t)&seed;
    uint32_t draw = rig_random(&seed);
    if (draw % 1024 == 0)
        usleep(3000);
    else if (draw % 32 == 0)
        usleep(rig_random(&seed) % 200);
    else if (draw % 4 == 0)
        sched_yield();
}

#define PAUSES(result, name, parameters, arguments)                                                \
    result __real_##name parameters;                                                               \
    result __wrap_##name parameters;                                                               \
    result __wrap_##name parameters {                                                              \
        pause_now_and_then();                                                                      \
        result value = __real_##name arguments;                                                    \
        pause_now_and_then();                                                                      \
        return value;                                                                              \
    }
#define PAUSES_VOID(name, parameters, arguments)                                                   \
    void __real_##name parameters;                                                                 \
    void __wrap_##name parameters;                                                                 \
    void __wrap_##name parameters {                                                                \
        pause_now_and_then();                                                                      \
        __real_##name arguments;                                                                   \
        pause_now_and_then();                                                                      \
    }

PAUSES(struct tp_slot *, tp_slot_take, (struct tp_gpu * gpu), (gpu))
PAUSES_VOID(tp_slot_give, (struct tp_gpu * gpu, struct tp_slot *slot), (gpu, slot))
PAUSES(uint32_t, tp_slots_free, (const struct tp_gpu *gpu), (gpu))
PAUSES_VOID(tp_slot_copy, (const struct tp_slot *slot, bool to_device), (slot, to_device))
PAUSES_VOID(tp_stage_end_piece, (struct tp_stage_piece * piece, bool good), (piece, good))
PAUSES(bool, tp_stage_step_any, (uint32_t first), (first))
PAUSES(bool, tp_stage_in_flight, (void), ())
PAUSES(uint32_t, tp_stage_work_left, (void), ())
PAUSES_VOID(tp_stage_news, (uint64_t bytes), (bytes))
PAUSES_VOID(tp_stage_rouse, (void), ())
PAUSES(tp_cu_result, tp_gpu_query, (struct tp_gpu * gpu, tp_cu_event event), (gpu, event))
PAUSES(tp_cu_result, tp_gpu_send_staged,
       (struct tp_gpu * gpu, enum tp_gpu_method *method, bool to_device,
        const struct tp_copy_op *ops, uint32_t count, uint64_t *scratch, tp_cu_event event),
       (gpu, method, to_device, ops, count, scratch, event))

/* ---- copies ---- */

/* Of one thread and direction: blocks that lie the other way round in the GPU's memory. */
struct way {
    bool to_device;
    struct tp_stage_job job;
    unsigned char *host, *sent, *got;
    CUdeviceptr gpu;
    size_t bytes;
};

static void plan(struct way *way, uint64_t *seed) {
    static const size_t blocks[] = {1, 7, 999, 4096, 16384, 40000, 262144, MIB + 1, 4 * MIB};
    size_t block = blocks[rig_random(seed) % (sizeof(blocks) / sizeof(*blocks))];
    size_t most = ROOM / block < 3000 ? ROOM / block : 3000;
    size_t count = 1 + rig_random(seed) % (rig_random(seed) % 2 ? most : 1);
    size_t shift = rig_random(seed) % 64;
    way->bytes = block * count;
    fill_random(way->sent, way->bytes, seed);
    if (way->to_device)
        memcpy(way->host, way->sent, way->bytes);
    else
        must(DRIVER(fakecuda_poke)(way->gpu + shift, way->sent, way->bytes) == 0, "poke");
    must(tp_stage_reserve(&way->job, way->bytes, (uint32_t)count), "reserve");
    for (size_t i = 0; i < count; i++)
        tp_stage_add(&way->job, (char *)way->host + i * block,
                     (char *)(uintptr_t)(way->gpu + shift) + (count - 1 - i) * block, block, 0);
    /* What has to come: the blocks in the other order. */
    for (size_t i = 0; i < count; i++)
        memcpy(way->got + i * block, way->sent + (count - 1 - i) * block, block);
    memcpy(way->sent, way->got, way->bytes);
    way->gpu += shift;
}

static void check(struct way *way, CUdeviceptr gpu) {
    enum tp_stage_state state = tp_stage_look(&way->job);
    must(state == TP_STAGE_DONE || is("calls") || is("lost"), "nothing fails by itself");
    if (state == TP_STAGE_DONE && way->to_device)
        must(DRIVER(fakecuda_peek)(way->got, way->gpu, way->bytes) == 0, "peek");
    if (state == TP_STAGE_DONE)
        must(memcmp(way->to_device ? way->got : way->host, way->sent, way->bytes) == 0, "bytes");
    atomic_fetch_add(state == TP_STAGE_DONE ? &done : &failed, 1);
    tp_stage_reset(&way->job);
    way->gpu = gpu;
}

/* Poll so many times, then leave it alone. */
static void wait_for(struct tp_stage_job *job, unsigned polls) {
    uint64_t end_ms = tp_now_ms() + 20000;
    while (tp_stage_look(job) == TP_STAGE_RUNNING) {
        if (polls > 0 || polled())
            tp_stage_help(job);
        else
            usleep(100);
        polls -= polls > 0;
        must(tp_now_ms() < end_ms, "a job ends");
    }
}

static void copy_both(struct way ways[2], const CUdeviceptr gpu[2], struct tp_gpu *its,
                      uint64_t *seed) {
    unsigned first = rig_random(seed) % 2;
    unsigned polls = rig_random(seed) % 3 == 0 ? 0 : rig_random(seed) % 50;
    for (int i = 0; i < 2; i++)
        plan(&ways[i], seed);
    usleep(rig_random(seed) % 500);
    tp_stage_start(&ways[first].job, its, ways[first].to_device);
    tp_stage_start(&ways[!first].job, its, ways[!first].to_device);
    for (unsigned i = 0; i < polls / 4; i++)
        tp_stage_help(&ways[first].job);
    wait_for(&ways[!first].job, polls);
    wait_for(&ways[first].job, polls / 2);
    for (int i = 0; i < 2; i++)
        check(&ways[i], gpu[i]);
}

/* After each round all wait for all: what somebody has started would wake threads that sleep by
 * mistake. */
static bool goes_on(size_t me) {
    static bool last;
    pthread_barrier_wait(&rounds);
    if (me == 0)
        last = atomic_load(&over);
    pthread_barrier_wait(&rounds);
    return !last;
}

static void *work(void *arg) {
    size_t me = (size_t)(uintptr_t)arg;
    uint64_t seed = tp_now_ns() + me;
    int device = (int)(me % DEVICES);
    struct way ways[2] = {{.to_device = false}, {.to_device = true}};
    CUdeviceptr gpu[2];
    (void)use_device(device);
    for (int i = 0; i < 2; i++) {
        ways[i].host = malloc(ROOM);
        ways[i].sent = malloc(ROOM);
        ways[i].got = malloc(ROOM);
        gpu[i] = ways[i].gpu = device_memory(ROOM + 64);
    }
    while (goes_on(me)) {
        struct tp_gpu *its = tp_gpu_get(device);
        if (its) /* else it is lost */
            copy_both(ways, gpu, its, &seed);
    }
    for (int i = 0; i < 2; i++) {
        tp_stage_release(&ways[i].job);
        free(ways[i].host);
        free(ways[i].sent);
        free(ways[i].got);
    }
    return NULL;
}

/* ---- what the driver refuses, for a while ---- */

/* Two calls of a kind, always or once. */
static void refuse(const char *const *names, uint32_t count, uint64_t *seed) {
    char rules[200] = "";
    for (int i = 0; i < 2 && count > 0; i++) {
        size_t at = strlen(rules);
        const char *name = names[rig_random(seed) % count];
        const char *comma = i ? "," : "";
        if (rig_random(seed) % 2)
            snprintf(rules + at, sizeof(rules) - at, "%s%s:*=2", comma, name);
        else
            snprintf(rules + at, sizeof(rules) - at, "%s%s:%u=2", comma, name,
                     1 + rig_random(seed) % 20);
    }
    must(DRIVER(fakecuda_set_failures)(rules) == 0, "rules");
}

static void meanwhile(uint64_t left_ms, uint64_t *seed) {
    static const char *const calls[] = {"cuMemcpyBatchAsync", "cuMemcpyAsync", "cuEventRecord",
                                        "cuEventQuery", "cuLaunchKernel"};
    static const char *const memory[] = {"cuMemHostAlloc", "cuEventCreate"};
    bool pause = rig_random(seed) % 2;
    struct tp_gpu *gpu = tp_gpu_get(0);
    if (is("calls"))
        refuse(calls, pause ? 0 : 5, seed);
    if (is("memory"))
        refuse(memory, pause ? 0 : 2, seed);
    if (is("stops"))
        tp_stage_stop();
    if (is("lost") && left_ms < SECONDS * 600 && gpu)
        tp_gpu_give_up(gpu, "a test has said so");
    if (is("lost") && left_ms < SECONDS * 200)
        must(DRIVER(fakecuda_set_failures)("cuEventQuery:*=700,cuStreamSynchronize:*=700") == 0,
             "rules");
}

static void start_all(const char *limit) {
    char settings[200];
    snprintf(settings, sizeof(settings),
             "\"register_peer_memory\": true, \"register_max_bytes\": \"%s\"", limit);
    setenv("FAKECUDA_DEVICES", "3", 1);
    setenv("TIDEPOOL_COPY_THREADS", "3", 1);
    load_driver(settings);
    for (int device = 0; device < DEVICES; device++) {
        (void)use_device(device);
        must(wait_gpu(device, 5000), "ready");
        while (!tp_gpu_calibrated(tp_gpu_get(device)))
            usleep(1000);
        must(tp_stage_ready(tp_gpu_get(device)), "there is a slot");
    }
    if (is("alone"))
        refuse_threads("tidepool-stage", INT_MAX);
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    uint64_t seed = tp_now_ns();
    must(argc == 3, "arguments: register_max_bytes, and what happens");
    happens = argv[2];
    start_all(argv[1]);
    pthread_barrier_init(&rounds, NULL, THREADS);
    for (size_t i = 0; i < THREADS; i++)
        must(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0, "thread");
    uint64_t end_ms = tp_now_ms() + SECONDS * 1000;
    for (uint64_t now_ms; (now_ms = tp_now_ms()) < end_ms; usleep(rig_random(&seed) % 20000))
        meanwhile(end_ms - now_ms, &seed);
    atomic_store(&over, true);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%u jobs done, %u failed\n", atomic_load(&done), atomic_load(&failed));
    must(!tp_stage_in_flight() && tp_stage_work_left() == 0, "nothing is left behind");
    tp_stage_stop();
    must(DRIVER(fakecuda_violations)() == 0, DRIVER(fakecuda_last_violation)());
    return 0;
}
