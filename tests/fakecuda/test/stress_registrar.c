/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: threads whose copies share chunks, far beyond the limit, each get their own bytes, while
 * chunks come and go under them; and segments go while the registrar is busy with them. A plain
 * program, so that it also runs under the thread sanitizer.
 */
#include "chunks_rig.h"

#define THREADS 4
#define ROUNDS 40
#define BYTES (24 * MIB)
#define LIMIT (8 * MIB)
#define STRIPE ((size_t)64 << 10)

static struct mapped *shared;

#define REGION (8 * MIB) /* where all of them work for some rounds, so that chunks come and go */

/* Each thread has every THREADS-th stripe to itself, so that all of them meet in all chunks. */
static void *work(void *arg) {
    size_t me = (size_t)(uintptr_t)arg;
    uint64_t seed = me + 1;
    unsigned char *sent = malloc(STRIPE);
    unsigned char *got = malloc(STRIPE);
    CUdeviceptr gpu = 0;
    (void)use_device(0);
    gpu = device_memory(BYTES);
    for (int i = 0; i < ROUNDS; i++) {
        size_t region = (size_t)i / 10 % (BYTES / REGION) * REGION;
        size_t stripe =
            region / STRIPE + rig_random(&seed) % (REGION / STRIPE / THREADS) * THREADS + me;
        fill_random(sent, STRIPE, &seed);
        must(DRIVER(fakecuda_poke)(gpu, sent, STRIPE) == 0, "poke");
        must(copy_chunks(shared, false, stripe * STRIPE, gpu, STRIPE), "put");
        must(copy_chunks(shared, true, stripe * STRIPE, gpu + STRIPE, STRIPE), "get");
        must(DRIVER(fakecuda_peek)(got, gpu + STRIPE, STRIPE) == 0, "peek");
        must(memcmp(sent, got, STRIPE) == 0, "these bytes");
        /* Reads of much at once, where nobody writes: whole chunks are registered in the thread. */
        size_t at = BYTES + region + rig_random(&seed) % (REGION - 6 * MIB);
        must(copy_chunks(shared, true, at, gpu, 6 * MIB), "a long get");
        must(counted(TP_REGISTERED_BYTES) + counted(TP_STAGING_BYTES) <= LIMIT,
             "the limit is kept");
    }
    free(sent);
    free(got);
    return NULL;
}

/* A segment whose end comes while its chunks are wanted. */
static void *come_and_go(void *arg) {
    (void)use_device(0);
    CUdeviceptr gpu = device_memory(4 * MIB);
    for (int i = 0; i < ROUNDS; i++) {
        struct mapped *own = map_segment(BYTES, 8 * MIB, 4096);
        for (uint64_t chunk = 0; chunk < 6; chunk++)
            must(copy_chunks(own, true, chunk * 4 * MIB, gpu, 4096), "get");
        must(!unmap_segment(own), "nothing is kept");
    }
    return arg;
}

int main(void) {
    pthread_t threads[THREADS + 1];
    load_driver("\"register_peer_memory\": true, \"register_max_bytes\": \"8M\", "
                "\"register_ahead_chunks\": 1, \"kernel_max_bytes\": 70000");
    (void)use_device(0);
    must(wait_gpu(0, 5000), "ready");
    tp_registrar_set_idle_ms(1);
    shared = map_segment(2 * BYTES, 12 * MIB, 4096);
    for (size_t i = 0; i < THREADS; i++)
        must(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0, "thread");
    must(pthread_create(&threads[THREADS], NULL, come_and_go, NULL) == 0, "thread");
    for (size_t i = 0; i <= THREADS; i++)
        pthread_join(threads[i], NULL);
    must(!unmap_segment(shared), "nothing is kept");
    tp_registrar_stop();
    must(counted(TP_REGISTERED_BYTES) == 0, "all is given back");
    must(counted(TP_REGISTER_EVICTIONS) > 0, "there were more than the limit");
    must(counted(TP_STAGED_BYTES) > 0, "and what had no room went by slots");
    must(counted(TP_REGISTER_FAILURES) == 0, "no failure");
    must(DRIVER(fakecuda_violations)() == 0, DRIVER(fakecuda_last_violation)());
    puts("ok");
    return 0;
}
