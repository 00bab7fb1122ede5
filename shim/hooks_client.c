/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The brackets around the batch calls of Mooncake's client: between begin and end, the transfers of
 * this thread gather, so that the many small requests of one call go to the GPU together
 * (MC_STORE_BATCHED_GET, MC_STORE_BATCHED_PUT).
 *
 * A bracket only says when copies may wait for each other: arguments and results pass through
 * untouched, and a poll of any of the transfers sends out what has gathered. It must not know what
 * gathers, or a type that it passes on.
 *
 * The result is a std::vector returned through a hidden pointer, which the original also returns.
 * An exception of the original passes through these frames (the project is compiled with
 * -fexceptions) and leaves the bracket open: see end().
 */
#include "env/env.h"
#include "shim/hooks.h"
#include "shim/modules.h"
#include "shim/start.h"
#include "transport/transport.h"

#include <stdatomic.h>
#include <string.h>

#define CALLER() __builtin_return_address(0)

/* True when a bracket was opened, which is then to be ended. */
static bool begin(bool get) {
    static atomic_flag said[2] = {ATOMIC_FLAG_INIT, ATOMIC_FLAG_INIT};
    const struct tp_config *config = tp_transport_on() ? tp_shim_config() : NULL;

    if (!config || !(get ? config->engine.batched_get : config->engine.batched_put)) {
        return false;
    }
    tp_log_once(&said[get], TP_LOG_DEBUG, "%s: GPU copies of one call gather from here on",
                get ? "MC_STORE_BATCHED_GET" : "MC_STORE_BATCHED_PUT");
    tp_gather_begin();
    return true;
}

/*
 * Not run when the original throws: a cleanup would need the unwinder's library (libgcc_s), which C
 * programs do not load. The thread then gathers until its next bracket ends; polls send its copies
 * out.
 */
static struct cxx_vector *end(bool open, struct cxx_vector *ret) {
    if (open) {
        tp_gather_end();
    }
    return ret;
}

/* Without an original (the caller would not have linked) the answer is an empty vector: callers
 * check its size. */
static struct cxx_vector *nothing(struct cxx_vector *ret) {
    memset(ret, 0, sizeof(*ret));
    return ret;
}

struct cxx_vector *tp_hook_client_get(struct cxx_vector *ret, void *self,
                                      const struct cxx_vector *keys, void *slices) {
    tp_real_client_get real =
        (tp_real_client_get)tp_next(TP_HOOK_client_get, tp_module_of(CALLER()));
    bool open = begin(true);

    return end(open, real ? real(ret, self, keys, slices) : nothing(ret));
}

struct cxx_vector *tp_hook_client_get_replicas(struct cxx_vector *ret, void *self,
                                               const struct cxx_vector *keys,
                                               const struct cxx_vector *replicas, void *slices) {
    tp_real_client_get_replicas real =
        (tp_real_client_get_replicas)tp_next(TP_HOOK_client_get_replicas, tp_module_of(CALLER()));
    bool open = begin(true);

    return end(open, real ? real(ret, self, keys, replicas, slices) : nothing(ret));
}

struct cxx_vector *tp_hook_client_get_queried(struct cxx_vector *ret, void *self,
                                              const struct cxx_vector *keys,
                                              const struct cxx_vector *queried, void *slices,
                                              bool same_node) {
    tp_real_client_get_queried real =
        (tp_real_client_get_queried)tp_next(TP_HOOK_client_get_queried, tp_module_of(CALLER()));
    bool open = begin(true);

    return end(open, real ? real(ret, self, keys, queried, slices, same_node) : nothing(ret));
}

struct cxx_vector *tp_hook_client_put(struct cxx_vector *ret, void *self,
                                      const struct cxx_vector *keys, struct cxx_vector *slices,
                                      const void *replication) {
    tp_real_client_put real =
        (tp_real_client_put)tp_next(TP_HOOK_client_put, tp_module_of(CALLER()));
    bool open = begin(false);

    return end(open, real ? real(ret, self, keys, slices, replication) : nothing(ret));
}

struct cxx_vector *tp_hook_client_put_staged(struct cxx_vector *ret, void *self,
                                             const struct cxx_vector *keys,
                                             struct cxx_vector *slices, const void *replication,
                                             const void *stager) {
    tp_real_client_put_staged real =
        (tp_real_client_put_staged)tp_next(TP_HOOK_client_put_staged, tp_module_of(CALLER()));
    bool open = begin(false);

    return end(open, real ? real(ret, self, keys, slices, replication, stager) : nothing(ret));
}

struct cxx_vector *tp_hook_client_put_flag(struct cxx_vector *ret, void *self,
                                           const struct cxx_vector *keys, struct cxx_vector *slices,
                                           const void *replication, const void *stager, bool flag) {
    tp_real_client_put_flag real =
        (tp_real_client_put_flag)tp_next(TP_HOOK_client_put_flag, tp_module_of(CALLER()));
    bool open = begin(false);

    return end(open,
               real ? real(ret, self, keys, slices, replication, stager, flag) : nothing(ret));
}

struct cxx_vector *tp_hook_client_upsert(struct cxx_vector *ret, void *self,
                                         const struct cxx_vector *keys, struct cxx_vector *slices,
                                         const void *replication) {
    tp_real_client_upsert real =
        (tp_real_client_upsert)tp_next(TP_HOOK_client_upsert, tp_module_of(CALLER()));
    bool open = begin(false);

    return end(open, real ? real(ret, self, keys, slices, replication) : nothing(ret));
}

struct cxx_vector *tp_hook_client_upsert_staged(struct cxx_vector *ret, void *self,
                                                const struct cxx_vector *keys,
                                                struct cxx_vector *slices, const void *replication,
                                                const void *stager) {
    tp_real_client_upsert_staged real =
        (tp_real_client_upsert_staged)tp_next(TP_HOOK_client_upsert_staged, tp_module_of(CALLER()));
    bool open = begin(false);

    return end(open, real ? real(ret, self, keys, slices, replication, stager) : nothing(ret));
}

struct cxx_vector *tp_hook_client_upsert_flag(struct cxx_vector *ret, void *self,
                                              const struct cxx_vector *keys,
                                              struct cxx_vector *slices, const void *replication,
                                              const void *stager, bool flag) {
    tp_real_client_upsert_flag real =
        (tp_real_client_upsert_flag)tp_next(TP_HOOK_client_upsert_flag, tp_module_of(CALLER()));
    bool open = begin(false);

    return end(open,
               real ? real(ret, self, keys, slices, replication, stager, flag) : nothing(ret));
}
