/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The objects of this process that call our hooks (store.so, _store.*.so, engine.so, a C++ program
 * or library), what each of them is, and the original function in each. Every wheel module holds
 * its own copy of the transfer engine, so "the original" is a property of the caller.
 */
#ifndef TIDEPOOL_MODULES_H
#define TIDEPOOL_MODULES_H

#include "shim/hooks.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define TP_MODULES 16

/* All but the atomics is written before the module can be seen, and never changes. Modules are
 * never unloaded: we hold them. */
struct tp_module {
    uintptr_t low, high; /* its loaded segments lie in [low, high) */
    void *handle;        /* dlopen(RTLD_NOLOAD); NULL for one that cannot be opened by name */
    bool store;          /* allocates segments: it exports Client::MountSegment or an allocator */
    bool tent;           /* a TENT build, with TENT switched on: TransferEngine is the border, not
                            MultiTransport */
    bool layout_refused; /* an element size that we do not know: nothing of this module is taken */
    _Atomic size_t element_bytes; /* sizeof(TransferRequest), 0 while unknown */
    _Atomic(void *) next[TP_HOOK_COUNT];
    void *(*operator_new)(size_t);
    void (*operator_delete)(void *);
    char path[256];
};

/*
 * The module that holds `return_address`, found on first sight and remembered (later lookups are a
 * scan of at most TP_MODULES ranges). Addresses in libstdc++ and other bystanders (thread entries
 * that tail-call) give the module seen last. NULL when there is none. Any thread; takes no lock
 * while it calls into the dynamic linker.
 */
struct tp_module *tp_module_of(const void *return_address);

/*
 * The original of `hook` for callers in `module` (NULL is allowed): its own definition, else the
 * next one in link order after this library (C++ programs that link a shared libtransfer_engine),
 * else that of the module seen last. NULL when there is none. Cached.
 */
void *tp_next(enum tp_hook hook, struct tp_module *module);

/* Is `symbol` in an object other than this library? (dlsym on the main program finds our own
 * first.) False for NULL. */
bool tp_symbol_foreign(const void *symbol);

/* Does `hook` have an original for callers in `module`? Says nothing when not. Cached when it does.
 */
bool tp_has(enum tp_hook hook, struct tp_module *module);

/* A symbol for callers in `module`, defined outside this library: its own, else the next in link
 * order. NULL when there is none. */
void *tp_module_symbol(const struct tp_module *module, const char *name);

/* Is the code at `caller`, in a store's module, Mooncake's way to mount a segment
 * (Client::MountSegment), or that to make its local hot cache (Client::InitLocalHotCache)? By the
 * exported name before it: for what is said, not for what is done. */
bool tp_registers_segment(const void *caller);
bool tp_registers_hot_cache(const void *caller);

/* Is this a size of TransferRequest that we know? (48 up to 0.3.12, 56 in 0.3.13, 72 in 0.3.14:
 * UPSTREAM.md) */
bool tp_element_known(size_t bytes);

#endif
