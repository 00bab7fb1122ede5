/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One contiguous copy, with the instructions that are fastest for its size on this CPU.
 *
 * It must not know: jobs, threads, what the memory is.
 */
#include "transport/copy_host.h"
#include "transport/copy_stream.h"

#include <cpuid.h>
#include <stdatomic.h>
#include <string.h>
#include <xmmintrin.h>

/* Below this memcpy wins or ties, hot and cold. */
#define STREAM_MIN_BYTES ((size_t)1024)

typedef void (*copy_fn)(void *to, const void *from, size_t bytes);

static void plain(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

/* The register states that the kernel saves for us (XCR0): having the instructions is not enough.
 */
static unsigned saved_states(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static copy_fn choose(void) {
    enum { AVX_STATES = 0x6, AVX512_STATES = 0xe6 }; /* XMM, YMM; and opmask, ZMM */
    unsigned a, b, c, d, states = saved_states();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return plain;
    /* VBMI2 stands for Ice Lake and Zen 4 or newer: Skylake servers lower their clock for 64-byte
     * registers (Intel's Optimization Reference Manual, "Skylake Server Power Management"). */
    if ((states & AVX512_STATES) == AVX512_STATES && (b & bit_AVX512F) && (c & bit_AVX512VBMI2))
        return tp_stream_avx512;
    if ((states & AVX_STATES) == AVX_STATES && (b & bit_AVX2))
        return tp_stream_avx2;
    return plain;
}

void tp_copy_bytes(void *to, const void *from, size_t bytes) {
    static _Atomic(copy_fn) chosen;
    if (bytes < STREAM_MIN_BYTES) {
        memcpy(to, from, bytes);
        return;
    }
    copy_fn copy = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!copy) {
        copy = choose();
        atomic_store_explicit(&chosen, copy, memory_order_relaxed);
    }
    copy(to, from, bytes);
}

void tp_copy_fence(void) {
    _mm_sfence();
}
