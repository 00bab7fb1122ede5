/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming copies with 64-byte registers: see copy_stream.h. */
#include "transport/copy_stream.h"

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* 4 * step bytes; `to` is aligned to 64, step is a multiple of 64. */
__attribute__((target("avx512f"))) static void four_streams(char *to, const char *from,
                                                            size_t step) {
    for (size_t at = 0; at < step; at += 64) {
        __m512i a = _mm512_loadu_si512(from + at);
        __m512i b = _mm512_loadu_si512(from + step + at);
        __m512i c = _mm512_loadu_si512(from + 2 * step + at);
        __m512i d = _mm512_loadu_si512(from + 3 * step + at);
        _mm512_stream_si512((void *)(to + at), a);
        _mm512_stream_si512((void *)(to + step + at), b);
        _mm512_stream_si512((void *)(to + 2 * step + at), c);
        _mm512_stream_si512((void *)(to + 3 * step + at), d);
    }
}

__attribute__((target("avx512f"))) void tp_stream_avx512(void *to, const void *from, size_t bytes) {
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
