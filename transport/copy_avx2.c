/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming copies with 32-byte registers: see copy_stream.h. */
#include "transport/copy_stream.h"

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* One cache line, so that its write-combining buffer fills at once. */
__attribute__((target("avx2"), always_inline)) static inline void line(char *to, const char *from) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)from);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
    _mm256_stream_si256((__m256i *)(void *)to, low);
    _mm256_stream_si256((__m256i *)(void *)(to + 32), high);
}

/* 4 * step bytes; `to` is aligned to 64, step is a multiple of 64. */
__attribute__((target("avx2"))) static void four_streams(char *to, const char *from, size_t step) {
    for (size_t at = 0; at < step; at += 64) {
        line(to + at, from + at);
        line(to + step + at, from + step + at);
        line(to + 2 * step + at, from + 2 * step + at);
        line(to + 3 * step + at, from + 3 * step + at);
    }
}

__attribute__((target("avx2"))) void tp_stream_avx2(void *to, const void *from, size_t bytes) {
    char *t = to;
    const char *f = from;
    size_t head = -(uintptr_t)t & 63;
    if (head > bytes)
        head = bytes;
    memcpy(t, f, head);
    t += head;
    f += head;
    bytes -= head;
    while (bytes >= (size_t)4 * 64) {
        size_t step = bytes / 4 & ~(size_t)63;
        if (step > TP_STREAM_STEP)
            step = TP_STREAM_STEP;
        four_streams(t, f, step);
        t += 4 * step;
        f += 4 * step;
        bytes -= 4 * step;
    }
    memcpy(t, f, bytes);
}
