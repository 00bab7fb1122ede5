/* SPDX-License-Identifier: Apache-2.0 */
/* The double of the driver, as these tests look at it: found by dlopen, as the library finds it. */
#ifndef TIDEPOOL_TEST_DOUBLE_H
#define TIDEPOOL_TEST_DOUBLE_H

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static inline void *double_symbol(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    cr_assert_not_null(library, "%s", dlerror());
    void *symbol = dlsym(library, name);
    cr_assert_not_null(symbol, "%s is not of the double: LD_LIBRARY_PATH?", name);
    return symbol;
}

#define DOUBLE(result, name, parameters) ((result(*) parameters)double_symbol(name))

/* Rules of FAKECUDA_FAIL; counted from here. */
static inline void double_fail(const char *rules) {
    cr_assert_eq(DOUBLE(int, "fakecuda_set_failures", (const char *))(rules), 0, "%s", rules);
}

/* No rule of CUDA was broken, and no context was made. */
static inline void double_proper(int contexts) {
    cr_assert_eq(DOUBLE(unsigned long, "fakecuda_violations", (void))(), 0, "%s",
                 DOUBLE(const char *, "fakecuda_last_violation", (void))());
    cr_assert_eq(DOUBLE(int, "fakecuda_contexts", (void))(), contexts);
}

/* How often the double's memory of this kind of place is mapped here. */
static inline unsigned double_mappings(void) {
    char line[512];
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    cr_assert_not_null(maps);
    while (fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "fakecuda-host") != NULL;
    (void)fclose(maps);
    return count;
}

#endif
