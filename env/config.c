/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Settings from the environment; MC_TENT_CONF is read by config_json.c.
 * It must not know: what the settings are used for.
 */
#include "env/config_parse.h"
#include "env/text.h"
#include "env/values.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WAIT_S 86400
#define DEFAULT_WAIT_S 300
#define DEFAULT_RESTORE_BYTES (UINT64_C(1280) << 20)
#define MAX_COPY_THREADS 64
#define MAX_CALL_THREADS 16
#define MAX_NODE 1023 /* the kernel's largest node number */

/* ---- findings
 * -----------------------------------------------------------------------------------------------------
 */

const char *tp_parse_variable(const struct tp_parse *parse, const char *name) {
    const char *value = parse->getenv_fn(name, parse->arg);

    return value && *value ? value : NULL;
}

static void add_notice(struct tp_config *config, const char *text) {
    const unsigned room = sizeof(config->notices) / sizeof(*config->notices);

    if (config->notice_count == room) {
        tp_text_format(config->notices[room - 1], sizeof(*config->notices), "and more");
        return;
    }
    tp_text_format(config->notices[config->notice_count++], sizeof(*config->notices), "%s", text);
}

void tp_parse_notice(struct tp_config *config, const char *format, ...) {
    char text[sizeof(*config->notices)];
    va_list args;

    va_start(args, format);
    tp_text_vformat(text, sizeof(text), format, args);
    va_end(args);
    add_notice(config, text);
}

static bool make_invalid(enum tp_half *half, char *error, size_t bytes, const char *text) {
    if (*half == TP_HALF_OFF)
        return false;
    *half = TP_HALF_INVALID;
    if (!error[0])
        tp_text_format(error, bytes, "%s", text);
    return true;
}

void tp_parse_wrong(struct tp_config *config, unsigned halves, const char *format, ...) {
    char text[sizeof(config->store.error)];
    struct tp_store_config *store = &config->store;
    struct tp_engine_config *engine = &config->engine;
    bool said = false;
    va_list args;

    va_start(args, format);
    tp_text_vformat(text, sizeof(text), format, args);
    va_end(args);
    if (halves & TP_STORE_HALF)
        said = make_invalid(&store->half, store->error, sizeof(store->error), text);
    if (halves & TP_ENGINE_HALF)
        said = make_invalid(&engine->half, engine->error, sizeof(engine->error), text) || said;
    if (!said)
        add_notice(config, text);
}

bool tp_parse_directory(struct tp_config *config, unsigned halves, const char *name,
                        const char *value, char ret_dir[static PATH_MAX]) {
    size_t length = strnlen(value, PATH_MAX);

    if (value[0] != '/') {
        tp_parse_wrong(config, halves,
                       "%s: " TP_SHOWN
                       " is not an absolute path (expected a directory such as /run/tidepool)",
                       name, TP_SHOW(value));
        return false;
    }
    if (length >= PATH_MAX) {
        tp_parse_wrong(config, halves,
                       "%s: " TP_SHOWN " is too long (expected a path of at most %d bytes)", name,
                       TP_SHOW(value), PATH_MAX - 1);
        return false;
    }
    memcpy(ret_dir, value, length + 1);
    return true;
}

/* ---- values of variables
 * ------------------------------------------------------------------------------------------ */

static void parse_flag(const struct tp_parse *parse, unsigned halves, const char *name,
                       bool *ret_value) {
    const char *value = tp_parse_variable(parse, name);

    if (value && tp_value_bool(value, ret_value) < 0)
        tp_parse_wrong(parse->config, halves, "%s: " TP_SHOWN " is wrong (expected 0 or 1)", name,
                       TP_SHOW(value));
}

static void parse_count(const struct tp_parse *parse, unsigned halves, const char *name,
                        unsigned max, unsigned *ret_value) {
    const char *value = tp_parse_variable(parse, name);
    uint64_t count;

    if (!value)
        return;
    if (tp_value_u64(value, max, &count) == 0)
        *ret_value = (unsigned)count;
    else
        tp_parse_wrong(parse->config, halves,
                       "%s: " TP_SHOWN " is wrong (expected an integer from 0 to %u)", name,
                       TP_SHOW(value), max);
}

static void parse_piece_bytes(const struct tp_parse *parse) {
    static const char name[] = "MC_STORE_CUMEM_PIECE_BYTES";
    const char *value = tp_parse_variable(parse, name);
    uint64_t bytes = 0;

    if (!value)
        return;
    if (tp_value_bytes(value, &bytes) < 0 || bytes == 0) {
        tp_parse_wrong(parse->config, TP_STORE_HALF,
                       "%s: " TP_SHOWN " is wrong (expected a number of bytes above 0 and at most "
                       "64 TiB, such as 2147483648 or 2G)",
                       name, TP_SHOW(value));
        return;
    }
    parse->config->store.piece_bytes = bytes;
    if (bytes % 4096 != 0)
        tp_parse_notice(parse->config,
                        "%s: " TP_SHOWN " is not a multiple of the page size; rounded up to one",
                        name, TP_SHOW(value));
}

static void list_online(const int *nodes, unsigned count, char *ret_text, size_t bytes) {
    size_t length = 0;

    ret_text[0] = '\0';
    for (unsigned i = 0; i < count && length + 8 < bytes; i++) {
        tp_text_format(ret_text + length, bytes - length, "%s%d", i ? "," : "", nodes[i]);
        length = strlen(ret_text);
    }
}

static void parse_nodes(const struct tp_parse *parse) {
    static const char name[] = "MC_STORE_CUMEM_NUMA_NODES";
    const char *value = tp_parse_variable(parse, name);
    struct tp_store_config *store = &parse->config->store;
    int online[TP_MAX_NODES];
    uint64_t wanted[TP_MAX_NODES];
    char online_text[128];
    unsigned online_count, wanted_count = 0;

    if (!value)
        return;
    online_count = tp_host_memory_nodes(online);
    list_online(online, online_count, online_text, sizeof(online_text));
    if (tp_value_list(value, MAX_NODE, TP_MAX_NODES, wanted, &wanted_count) < 0) {
        tp_parse_wrong(
            parse->config, TP_STORE_HALF,
            "%s: " TP_SHOWN
            " is wrong (expected NUMA nodes such as 0,1 or 0-3; nodes with memory here: %s)",
            name, TP_SHOW(value), online_text);
        return;
    }
    for (unsigned i = 0; i < wanted_count; i++) {
        unsigned at = 0;

        while (at < online_count && (uint64_t)online[at] != wanted[i])
            at++;
        if (at == online_count) {
            tp_parse_wrong(
                parse->config, TP_STORE_HALF,
                "%s: " TP_SHOWN
                ": node %u is not online or has no memory for this process (nodes that have: %s)",
                name, TP_SHOW(value), (unsigned)wanted[i], online_text);
            return;
        }
        store->nodes[i] = (int)wanted[i];
    }
    store->node_count = wanted_count;
}

static void parse_uids(const struct tp_parse *parse) {
    static const char name[] = "TIDEPOOL_ALLOW_UIDS";
    const char *value = tp_parse_variable(parse, name);
    struct tp_config *config = parse->config;
    uint64_t uids[TP_MAX_UIDS];
    unsigned count = 0;

    if (!value)
        return;
    /* The largest uid_t is no user: (uid_t)-1 means "unchanged" to the kernel. */
    if (tp_value_list(value, UINT32_MAX - 1, TP_MAX_UIDS, uids, &count) < 0) {
        tp_parse_wrong(config, TP_STORE_HALF | TP_ENGINE_HALF,
                       "%s: " TP_SHOWN " is wrong (expected at most %d user ids such as 1000,1001)",
                       name, TP_SHOW(value), TP_MAX_UIDS);
        return;
    }
    for (unsigned i = 0; i < count; i++)
        config->allow_uids[i] = (uid_t)uids[i];
    config->allow_uid_count = count;
}

/* ---- the halves
 * ---------------------------------------------------------------------------------------------------
 */

static void parse_store_dirs(const struct tp_parse *parse, const char *cumem_dir,
                             const char *segment_dir) {
    struct tp_store_config *store = &parse->config->store;
    const char *socket_dir = tp_parse_variable(parse, "TIDEPOOL_SOCKET_DIR");

    if (cumem_dir && segment_dir) {
        tp_parse_wrong(parse->config, TP_STORE_HALF,
                       "MC_STORE_CUMEM_SOCKET_DIR (" TP_SHOWN
                       ") and MC_STORE_SHM_SEGMENT_DIR (" TP_SHOWN
                       ") are both set; a store's segments are made of one or the other: unset one",
                       TP_SHOW(cumem_dir), TP_SHOW(segment_dir));
        return;
    }
    if (cumem_dir) {
        store->kind = TP_SEGMENT_CUMEM;
        tp_parse_directory(parse->config, TP_STORE_HALF, "MC_STORE_CUMEM_SOCKET_DIR", cumem_dir,
                           store->socket_dir);
        return;
    }
    if (segment_dir && !strcmp(segment_dir, "memfd")) {
        store->kind = TP_SEGMENT_MEMFD;
        if (!socket_dir)
            tp_parse_wrong(
                parse->config, TP_STORE_HALF,
                "TIDEPOOL_SOCKET_DIR is not set, and MC_STORE_SHM_SEGMENT_DIR=memfd has no "
                "directory of its own "
                "(expected the directory for the store's socket, which engines name too)");
    } else if (segment_dir) {
        store->kind = TP_SEGMENT_FILES;
        tp_parse_directory(parse->config, TP_STORE_HALF, "MC_STORE_SHM_SEGMENT_DIR", segment_dir,
                           store->segment_dir);
        memcpy(store->socket_dir, store->segment_dir, sizeof(store->socket_dir));
    }
    if (socket_dir)
        tp_parse_directory(parse->config, TP_STORE_HALF, "TIDEPOOL_SOCKET_DIR", socket_dir,
                           store->socket_dir);
}

/* Mooncake's own settings: a value that Mooncake does not take leaves its default, as there. */
static void parse_mooncakes_memory(const struct tp_parse *parse) {
    struct tp_store_config *store = &parse->config->store;
    const char *bytes = tp_parse_variable(parse, "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES");
    const char *uring = tp_parse_variable(parse, "MOONCAKE_OFFLOAD_USE_URING");
    const char *pinned = tp_parse_variable(parse, "MC_STORE_PIN_MEMORY_MAX_BYTES");

    if (!bytes || tp_value_u64(bytes, TP_VALUE_MAX_BYTES, &store->restore_bytes) < 0)
        store->restore_bytes = DEFAULT_RESTORE_BYTES;
    if (!uring)
        uring = tp_parse_variable(parse, "MOONCAKE_USE_URING");
    store->restore_uring = uring && !strcmp(uring, "true");
    store->pins_segments = pinned && strcmp(pinned, "0") != 0;
    store->asks_hugepages = parse->getenv_fn("MC_STORE_USE_HUGEPAGE", parse->arg) != NULL;
}

static void parse_store(const struct tp_parse *parse) {
    struct tp_store_config *store = &parse->config->store;
    const char *cumem_dir = tp_parse_variable(parse, "MC_STORE_CUMEM_SOCKET_DIR");
    const char *segment_dir = tp_parse_variable(parse, "MC_STORE_SHM_SEGMENT_DIR");

    store->wait_s = DEFAULT_WAIT_S;
    if (cumem_dir || segment_dir) {
        store->half = TP_HALF_ON;
        parse_store_dirs(parse, cumem_dir, segment_dir);
    }
    parse_nodes(parse);
    parse_piece_bytes(parse);
    parse_flag(parse, TP_STORE_HALF, "TIDEPOOL_HUGEPAGES", &store->hugepages);
    parse_flag(parse, TP_STORE_HALF, "TIDEPOOL_OVERCOMMIT", &store->overcommit);
    parse_count(parse, TP_STORE_HALF, "MC_STORE_SHM_SEGMENT_WAIT_S", MAX_WAIT_S, &store->wait_s);
    parse_mooncakes_memory(parse);
}

static void parse_engine(const struct tp_parse *parse) {
    struct tp_engine_config *engine = &parse->config->engine;
    const char *conf = tp_parse_variable(parse, "MC_TENT_CONF");
    const char *socket_dir = tp_parse_variable(parse, "TIDEPOOL_SOCKET_DIR");

    engine->device_copy = true;
    engine->register_ahead_chunks = 8;
    if (conf)
        tp_parse_tent_conf(parse->config, conf);
    if (engine->half == TP_HALF_ON && !engine->socket_dir[0]) {
        if (socket_dir)
            tp_parse_directory(parse->config, TP_ENGINE_HALF, "TIDEPOOL_SOCKET_DIR", socket_dir,
                               engine->socket_dir);
        else
            tp_parse_wrong(
                parse->config, TP_ENGINE_HALF,
                "transports.shm.enable is true but transports.shm.socket_dir is not set (expected "
                "the store's socket "
                "directory there, in transports.shm.cumem_socket_dir or in TIDEPOOL_SOCKET_DIR)");
    }
    parse_count(parse, TP_ENGINE_HALF, "TIDEPOOL_COPY_THREADS", MAX_COPY_THREADS,
                &engine->copy_threads);
    parse_count(parse, TP_ENGINE_HALF, "TIDEPOOL_CALL_THREADS", MAX_CALL_THREADS,
                &engine->call_threads);
    parse_flag(parse, TP_ENGINE_HALF, "MC_STORE_BATCHED_GET", &engine->batched_get);
    parse_flag(parse, TP_ENGINE_HALF, "MC_STORE_BATCHED_PUT", &engine->batched_put);
}

/* An amount of Mooncake's that is not 0. */
static bool asked_for(const struct tp_parse *parse, const char *name) {
    const char *value = tp_parse_variable(parse, name);

    return value && strspn(value, " 0") != strlen(value);
}

/* Settings of Mooncake's own that matter here. A value that is not ours is Mooncake's business: a
 * notice. */
static void parse_shared(const struct tp_parse *parse) {
    struct tp_config *config = parse->config;
    const char *machine_id = tp_parse_variable(parse, "MC_TENT_MACHINE_ID");
    const char *platform = tp_parse_variable(parse, "MC_TENT_PLATFORM");
    const char *backend = tp_parse_variable(parse, "MOONCAKE_STORE_BACKEND");

    config->boot_id_only = machine_id && !strcmp(machine_id, "boot_id");
    if (machine_id && !config->boot_id_only)
        tp_parse_notice(config,
                        "MC_TENT_MACHINE_ID: " TP_SHOWN
                        " is left to Mooncake (Tidepool knows only boot_id)",
                        TP_SHOW(machine_id));
    config->platform_cpu = platform && !strcmp(platform, "cpu");
    if (platform && !config->platform_cpu)
        tp_parse_notice(
            config, "MC_TENT_PLATFORM: " TP_SHOWN " is left to Mooncake (Tidepool knows only cpu)",
            TP_SHOW(platform));
    config->force_shm = tp_parse_variable(parse, "MC_FORCE_SHM") != NULL;
    config->pinned_restore = asked_for(parse, "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES");
    if (backend && !strcmp(backend, "rs"))
        tp_parse_wrong(config, TP_STORE_HALF | TP_ENGINE_HALF,
                       "MOONCAKE_STORE_BACKEND: \"rs\" selects a store that Tidepool cannot serve "
                       "(expected unset)");
}

int tp_config_parse(const char *(*getenv_fn)(const char *name, void *arg), void *arg,
                    struct tp_config *ret_config) {
    const struct tp_parse parse = {.getenv_fn = getenv_fn, .arg = arg, .config = ret_config};

    memset(ret_config, 0, sizeof(*ret_config));
    parse_store(&parse);
    parse_engine(&parse);
    parse_uids(&parse);
    parse_shared(&parse);
    return 0;
}

/* ---- this process's own
 * ------------------------------------------------------------------------------------------- */

static struct tp_config own_config;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static const char *process_variable(const char *name, void *arg) {
    (void)arg;
    return getenv(name);
}

static void parse_own(void) {
    const struct tp_store_config *store = &own_config.store;
    const struct tp_engine_config *engine = &own_config.engine;

    tp_config_parse(process_variable, NULL, &own_config);
    if (store->half == TP_HALF_INVALID)
        tp_log(TP_LOG_ERROR, "%s; this store will not get memory for its segments", store->error);
    if (engine->half == TP_HALF_INVALID)
        tp_log(TP_LOG_ERROR, "%s; shared memory is off here, transfers are left to Mooncake",
               engine->error);
    for (unsigned i = 0; i < own_config.notice_count; i++)
        tp_log(TP_LOG_INFO, "%s", own_config.notices[i]);
}

const struct tp_config *tp_config(void) {
    pthread_once(&own_once, parse_own);
    return &own_config;
}
