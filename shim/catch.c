/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An empty `catch (...)` for C: a frame whose personality routine says that every exception is
 * handled here, at the one landing pad that it has. See catch.h, also for what it must not know.
 *
 * The compiler's own means would make this library need libgcc_s, which C programs do not load, or
 * libstdc++. Sources: Itanium C++ ABI, Exception Handling 1.6 (personality routine), 2.5.4
 * (__cxa_begin_catch); System V ABI AMD64 3.7 (rax carries the exception to the landing pad).
 */
#include "shim/catch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unwind.h>

#define RAX 0 /* its DWARF register number */

/* run(arg) in a frame of ours; the exception that ended it, or NULL. */
struct _Unwind_Exception *tp_catch_frame(void (*run)(void *arg), void *arg);
extern const char tp_catch_landing[];
_Unwind_Reason_Code tp_catch_personality(int version, _Unwind_Action actions,
                                         _Unwind_Exception_Class class,
                                         struct _Unwind_Exception *exception,
                                         struct _Unwind_Context *context);

/* The encoding 0x1b: a signed 32-bit offset from here. */
__asm__(".pushsection .text\n"
        ".type tp_catch_frame, @function\n"
        ".hidden tp_catch_frame\n"
        ".globl tp_catch_frame\n"
        ".hidden tp_catch_landing\n"
        ".globl tp_catch_landing\n"
        "tp_catch_frame:\n"
        ".cfi_startproc\n"
        ".cfi_personality 0x1b, tp_catch_personality\n"
        "endbr64\n"
        "push %rbp\n"
        ".cfi_def_cfa_offset 16\n"
        ".cfi_offset %rbp, -16\n"
        "mov %rsp, %rbp\n"
        ".cfi_def_cfa_register %rbp\n"
        "mov %rdi, %rax\n"
        "mov %rsi, %rdi\n"
        "call *%rax\n"
        "xor %eax, %eax\n"
        "tp_catch_landing:\n"
        "pop %rbp\n"
        ".cfi_def_cfa %rsp, 8\n"
        "ret\n"
        ".cfi_endproc\n"
        ".size tp_catch_frame, .-tp_catch_frame\n"
        ".popsection\n");

static struct {
    pthread_mutex_t lock;
    atomic_bool ready;
    void (*set_register)(struct _Unwind_Context *, int, uintptr_t);
    void (*set_ip)(struct _Unwind_Context *, uintptr_t);
    void *(*begin)(void *);
    void (*end)(void);
} runtime = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool find(const struct tp_module *module, const char *name, void *ret_function) {
    void *symbol = tp_module_symbol(module, name);

    if (!symbol)
        return false;
    memcpy(ret_function, &symbol, sizeof(symbol));
    return true;
}

bool tp_catch_ready(const struct tp_module *module) {
    if (atomic_load_explicit(&runtime.ready, memory_order_acquire))
        return true;
    pthread_mutex_lock(&runtime.lock);
    bool ready = find(module, "_Unwind_SetGR", (void *)&runtime.set_register) &&
                 find(module, "_Unwind_SetIP", (void *)&runtime.set_ip) &&
                 find(module, "__cxa_begin_catch", (void *)&runtime.begin) &&
                 find(module, "__cxa_end_catch", (void *)&runtime.end);
    atomic_store_explicit(&runtime.ready, ready, memory_order_release);
    pthread_mutex_unlock(&runtime.lock);
    return ready;
}

/* Called by the unwinder, through the frame's entry in .eh_frame alone. */
__attribute__((visibility("hidden"), used)) _Unwind_Reason_Code
tp_catch_personality(int version, _Unwind_Action actions, _Unwind_Exception_Class class,
                     struct _Unwind_Exception *exception, struct _Unwind_Context *context) {
    (void)class;
    /* The end of a thread (pthread_exit, cancellation) passes. */
    if (version != 1 || (actions & _UA_FORCE_UNWIND) || !atomic_load(&runtime.ready))
        return _URC_CONTINUE_UNWIND;
    if (actions & _UA_SEARCH_PHASE)
        return _URC_HANDLER_FOUND;
    runtime.set_register(context, RAX, (uintptr_t)exception);
    runtime.set_ip(context, (uintptr_t)tp_catch_landing);
    return _URC_INSTALL_CONTEXT;
}

bool tp_catch(void (*run)(void *arg), void *arg) {
    struct _Unwind_Exception *exception = tp_catch_frame(run, arg);

    if (!exception)
        return false;
    runtime.begin(exception);
    runtime.end();
    return true;
}
