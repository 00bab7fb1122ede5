/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The original function behind a hook. RTLD_NEXT alone does not see python modules (they are loaded
 * RTLD_LOCAL), and one process may hold several originals, so the caller's own module comes first.
 */
#include "env/env.h"
#include "shim/modules.h"

#include <dlfcn.h>

static const char *const mangled_names[TP_HOOK_COUNT] = {
#define HOOK(identifier, result, parameters, mangled, role, since, why) mangled,
#include "shim/hooks.def"
#undef HOOK
};

bool tp_symbol_foreign(const void *symbol) {
    Dl_info ours;
    Dl_info theirs;

    return symbol && dladdr(mangled_names, &ours) && dladdr(symbol, &theirs) &&
           theirs.dli_fbase != ours.dli_fbase;
}

void *tp_module_symbol(const struct tp_module *module, const char *name) {
    void *symbol = NULL;

    if (module && module->handle) {
        symbol = dlsym(module->handle, name);
    }
    if (!tp_symbol_foreign(symbol)) {
        symbol = dlsym(RTLD_NEXT, name);
    }
    return tp_symbol_foreign(symbol) ? symbol : NULL;
}

static void *cached_next(enum tp_hook hook, struct tp_module *module) {
    void *symbol = module ? atomic_load_explicit(&module->next[hook], memory_order_acquire) : NULL;

    if (symbol) {
        return symbol;
    }
    symbol = tp_module_symbol(module, mangled_names[hook]);
    if (symbol && module) {
        atomic_store_explicit(&module->next[hook], symbol, memory_order_release);
    }
    return symbol;
}

bool tp_has(enum tp_hook hook, struct tp_module *module) {
    return cached_next(hook, module) != NULL;
}

void *tp_next(enum tp_hook hook, struct tp_module *module) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    void *symbol = cached_next(hook, module);

    if (!symbol) {
        tp_log_once(
            &said, TP_LOG_WARN,
            "the original of %s was not found (called from %s); the call is answered with an error",
            mangled_names[hook], module ? module->path : "an unknown module");
    }
    return symbol;
}
