/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of libc that this library defines in their stead (hooks_libc.def), and their
 * originals. */
#ifndef TIDEPOOL_HOOKS_LIBC_H
#define TIDEPOOL_HOOKS_LIBC_H

#include <stdbool.h>
#include <stddef.h>

enum tp_libc_hook {
#define HOOK(identifier, result, parameters, mangled, role, since, why) TP_LIBC_##identifier,
#include "shim/hooks_libc.def"
#undef HOOK
    TP_LIBC_COUNT
};

#define HOOK(identifier, result, parameters, mangled, role, since, why)                            \
    result tp_hook_##identifier parameters __asm__(mangled)                                        \
        __attribute__((visibility("default")));                                                    \
    typedef result(*tp_real_##identifier) parameters;
#include "shim/hooks_libc.def"
#undef HOOK

/*
 * The original: the next in link order, libc's or that of an allocator that is preloaded after this
 * library. NULL while another thread, or this one further out, is looking for it: nobody may wait
 * here. Neither allocates, locks nor logs. Any thread.
 */
void *tp_libc_next(enum tp_libc_hook hook);

/*
 * Does the host's call of free() come here? False when an allocator is preloaded before this
 * library or linked into the program. May allocate.
 */
bool tp_libc_hooks_reached(void);

/* Log which of them it is, and what to do. */
void tp_libc_say_unreached(void);

/*
 * The file of the object that comes before this library and defines `name` (a function of
 * hooks_libc.def) for everybody. NULL: there is none, or it is the program itself.
 */
const char *tp_libc_taken_by(const char *name);

#endif
