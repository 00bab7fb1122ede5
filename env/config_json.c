/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's half of the settings: transports.shm in MC_TENT_CONF, which is a file's path or the
 * JSON itself. All other keys are Mooncake's and are neither checked nor looked at, but the text as
 * a whole must be JSON without duplicate keys: Mooncake's parser and ours could disagree on which
 * of two is meant.
 *
 * It must not know: environment variables other than this one's name.
 */
#include "env/config_parse.h"
#include "env/text.h"
#include "env/values.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_JSON_BYTES ((size_t)1 << 20)
#define INLINE_NAME "MC_TENT_CONF"

/* One object under parsing: the key's name in messages is "transports.shm.KEY in FILE". */
struct shm_parse {
    struct tp_config *config;
    const char *source; /* "MC_TENT_CONF" or the file's path */
    const json_t *root;
    const json_t *shm;
};

/* TENT takes "transports/shm/KEY" at the top as well, where there is no such path of objects. */
static const json_t *find_value(const struct shm_parse *parse, const char *key) {
    const json_t *value = json_object_get(parse->shm, key);
    char flat[64];

    if (value)
        return value;
    tp_text_format(flat, sizeof(flat), "transports/shm/%s", key);
    return json_object_get(parse->root, flat);
}

static int read_whole(int fd, char *ret_text, size_t room, size_t *ret_bytes) {
    size_t done = 0;

    while (done < room) {
        ssize_t got = read(fd, ret_text + done, room - done);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            break;
        done += (size_t)got;
    }
    *ret_bytes = done;
    return 0;
}

/* *ret_text is from malloc. -EFBIG above the limit, -EISDIR and the like for what is not a file. */
static int read_conf_file(const char *path, char **ret_text, size_t *ret_bytes) {
    struct stat status;
    char *text = NULL;
    size_t bytes = 0;
    /* O_NONBLOCK: a FIFO would stop the host process here. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    int rc;

    if (fd < 0)
        return -errno;
    rc = -errno;
    if (fstat(fd, &status) != 0)
        goto out;
    rc = S_ISDIR(status.st_mode) ? -EISDIR : -EINVAL;
    if (!S_ISREG(status.st_mode))
        goto out;
    rc = -ENOMEM;
    text = malloc(MAX_JSON_BYTES + 1);
    if (!text)
        goto out;
    rc = read_whole(fd, text, MAX_JSON_BYTES + 1, &bytes);
    if (rc == 0 && bytes > MAX_JSON_BYTES)
        rc = -EFBIG;
    if (rc < 0)
        goto out;
    *ret_text = text;
    *ret_bytes = bytes;
    text = NULL;
out:
    free(text);
    close(fd);
    return rc;
}

static const char *error_text(int rc) {
    const char *text = strerrordesc_np(-rc);

    if (rc == -EFBIG)
        return "larger than 1 MiB";
    if (rc == -EINVAL)
        return "not a regular file";
    return text ? text : "unknown error";
}

/* The parsed text, or NULL after a finding. */
static json_t *parse_text(struct tp_config *config, const char *source, const char *text,
                          size_t bytes) {
    json_error_t error;
    json_t *root;

    /* A byte order mark, which Mooncake's parser takes too. */
    if (bytes >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) {
        text += 3;
        bytes -= 3;
    }
    root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (root)
        return root;
    if (!strcmp(source, INLINE_NAME))
        tp_parse_wrong(config, TP_ENGINE_HALF,
                       "MC_TENT_CONF: begins with { but is not JSON: line %d, column %d: %.160s",
                       error.line, error.column, error.text);
    else
        tp_parse_wrong(config, TP_ENGINE_HALF,
                       "MC_TENT_CONF: %.160s is not JSON: line %d, column %d: %.120s", source,
                       error.line, error.column, error.text);
    return NULL;
}

static json_t *load(struct tp_config *config, const char *value, const char **ret_source) {
    char *text = NULL;
    size_t bytes = 0;
    json_t *root;
    int rc;

    if (value[strspn(value, " \t\r\n")] == '{') {
        *ret_source = INLINE_NAME;
        bytes = strnlen(value, MAX_JSON_BYTES + 1);
        if (bytes <= MAX_JSON_BYTES)
            return parse_text(config, INLINE_NAME, value, bytes);
        tp_parse_wrong(config, TP_ENGINE_HALF, "MC_TENT_CONF: the JSON is larger than 1 MiB");
        return NULL;
    }
    *ret_source = value;
    rc = read_conf_file(value, &text, &bytes);
    if (rc < 0) {
        tp_parse_wrong(config, TP_ENGINE_HALF,
                       "MC_TENT_CONF: cannot read %.200s: %s (expected the path of a JSON file, or "
                       "JSON that begins with {)",
                       value, error_text(rc));
        return NULL;
    }
    root = parse_text(config, value, text, bytes);
    free(text);
    return root;
}

/* ---- values under transports.shm
 * ---------------------------------------------------------------------------------- */

static void show_value(const json_t *value, char *ret_text, size_t bytes) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    size_t length = text ? strnlen(text, bytes) : 0;

    if (!text || length >= bytes) {
        static const char *const names[] = {"an object", "an array", "a long string", "a number",
                                            "a number"};
        size_t type = (size_t)json_typeof(value);

        strncpy(ret_text, type < 5 ? names[type] : "a value", bytes - 1);
        ret_text[bytes - 1] = '\0';
    } else {
        memcpy(ret_text, text, length + 1);
    }
    free(text);
}

static void wrong_value(const struct shm_parse *parse, const char *key, const json_t *value,
                        const char *expected) {
    char shown[80];

    show_value(value, shown, sizeof(shown));
    tp_parse_wrong(parse->config, TP_ENGINE_HALF,
                   "transports.shm.%s in %.160s: %s is wrong (expected %s)", key, parse->source,
                   shown, expected);
}

static void parse_flag(const struct shm_parse *parse, const char *key, bool *ret_value) {
    const json_t *value = find_value(parse, key);

    if (!value)
        return;
    if (json_is_boolean(value))
        *ret_value = json_is_true(value);
    else
        wrong_value(parse, key, value, "true or false");
}

static void parse_count(const struct shm_parse *parse, const char *key, unsigned max,
                        const char *expected, unsigned *ret_value) {
    const json_t *value = find_value(parse, key);

    if (!value)
        return;
    if (json_is_integer(value) && json_integer_value(value) >= 0 &&
        json_integer_value(value) <= (json_int_t)max)
        *ret_value = (unsigned)json_integer_value(value);
    else
        wrong_value(parse, key, value, expected);
}

static void parse_bytes(const struct shm_parse *parse, const char *key, uint64_t *ret_bytes) {
    const json_t *value = find_value(parse, key);

    if (!value)
        return;
    if (json_is_integer(value) && json_integer_value(value) >= 0 &&
        json_integer_value(value) <= (json_int_t)TP_VALUE_MAX_BYTES)
        *ret_bytes = (uint64_t)json_integer_value(value);
    else if (!json_is_string(value) || tp_value_bytes(json_string_value(value), ret_bytes) < 0)
        wrong_value(parse, key, value, "bytes, or a string such as \"4G\", at most 64 TiB");
}

static void parse_copy_engine(const struct shm_parse *parse) {
    static const char *const names[] = {
        [TP_COPY_AUTO] = "auto", [TP_COPY_DMA] = "dma", [TP_COPY_KERNEL] = "kernel"};
    const json_t *value = find_value(parse, "copy_engine");

    if (!value)
        return;
    for (size_t i = 0; json_is_string(value) && i < sizeof(names) / sizeof(*names); i++) {
        if (!strcmp(json_string_value(value), names[i])) {
            parse->config->engine.copy_engine = (enum tp_copy_engine)i;
            return;
        }
    }
    wrong_value(parse, "copy_engine", value, "\"auto\", \"dma\" or \"kernel\"");
}

/* The directory under `key`; empty when it is not set or wrong. */
static void parse_dir(const struct shm_parse *parse, const char *key,
                      char ret_dir[static PATH_MAX]) {
    const json_t *value = find_value(parse, key);
    char name[256];

    ret_dir[0] = '\0';
    if (!value || (json_is_string(value) && json_string_length(value) == 0))
        return;
    if (!json_is_string(value)) {
        wrong_value(parse, key, value, "a directory's absolute path");
        return;
    }
    tp_text_format(name, sizeof(name), "transports.shm.%s", key);
    tp_parse_directory(parse->config, TP_ENGINE_HALF, name, json_string_value(value), ret_dir);
}

static void parse_dirs(const struct shm_parse *parse) {
    char other[PATH_MAX];
    struct tp_engine_config *engine = &parse->config->engine;

    parse_dir(parse, "socket_dir", engine->socket_dir);
    parse_dir(parse, "cumem_socket_dir", other);
    if (!engine->socket_dir[0])
        memcpy(engine->socket_dir, other, sizeof(other));
    else if (other[0] && strcmp(engine->socket_dir, other) != 0)
        tp_parse_wrong(parse->config, TP_ENGINE_HALF,
                       "transports.shm.socket_dir (%.100s) and transports.shm.cumem_socket_dir "
                       "(%.100s) in %.120s differ; they "
                       "mean the same, set one",
                       engine->socket_dir, other, parse->source);
}

/* ---- the object
 * ---------------------------------------------------------------------------------------------------
 */

static const char *const known_keys[] = {
    "enable",
    "socket_dir",
    "cumem_socket_dir",
    "device_copy",
    "register_peer_memory",
    "register_max_bytes",
    "register_ahead_chunks",
    "copy_engine",
    "kernel_max_bytes",
    "kernel_blocks",
};

static bool is_known(const char *key) {
    size_t i = 0;

    while (i < sizeof(known_keys) / sizeof(*known_keys) && strcmp(known_keys[i], key) != 0)
        i++;
    return i < sizeof(known_keys) / sizeof(*known_keys);
}

static void note_keys(const struct shm_parse *parse) {
    for (void *at = json_object_iter((json_t *)parse->shm); at;
         at = json_object_iter_next((json_t *)parse->shm, at)) {
        const char *key = json_object_iter_key(at);

        if (!is_known(key))
            tp_parse_notice(
                parse->config,
                "transports.shm.%.64s in %.120s is not a setting of Tidepool; left to Mooncake",
                key, parse->source);
    }
}

static void parse_shm(const struct shm_parse *parse) {
    struct tp_engine_config *engine = &parse->config->engine;

    parse_dirs(parse);
    parse_flag(parse, "device_copy", &engine->device_copy);
    parse_flag(parse, "register_peer_memory", &engine->register_peer_memory);
    parse_bytes(parse, "register_max_bytes", &engine->register_max_bytes);
    parse_count(parse, "register_ahead_chunks", 1024, "an integer from 0 to 1024",
                &engine->register_ahead_chunks);
    parse_copy_engine(parse);
    parse_bytes(parse, "kernel_max_bytes", &engine->kernel_max_bytes);
    parse_count(parse, "kernel_blocks", 1024, "an integer from 0 to 1024", &engine->kernel_blocks);
    note_keys(parse);
}

void tp_parse_tent_conf(struct tp_config *config, const char *value) {
    struct shm_parse parse = {.config = config};
    const json_t *transports, *enable;
    json_t *root;

    config->engine.half = TP_HALF_ON; /* so that findings make it invalid */
    root = load(config, value, &parse.source);
    if (!root)
        return;
    parse.root = root;
    transports = json_object_get(root, "transports");
    parse.shm = json_object_get(transports, "shm");
    enable = find_value(&parse, "enable");
    if (!json_is_object(root)) {
        tp_parse_wrong(config, TP_ENGINE_HALF,
                       "MC_TENT_CONF: %.160s holds no JSON object (expected {...})", parse.source);
    } else if (enable && !json_is_boolean(enable)) {
        wrong_value(&parse, "enable", enable, "true or false");
    } else if (!json_is_true(enable)) {
        config->engine.half = TP_HALF_OFF;
        if (transports &&
            (!json_is_object(transports) || (parse.shm && !json_is_object(parse.shm))))
            tp_parse_notice(config, "transports.shm in %.160s is not an object; taken as absent",
                            parse.source);
    } else {
        parse_shm(&parse);
    }
    json_decref(root);
}
