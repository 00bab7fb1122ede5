/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: threads that submit to the same GPU, some of them deferring, each get their own bytes. A
 * plain program, so that it also runs under the thread sanitizer.
 */
#include "device_rig.h"

#define THREADS 6
#define ROUNDS 30
#define ROOM ((size_t)100000)

static struct random_copies all[THREADS];

static void *work(void *arg) {
    size_t me = (size_t)(uintptr_t)arg;
    struct random_copies copies = all[me];
    struct tp_device_job job = {0};
    uint64_t seed = me + 1;
    for (int i = 0; i < ROUNDS; i++) {
        copies.to_device = i & 1;
        if (me & 1)
            tp_device_defer_begin();
        must(run_random(&copies, &job, &seed) == TP_DEVICE_DONE, "done");
        if (me & 1)
            tp_device_defer_end();
    }
    tp_device_release(&job);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    load_driver("\"kernel_max_bytes\": 500");
    (void)use_device(0);
    must(wait_gpu(0, 5000), "ready");
    for (size_t i = 0; i < THREADS; i++)
        all[i] = (struct random_copies){.mapped = true,
                                        .gpu = device_memory(ROOM),
                                        .host = pinned_memory(ROOM),
                                        .room = ROOM,
                                        .count = 60,
                                        .largest = 4000};
    for (size_t i = 0; i < THREADS; i++)
        must(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0, "thread");
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    must(DRIVER(fakecuda_violations)() == 0, DRIVER(fakecuda_last_violation)());
    puts("ok");
    return 0;
}
