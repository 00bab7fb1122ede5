/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: tp_copy_bytes and tp_copy_bytes_kept copy exactly the bytes they were told, for any
 * alignment and length, and touch nothing before or after: both buffers end at, or begin behind, a
 * page that faults. So do each instruction set's own copies that this CPU can run.
 */
#include "transport/copy_host.h"
#include "transport/copy_stream.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define ROOM ((size_t)2 << 20)

/* ROOM readable and writable bytes between two guard pages. */
static unsigned char *guarded(void) {
    unsigned char *p = mmap(NULL, ROOM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(p, MAP_FAILED);
    cr_assert_eq(mprotect(p + PAGE, ROOM, PROT_READ | PROT_WRITE), 0);
    return p + PAGE;
}

static uint32_t next_random(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static unsigned char *from, *to, *expected;

static void (*copy)(void *, const void *, size_t) = tp_copy_bytes;

static void setup(void) {
    uint32_t x = 12345;
    from = guarded();
    to = guarded();
    expected = guarded();
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (unsigned char)next_random(&x);
}

/* `margin` bytes around the destination must stay as they were. */
static void check(size_t to_at, size_t from_at, size_t bytes) {
    size_t margin = 256;
    size_t low = to_at < margin ? 0 : to_at - margin;
    size_t high = to_at + bytes + margin > ROOM ? ROOM : to_at + bytes + margin;
    memset(to + low, 0xa5, high - low);
    memset(expected + low, 0xa5, high - low);
    memcpy(expected + to_at, from + from_at, bytes);
    copy(to + to_at, from + from_at, bytes);
    cr_assert_eq(memcmp(to + low, expected + low, high - low), 0, "to +%zu from +%zu, %zu bytes",
                 to_at, from_at, bytes);
}

static void every_small_length_at_both_guards(void) {
    for (size_t bytes = 0; bytes <= 1100; bytes++) {
        check(0, 0, bytes);
        check(ROOM - bytes, ROOM - bytes, bytes);
        check(0, ROOM - bytes, bytes);
        check(ROOM - bytes, 0, bytes);
    }
}

static void every_alignment_of_both_ends(void) {
    static const size_t lengths[] = {4096, 65536 - 1, 65536 + 77, 262144 + 33};
    for (size_t n = 0; n < sizeof(lengths) / sizeof(lengths[0]); n++) {
        for (size_t to_at = 0; to_at < 64; to_at += n < 2 ? 1 : 7) {
            for (size_t from_at = 0; from_at < 64; from_at += n < 2 ? 5 : 9)
                check(to_at, from_at, lengths[n]);
        }
    }
}

static void random_places_and_lengths_up_to_the_guards(void) {
    uint32_t x = 987654321;
    for (int i = 0; i < 3000; i++) {
        unsigned shift = next_random(&x) % 21;
        size_t bytes = next_random(&x) % (((size_t)1 << shift) + 1);
        bool at_end = next_random(&x) & 1;
        size_t to_at = at_end ? ROOM - bytes : next_random(&x) % (ROOM - bytes);
        size_t from_at = next_random(&x) & 1 ? ROOM - bytes : next_random(&x) % (ROOM - bytes);
        check(to_at, from_at, bytes);
    }
}

static void all_properties(void) {
    setup();
    every_small_length_at_both_guards();
    every_alignment_of_both_ends();
    random_places_and_lengths_up_to_the_guards();
}

Test(copy_bytes, the_copy_of_this_cpu) {
    all_properties();
}

Test(copy_bytes, the_copy_of_this_cpu_that_stays_in_the_cache) {
    copy = tp_copy_bytes_kept;
    all_properties();
}

Test(copy_bytes, with_avx2) {
    if (!__builtin_cpu_supports("avx2"))
        cr_skip_test("this CPU has no AVX2");
    copy = tp_stream_avx2;
    all_properties();
    copy = tp_keep_avx2;
    all_properties();
}

Test(copy_bytes, with_avx512) {
    if (!__builtin_cpu_supports("avx512f"))
        cr_skip_test("this CPU has no AVX-512");
    copy = tp_stream_avx512;
    all_properties();
    copy = tp_keep_avx512;
    all_properties();
}
