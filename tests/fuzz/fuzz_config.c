/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the settings: the input is "NAME=VALUE" records with a NUL after each. They become
 * the variables that tp_config_parse sees, MC_TENT_CONF included; an input without a '=' before its
 * first NUL is a JSON text by itself. MC_TENT_CONF never names a file here, so no input can make
 * the fuzzer read one.
 *
 * With clang, from the top of the tree:
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. tests/fuzz/fuzz_config.c
 * env/[a-z]*.c -ljansson -o fuzz
 *   ./fuzz -dict=tests/fuzz/config.dict corpus-of-your-own tests/fuzz/corpus-config
 * Elsewhere -DREPLAY gives a program that runs the files and directories of its arguments, or
 * standard input (AFL).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "env/env.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

struct input {
    const char *text;
    size_t bytes;
};

static const char *find_variable(const char *name, void *arg) {
    const struct input *input = arg;
    size_t length = strlen(name);
    const char *value = NULL;

    for (size_t at = 0; at < input->bytes; at += strlen(input->text + at) + 1) {
        const char *record = input->text + at;

        if (!strncmp(record, name, length) && record[length] == '=')
            value = record + length + 1;
    }
    if (!strchr(input->text, '='))
        value = strcmp(name, "MC_TENT_CONF") ? NULL : input->text;
    if (value && !strcmp(name, "MC_TENT_CONF") && value[strspn(value, " \t\r\n")] != '{')
        return NULL;
    return value;
}

static void require(bool right, const char *what) {
    if (right)
        return;
    fprintf(stderr, "fuzz_config: not true: %s\n", what);
    abort();
}

static void check_text(const char *text, size_t room) {
    size_t length = strnlen(text, room);

    require(length < room, "texts end");
    for (size_t i = 0; i < length; i++)
        require((unsigned char)text[i] >= 0x20 && text[i] != 0x7f, "texts are one line");
}

static void check_half(enum tp_half half, const char *error, size_t room) {
    check_text(error, room);
    require((half == TP_HALF_INVALID) == (error[0] != '\0'),
            "invalid halves, and only they, say why");
}

static void check_config(const struct tp_config *config) {
    const struct tp_store_config *store = &config->store;
    const struct tp_engine_config *engine = &config->engine;

    check_half(store->half, store->error, sizeof(store->error));
    check_half(engine->half, engine->error, sizeof(engine->error));
    require(config->notice_count <= 16, "notices are bounded");
    for (unsigned i = 0; i < config->notice_count; i++)
        check_text(config->notices[i], sizeof(config->notices[i]));
    require(config->allow_uid_count <= TP_MAX_UIDS, "user ids are bounded");
    require(store->node_count <= TP_MAX_NODES, "nodes are bounded");
    require(store->piece_bytes <= UINT64_C(1) << 46, "sizes are bounded");
    require(engine->register_max_bytes <= UINT64_C(1) << 46, "sizes are bounded");
    require(engine->copy_threads <= 64 && store->wait_s <= 86400, "counts are bounded");
    if (store->half == TP_HALF_ON)
        require(store->kind != TP_SEGMENT_NONE && store->socket_dir[0] == '/',
                "a store can listen");
    if (engine->half == TP_HALF_ON)
        require(engine->socket_dir[0] == '/', "an engine knows where to look");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static struct tp_config config;
    char *text = malloc(bytes + 1);
    struct input input = {.text = text, .bytes = bytes};

    if (!text)
        return 0;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    memset(&config, 0xa5, sizeof(config));
    require(tp_config_parse(find_variable, &input, &config) == 0, "parsing returns 0");
    check_config(&config);
    free(text);
    return 0;
}

#ifdef REPLAY
#include <dirent.h>
#include <limits.h>

#define MAX_INPUT_BYTES ((size_t)4 << 20)

static unsigned replayed;

static void replay_stream(FILE *file) {
    uint8_t *data = malloc(MAX_INPUT_BYTES);

    require(data != NULL, "memory for an input");
    LLVMFuzzerTestOneInput(data, fread(data, 1, MAX_INPUT_BYTES, file));
    replayed++;
    free(data);
}

static void replay_path(const char *path) {
    char entry_path[PATH_MAX];
    DIR *dir = opendir(path);
    FILE *file;

    if (!dir) {
        file = fopen(path, "rbe");
        require(file != NULL, "the named file opens");
        replay_stream(file);
        fclose(file);
        return;
    }
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(entry_path, sizeof(entry_path), "%s/%s", path, entry->d_name);
        replay_path(entry_path);
    }
    closedir(dir);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        replay_path(argv[i]);
    if (argc == 1)
        replay_stream(stdin);
    printf("%u inputs\n", replayed);
    return replayed > 0 ? 0 : 1;
}
#endif
