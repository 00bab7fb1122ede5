/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of hooks as C: their numbers, their prototypes (each with its mangled name as assembler
 * label, so that a plain C function stands in for the C++ one), and the type of each original.
 */
#ifndef TIDEPOOL_HOOKS_H
#define TIDEPOOL_HOOKS_H

#include "shim/abi.h"

#include <stdbool.h>

enum tp_hook {
#define HOOK(identifier, result, parameters, mangled, role, since, why) TP_HOOK_##identifier,
#include "shim/hooks.def"
#undef HOOK
    TP_HOOK_COUNT
};

#define HOOK(identifier, result, parameters, mangled, role, since, why)                            \
    result tp_hook_##identifier parameters __asm__(mangled)                                        \
        __attribute__((visibility("default")));                                                    \
    typedef result(*tp_real_##identifier) parameters;
#include "shim/hooks.def"
#undef HOOK

#endif
