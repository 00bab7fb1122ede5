/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: the parts of a call run under the CUDA context of its caller, on whichever thread, and
 * leave none behind on the library's threads; where the caller has none, none is made. */
#include "device_rig.h"
#include "shim/parts.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdatomic.h>

#define KEYS 256

/* ---- what parts.c and catch.c ask of modules.c */

void *tp_module_symbol(const struct tp_module *module, const char *name) {
    (void)module;
    return dlsym(RTLD_DEFAULT, name);
}

bool tp_symbol_foreign(const void *symbol) {
    return symbol != NULL;
}

static struct tp_module module;

/* The C++ runtime, as a wheel's module brings it. */
static void load_runtime(void) {
    void *runtime = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_GLOBAL);

    cr_assert_not_null(runtime);
    void *symbols[] = {dlsym(runtime, "_Znwm"), dlsym(runtime, "_ZdlPv")};
    memcpy(&module.operator_new, &symbols[0], sizeof(symbols[0]));
    memcpy(&module.operator_delete, &symbols[1], sizeof(symbols[1]));
}

/* ---- a call that notes the context of each of its parts */

struct seen {
    pthread_t caller;
    atomic_int here, elsewhere; /* parts on either side */
    CUcontext expected;
    atomic_int wrong;
};

static void look(void *context, size_t first, size_t count, struct cxx_vector *ret) {
    struct seen *seen = context;
    CUcontext current = NULL;
    bool here = pthread_equal(pthread_self(), seen->caller);

    (void)first;
    atomic_fetch_add(here ? &seen->here : &seen->elsewhere, 1);
    /* Until the other side has had a part too. */
    for (int i = 0; i < 5000 && !(here ? seen->elsewhere : seen->here); i++)
        usleep(1000);
    if (DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || current != seen->expected)
        atomic_fetch_add(&seen->wrong, 1);
    char *results = module.operator_new(count);
    *ret = (struct cxx_vector){results, results + count, results + count};
}

static void call_under(CUcontext expected) {
    struct seen seen = {.caller = pthread_self(), .expected = expected};
    struct tp_parts parts = {.run = look,
                             .context = &seen,
                             .module = &module,
                             .keys = KEYS,
                             .result_bytes = 1,
                             .bytes = (uint64_t)1 << 30,
                             .threads = 2};
    struct cxx_vector results = {0};
    uint64_t before = counted(TP_CALLS_DIVIDED);

    tp_parts_run(&parts, &results);
    cr_assert_eq(results.end - results.begin, KEYS);
    module.operator_delete(results.begin);
    cr_assert_eq(counted(TP_CALLS_DIVIDED), before + 1);
    cr_assert_gt(seen.elsewhere, 0);
    cr_assert_eq(seen.wrong, 0);
}

Test(call_parts, context_of_the_caller, .timeout = 60) {
    CUcontext popped = NULL;

    load_driver("");
    load_runtime();
    CUcontext second = use_device(1);
    call_under(second);
    cr_assert_eq(DRIVER(fakecuda_contexts)(), 1);
    /* The same two threads, without: nothing was left, and nothing is made. */
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    call_under(NULL);
    CUcontext first = use_device(0);
    call_under(first);
    cr_assert_eq(DRIVER(fakecuda_contexts)(), 2);
    cr_assert_eq(DRIVER(fakecuda_violations)(), 0, "%s", DRIVER(fakecuda_last_violation)());
}

Test(call_parts, no_context_is_made, .timeout = 60) {
    load_driver("");
    load_runtime();
    cr_assert_eq(DRIVER(cuInit)(0), CUDA_SUCCESS);
    call_under(NULL);
    cr_assert_eq(DRIVER(fakecuda_contexts)(), 0);
}
