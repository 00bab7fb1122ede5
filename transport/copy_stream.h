/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside transport/: copies in several streams at once, one file an instruction set. tp_stream_*
 * have streaming (non-temporal) stores, which leave the caches alone and need not read the lines
 * they overwrite; tp_keep_* have ordinary ones, which leave what was written in the cache.
 *
 * It must not know: when they are worth it (copy_bytes.c), jobs, threads.
 *
 * Four streams, TP_STREAM_STEP bytes apart, are copied in turn: one page's reads then do not wait
 * for the one before, which a single stream does at each 4 KiB border, where hardware prefetchers
 * stop (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Hardware Prefetching").
 *
 * Streaming stores are weakly ordered: tp_copy_fence comes before the flag that another thread
 * waits for. Any alignment, any length. The caller has checked that the CPU has the instructions.
 */
#ifndef TIDEPOOL_COPY_STREAM_H
#define TIDEPOOL_COPY_STREAM_H

#include <stddef.h>

#define TP_STREAM_STEP ((size_t)16384)

void tp_stream_avx2(void *to, const void *from, size_t bytes);
void tp_stream_avx512(void *to, const void *from, size_t bytes);
void tp_keep_avx2(void *to, const void *from, size_t bytes);
void tp_keep_avx512(void *to, const void *from, size_t bytes);

#endif
