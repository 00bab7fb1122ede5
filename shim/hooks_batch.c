/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The batch calls of Mooncake's RealClient (what the python methods of these names call), which are
 * carried out in parts (parts.h) when MC_STORE_BATCHED_GET or MC_STORE_BATCHED_PUT is set.
 *
 * Arguments are divided by key and results put together again. What would not mean the same in
 * parts goes to the original whole: replicas that are to lie on one node, lists of one element a
 * key beside the keys, a key that is put twice, arguments for which Mooncake fails the whole call.
 * It must not know: threads, transfers.
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
 * mooncake::ReplicateConfig by the size of TransferRequest in the same module: in both, words 10
 * and 18 begin the strings preferred_segment and host_id, the byte before the second is
 * prefer_alloc_in_same_node, and behind it are optionals of one vector each, group_ids the first
 * (UPSTREAM.md). Most of those hold one element a key.
 */
static const struct {
    size_t element_bytes;
    unsigned optionals;
} replications[] = {{56, 1}, {72, 5}};

enum { SEGMENT_WORD = 10, SAME_NODE_WORD = 17, HOST_WORD = 18, OPTIONALS_WORD = 22 };
enum { OPTIONAL_WORDS = 4, SHORT_BYTES = 16, LONG_BYTES = 4096 };

/* A short string points to itself; a longer one has memory for its bytes, of a size that no other
 * field would show by chance. */
static bool is_string(const uintptr_t *word) {
    bool in_itself = word[0] == (uintptr_t)&word[2];
    bool elsewhere = word[0] > UINT32_MAX && word[1] >= SHORT_BYTES && word[2] >= word[1] &&
                     word[2] <= LONG_BYTES;
    return in_itself ? word[1] < SHORT_BYTES : elsewhere;
}

/* Is this a ReplicateConfig that we know, without a field that concerns several keys? */
static bool keys_are_alone(const void *replication, size_t element_bytes) {
    const uintptr_t *words = replication;
    unsigned optionals = 0;

    for (size_t i = 0; i < sizeof(replications) / sizeof(*replications); i++) {
        if (replications[i].element_bytes == element_bytes)
            optionals = replications[i].optionals;
    }
    if (!optionals || !is_string(&words[SEGMENT_WORD]) || !is_string(&words[HOST_WORD]) ||
        *(const unsigned char *)&words[SAME_NODE_WORD] != 0)
        return false;
    for (unsigned i = 1; i <= optionals; i++) {
        const uintptr_t *flag = &words[OPTIONALS_WORD + i * OPTIONAL_WORDS - 1];
        if (*(const unsigned char *)flag != 0)
            return false;
    }
    return true;
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

/* The last of two equal keys wins in Mooncake's own function. Keys of one hash count as equal. */
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

/* Has each key as many buffers as sizes? Where one has not, Mooncake stores none. */
static bool keys_are_even(const struct batch *batch, size_t keys) {
    const struct cxx_vector *buffers =
        (const struct cxx_vector *)(const void *)batch->buffers->begin;
    const struct cxx_vector *sizes = (const struct cxx_vector *)(const void *)batch->sizes->begin;
    bool even = true;

    for (size_t i = 0; i < keys && even; i++)
        even = buffers[i].end - buffers[i].begin == sizes[i].end - sizes[i].begin;
    return even;
}

/* By the settings and what costs little to see. */
static bool may_divide(const struct batch *batch, const struct tp_module *module, size_t keys) {
    const struct tp_config *config = tp_transport_on() ? tp_shim_config() : NULL;
    bool put = batch->replication != NULL;

    if (!config || !(put ? config->engine.batched_put : config->engine.batched_get))
        return false;
    if (!module || module->layout_refused)
        return false;
    if (keys < 2 || count_of(batch->buffers, element(batch)) != keys ||
        count_of(batch->sizes, element(batch)) != keys ||
        (batch->multi && !keys_are_even(batch, keys)))
        return false;
    return put || !batch->flag; /* a get's: replicas on one node */
}

static bool may_divide_put(const struct batch *batch, const struct tp_module *module, size_t keys) {
    return keys_are_alone(batch->replication, atomic_load(&module->element_bytes)) &&
           keys_differ(batch->keys, keys);
}

static struct cxx_vector *call(struct batch *batch, const void *caller, struct cxx_vector *ret) {
    struct tp_module *module = tp_module_of(caller);
    size_t keys = count_of(batch->keys, sizeof(struct cxx_string));

    batch->real = tp_next(batch->hook, module);
    if (!batch->real) { /* callers check its size */
        memset(ret, 0, sizeof(*ret));
        return ret;
    }
    if (!may_divide(batch, module, keys)) {
        call_real(batch, batch->keys, batch->buffers, batch->sizes, ret);
        return ret;
    }
    struct tp_parts parts = {.run = run_part,
                             .context = batch,
                             .module = module,
                             .keys = keys,
                             .result_bytes = batch->hook == TP_HOOK_real_get_into ? sizeof(int64_t)
                                                                                  : sizeof(int),
                             .bytes = bytes_of(batch, keys),
                             .threads = tp_shim_config()->engine.call_threads};
    if (tp_parts_allowed(&parts) < 2 ||
        (batch->replication && !may_divide_put(batch, module, keys)))
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
