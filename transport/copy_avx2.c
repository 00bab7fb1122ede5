/* SPDX-License-Identifier: Apache-2.0 */
/* Copies in streams with 32-byte registers: see copy_stream.h. */
#include "transport/copy_stream.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* One cache line, so that its write-combining buffer fills at once. */
__attribute__((target("avx2"), always_inline)) static inline void line(char *to, const char *from,
                                                                       bool keep) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)from);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));
    __m256i *line = (__m256i *)(void *)to;
    if (keep) {
        _mm256_store_si256(line, low);
        _mm256_store_si256(line + 1, high);
    } else {
        _mm256_stream_si256(line, low);
        _mm256_stream_si256(line + 1, high);
    }
}

/* 4 * step bytes; `to` is aligned to 64, step is a multiple of 64. */
__attribute__((target("avx2"), always_inline)) static inline void
four_streams(char *to, const char *from, size_t step, bool keep) {
    for (size_t at = 0; at < step; at += 64) {
        line(to + at, from + at, keep);
        line(to + step + at, from + step + at, keep);
        line(to + 2 * step + at, from + 2 * step + at, keep);
        line(to + 3 * step + at, from + 3 * step + at, keep);
    }
}

__attribute__((target("avx2"), always_inline)) static inline void copy(char *to, const char *from,
                                                                       size_t bytes, bool keep) {
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

__attribute__((target("avx2"))) void tp_stream_avx2(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes, false);
}

__attribute__((target("avx2"))) void tp_keep_avx2(void *to, const void *from, size_t bytes) {
    copy(to, from, bytes, true);
}
