/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The names of this process's engines, and which of them is told to engines of other processes.
 *
 * The protocol knows one name a process. Of several stores in one process the one that published
 * last has it; transfers to the others are left to Mooncake, and that is said once. It must not
 * know: hooks, what the memory is.
 */
#include "shim/endpoints.h"

#include "env/env.h"
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

/* Under the lock: another engine with memory, told before. */
static bool takes_the_name_of_another(const struct endpoint *endpoint) {
    const struct endpoint *other = told ? find(told) : NULL;

    return other && other != endpoint && other->serves;
}

void tp_endpoints_serve(const void *engine) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char name[256] = "";
    bool several = false;

    pthread_mutex_lock(&endpoints_lock);
    struct endpoint *endpoint = find(engine);
    if (endpoint && !endpoint->serves) {
        several = takes_the_name_of_another(endpoint);
        endpoint->serves = true;
        told = engine;
        memcpy(name, endpoint->name, sizeof(name));
    }
    pthread_mutex_unlock(&endpoints_lock);
    if (name[0]) {
        tp_shim_set_name(name, true);
    }
    if (several) {
        tp_log_once(&said, TP_LOG_WARN,
                    "this process has several stores with memory: engines reach %s through shared "
                    "memory and the others by Mooncake's transport; use a process for each store",
                    name);
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
    pthread_mutex_unlock(&endpoints_lock);
    if (name[0]) {
        tp_shim_set_name(name, true);
    }
}
