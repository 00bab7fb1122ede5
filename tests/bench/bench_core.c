/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library itself costs: planning and routing a request, a status poll, a whole batch;
 * without Mooncake, against a store in another process. Bytes are few, so that the copies do not
 * hide the rest.
 */
#include <pthread.h>
#include <stdio.h>

#include "../unit/rig.h"

#define NAME "127.0.0.1:1"
#define BATCHES 64
#define SLICE 64 /* bytes a request */

static struct tp_config *config;
static struct tp_engine *engine;
static struct fake_store store;
static int engine_key;
static unsigned char buffer[1 << 20];

struct result {
    double plan_ns, commit_ns, poll_ns, free_ns;
};

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* `n` requests a batch, 64 batches live at once as in batch_get_into. Times are of the best of some
 * rounds: the machine is shared. */
static struct result measure(unsigned n, uint64_t first_id) {
    struct result best = {1e9, 1e9, 1e9, 1e9};
    static _Thread_local struct rig_request r[256];
    for (unsigned i = 0; i < n; i++)
        r[i] = rig_make(i % 2, buffer + (size_t)i * 2 * SLICE, 1,
                        FAKE_BASE + (uint64_t)i * 3 * SLICE, SLICE);
    for (int round = 0; round < 200; round++) {
        struct tp_submit submits[BATCHES];
        struct tp_task_status status;
        double t0 = now_ns();
        for (unsigned b = 0; b < BATCHES; b++) {
            if (rig_begin(engine, first_id + b * 4096, n, r, n, &submits[b]) != TP_PLAN_ALL) {
                fprintf(stderr, "not local\n");
                exit(1);
            }
        }
        double t1 = now_ns();
        for (unsigned b = 0; b < BATCHES; b++)
            tp_submit_commit(&submits[b]);
        for (unsigned b = 0; b < BATCHES; b++)
            rig_finish(first_id + b * 4096, NULL);
        double t2 = now_ns();
        for (unsigned b = 0; b < BATCHES; b++) {
            for (unsigned i = 0; i < n; i++)
                tp_batch_task_status(first_id + b * 4096, i, &status);
        }
        double t3 = now_ns();
        for (unsigned b = 0; b < BATCHES; b++)
            rig_free(first_id + b * 4096);
        double t4 = now_ns();
        struct result now = {(t1 - t0) / BATCHES / n, (t2 - t1) / BATCHES / n,
                             (t3 - t2) / BATCHES / n, (t4 - t3) / BATCHES};
        if (now.plan_ns < best.plan_ns)
            best.plan_ns = now.plan_ns;
        if (now.commit_ns < best.commit_ns)
            best.commit_ns = now.commit_ns;
        if (now.poll_ns < best.poll_ns)
            best.poll_ns = now.poll_ns;
        if (now.free_ns < best.free_ns)
            best.free_ns = now.free_ns;
    }
    return best;
}

static struct result results[4];

static void *in_thread(void *arg) {
    struct result *result = arg;
    *result = measure(61, 0x100000000u + ((uint64_t)(result - results) << 24));
    return NULL;
}

int main(void) {
    static const unsigned sizes[] = {1, 61, 160};
    config = fake_config();
    fake_start(&store, config, &(struct fake_options){.name = NAME});
    if (tp_transport_start(config) != 0)
        return 1;
    engine = tp_engine_find(&engine_key, true);
    tp_engine_open(engine, 1, NAME, strlen(NAME));
    if (!rig_wait(engine, 1, FAKE_BASE, 5000))
        return 1;
    tp_register_range(buffer, sizeof(buffer), "*");
    double t0 = now_ns();
    for (int i = 0; i < 1000000; i++)
        tp_engine_open(engine, 1, NAME, strlen(NAME));
    printf("open of a known segment %.0f ns\n", (now_ns() - t0) / 1e6);
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct result r = measure(sizes[i], 0x1000000);
        printf(
            "batches of %3u: plan and route %.0f ns a request, copy of %d bytes and end %.0f ns a "
            "request, poll %.0f ns, free %.0f ns a batch\n",
            sizes[i], r.plan_ns, SLICE, r.commit_ns, r.poll_ns, r.free_ns);
    }
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        if (pthread_create(&threads[i], NULL, in_thread, &results[i]) != 0)
            return 1;
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf("4 threads at once, batches of 61: plan and route %.0f ns a request, poll %.0f ns\n",
           results[0].plan_ns, results[0].poll_ns);
    tp_transport_stop();
    fake_end(&store);
    (void)rmdir(config->engine.socket_dir);
    free(config);
    return 0;
}
