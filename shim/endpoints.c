/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The names of this process's engines, and which of them is told to engines of other processes.
 *
 * The protocol knows one name a process. Of several stores in one process the one that published
 * last has it, and transfers to the others fall back to Mooncake's transport: a line says so each
 * time that another one gets it. It must not know: hooks, what the memory is.
 */
#include "shim/endpoints.h"

#include "env/env.h"
#include "env/stats.h"
#include "shim/start.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define ENDPOINTS 64

struct endpoint {
    const void *engine; /* NULL: unused */
    bool serves;        /* has published memory */
    char name[256];
};

static struct endpoint endpoints[ENDPOINTS];
static const void *told; /* the engine whose name the server has */
static pthread_mutex_t endpoints_lock = PTHREAD_MUTEX_INITIALIZER;

/* Under the lock. NULL: not known. */
static struct endpoint *find(const void *engine) {
    for (size_t i = 0; i < ENDPOINTS; i++) {
        if (endpoints[i].engine == engine) {
            return &endpoints[i];
        }
    }
    return NULL;
}

void tp_endpoints_learn(const void *engine, const char *name) {
    pthread_mutex_lock(&endpoints_lock);
    struct endpoint *endpoint = find(engine);
    if (!endpoint) {
        endpoint = find(NULL);
    }
    if (endpoint) {
        *endpoint = (struct endpoint){.engine = engine};
        (void)snprintf(endpoint->name, sizeof(endpoint->name), "%s", name);
    }
    pthread_mutex_unlock(&endpoints_lock);
}

/* Under the lock: how many engines have published memory? */
static unsigned serving(void) {
    unsigned count = 0;

    for (size_t i = 0; i < ENDPOINTS; i++) {
        count += endpoints[i].engine && endpoints[i].serves;
    }
    return count;
}

/* `name` is told to engines of other processes from now on; so many engines have memory. */
static void tell(const char *name, unsigned count) {
    tp_shim_set_name(name, true);
    tp_stats_condition(TP_CONDITION_SEVERAL_STORES, count > 1);
    if (count > 1) {
        tp_log(TP_LOG_WARN,
               "this process has %u stores with memory: engines reach %s through shared memory, "
               "the others fall back to Mooncake's transport; use a process for each store",
               count, name);
    }
}

void tp_endpoints_serve(const void *engine) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char name[256] = "";
    unsigned count;

    pthread_mutex_lock(&endpoints_lock);
    struct endpoint *endpoint = find(engine);
    bool known = endpoint;
    if (endpoint && !endpoint->serves) {
        endpoint->serves = true;
        told = engine;
        memcpy(name, endpoint->name, sizeof(name));
    }
    count = serving();
    bool unnamed = !known && count == 0;
    pthread_mutex_unlock(&endpoints_lock);
    if (name[0]) {
        tell(name, count);
    }
    if (!known) {
        tp_log_once(&said, TP_LOG_WARN,
                    "the name by which peers open this process's memory could not be learned: what "
                    "engines put and get there falls back to Mooncake's transport");
    }
    if (unnamed) {
        tp_stats_condition(TP_CONDITION_UNNAMED, true);
    }
}

void tp_endpoints_move(const void *engine, const void *now) {
    pthread_mutex_lock(&endpoints_lock);
    struct endpoint *endpoint = find(engine);
    if (endpoint) {
        endpoint->engine = now;
    }
    if (endpoint && told == engine) {
        told = now;
    }
    pthread_mutex_unlock(&endpoints_lock);
}

void tp_endpoints_forget(const void *engine) {
    char name[256] = "";
    unsigned count;

    pthread_mutex_lock(&endpoints_lock);
    struct endpoint *endpoint = find(engine);
    if (endpoint) {
        *endpoint = (struct endpoint){0};
    }
    if (endpoint && told == engine) {
        told = NULL;
        for (size_t i = 0; i < ENDPOINTS && !told; i++) {
            if (endpoints[i].engine && endpoints[i].serves) {
                told = endpoints[i].engine;
                memcpy(name, endpoints[i].name, sizeof(name));
            }
        }
    }
    count = serving();
    pthread_mutex_unlock(&endpoints_lock);
    if (name[0]) {
        tell(name, count);
    }
}
