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
#define PLAIN_PART_BYTES ((size_t)16384)

typedef void (*copy_fn)(void *to, const void *from, size_t bytes);

struct copies {
    copy_fn stream, keep;
};

static void plain(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

/* In parts, since memcpy streams what is large. */
static void plain_parts(void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PLAIN_PART_BYTES) {
        size_t part = bytes - at < PLAIN_PART_BYTES ? bytes - at : PLAIN_PART_BYTES;
        memcpy((char *)to + at, (const char *)from + at, part);
    }
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

static const struct copies *choose(void) {
    static const struct copies none = {plain, plain_parts};
    static const struct copies avx2 = {tp_stream_avx2, tp_keep_avx2};
    static const struct copies avx512 = {tp_stream_avx512, tp_keep_avx512};
    enum { AVX_STATES = 0x6, AVX512_STATES = 0xe6 }; /* XMM, YMM; and opmask, ZMM */
    unsigned a, b, c, d, states = saved_states();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return &none;
    /* VBMI2 stands for Ice Lake and Zen 4 or newer: Skylake servers lower their clock for 64-byte
     * registers (Intel's Optimization Reference Manual, "Skylake Server Power Management"). */
    if ((states & AVX512_STATES) == AVX512_STATES && (b & bit_AVX512F) && (c & bit_AVX512VBMI2))
        return &avx512;
    if ((states & AVX_STATES) == AVX_STATES && (b & bit_AVX2))
        return &avx2;
    return &none;
}

static const struct copies *copies(void) {
    static _Atomic(const struct copies *) chosen;
    const struct copies *known = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!known) {
        known = choose();
        atomic_store_explicit(&chosen, known, memory_order_relaxed);
    }
    return known;
}

void tp_copy_bytes(void *to, const void *from, size_t bytes) {
    if (bytes < STREAM_MIN_BYTES)
        memcpy(to, from, bytes);
    else
        copies()->stream(to, from, bytes);
}

void tp_copy_bytes_kept(void *to, const void *from, size_t bytes) {
    if (bytes < STREAM_MIN_BYTES)
        memcpy(to, from, bytes);
    else
        copies()->keep(to, from, bytes);
}

void tp_copy_fence(void) {
    _mm_sfence();
}
