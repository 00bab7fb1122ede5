/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: engines and their handles are found by key and number, and forgotten when they end. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "rig.h"
#include "transport/engine.h"
#include "transport/names.h"

static int keys[80];

Test(engine, keys_and_aliases) {
    cr_assert_null(tp_engine_find(&keys[0], false));
    cr_assert_null(tp_engine_only());
    struct tp_engine *engine = tp_engine_find(&keys[0], true);
    cr_assert_not_null(engine);
    cr_assert_eq(tp_engine_find(&keys[0], true), engine);
    tp_engine_alias(engine, &keys[1]);
    tp_engine_alias(engine, &keys[1]);
    cr_assert_eq(tp_engine_find(&keys[1], false), engine);
    cr_assert_eq(tp_engine_only(), engine);
    cr_assert_neq(tp_engine_find(&keys[2], true), engine);
    cr_assert_null(tp_engine_only());
    tp_engine_open(engine, 3, "a", 1);
    tp_engine_forget(&keys[0]);
    cr_assert_null(tp_engine_find(&keys[0], false));
    cr_assert_eq(tp_engine_find(&keys[1], false), engine,
                 "a moved engine lives on under its other key");
    cr_assert_not_null(tp_engine_name(engine, 3));
    tp_engine_forget(&keys[1]);
    cr_assert_null(tp_engine_find(&keys[1], false));
    struct tp_engine *next = tp_engine_find(&keys[0], true);
    cr_assert_null(tp_engine_name(next, 3), "handles do not outlive their engine");
}

Test(engine, the_sixty_fifth_is_refused) {
    for (int i = 0; i < 64; i++)
        cr_assert_not_null(tp_engine_find(&keys[i], true));
    cr_assert_null(tp_engine_find(&keys[64], true));
    tp_engine_forget(&keys[10]);
    cr_assert_not_null(tp_engine_find(&keys[64], true));
}

Test(engine, handles_follow_the_last_name) {
    struct tp_engine *engine = tp_engine_find(&keys[0], true);
    for (uint64_t i = 0; i < 1000; i++) {
        char name[32];
        int bytes = snprintf(name, sizeof(name), "host:%d", (int)i);
        tp_engine_open(engine, i, name, (size_t)bytes);
    }
    cr_assert_str_eq(tp_engine_name(engine, 999)->text, "host:999");
    cr_assert_null(tp_engine_name(engine, 1000));
    tp_engine_open(engine, 5, "//other", 7);
    cr_assert_str_eq(tp_engine_name(engine, 5)->text, "other", "leading slashes do not count");
    tp_engine_open(engine, 5, "", 0);
    cr_assert_null(tp_engine_name(engine, 5), "no old name under a new one that cannot be kept");
    tp_engine_close(engine, 6);
    cr_assert_null(tp_engine_name(engine, 6));
}

Test(engine, names) {
    char text[300];
    memset(text, 'n', sizeof(text));
    cr_assert_null(tp_name_intern(text, 256));
    cr_assert_not_null(tp_name_intern(text, 255));
    cr_assert_eq(tp_name_intern("/x", 2), tp_name_intern("x", 1));
    cr_assert_neq(tp_name_intern("y", 1), tp_name_intern("x", 1));
    cr_assert_null(tp_name_intern("///", 3));
}
