/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: twenty threads submit, poll and free at once while their store is killed and comes back,
 * and no answer of success comes with wrong bytes, no thread hangs, nothing races. Without
 * Criterion, so that it also runs under ThreadSanitizer.
 *
 * Usage: stress_batch [seconds]   (longer, until two stores were attached and a batch completed)
 */
#include <pthread.h>
#include <stdio.h>

#include "rig.h"

#define NAME "127.0.0.1:1"
#define THREADS 20
#define SHARE ((uint64_t)1 << 18)

static struct tp_config *config;
static struct tp_engine *engine;
static int engine_key;
static _Atomic bool stop;
static _Atomic uint64_t base = FAKE_BASE; /* no store has addresses of one before it */
static _Atomic uint64_t completed, failed, left, wrong;

static bool transfer(uint64_t id, int opcode, unsigned char *mine, uint64_t me, uint64_t bytes) {
    struct rig_request r[8];
    struct tp_submit submit;
    for (unsigned i = 0; i < 8; i++)
        r[i] = rig_make(opcode, mine + i * bytes, 1, base + me * SHARE + i * bytes * 2, bytes);
    enum tp_plan plan = rig_begin(engine, id, 8, r, 8, &submit);
    if (plan == TP_PLAN_MIXED)
        tp_submit_abort(&submit); /* the store came or went in the middle */
    if (plan != TP_PLAN_ALL) {
        left++;
        return false;
    }
    tp_submit_commit(&submit);
    enum tp_task_state state = rig_finish(id, NULL);
    if (rig_free(id) != 0 || (state != TP_TASK_COMPLETED && state != TP_TASK_FAILED))
        wrong++;
    *(state == TP_TASK_COMPLETED ? &completed : &failed) += 1;
    return state == TP_TASK_COMPLETED;
}

static void *hammer(void *arg) {
    uint64_t me = (uint64_t)(uintptr_t)arg;
    unsigned char *mine = malloc(SHARE), *back = malloc(SHARE);
    for (unsigned i = 0; !atomic_load(&stop); i++) {
        uint64_t bytes = 1 + (i * 977 + me) % 15000;
        uint64_t lost = rig_counter(TP_PEERS_LOST);
        memset(mine, (int)(i + me), 8 * bytes);
        tp_engine_open(engine, 1, NAME, strlen(NAME));
        bool good = transfer(0x1000000 + me * 4096, TP_OP_WRITE, mine, me, bytes) &&
                    transfer(0x1000040 + me * 4096, TP_OP_READ, back, me, bytes);
        if (good && rig_counter(TP_PEERS_LOST) == lost && memcmp(mine, back, 8 * bytes) != 0)
            wrong++;
        if (!good)
            usleep(1000);
    }
    free(mine);
    free(back);
    return NULL;
}

int main(int argc, char **argv) {
    unsigned seconds = argc > 1 ? (unsigned)atoi(argv[1]) : 2;
    pthread_t threads[THREADS];
    struct fake_store store;
    struct fake_options options = {
        .name = NAME, .bytes = THREADS * SHARE, .piece_bytes = THREADS * SHARE / 10};
    config = fake_config();
    if (tp_transport_start(config) != 0)
        return 1;
    engine = tp_engine_find(&engine_key, true);
    tp_engine_open(engine, 1, NAME, strlen(NAME));
    for (uintptr_t i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, hammer, (void *)i) != 0)
            return 1;
    }
    unsigned rounds = 0;
    alarm(seconds + 90);
    /* Not by the clock alone: a machine that stands still for seconds has done nothing in them. */
    for (uint64_t end = tp_now_ms() + seconds * 1000;
         tp_now_ms() < end || rig_counter(TP_PEERS_ATTACHED) < 2 || completed == 0; rounds++) {
        options.base = FAKE_BASE + ((uint64_t)rounds << 30);
        atomic_store(&base, options.base);
        fake_start(&store, config, &options);
        usleep(250000);
        fake_end(&store);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    uint64_t attached = rig_counter(TP_PEERS_ATTACHED);
    tp_transport_stop();
    rmdir(config->engine.socket_dir);
    free(config);
    printf(
        "%u stores, %llu attached; batches: %llu completed, %llu failed, %llu left; %llu wrong\n",
        rounds, (unsigned long long)attached, (unsigned long long)completed,
        (unsigned long long)failed, (unsigned long long)left, (unsigned long long)wrong);
    return wrong != 0;
}
