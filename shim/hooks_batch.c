/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The batch calls of Mooncake's RealClient (what the python methods of these names call), which are
 * carried out in parts (parts.h) when MC_STORE_BATCHED_GET or MC_STORE_BATCHED_PUT is set.
 *
 * Arguments are divided by key and results put together again. What would not mean the same in
 * parts goes to the original whole: replicas that are to lie on one node, groups of keys, a key
 * that is put twice. It must not know: threads, transfers.
 */
#include "env/env.h"
#include "shim/hooks.h"
#include "shim/modules.h"
#include "shim/parts.h"
#include "shim/start.h"
#include "transport/transport.h"

#include <stdlib.h>
#include <string.h>

#define CALLER() __builtin_return_address(0)

/* A batch call with its arguments. The buffers and sizes of a key are one element each, or a
 * vector of them (`multi`). */
struct batch {
    enum tp_hook hook;
    void *real;
    void *self;
    const struct cxx_vector *keys, *buffers, *sizes;
    const void *replication;
    bool flag;
    bool multi;
};

static size_t element(const struct batch *batch) {
    return batch->multi ? sizeof(struct cxx_vector) : sizeof(void *);
}

static size_t count_of(const struct cxx_vector *vector, size_t element_bytes) {
    return (size_t)(vector->end - vector->begin) / element_bytes;
}

/* `count` elements of a vector that is only read: nothing is owned. */
static struct cxx_vector view(const struct cxx_vector *vector, size_t element_bytes, size_t first,
                              size_t count) {
    char *begin = vector->begin + first * element_bytes;
    char *end = begin + count * element_bytes;

    return (struct cxx_vector){begin, end, end};
}

/* ---- calling the original ---- */

static void call_real(const struct batch *batch, const struct cxx_vector *keys,
                      const struct cxx_vector *buffers, const struct cxx_vector *sizes,
                      struct cxx_vector *ret) {
    switch (batch->hook) {
    case TP_HOOK_real_get_into:
        ((tp_real_real_get_into)batch->real)(ret, batch->self, keys, buffers, sizes);
        break;
    case TP_HOOK_real_get_multi:
        ((tp_real_real_get_multi)batch->real)(ret, batch->self, keys, buffers, sizes, batch->flag);
        break;
    case TP_HOOK_real_put_from:
        ((tp_real_real_put_from)batch->real)(ret, batch->self, keys, buffers, sizes,
                                             batch->replication);
        break;
    default:
        ((tp_real_real_put_multi)batch->real)(ret, batch->self, keys, buffers, sizes,
                                              batch->replication, batch->flag);
    }
}

static void run_part(void *context, size_t first, size_t count, struct cxx_vector *ret) {
    const struct batch *batch = context;
    struct cxx_vector keys = view(batch->keys, sizeof(struct cxx_string), first, count);
    struct cxx_vector buffers = view(batch->buffers, element(batch), first, count);
    struct cxx_vector sizes = view(batch->sizes, element(batch), first, count);

    call_real(batch, &keys, &buffers, &sizes, ret);
}

/* ---- may it be divided? ---- */

static uint64_t bytes_of(const struct batch *batch, size_t keys) {
    const struct cxx_vector *sizes = batch->sizes;
    uint64_t bytes = 0;

    if (batch->multi) /* keys are of one kind */
        sizes = (const struct cxx_vector *)(const void *)sizes->begin;
    for (const char *at = sizes->begin; at < sizes->end; at += sizeof(size_t)) {
        size_t one;
        memcpy(&one, at, sizeof(one));
        bytes += one;
    }
    return batch->multi ? bytes * keys : bytes;
}

/*
 * mooncake::ReplicateConfig since 0.3.13 ends in: std::string preferred_segment, one vector, bool
 * prefer_alloc_in_same_node, an enum of a byte to four, std::string host_id,
 * optional<vector<string>> group_ids (UPSTREAM.md). Its two strings are found by their pointers to
 * themselves, which short ones have. True when that is what lies there, and neither of the two
 * fields that concern all keys of a call is set.
 */
static bool keys_are_alone(const void *replication) {
    enum { WORDS = 32, STRING = 4, VECTOR = 3 };
    const uintptr_t *words = replication;
    unsigned strings[2];
    unsigned found = 0;

    for (unsigned i = 0; i + 1 < WORDS && found < 2; i++) {
        if (words[i] == (uintptr_t)&words[i + 2] && words[i + 1] < 16) {
            strings[found++] = i;
            i += STRING - 1;
        }
    }
    if (found < 2 || strings[1] != strings[0] + STRING + VECTOR + 1)
        return false;
    const unsigned char *same_node = (const unsigned char *)&words[strings[1] - 1];
    const unsigned char *groups = (const unsigned char *)&words[strings[1] + STRING + VECTOR];
    return *same_node == 0 && *groups == 0;
}

static uint64_t hash_of(const struct cxx_string *key) {
    uint64_t hash = key->bytes;

    for (size_t i = 0; i < key->bytes; i += 8) {
        uint64_t word = 0;
        size_t left = key->bytes - i;
        memcpy(&word, key->data + i, left < 8 ? left : 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash | 1; /* 0: an empty place */
}

/* The last of two equal keys wins in Mooncake's own function. Two keys of one hash count as equal.
 */
static bool keys_differ(const struct cxx_vector *vector, size_t keys) {
    const struct cxx_string *key = (const struct cxx_string *)(const void *)vector->begin;
    size_t room = 64;
    bool differ = true;

    while (room < 2 * keys)
        room *= 2;
    uint64_t *places = calloc(room, sizeof(*places));
    for (size_t i = 0; i < keys && places && differ; i++) {
        uint64_t hash = hash_of(&key[i]);
        size_t at = (hash >> 20) & (room - 1);
        while (places[at] && places[at] != hash)
            at = (at + 1) & (room - 1);
        differ = places[at] != hash;
        places[at] = hash;
    }
    differ = differ && places;
    free(places);
    return differ;
}

static bool may_divide(const struct batch *batch, size_t keys) {
    const struct tp_config *config = tp_transport_on() ? tp_shim_config() : NULL;
    bool put = batch->replication != NULL;

    if (!config || !(put ? config->engine.batched_put : config->engine.batched_get))
        return false;
    if (keys < 2 || count_of(batch->buffers, element(batch)) != keys ||
        count_of(batch->sizes, element(batch)) != keys)
        return false;
    return put || !batch->flag; /* a get's: replicas on one node */
}

static struct cxx_vector *call(struct batch *batch, const void *caller, struct cxx_vector *ret) {
    struct tp_module *module = tp_module_of(caller);
    size_t keys = count_of(batch->keys, sizeof(struct cxx_string));

    batch->real = tp_next(batch->hook, module);
    if (!batch->real) { /* callers check its size */
        memset(ret, 0, sizeof(*ret));
        return ret;
    }
    if (!may_divide(batch, keys)) {
        call_real(batch, batch->keys, batch->buffers, batch->sizes, ret);
        return ret;
    }
    struct tp_parts parts = {.run = run_part,
                             .context = batch,
                             .module = module,
                             .keys = keys,
                             .bytes = bytes_of(batch, keys),
                             .threads = tp_shim_config()->engine.call_threads};
    if (tp_parts_allowed(&parts) < 2 ||
        (batch->replication &&
         !(keys_are_alone(batch->replication) && keys_differ(batch->keys, keys))))
        call_real(batch, batch->keys, batch->buffers, batch->sizes, ret);
    else
        tp_parts_run(&parts, ret);
    return ret;
}

struct cxx_vector *tp_hook_real_get_into(struct cxx_vector *ret, void *self,
                                         const struct cxx_vector *keys,
                                         const struct cxx_vector *buffers,
                                         const struct cxx_vector *sizes) {
    struct batch batch = {.hook = TP_HOOK_real_get_into,
                          .self = self,
                          .keys = keys,
                          .buffers = buffers,
                          .sizes = sizes};
    return call(&batch, CALLER(), ret);
}

struct cxx_vector *tp_hook_real_get_multi(struct cxx_vector *ret, void *self,
                                          const struct cxx_vector *keys,
                                          const struct cxx_vector *buffers,
                                          const struct cxx_vector *sizes, bool same_node) {
    struct batch batch = {.hook = TP_HOOK_real_get_multi,
                          .self = self,
                          .keys = keys,
                          .buffers = buffers,
                          .sizes = sizes,
                          .flag = same_node,
                          .multi = true};
    return call(&batch, CALLER(), ret);
}

struct cxx_vector *tp_hook_real_put_from(struct cxx_vector *ret, void *self,
                                         const struct cxx_vector *keys,
                                         const struct cxx_vector *buffers,
                                         const struct cxx_vector *sizes, const void *replication) {
    struct batch batch = {.hook = TP_HOOK_real_put_from,
                          .self = self,
                          .keys = keys,
                          .buffers = buffers,
                          .sizes = sizes,
                          .replication = replication};
    return call(&batch, CALLER(), ret);
}

struct cxx_vector *tp_hook_real_put_multi(struct cxx_vector *ret, void *self,
                                          const struct cxx_vector *keys,
                                          const struct cxx_vector *buffers,
                                          const struct cxx_vector *sizes, const void *replication,
                                          bool stage) {
    struct batch batch = {.hook = TP_HOOK_real_put_multi,
                          .self = self,
                          .keys = keys,
                          .buffers = buffers,
                          .sizes = sizes,
                          .replication = replication,
                          .flag = stage,
                          .multi = true};
    return call(&batch, CALLER(), ret);
}
