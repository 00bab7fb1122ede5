/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: threads with streams of their own do not disturb each other, and no byte is lost. A plain
 * program, so that it also runs under the thread sanitizer, which Criterion's processes do not.
 */
#include "../fakecuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS 6
#define ROUNDS 40
#define BYTES 100000

static int failures[THREADS];

/* One round trip host, device, device, host; the number of wrong results. */
static int round_trip(CUstream stream, CUevent event, unsigned char *out, unsigned char *in) {
    CUdeviceptr to[1], from[1], a = 0, b = 0;
    size_t sizes[1] = {BYTES}, indexes[1] = {0};
    CUmemcpyAttributes attrs[1] = {{.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM}};
    int bad = 0;

    bad += cuMemAlloc_v2(&a, BYTES) || cuMemAlloc_v2(&b, BYTES);
    bad += cuMemcpyHtoDAsync_v2(a, out, BYTES, stream) != 0;
    to[0] = b;
    from[0] = a;
    bad += cuMemcpyBatchAsync_v2(to, from, sizes, 1, attrs, indexes, 1, stream) != 0;
    bad += cuMemcpyDtoHAsync_v2(in, b, BYTES, stream) != 0;
    bad += cuEventRecord(event, stream) || cuEventSynchronize(event);
    bad += memcmp(in, out, BYTES) != 0;
    return bad + (cuMemFree_v2(a) || cuMemFree_v2(b));
}

static void *work(void *arg) {
    unsigned char *out = malloc(BYTES), *in = malloc(BYTES);
    size_t me = (size_t)(uintptr_t)arg;
    CUcontext context;
    CUstream stream;
    CUevent event;

    if (!out || !in || cuDevicePrimaryCtxRetain(&context, (int)(me % 2)) ||
        cuCtxPushCurrent_v2(context) || cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) ||
        cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)) {
        failures[me] = 1;
        goto out;
    }
    for (int i = 0; i < ROUNDS; i++) {
        memset(out, (int)me * ROUNDS + i, BYTES);
        failures[me] += round_trip(stream, event, out, in);
    }
    failures[me] += cuEventDestroy_v2(event) || cuStreamDestroy_v2(stream) ||
                    cuDevicePrimaryCtxRelease_v2((int)(me % 2));
out:
    free(out);
    free(in);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    int bad = 0;

    if (cuInit(0))
        return 1;
    for (size_t i = 0; i < THREADS; i++)
        bad += pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) != 0;
    for (size_t i = 0; i < THREADS && !bad; i++) {
        pthread_join(threads[i], NULL);
        bad += failures[i];
    }
    if (bad || fakecuda_violations())
        fprintf(stderr, "stress: %d failure(s), last violation \"%s\"\n", bad,
                fakecuda_last_violation());
    return bad || fakecuda_violations() || fakecuda_contexts();
}
