/* SPDX-License-Identifier: Apache-2.0 */
/* Copies in streams with 64-byte registers: see copy_stream.h. */
#include "transport/copy_stream.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

__attribute__((target("avx512f"), always_inline)) static inline void put(char *to, __m512i line,
                                                                         bool keep) {
    if (keep)
        _mm512_store_si512((void *)to, line);
    else
        _mm512_stream_si512((void *)to, line);
}

/* 4 * step bytes; `to` is aligned to 64, step is a multiple of 64. */
__attribute__((target("avx512f"), always_inline)) static inline void
four_streams(char *to, const char *from, size_t step, bool keep) {
    for (size_t at = 0; at < step; at += 64) {
        __m512i a = _mm512_loadu_si512(from + at);
        __m512i b = _mm512_loadu_si512(from + step + at);
        __m512i c = _mm512_loadu_si512(from + 2 * step + at);
        __m512i d = _mm512_loadu_si512(from + 3 * step + at);
        put(to + at, a, keep);
        put(to + step + at, b, keep);
        put(to + 2 * step + at, c, keep);
        put(to + 3 * step + at, d, keep);
    }
}

__attribute__((target("avx512f"), always_inline)) static inline void
copy(char *to, const char *from, size_t bytes, bool keep) {
    size_t head = -(uintptr_t)to & 63;
    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    while (bytes >= (size_t)4 * 64) {
        size_t step = bytes / 4 & ~(size_t)63;
        if (step > TP_STREAM_STEP)
            step = TP_STREAM_STEP;
        four_streams(to, from, step, keep);
        to += 4 * step;
        from += 4 * step;
        bytes -= 4 * step;
    }
    memcpy(to, from, bytes);
}

__attribute__((target("avx512f"))) void tp_stream_avx512(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes, false);
}

__attribute__((target("avx512f"))) void tp_keep_avx512(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes, true);
}
