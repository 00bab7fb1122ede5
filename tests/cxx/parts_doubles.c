/* SPDX-License-Identifier: Apache-2.0 */
/* What hooks_batch.c, parts.c and catch.c stand on, for the programs with parts_client.cpp. */
#include "env/cuda.h"
#include "env/env.h"
#include "env/stats.h"
#include "shim/modules.h"
#include "shim/start.h"
#include "transport/transport.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

extern void *originals[];

unsigned double_threads_left, double_threads_started;
unsigned double_lines; /* logged */
size_t double_element_bytes;
bool double_layout_refused;

static _Atomic unsigned long divided;
static _Atomic bool inert;
static struct tp_config config;
static struct tp_module module;

/* `threads`: as TIDEPOOL_CALL_THREADS. */
void set_calls(bool get, bool put, unsigned threads);
void set_calls(bool get, bool put, unsigned threads) {
    void *symbols[] = {dlsym(RTLD_DEFAULT, "_Znwm"), dlsym(RTLD_DEFAULT, "_ZdlPv")};

    memcpy(&module.operator_new, &symbols[0], sizeof(symbols[0]));
    memcpy(&module.operator_delete, &symbols[1], sizeof(symbols[1]));
    config.engine.batched_get = get;
    config.engine.batched_put = put;
    config.engine.call_threads = threads;
}

bool tp_transport_on(void) {
    return true;
}

const struct tp_config *tp_shim_config(void) {
    return tp_inert() ? NULL : &config;
}

struct tp_module *tp_module_of(const void *return_address) {
    (void)return_address;
    atomic_store(&module.element_bytes, double_element_bytes);
    if (module.layout_refused != double_layout_refused) /* callers are at work beside */
        module.layout_refused = double_layout_refused;
    return &module;
}

void *tp_next(enum tp_hook hook, struct tp_module *caller) {
    (void)caller;
    return originals[hook - TP_HOOK_real_get_into];
}

bool tp_symbol_foreign(const void *symbol) {
    return symbol != NULL;
}

void *tp_module_symbol(const struct tp_module *caller, const char *name) {
    (void)caller;
    return dlsym(RTLD_DEFAULT, name);
}

const struct tp_cuda *tp_cuda(bool load, bool *ret_unusable) {
    (void)load;
    (void)ret_unusable;
    return NULL;
}

void tp_log_once(atomic_flag *flag, enum tp_log_level level, const char *format, ...) {
    (void)level;
    (void)format;
    if (!atomic_flag_test_and_set(flag))
        double_lines++;
}

unsigned tp_host_cpus(void) {
    return 64;
}

void tp_count(enum tp_counter counter, uint64_t amount) {
    if (counter == TP_CALLS_DIVIDED)
        atomic_fetch_add(&divided, amount);
}

/* Called under the crew's lock. */
int tp_thread_start_deep(const char *name, size_t stack_bytes, void *(*run)(void *arg), void *arg,
                         pthread_t *ret_thread) {
    (void)name;
    (void)stack_bytes;
    if (double_threads_left == 0)
        return -EAGAIN;
    double_threads_left--;
    double_threads_started++;
    return -pthread_create(ret_thread, NULL, run, arg);
}

unsigned long double_divided(void);
unsigned long double_divided(void) {
    return divided;
}

bool tp_inert(void) {
    return inert;
}

void tp_fork_guard(void) {
    inert = true;
}
