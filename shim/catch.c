/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A `catch (...)` for C: a frame whose personality routine says that every exception is handled
 * here, at the one landing pad that it has. See catch.h, also for what it must not know.
 *
 * The compiler's own means would make this library need libgcc_s, which C programs do not load, or
 * libstdc++. Sources: Itanium C++ ABI, Exception Handling 1.2 (_Unwind_Exception), 1.3 (raising,
 * forced unwinding), 1.6 (personality routine), 2.2.2 (__cxa_eh_globals), 2.5.3
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
        "jmp 1f\n"
        "tp_catch_landing:\n"
        "endbr64\n"
        "1: pop %rbp\n"
        ".cfi_def_cfa %rsp, 8\n"
        "ret\n"
        ".cfi_endproc\n"
        ".size tp_catch_frame, .-tp_catch_frame\n"
        ".popsection\n");

/* How many exceptions of a thread are under way (std::uncaught_exceptions). */
struct cxa_globals {
    void *caught;
    unsigned uncaught;
};

static struct {
    pthread_mutex_t lock;
    atomic_bool ready;
    void (*set_register)(struct _Unwind_Context *, int, _Unwind_Word);
    void (*set_ip)(struct _Unwind_Context *, _Unwind_Ptr);
    _Unwind_Reason_Code (*raise)(struct _Unwind_Exception *);
    void (*resume)(struct _Unwind_Exception *);
    void *(*begin)(void *);
    void (*end)(void);
    struct cxa_globals *(*globals)(void);
    void (*terminate)(void);
} runtime = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The function that the module's own calls reach: one that the program or a preload defines (a
 * sanitizer, another unwinder) comes before the libraries that the module brings. */
static bool find(const struct tp_module *module, const char *name, void *ret_function) {
    void *symbol = dlsym(RTLD_DEFAULT, name);

    if (!tp_symbol_foreign(symbol))
        symbol = tp_module_symbol(module, name);
    if (!symbol)
        return false;
    memcpy(ret_function, &symbol, sizeof(symbol));
    return true;
}

static bool find_all(const struct tp_module *module) {
    return find(module, "_Unwind_SetGR", (void *)&runtime.set_register) &&
           find(module, "_Unwind_SetIP", (void *)&runtime.set_ip) &&
           find(module, "_Unwind_RaiseException", (void *)&runtime.raise) &&
           find(module, "_Unwind_Resume", (void *)&runtime.resume) &&
           find(module, "__cxa_begin_catch", (void *)&runtime.begin) &&
           find(module, "__cxa_end_catch", (void *)&runtime.end) &&
           find(module, "__cxa_get_globals", (void *)&runtime.globals) &&
           find(module, "_ZSt9terminatev", (void *)&runtime.terminate);
}

bool tp_catch_ready(const struct tp_module *module) {
    if (atomic_load_explicit(&runtime.ready, memory_order_acquire))
        return true;
    pthread_mutex_lock(&runtime.lock);
    bool ready = atomic_load(&runtime.ready) || find_all(module);
    atomic_store_explicit(&runtime.ready, ready, memory_order_release);
    pthread_mutex_unlock(&runtime.lock);
    return ready;
}

/* Called by the unwinder, through the frame's entry in .eh_frame alone. The end of a thread
 * (forced unwinding) knows no search: it stops here as at a cleanup, and is to be resumed. */
__attribute__((visibility("hidden"), used)) _Unwind_Reason_Code
tp_catch_personality(int version, _Unwind_Action actions, _Unwind_Exception_Class class,
                     struct _Unwind_Exception *exception, struct _Unwind_Context *context) {
    (void)class;
    if (version != 1 || !atomic_load(&runtime.ready))
        return _URC_CONTINUE_UNWIND;
    if (actions & _UA_SEARCH_PHASE)
        return _URC_HANDLER_FOUND;
    runtime.set_register(context, RAX, (_Unwind_Word)exception);
    runtime.set_ip(context, (_Unwind_Ptr)tp_catch_landing);
    return _URC_INSTALL_CONTEXT;
}

/* The lower half of the class names the language: "C++", and a byte that tells two kinds apart.
 * Only these are counted. */
static bool counted(const struct _Unwind_Exception *exception) {
    return ((exception->exception_class >> 8) & 0xffffff) == 0x432b2b;
}

bool tp_catch_is_end(const void *thrown) {
    const struct _Unwind_Exception *exception = thrown;

    return exception->private_1 != 0; /* forced unwinding keeps its stop function there */
}

void *tp_catch(void (*run)(void *arg), void *arg) {
    struct _Unwind_Exception *exception = tp_catch_frame(run, arg);

    if (exception && !tp_catch_is_end(exception) && counted(exception))
        runtime.globals()->uncaught--;
    return exception;
}

void tp_catch_drop(void *exception) {
    if (counted(exception))
        runtime.globals()->uncaught++;
    runtime.begin(exception);
    runtime.end();
}

void tp_throw(void *thrown) {
    if (tp_catch_is_end(thrown)) {
        runtime.resume(thrown);
    } else {
        if (counted(thrown))
            runtime.globals()->uncaught++;
        runtime.raise(thrown);
        runtime.begin(thrown); /* nobody catches it: what `throw` does then */
    }
    runtime.terminate();
    __builtin_unreachable();
}
