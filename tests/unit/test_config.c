/* SPDX-License-Identifier: Apache-2.0 */
/* Settings mean what the reference says, and a wrong one gives a line that helps and a half that
 * stays out of the way. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "env/env.h"
#include "env/values.h"
#include "scratch.h"

#define CONF(body) "MC_TENT_CONF={\"transports\": {\"shm\": {\"enable\": true" body "}}}"
#define STORE "MC_STORE_SHM_SEGMENT_DIR=memfd", "TIDEPOOL_SOCKET_DIR=/run/t"
#define ENGINE CONF(", \"socket_dir\": \"/run/t\"")

TestSuite(config, .timeout = 30);

static struct tp_config config;

/* `variables` is a list of "NAME=VALUE" that ends with NULL. */
static const char *from_list(const char *name, void *variables) {
    size_t length = strlen(name);
    for (const char *const *at = variables; *at; at++)
        if (!strncmp(*at, name, length) && (*at)[length] == '=')
            return *at + length + 1;
    return NULL;
}

#define PARSE(...) parse((const char *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})
static void parse(const char *const *variables) {
    memset(&config, 0xa5, sizeof config);
    cr_assert_eq(tp_config_parse(from_list, (void *)variables, &config), 0);
}

static bool noticed(const char *fragment) {
    for (unsigned i = 0; i < config.notice_count; i++)
        if (strstr(config.notices[i], fragment))
            return true;
    return false;
}

static bool one_clean_line(const char *text) {
    for (const char *at = text; *at; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7f)
            return false;
    return *text && strlen(text) < 512;
}

Test(config, nothing_set_is_inert) {
    PARSE();
    cr_assert_eq(config.store.half, TP_HALF_OFF);
    cr_assert_eq(config.engine.half, TP_HALF_OFF);
    cr_assert_eq(config.notice_count, 0);
    cr_assert_eq(config.store.wait_s, 300);
    cr_assert(config.engine.device_copy);
    cr_assert_not(config.boot_id_only);
}

Test(config, empty_variables_are_unset) {
    PARSE("MC_STORE_SHM_SEGMENT_DIR=", "MC_STORE_CUMEM_SOCKET_DIR=", "MC_TENT_CONF=",
          "TIDEPOOL_SOCKET_DIR=", "TIDEPOOL_ALLOW_UIDS=", "MC_STORE_CUMEM_NUMA_NODES=",
          "MC_TENT_MACHINE_ID=");
    cr_assert_eq(config.store.half, TP_HALF_OFF);
    cr_assert_eq(config.engine.half, TP_HALF_OFF);
    cr_assert_eq(config.notice_count, 0);
}

Test(config, memfd_store) {
    PARSE(STORE, "MC_STORE_CUMEM_NUMA_NODES=0,0,0-0", "MC_STORE_CUMEM_PIECE_BYTES=64MiB",
          "TIDEPOOL_HUGEPAGES=true", "TIDEPOOL_OVERCOMMIT=1");
    cr_assert_eq(config.store.half, TP_HALF_ON, "%s", config.store.error);
    cr_assert_eq(config.store.kind, TP_SEGMENT_MEMFD);
    cr_assert_str_eq(config.store.segment_dir, "");
    cr_assert_str_eq(config.store.socket_dir, "/run/t");
    cr_assert_eq(config.store.node_count, 1);
    cr_assert_eq(config.store.nodes[0], 0);
    cr_assert_eq(config.store.piece_bytes, 64 << 20);
    cr_assert(config.store.hugepages);
    cr_assert(config.store.overcommit);
    cr_assert_eq(config.engine.half, TP_HALF_OFF);
}

Test(config, file_store_listens_in_its_directory_unless_told) {
    PARSE("MC_STORE_SHM_SEGMENT_DIR=/mnt/huge");
    cr_assert_eq(config.store.half, TP_HALF_ON, "%s", config.store.error);
    cr_assert_eq(config.store.kind, TP_SEGMENT_FILES);
    cr_assert_str_eq(config.store.segment_dir, "/mnt/huge");
    cr_assert_str_eq(config.store.socket_dir, "/mnt/huge");
    PARSE("MC_STORE_SHM_SEGMENT_DIR=/mnt/huge", "TIDEPOOL_SOCKET_DIR=/run/t");
    cr_assert_str_eq(config.store.segment_dir, "/mnt/huge");
    cr_assert_str_eq(config.store.socket_dir, "/run/t");
}

Test(config, cumem_store_is_parsed) {
    PARSE("MC_STORE_CUMEM_SOCKET_DIR=/run/c", "TIDEPOOL_SOCKET_DIR=/run/t");
    cr_assert_eq(config.store.half, TP_HALF_ON, "%s", config.store.error);
    cr_assert_eq(config.store.kind, TP_SEGMENT_CUMEM);
    cr_assert_str_eq(config.store.socket_dir, "/run/c");
    cr_assert_eq(config.notice_count, 0);
}

Test(config, engine_falls_back_to_the_socket_variable) {
    PARSE(CONF(""), "TIDEPOOL_SOCKET_DIR=/run/t");
    cr_assert_eq(config.engine.half, TP_HALF_ON, "%s", config.engine.error);
    cr_assert_str_eq(config.engine.socket_dir, "/run/t");
    PARSE(ENGINE, "TIDEPOOL_SOCKET_DIR=/elsewhere");
    cr_assert_str_eq(config.engine.socket_dir, "/run/t");
}

Test(config, inline_json_may_begin_with_blanks) {
    PARSE("MC_TENT_CONF= \n\t{\"transports\": {\"shm\": {\"enable\": true, \"socket_dir\": "
          "\"/a\"}}}");
    cr_assert_eq(config.engine.half, TP_HALF_ON, "%s", config.engine.error);
}

Test(config, engine_values_arrive) {
    PARSE(CONF(", \"socket_dir\": \"/a\", \"device_copy\": false, \"register_peer_memory\": true, "
               "\"register_max_bytes\": \"8G\", \"register_ahead_chunks\": 4, \"copy_engine\": "
               "\"kernel\", "
               "\"kernel_max_bytes\": 65536, \"kernel_blocks\": 16"),
          "TIDEPOOL_COPY_THREADS=64", "TIDEPOOL_CALL_THREADS=16", "MC_STORE_BATCHED_GET=1",
          "MC_STORE_BATCHED_PUT=TRUE", "TIDEPOOL_ALLOW_UIDS=1000, 1001,1000,4294967294",
          "MC_TENT_MACHINE_ID=boot_id", "MC_TENT_PLATFORM=cpu");
    const struct tp_engine_config *engine = &config.engine;
    cr_assert_eq(engine->half, TP_HALF_ON, "%s", engine->error);
    cr_assert_not(engine->device_copy);
    cr_assert(engine->register_peer_memory);
    cr_assert_eq(engine->register_max_bytes, UINT64_C(8) << 30);
    cr_assert_eq(engine->register_ahead_chunks, 4);
    cr_assert_eq(engine->copy_engine, TP_COPY_KERNEL);
    cr_assert_eq(engine->kernel_max_bytes, 65536);
    cr_assert_eq(engine->kernel_blocks, 16);
    cr_assert_eq(engine->copy_threads, 64);
    cr_assert_eq(engine->call_threads, 16);
    cr_assert(engine->batched_get && engine->batched_put);
    cr_assert_eq(config.allow_uid_count, 3);
    cr_assert_eq(config.allow_uids[2], 4294967294U);
    cr_assert(config.boot_id_only && config.platform_cpu);
}

Test(config, foreign_values_of_mooncakes_settings_are_left_alone) {
    PARSE(STORE, ENGINE, "MC_TENT_MACHINE_ID=rack7", "MC_TENT_PLATFORM=cuda",
          "MOONCAKE_STORE_BACKEND=cpp");
    cr_assert_eq(config.store.half, TP_HALF_ON, "%s", config.store.error);
    cr_assert_eq(config.engine.half, TP_HALF_ON, "%s", config.engine.error);
    cr_assert_not(config.boot_id_only || config.platform_cpu);
    cr_assert(noticed("MC_TENT_MACHINE_ID: \"rack7\""));
    cr_assert(noticed("MC_TENT_PLATFORM: \"cuda\""));
}

/* Mooncake looks whether it is there. */
Test(config, huge_pages_of_mooncakes_are_asked_for_by_any_value) {
    PARSE(STORE);
    cr_assert_not(config.store.asks_hugepages);
    PARSE(STORE, "MC_STORE_USE_HUGEPAGE=0");
    cr_assert(config.store.asks_hugepages);
    PARSE(STORE, "MC_STORE_USE_HUGEPAGE=");
    cr_assert(config.store.asks_hugepages);
}

struct wrong {
    enum { STORE_HALF, ENGINE_HALF, BOTH_HALVES } half;
    const char *variable; /* added to a right configuration of both halves */
    const char *fragments[3];
};

static const struct wrong wrongs[] = {
    {STORE_HALF,
     "MC_STORE_CUMEM_SOCKET_DIR=/c",
     {"MC_STORE_CUMEM_SOCKET_DIR", "MC_STORE_SHM_SEGMENT_DIR", "memfd"}},
    {STORE_HALF,
     "MC_STORE_CUMEM_NUMA_NODES=0,977",
     {"MC_STORE_CUMEM_NUMA_NODES", "node 977", "have: 0"}},
    {STORE_HALF,
     "MC_STORE_CUMEM_NUMA_NODES=0-1023",
     {"MC_STORE_CUMEM_NUMA_NODES", "0-1023", "memory here: 0"}},
    {STORE_HALF, "MC_STORE_CUMEM_NUMA_NODES=0-99999999999999999999", {"MC_STORE_CUMEM_NUMA_NODES"}},
    {STORE_HALF, "MC_STORE_CUMEM_NUMA_NODES=1-0", {"MC_STORE_CUMEM_NUMA_NODES", "expected"}},
    {STORE_HALF,
     "MC_STORE_CUMEM_NUMA_NODES=all",
     {"MC_STORE_CUMEM_NUMA_NODES", "\"all\"", "expected"}},
    {STORE_HALF, "MC_STORE_CUMEM_NUMA_NODES=0,", {"MC_STORE_CUMEM_NUMA_NODES", "expected"}},
    {STORE_HALF,
     "MC_STORE_CUMEM_PIECE_BYTES=0",
     {"MC_STORE_CUMEM_PIECE_BYTES", "\"0\"", "above 0"}},
    {STORE_HALF, "MC_STORE_CUMEM_PIECE_BYTES=-1", {"MC_STORE_CUMEM_PIECE_BYTES", "\"-1\""}},
    {STORE_HALF,
     "MC_STORE_CUMEM_PIECE_BYTES=65T",
     {"MC_STORE_CUMEM_PIECE_BYTES", "\"65T\"", "64 TiB"}},
    {STORE_HALF,
     "MC_STORE_CUMEM_PIECE_BYTES=18446744073709551617",
     {"MC_STORE_CUMEM_PIECE_BYTES", "64 TiB"}},
    {STORE_HALF, "MC_STORE_CUMEM_PIECE_BYTES=2GB", {"MC_STORE_CUMEM_PIECE_BYTES", "\"2GB\""}},
    {STORE_HALF, "MC_STORE_CUMEM_PIECE_BYTES= 2G", {"MC_STORE_CUMEM_PIECE_BYTES", "\" 2G\""}},
    {STORE_HALF, "MC_STORE_CUMEM_PIECE_BYTES=1.5G", {"MC_STORE_CUMEM_PIECE_BYTES", "\"1.5G\""}},
    {STORE_HALF, "TIDEPOOL_HUGEPAGES=yes", {"TIDEPOOL_HUGEPAGES", "\"yes\"", "0 or 1"}},
    {STORE_HALF, "TIDEPOOL_OVERCOMMIT=2", {"TIDEPOOL_OVERCOMMIT", "\"2\"", "0 or 1"}},
    {STORE_HALF,
     "MC_STORE_SHM_SEGMENT_WAIT_S=86401",
     {"MC_STORE_SHM_SEGMENT_WAIT_S", "\"86401\"", "0 to 86400"}},
    {ENGINE_HALF, "TIDEPOOL_COPY_THREADS=65", {"TIDEPOOL_COPY_THREADS", "\"65\"", "0 to 64"}},
    {ENGINE_HALF, "TIDEPOOL_CALL_THREADS=17", {"TIDEPOOL_CALL_THREADS", "\"17\"", "0 to 16"}},
    {ENGINE_HALF, "TIDEPOOL_COPY_THREADS=four", {"TIDEPOOL_COPY_THREADS", "\"four\"", "0 to 64"}},
    {ENGINE_HALF, "MC_STORE_BATCHED_GET=2", {"MC_STORE_BATCHED_GET", "\"2\"", "0 or 1"}},
    {ENGINE_HALF, "MC_STORE_BATCHED_PUT=on", {"MC_STORE_BATCHED_PUT", "\"on\"", "0 or 1"}},
    {BOTH_HALVES, "TIDEPOOL_ALLOW_UIDS=root", {"TIDEPOOL_ALLOW_UIDS", "\"root\"", "user ids"}},
    {BOTH_HALVES, "TIDEPOOL_ALLOW_UIDS=4294967295", {"TIDEPOOL_ALLOW_UIDS", "\"4294967295\""}},
    {BOTH_HALVES, "TIDEPOOL_ALLOW_UIDS=1-33", {"TIDEPOOL_ALLOW_UIDS", "at most 32"}},
    {BOTH_HALVES, "TIDEPOOL_ALLOW_UIDS=0-4294967294", {"TIDEPOOL_ALLOW_UIDS", "at most 32"}},
    {BOTH_HALVES, "MOONCAKE_STORE_BACKEND=rs", {"MOONCAKE_STORE_BACKEND", "rs"}},
};

static void check_error(const struct wrong *wrong, enum tp_half half, const char *error, bool hit) {
    cr_assert_eq(half, hit ? TP_HALF_INVALID : TP_HALF_ON, "%s: half %d, %s", wrong->variable, half,
                 error);
    for (size_t i = 0; hit && i < 3 && wrong->fragments[i]; i++)
        cr_assert(strstr(error, wrong->fragments[i]), "%s: no \"%s\" in: %s", wrong->variable,
                  wrong->fragments[i], error);
    if (hit)
        cr_assert(one_clean_line(error), "%s", error);
}

Test(config, a_wrong_value_hits_its_half_and_names_variable_value_and_expectation) {
    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        PARSE(STORE, ENGINE, wrongs[i].variable);
        check_error(&wrongs[i], config.store.half, config.store.error,
                    wrongs[i].half != ENGINE_HALF);
        check_error(&wrongs[i], config.engine.half, config.engine.error,
                    wrongs[i].half != STORE_HALF);
    }
}

Test(config, a_wrong_value_of_a_half_that_is_off_is_only_a_notice) {
    for (size_t i = 1; i < sizeof wrongs / sizeof *wrongs; i++) {
        PARSE(wrongs[i].variable);
        cr_assert_eq(config.store.half, TP_HALF_OFF, "%s", wrongs[i].variable);
        cr_assert_eq(config.engine.half, TP_HALF_OFF, "%s", wrongs[i].variable);
        cr_assert(noticed(wrongs[i].fragments[0]), "%s", wrongs[i].variable);
    }
}

Test(config, directories_of_stores) {
    PARSE("MC_STORE_SHM_SEGMENT_DIR=memfd");
    cr_assert_eq(config.store.half, TP_HALF_INVALID);
    cr_assert(strstr(config.store.error, "TIDEPOOL_SOCKET_DIR"));
    PARSE("MC_STORE_SHM_SEGMENT_DIR=huge");
    cr_assert(
        strstr(config.store.error, "MC_STORE_SHM_SEGMENT_DIR: \"huge\" is not an absolute path"));
    PARSE("MC_STORE_CUMEM_SOCKET_DIR=./c");
    cr_assert(
        strstr(config.store.error, "MC_STORE_CUMEM_SOCKET_DIR: \"./c\" is not an absolute path"));
    PARSE("MC_STORE_SHM_SEGMENT_DIR=memfd", "TIDEPOOL_SOCKET_DIR=t", CONF(""));
    cr_assert(strstr(config.store.error, "TIDEPOOL_SOCKET_DIR: \"t\""));
    cr_assert(strstr(config.engine.error, "TIDEPOOL_SOCKET_DIR: \"t\""));
}

Test(config, hostile_texts_stay_one_short_line) {
    char variable[70000] = "MC_STORE_SHM_SEGMENT_DIR=";
    memset(variable + strlen(variable), 'x', sizeof variable - strlen(variable) - 1);
    variable[sizeof variable - 1] = '\0';
    PARSE(variable);
    cr_assert_eq(config.store.half, TP_HALF_INVALID);
    cr_assert(one_clean_line(config.store.error));
    PARSE("MC_STORE_SHM_SEGMENT_DIR=\x1b[2J\r\nfake line\x7f", "MC_TENT_CONF=\n\x1b]0;x\a");
    cr_assert(one_clean_line(config.store.error), "%s", config.store.error);
    cr_assert(one_clean_line(config.engine.error), "%s", config.engine.error);
}

Test(config, odd_piece_sizes_are_rounded_with_a_notice) {
    PARSE(STORE, "MC_STORE_CUMEM_PIECE_BYTES=12345");
    cr_assert_eq(config.store.half, TP_HALF_ON);
    cr_assert_eq(config.store.piece_bytes, 12345);
    cr_assert(noticed("MC_STORE_CUMEM_PIECE_BYTES"));
}

Test(config, notices_have_a_bound) {
    char variable[2048] =
        "MC_TENT_CONF={\"transports\": {\"shm\": {\"enable\": true, \"socket_dir\": \"/a\"";
    for (int i = 0; i < 40; i++)
        snprintf(variable + strlen(variable), sizeof variable - strlen(variable), ", \"key%d\": 1",
                 i);
    snprintf(variable + strlen(variable), sizeof variable - strlen(variable), "}}}");
    PARSE(variable);
    cr_assert_eq(config.engine.half, TP_HALF_ON, "%s", config.engine.error);
    cr_assert_eq(config.notice_count, 16);
    cr_assert_str_eq(config.notices[15], "and more");
}

/* ---- the reference ---- */

static char asked[64][64];
static unsigned asked_count;

static const char *record(const char *name, void *arg) {
    cr_assert_lt(asked_count, 64);
    snprintf(asked[asked_count++], sizeof *asked, "%s", name);
    return from_list(name, arg);
}

static bool is_json_path(const char *name) {
    return !strncmp(name, "transports.", 11);
}

Test(config, the_reference_lists_exactly_the_variables_that_are_read) {
    const char *const list[] = {STORE, ENGINE, NULL};
    cr_assert_eq(tp_config_parse(record, (void *)list, &config), 0);
    for (unsigned i = 0; i < asked_count; i++) {
        const struct tp_setting *setting = tp_settings;
        while (setting->name && strcmp(setting->name, asked[i]) != 0)
            setting++;
        cr_assert(setting->name, "%s is read but not in the reference", asked[i]);
    }
    for (const struct tp_setting *setting = tp_settings; setting->name; setting++) {
        bool found = is_json_path(setting->name) || !strcmp(setting->name, "TIDEPOOL_LOG");
        for (unsigned i = 0; i < asked_count; i++)
            found = found || !strcmp(setting->name, asked[i]);
        cr_assert(found, "%s is in the reference but not read", setting->name);
        cr_assert(setting->expected && setting->default_value && setting->meaning, "%s",
                  setting->name);
    }
}

/* ---- MC_TENT_CONF as a file ---- */

static void parse_file(const char *path) {
    char variable[PATH_MAX + 32];
    snprintf(variable, sizeof variable, "MC_TENT_CONF=%s", path);
    PARSE(variable);
}

static void read_line(const char *path, char *line, size_t bytes) {
    FILE *file = fopen(path, "re");
    cr_assert(file, "%s", path);
    cr_assert(fgets(line, (int)bytes, file), "%s", path);
    line[strcspn(line, "\n")] = '\0';
    fclose(file);
}

/* Every NAME.json of a directory, with the line in NAME.`suffix`. */
static void each_file(const char *dir, const char *suffix,
                      void (*check)(const char *path, const char *line)) {
    char path[PATH_MAX], beside[PATH_MAX], line[512];
    unsigned count = 0;
    DIR *entries = opendir(dir);
    cr_assert(entries, "%s", dir);
    for (struct dirent *entry; (entry = readdir(entries));) {
        char *dot = strrchr(entry->d_name, '.');
        if (!dot || strcmp(dot, ".json") != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        snprintf(beside, sizeof beside, "%s/%.*s.%s", dir, (int)(dot - entry->d_name),
                 entry->d_name, suffix);
        read_line(beside, line, sizeof line);
        parse_file(path);
        check(path, line);
        count++;
    }
    closedir(entries);
    cr_assert_gt(count, 10);
}

static void check_valid(const char *path, const char *line) {
    cr_assert_eq(config.store.half, TP_HALF_OFF);
    cr_assert_eq(config.engine.half, strcmp(line, "off") ? TP_HALF_ON : TP_HALF_OFF, "%s: %s", path,
                 config.engine.error);
    if (strcmp(line, "off") != 0)
        cr_assert_str_eq(config.engine.socket_dir, line + strlen("on "), "%s", path);
    cr_assert_str_eq(config.engine.error, "");
}

Test(config, valid_files) {
    each_file(TENT_CONF_DIR "/valid", "expect", check_valid);
}

static void check_invalid(const char *path, const char *line) {
    cr_assert_eq(config.engine.half, TP_HALF_INVALID, "%s", path);
    cr_assert(strstr(config.engine.error, line), "%s: no \"%s\" in: %s", path, line,
              config.engine.error);
    cr_assert(one_clean_line(config.engine.error), "%s: %s", path, config.engine.error);
}

Test(config, invalid_files) {
    each_file(TENT_CONF_DIR "/invalid", "error", check_invalid);
}

static char scratch[] = "/tmp/tidepool-config-XXXXXX";

static const char *in_scratch(const char *name) {
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    return path;
}

static void remove_scratch(const char *name) {
    unlink(in_scratch(name));
    cr_assert_eq(rmdir(scratch), 0);
}

Test(config, files_that_are_no_files) {
    cr_assert(scratch_directory(scratch));
    parse_file(scratch);
    cr_assert(strstr(config.engine.error, "Is a directory"), "%s", config.engine.error);
    parse_file(in_scratch("missing"));
    cr_assert(strstr(config.engine.error, "No such file"), "%s", config.engine.error);
    cr_assert_eq(mkfifo(in_scratch("fifo"), 0600), 0);
    parse_file(in_scratch("fifo")); /* a blocking open would run into the time limit */
    cr_assert(strstr(config.engine.error, "not a regular file"), "%s", config.engine.error);
    parse_file("/dev/zero");
    cr_assert(strstr(config.engine.error, "not a regular file"), "%s", config.engine.error);
    remove_scratch("fifo");
}

Test(config, files_of_a_mebibyte_pass_and_larger_ones_do_not) {
    static char text[(1 << 20) + 1];
    const char json[] = "{\"transports\": {\"shm\": {\"enable\": true, \"socket_dir\": \"/a\"}}}";
    cr_assert(scratch_directory(scratch));
    memset(text, ' ', sizeof text);
    memcpy(text, json, sizeof json - 1);
    for (size_t bytes = sizeof text - 1; bytes <= sizeof text; bytes++) {
        int fd = open(in_scratch("big"), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        cr_assert_eq(write(fd, text, bytes), (ssize_t)bytes);
        close(fd);
        parse_file(in_scratch("big"));
        cr_assert_eq(config.engine.half, bytes < sizeof text ? TP_HALF_ON : TP_HALF_INVALID, "%s",
                     config.engine.error);
    }
    cr_assert(strstr(config.engine.error, "larger than 1 MiB"), "%s", config.engine.error);
    remove_scratch("big");
}

/* ---- no memory ---- */

static unsigned allocations_left;

static void *failing_malloc(size_t bytes) {
    if (allocations_left == 0)
        return NULL;
    allocations_left--;
    return malloc(bytes);
}

Test(config, every_failed_allocation_of_the_parser_leaves_the_engine_out) {
    bool done = false;
    json_set_alloc_funcs(failing_malloc, free);
    for (unsigned limit = 0; !done && limit < 10000; limit++) {
        allocations_left = limit;
        PARSE(CONF(", \"socket_dir\": \"/a\", \"kernel_blocks\": [1, 2, {\"x\": \"y\"}]"));
        cr_assert_eq(config.engine.half, TP_HALF_INVALID);
        cr_assert(one_clean_line(config.engine.error));
        done = allocations_left > 0;
    }
    cr_assert(done);
    cr_assert(strstr(config.engine.error, "kernel_blocks"), "%s", config.engine.error);
}

/* ---- the forms of values ---- */

Test(config, sizes) {
    static const struct {
        const char *text;
        uint64_t bytes; /* UINT64_MAX: refused */
    } cases[] = {
        {"1", 1},
        {"4096", 4096},
        {"1k", 1024},
        {"1KiB", 1024},
        {"2G", 1ULL << 31},
        {"64T", 1ULL << 46},
        {"70368744177664", 1ULL << 46},
        {"0", 0},
        {"00010", 10},
        {"70368744177665", UINT64_MAX},
        {"65T", UINT64_MAX},
        {"", UINT64_MAX},
        {"K", UINT64_MAX},
        {"1KB", UINT64_MAX},
        {"1Ki", UINT64_MAX},
        {"1Kibb", UINT64_MAX},
        {"1P", UINT64_MAX},
        {"+1", UINT64_MAX},
        {"-1", UINT64_MAX},
        {"0x10", UINT64_MAX},
        {"1e3", UINT64_MAX},
        {"99999999999999999999999K", UINT64_MAX},
        {"1 K", UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t bytes = UINT64_MAX;
        int rc = tp_value_bytes(cases[i].text, &bytes);
        cr_assert_eq(bytes, cases[i].bytes, "%s", cases[i].text);
        cr_assert_eq(rc == 0, cases[i].bytes != UINT64_MAX, "%s", cases[i].text);
    }
}

Test(config, lists) {
    uint64_t numbers[4];
    unsigned count = 0;
    cr_assert_eq(tp_value_list("3,1-2,2", 9, 4, numbers, &count), 0);
    cr_assert_eq(count, 3);
    cr_assert_eq(numbers[0], 3);
    cr_assert_eq(numbers[1], 1);
    cr_assert_eq(numbers[2], 2);
    cr_assert_lt(tp_value_list("0-4", 9, 4, numbers, &count), 0);
    cr_assert_lt(tp_value_list("10", 9, 4, numbers, &count), 0);
    cr_assert_lt(tp_value_list("1,,2", 9, 4, numbers, &count), 0);
    cr_assert_lt(tp_value_list("1-", 9, 4, numbers, &count), 0);
    cr_assert_lt(tp_value_list("1 2", 9, 4, numbers, &count), 0);
    cr_assert_lt(tp_value_list("", 9, 4, numbers, &count), 0);
    cr_assert_eq(tp_value_list("18446744073709551615", UINT64_MAX, 4, numbers, &count), 0);
    cr_assert_eq(count, 1);
}
