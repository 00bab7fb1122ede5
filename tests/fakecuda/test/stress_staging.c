/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: threads whose copies are staged at once, both ways and on two GPUs, in blocks that share
 * slots, each get their own bytes; also while the library's threads end and start again. A plain
 * program, so that it also runs under the thread sanitizer.
 */
#include "chunks_rig.h"

#define THREADS 4
#define ROUNDS 12
#define OWN (6 * MIB)
#define BLOCK 40000
#define BLOCKS (OWN / BLOCK)

static struct mapped *shared;
static _Atomic unsigned running;

/* The blocks of this thread, the other way round in the GPU's memory. */
static void move(struct tp_device_job *job, size_t me, bool to_device, CUdeviceptr gpu) {
    struct tp_chunk_cursor cursor = {0};
    uint8_t group = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        struct tp_chunk_copy copy = {.device = (int)(me % 2),
                                     .to_device = to_device,
                                     .there = shared->address + me * OWN + i * BLOCK,
                                     .here = (char *)(uintptr_t)(gpu + (BLOCKS - 1 - i) * BLOCK),
                                     .bytes = BLOCK,
                                     .run_bytes = BLOCK};
        must(tp_chunks_add(job, shared->chunks, &cursor, &copy, &group) == 0, "add");
    }
    tp_device_start(job);
    must(finish(job) == TP_DEVICE_DONE, "the end");
    tp_device_reset(job);
}

static void *work(void *arg) {
    size_t me = (size_t)(uintptr_t)arg;
    struct tp_device_job job = {0};
    unsigned char *sent = malloc(OWN);
    unsigned char *got = malloc(OWN);
    uint64_t seed = me + 1;
    (void)use_device((int)(me % 2));
    CUdeviceptr gpu = device_memory(2 * OWN);
    for (int i = 0; i < ROUNDS; i++) {
        fill_random(sent, BLOCKS * BLOCK, &seed);
        must(DRIVER(fakecuda_poke)(gpu, sent, BLOCKS * BLOCK) == 0, "poke");
        move(&job, me, false, gpu);
        move(&job, me, true, gpu + OWN);
        must(DRIVER(fakecuda_peek)(got, gpu + OWN, BLOCKS * BLOCK) == 0, "peek");
        must(memcmp(sent, got, BLOCKS * BLOCK) == 0, "these bytes");
    }
    tp_device_release(&job);
    free(sent);
    free(got);
    atomic_fetch_sub(&running, 1);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    load_driver("\"register_peer_memory\": true, \"kernel_max_bytes\": 70000");
    for (int device = 0; device < 2; device++) {
        (void)use_device(device);
        must(wait_gpu(device, 5000), "ready");
    }
    must(DRIVER(fakecuda_set_failures)("cuMemHostRegister:*=2") == 0, "no registration");
    shared = map_segment(THREADS * OWN, 10 * MIB, 4096);
    atomic_store(&running, THREADS);
    for (size_t i = 0; i < THREADS; i++)
        must(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0, "thread");
    while (atomic_load(&running) > 0) {
        usleep(20000);
        tp_stage_stop();
    }
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    tp_registrar_stop();
    must(!unmap_segment(shared), "nothing is kept");
    tp_stage_stop();
    must(counted(TP_STAGED_BYTES) == (uint64_t)THREADS * ROUNDS * 2 * BLOCKS * BLOCK, "all staged");
    must(DRIVER(fakecuda_violations)() == 0, DRIVER(fakecuda_last_violation)());
    puts("ok");
    return 0;
}
