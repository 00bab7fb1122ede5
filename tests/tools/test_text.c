/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: text from elsewhere is harmless after text_clean, and sizes and ages are short and right
 * at their edges. */
#include "tools/tool.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

Test(text, clean_replaces_all_but_printable_ascii_and_always_terminates) {
    char out[8];

    text_clean(out, sizeof(out),
               "a\033[\n\x7f\xff"
               "b and more");
    cr_assert_str_eq(out, "a?[???b");
    text_clean(out, 1, "abc");
    cr_assert_str_eq(out, "");
    memset(out, 'x', sizeof(out));
    text_clean(out, 0, "abc");
    cr_assert_eq(out[0], 'x');
}

Test(text, bytes_at_the_edges) {
    static const struct {
        uint64_t count;
        const char *expected;
    } cases[] = {
        {0, "0 B"},
        {1023, "1023 B"},
        {1024, "1.0 KiB"},
        {UINT64_C(1) << 20, "1.0 MiB"},
        {UINT64_C(100) << 30, "100 GiB"},
        {UINT64_MAX, "16.0 EiB"},
    };
    char out[16];

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        cr_assert_str_eq(text_bytes(cases[i].count, out), cases[i].expected);
    }
}

Test(text, bytes_never_say_1024_of_a_unit) {
    char out[16];

    cr_assert_str_eq(text_bytes((UINT64_C(1) << 20) - 1, out), "1.0 MiB");
    cr_assert_str_eq(text_bytes((UINT64_C(1) << 40) - 1, out), "1.0 TiB");
}

Test(text, ages_at_the_edges) {
    char out[16];

    cr_assert_str_eq(text_age(0, out), "0s");
    cr_assert_str_eq(text_age(59, out), "59s");
    cr_assert_str_eq(text_age(60, out), "1m00s");
    cr_assert_str_eq(text_age(3600, out), "1h00m");
    cr_assert_str_eq(text_age(86400 + 3600, out), "1d01h");
    cr_assert_str_eq(text_age(UINT64_MAX, out), "?");
}

Test(text, quoted_words_come_back_from_a_shell) {
    static const char *const words[] = {"",    "plain/word",          "it's",
                                        "a b", "$HOME `id` \"x\" \\", "*;&|\n~"};

    for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++) {
        char command[256] = "";
        char back[256] = "";
        FILE *out = fmemopen(command, sizeof(command), "w");
        cr_assert(out);
        (void)fputs("printf %s ", out);
        text_shell_quoted(out, words[i]);
        (void)fclose(out);
        FILE *shell = popen(command, "r");
        cr_assert(shell);
        size_t length = fread(back, 1, sizeof(back) - 1, shell);
        cr_assert_eq(pclose(shell), 0);
        cr_assert_eq(length, strlen(words[i]));
        cr_assert_str_eq(back, words[i]);
    }
}
