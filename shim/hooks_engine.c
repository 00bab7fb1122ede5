/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks that tell which object is which: engines come and go, handles get names, memory is
 * registered. And where the halves start. It must not know how transfers are decided.
 */
#include "env/env.h"
#include "env/stats.h"
#include "segment/segment.h"
#include "shim/endpoints.h"
#include "shim/hooks.h"
#include "shim/modules.h"
#include "shim/overlays.h"
#include "shim/start.h"
#include "transport/transport.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define CALLER() __builtin_return_address(0)

/* std::string TransferEngine::getLocalIpAndPort() */
#define LOCAL_NAME "_ZN8mooncake14TransferEngine17getLocalIpAndPortB5cxx11Ev"

/* The engine whose init runs in this thread: a MultiTransport made meanwhile is its own. */
static _Thread_local struct tp_engine *starting_engine;
static _Thread_local void *starting_object;

/* 0.3.8 exports no destructor of TransferEngine: it is inlined into its callers. There the end of
 * its MultiTransport, which it alone holds, is its end; which belongs to which is kept here. */
#define PAIRS 64
static struct { void *transport, *engine; } pairs[PAIRS];
static pthread_mutex_t pairs_lock = PTHREAD_MUTEX_INITIALIZER;

static void pair(void *transport, void *engine) {
    pthread_mutex_lock(&pairs_lock);
    for (size_t i = 0; i < PAIRS; i++) {
        if (!pairs[i].transport) {
            pairs[i].transport = transport;
            pairs[i].engine = engine;
            break;
        }
    }
    pthread_mutex_unlock(&pairs_lock);
}

static void *unpair(const void *transport) {
    void *engine = NULL;

    pthread_mutex_lock(&pairs_lock);
    for (size_t i = 0; i < PAIRS && !engine; i++) {
        if (pairs[i].transport == transport) {
            engine = pairs[i].engine;
            pairs[i].transport = pairs[i].engine = NULL;
        }
    }
    pthread_mutex_unlock(&pairs_lock);
    return engine;
}

/* ---- engines come and go
 * -----------------------------------------------------------------------------------------------
 */

static void ended(void *engine) {
    tp_engine_forget(engine);
    tp_overlays_end(engine);
    tp_endpoints_forget(engine);
}

void tp_hook_mt_construct(void *self, void *metadata, void *local_name) {
    struct tp_module *module = tp_module_of(CALLER());
    tp_real_mt_construct real = (tp_real_mt_construct)tp_next(TP_HOOK_mt_construct, module);

    if (real) {
        real(self, metadata, local_name);
    }
    if (starting_engine) {
        tp_engine_alias(starting_engine, self);
        if (!tp_has(TP_HOOK_te_destroy, module)) {
            pair(self, starting_object);
        }
    }
}

void tp_hook_mt_destroy(void *self) {
    tp_real_mt_destroy real =
        (tp_real_mt_destroy)tp_next(TP_HOOK_mt_destroy, tp_module_of(CALLER()));
    void *engine = tp_shim_config() ? unpair(self) : NULL;

    if (tp_shim_config()) {
        tp_engine_forget(self);
    }
    if (real) {
        real(self);
    }
    if (engine) {
        ended(engine);
    }
}

void tp_hook_te_construct_move(void *self, void *other) {
    tp_real_te_construct_move real =
        (tp_real_te_construct_move)tp_next(TP_HOOK_te_construct_move, tp_module_of(CALLER()));
    struct tp_engine *engine = tp_shim_config() ? tp_engine_find(other, false) : NULL;

    if (real) {
        real(self, other);
    }
    if (engine) {
        tp_engine_alias(engine, self);
    }
    if (tp_shim_config()) { /* before the old one is destroyed */
        tp_overlays_move(other, self);
        tp_endpoints_move(other, self);
    }
}

static void destroy(enum tp_hook hook, struct tp_module *module, void *self) {
    tp_real_te_destroy real = (tp_real_te_destroy)tp_next(hook, module);

    if (real) {
        real(self);
    }
    if (tp_shim_config()) {
        ended(self);
    }
}

void tp_hook_te_destroy(void *self) {
    destroy(TP_HOOK_te_destroy, tp_module_of(CALLER()), self);
}

void tp_hook_te_destroy_base(void *self) {
    destroy(TP_HOOK_te_destroy_base, tp_module_of(CALLER()), self);
}

int tp_hook_te_free_engine(void *self) {
    tp_real_te_free_engine real =
        (tp_real_te_free_engine)tp_next(TP_HOOK_te_free_engine, tp_module_of(CALLER()));

    if (tp_shim_config()) {
        tp_overlays_withdraw(self);
    }
    return real ? real(self) : -1;
}

/* ---- the start
 * ---------------------------------------------------------------------------------------------------------
 */

/* The name that this engine gave itself, asked from the engine: with P2PHANDSHAKE and under TENT
 * the port is only known there. */
static void ask_name(const struct tp_module *module, void *self, char *ret_name,
                     size_t name_bytes) {
    struct cxx_string *(*local_name)(struct cxx_string *, void *) = NULL;
    struct cxx_string text = {0};
    void *symbol = tp_module_symbol(module, LOCAL_NAME);

    if (!symbol) {
        return;
    }
    memcpy(&local_name, &symbol, sizeof(local_name));
    local_name(&text, self);
    if (text.data && text.bytes < name_bytes) {
        memcpy(ret_name, text.data, text.bytes);
        ret_name[text.bytes] = '\0';
    }
    if (text.data && text.data != text.u.local && module->operator_delete) {
        module->operator_delete(text.data);
    }
}

static void publish_name(const struct tp_module *module, void *self,
                         const struct cxx_string *metadata, const struct cxx_string *local_name,
                         bool store) {
    static const char p2p[] = "P2PHANDSHAKE";
    char name[256] = "";

    if (module->tent ||
        (metadata->bytes == sizeof(p2p) - 1 && memcmp(metadata->data, p2p, metadata->bytes) == 0)) {
        ask_name(module, self, name, sizeof(name));
    } else if (local_name->bytes < sizeof(name)) {
        memcpy(name, local_name->data, local_name->bytes);
        name[local_name->bytes] = '\0';
    }
    if (name[0]) {
        tp_shim_set_name(name, false);
    }
    if (name[0] && store) {
        tp_endpoints_learn(self, name); /* without one, a line says so when it publishes memory */
    }
}

int tp_hook_te_init(void *self, const struct cxx_string *metadata,
                    const struct cxx_string *local_name, const struct cxx_string *host,
                    uint64_t port) {
    struct tp_module *module = tp_module_of(CALLER());
    tp_real_te_init real = (tp_real_te_init)tp_next(TP_HOOK_te_init, module);
    const struct tp_config *config = tp_shim_config();
    struct tp_engine *outer = starting_engine;
    void *outer_object = starting_object;

    if (!real) {
        return -1;
    }
    if (config) {
        tp_shim_start(config);
        starting_engine = tp_engine_find(self, true);
        starting_object = self;
    }
    int rc = real(self, metadata, local_name, host, port);
    starting_engine = outer;
    starting_object = outer_object;
    if (rc == 0 && config && module) {
        /* Any module: a store takes an engine that another one has made (setup's `engine`). */
        publish_name(module, self, metadata, local_name, config->store.half == TP_HALF_ON);
    }
    return rc;
}

/* ---- handles
 * -----------------------------------------------------------------------------------------------------------
 */

uint64_t tp_hook_te_open(void *self, const struct cxx_string *name) {
    tp_real_te_open real = (tp_real_te_open)tp_next(TP_HOOK_te_open, tp_module_of(CALLER()));

    if (!real) {
        return UINT64_MAX;
    }
    uint64_t handle = real(self, name);
    if (tp_transport_on() && (int64_t)handle >= 0) { /* errors are negative */
        struct tp_engine *engine = tp_engine_find(self, true);
        if (engine) {
            tp_engine_open(engine, handle, name->data, name->bytes);
        }
    }
    return handle;
}

int tp_hook_te_close(void *self, uint64_t handle) {
    tp_real_te_close real = (tp_real_te_close)tp_next(TP_HOOK_te_close, tp_module_of(CALLER()));
    struct tp_engine *engine = tp_transport_on() ? tp_engine_find(self, false) : NULL;

    if (engine) {
        tp_engine_close(engine, handle);
    }
    return real ? real(self, handle) : -1;
}

/* ---- registrations
 * -----------------------------------------------------------------------------------------------------
 */

static void note_range(const void *address, size_t bytes, const struct cxx_string *location) {
    char text[64] = "";

    if (location->data && location->bytes < sizeof(text)) {
        memcpy(text, location->data, location->bytes);
    }
    tp_register_range(address, bytes, text);
}

/*
 * A process that lends CUDA memory and has GPUs: what lies in its own segment Mooncake copies
 * itself, with addresses that only the CPU reaches at first. Whoever copies from or to a GPU has
 * mostly registered its memory before; for the others GPUs are looked for each second (start.c).
 */
static void reach_own_segments(const struct tp_config *config) {
    if (config && config->store.half == TP_HALF_ON && config->store.kind == TP_SEGMENT_CUMEM &&
        !config->platform_cpu) {
        tp_segment_open_to_gpus();
    }
}

/*
 * A segment of a process that shares none: other engines of the host put there and get from there
 * by Mooncake's transport. Inference engines lend memory by default.
 */
static void note_unshared_segment(const void *caller, size_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;

    if (!tp_registers_segment(caller)) {
        return;
    }
    tp_stats_condition(TP_CONDITION_LENDS_UNSHARED, true);
    tp_log_once(&said, TP_LOG_WARN,
                "this process lends %zu MiB to Mooncake's store but is set up as an engine only: "
                "what others put there falls back to Mooncake's transport; set it up as a store "
                "too (tidepool run --store DIR --engine DIR, or MC_STORE_SHM_SEGMENT_DIR), or give "
                "it a global segment size of 0",
                bytes >> 20);
}

int tp_hook_te_register(void *self, void *address, size_t bytes, const struct cxx_string *location,
                        bool remote_accessible, bool update_metadata) {
    struct tp_module *module = tp_module_of(CALLER());
    tp_real_te_register real = (tp_real_te_register)tp_next(TP_HOOK_te_register, module);
    const struct tp_config *config = tp_shim_config();
    bool store_memory =
        config && config->store.half != TP_HALF_OFF && remote_accessible && module && module->store;

    if (!real || (store_memory && tp_overlays_prepare(CALLER(), address, bytes, config) != 0)) {
        return -1;
    }
    if (store_memory && !tp_segment_settle(address, bytes)) {
        return -1;
    }
    reach_own_segments(config);
    int rc = real(self, address, bytes, location, remote_accessible, update_metadata);
    if (rc == 0 && store_memory) {
        tp_overlays_publish(self, address, config);
    } else if (rc == 0 && config && remote_accessible && module && module->store) {
        note_unshared_segment(CALLER(), bytes);
    }
    if (rc == 0 && tp_transport_on()) {
        note_range(address, bytes, location);
    }
    return rc;
}

int tp_hook_te_unregister(void *self, void *address, bool update_metadata) {
    tp_real_te_unregister real =
        (tp_real_te_unregister)tp_next(TP_HOOK_te_unregister, tp_module_of(CALLER()));

    if (tp_shim_config()) {
        (void)tp_segment_withdraw(address); /* most registrations are not segments */
    }
    if (tp_transport_on()) {
        tp_unregister_range(address);
    }
    return real ? real(self, address, update_metadata) : -1;
}

/* mooncake::Transport::BufferEntry: {void *addr; size_t length;} */
struct buffer_entry {
    void *address;
    size_t bytes;
};

int tp_hook_te_register_batch(void *self, const struct cxx_vector *buffers,
                              const struct cxx_string *location) {
    tp_real_te_register_batch real =
        (tp_real_te_register_batch)tp_next(TP_HOOK_te_register_batch, tp_module_of(CALLER()));
    reach_own_segments(tp_shim_config());
    int rc = real ? real(self, buffers, location) : -1;

    if (rc == 0 && tp_transport_on()) {
        for (const char *at = buffers->begin; at + sizeof(struct buffer_entry) <= buffers->end;
             at += sizeof(struct buffer_entry)) {
            struct buffer_entry entry;
            memcpy(&entry, at, sizeof(entry));
            note_range(entry.address, entry.bytes, location);
        }
    }
    return rc;
}

int tp_hook_te_unregister_batch(void *self, const struct cxx_vector *addresses) {
    tp_real_te_unregister_batch real =
        (tp_real_te_unregister_batch)tp_next(TP_HOOK_te_unregister_batch, tp_module_of(CALLER()));

    if (tp_transport_on()) {
        for (const char *at = addresses->begin; at + sizeof(void *) <= addresses->end;
             at += sizeof(void *)) {
            void *address;
            memcpy(&address, at, sizeof(address));
            tp_unregister_range(address);
        }
    }
    return real ? real(self, addresses) : -1;
}
