/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `tidepool run`: put the library and its settings into the environment, check them as the library
 * would, become the program.
 *
 * It must not know what the settings do: env/ parses the result, and what it refuses is not
 * started. (The library itself never stops a program for an engine's wrong setting; a person who
 * types `run` wants to know.)
 */
#include "tools/tool.h"

#include "env/env.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct options {
    const char *store, *engine, *segment, *library;
    bool hugepages, print;
    char **command; /* NULL-terminated, may be empty with --print */
};

/* What will be set: at most one entry for each name. */
struct assignment {
    const char *name;
    char *value; /* owned */
};
struct assignments {
    struct assignment list[10];
    size_t count;
};

static void print_help(FILE *out) {
    (void)fputs(
        "usage: tidepool run [--store DIR] [--engine DIR] [OPTIONS] -- COMMAND [ARGUMENT]...\n"
        "\n"
        "Run COMMAND with the library preloaded. DIR is the directory in which the processes of "
        "this host find each other; it\n"
        "is made (mode 0700) when it is missing. Give the same DIR to the store and to its "
        "engines. Without --store and\n"
        "--engine the settings are those of the environment. With MC_TENT_PLATFORM=cpu, stand-ins "
        "for CUDA's libraries are\n"
        "named in LD_LIBRARY_PATH where those are missing.\n"
        "\n"
        "  --store DIR       the memory that COMMAND gives to Mooncake can be mapped by engines\n"
        "  --engine DIR      COMMAND uses shared memory for stores found in DIR\n"
        "  --segment WHERE   with --store: what segments are made of: cuda (CUDA host memory), "
        "memfd, or a directory on\n"
        "                    hugetlbfs or tmpfs; default: cuda where the driver can make it, else "
        "memfd\n"
        "  --hugepages       with --store and memfd: on reserved huge pages\n"
        "  --lib PATH        the library, instead of the one that belongs to this tool\n"
        "  --print           do not run; print what would be set, for a shell to read\n"
        "\n"
        "Exit status: that of COMMAND; 125 when nothing was started because of a setting or an "
        "argument; 126 when COMMAND\n"
        "cannot be executed; 127 when it is not found.\n",
        out);
}

static void assign(struct assignments *set, const char *name, char *value) {
    set->list[set->count].name = name;
    set->list[set->count].value = value;
    set->count++;
}

static void free_assignments(struct assignments *set) {
    for (size_t i = 0; i < set->count; i++) {
        free(set->list[i].value);
    }
    set->count = 0;
}

/* The environment as COMMAND will see it. */
static const char *future_getenv(const char *name, void *arg) {
    const struct assignments *set = arg;

    for (size_t i = 0; i < set->count; i++) {
        if (strcmp(name, set->list[i].name) == 0) {
            return set->list[i].value;
        }
    }
    return getenv(name);
}

/* 0: go on; otherwise the exit status + 1 (0 is a status too). */
static int parse_options(int argc, char **argv, struct options *ret_options) {
    static const struct option known[] = {
        {"store", required_argument, NULL, 's'},   {"engine", required_argument, NULL, 'e'},
        {"segment", required_argument, NULL, 'm'}, {"hugepages", no_argument, NULL, 'H'},
        {"lib", required_argument, NULL, 'l'},     {"print", no_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0},
    };
    struct options options = {0};
    int option;

    opterr = 0;
    while ((option = getopt_long(argc, argv, "+:h", known, NULL)) != -1) {
        switch (option) {
        case 's':
            options.store = optarg;
            break;
        case 'e':
            options.engine = optarg;
            break;
        case 'm':
            options.segment = optarg;
            break;
        case 'H':
            options.hugepages = true;
            break;
        case 'l':
            options.library = optarg;
            break;
        case 'p':
            options.print = true;
            break;
        case 'h':
            print_help(stdout);
            return TOOL_OK + 1;
        case ':':
            tool_error("run", "%s needs a value (tidepool run --help)", argv[optind - 1]);
            return TOOL_RUN_REFUSED + 1;
        default:
            tool_error("run", "unknown option '%s' (tidepool run --help)", argv[optind - 1]);
            return TOOL_RUN_REFUSED + 1;
        }
    }
    options.command = argv + optind;
    *ret_options = options;
    return 0;
}

static int check_options(const struct options *options) {
    const char *names[] = {options->store, options->engine, options->segment, options->library};

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if (names[i] && !*names[i]) {
            tool_error("run", "--%s is empty; expected a directory or a path",
                       (const char *[]){"store", "engine", "segment", "lib"}[i]);
            return -EINVAL;
        }
    }
    if (!options->store && (options->segment || options->hugepages)) {
        tool_error("run", "--%s says what the store's segments are made of: it needs --store DIR",
                   options->segment ? "segment" : "hugepages");
        return -EINVAL;
    }
    if (options->hugepages && options->segment && strcmp(options->segment, "memfd") != 0) {
        tool_error("run",
                   "--hugepages is for memfd segments; the pages of '%s' are those of its mount",
                   options->segment);
        return -EINVAL;
    }
    if (!options->command[0] && !options->print) {
        tool_error("run",
                   "no command to run: tidepool run [OPTIONS] -- COMMAND (tidepool run --help)");
        return -EINVAL;
    }
    return 0;
}

/* The directory's absolute path, so that it holds wherever the program changes to. With `create` it
 * exists afterwards. */
static char *absolute_dir(const char *dir, bool create) {
    static struct tp_config
        config; /* for TIDEPOOL_ALLOW_UIDS only: the directory may be another user's */
    char error[512] = "";
    char *base = dir[0] == '/' ? strdup("") : getcwd(NULL, 0);
    char *path = NULL;
    char *resolved = NULL;
    int fd;

    if (!base || asprintf(&path, "%s%s%s", base, *base ? "/" : "", dir) < 0) {
        path = NULL;
        goto out;
    }
    if (create) {
        (void)tp_config_parse(tool_getenv, NULL, &config);
        fd = tp_host_open_dir(path, true, &config, error, sizeof(error));
        if (fd < 0) {
            tool_error("run", "%s", *error ? error : strerror(-fd));
            goto out;
        }
        (void)close(fd);
    }
    resolved = realpath(path, NULL);
    if (!resolved && !create && errno == ENOENT) {
        resolved = path; /* --print of a directory that does not exist yet */
        path = NULL;
    } else if (!resolved) {
        tool_error("run", "%s: %s", path, strerror(errno));
    }
out:
    free(base);
    free(path);
    return resolved;
}

/* Is `path` one of the entries of a value of LD_PRELOAD? */
static bool preloads(const char *value, const char *path) {
    size_t length = strlen(path);

    for (const char *at = strstr(value, path); at; at = strstr(at + 1, path)) {
        bool begins = at == value || strchr(" :", at[-1]);
        if (begins && strchr(" :", at[length])) { /* the end of the string counts, too */
            return true;
        }
    }
    return false;
}

/* ld.so splits LD_PRELOAD at spaces and colons and expands $ORIGIN and its like: there is no way to
 * quote. */
static int add_preload(struct assignments *set, const struct options *options,
                       char ret_library[static PATH_MAX]) {
    char found[PATH_MAX];
    char looked[4 * PATH_MAX] = "";
    const char *before = getenv("LD_PRELOAD");
    char *value = NULL;

    if (options->library && (!realpath(options->library, found) || access(found, R_OK) != 0)) {
        tool_error("run", "--lib %s: %s", options->library, strerror(errno));
        return -ENOENT;
    }
    if (!options->library && tool_find_library(found, sizeof(found), looked, sizeof(looked)) != 0) {
        tool_error("run", "libtidepool.so is in none of: %s. Name it with --lib PATH", looked);
        return -ENOENT;
    }
    if (strpbrk(found, " :$\t\n")) {
        tool_error(
            "run",
            "%s: LD_PRELOAD cannot hold a path with a space, a colon or '$'; move the library",
            found);
        return -EINVAL;
    }
    bool more = before && *before;
    bool there = more && preloads(before, found);
    if (asprintf(&value, "%s%s%s", there ? "" : found, more && !there ? ":" : "",
                 more ? before : "") < 0) {
        return -ENOMEM;
    }
    assign(set, "LD_PRELOAD", value);
    memcpy(ret_library, found, strlen(found) + 1);
    return 0;
}

/* MC_TENT_PLATFORM=cpu: modules built for CUDA load, also where there is none. */
static int add_stand_ins(struct assignments *set, const char *library) {
    const char *platform = getenv("MC_TENT_PLATFORM");
    char *path = NULL;

    if (!platform || strcmp(platform, "cpu") != 0) {
        return 0;
    }
    int result = tool_stand_ins(library, &path);
    if (path) {
        assign(set, "LD_LIBRARY_PATH", path);
    }
    return result;
}

/* What the user has put into the environment; empty is as good as not there. */
static const char *given(const char *name) {
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

/*
 * What segments are made of when --segment does not say: *ret_segment is memfd or cuda, or NULL
 * where the environment says it. One line tells which and why. 0 or -EINVAL with an error printed.
 */
static int choose_segment(const struct options *options, const char *library, const char *dir,
                          const char **ret_segment) {
    const char *cumem = given("MC_STORE_CUMEM_SOCKET_DIR");
    const char *shm = given("MC_STORE_SHM_SEGMENT_DIR");
    char why[PATH_MAX + 128];
    char resolved[PATH_MAX];

    *ret_segment = options->hugepages ? "memfd" : NULL;
    if (options->hugepages) {
        return 0;
    }
    if (cumem && (!realpath(cumem, resolved) || strcmp(resolved, dir) != 0)) {
        tool_error("run",
                   "--store %s and MC_STORE_CUMEM_SOCKET_DIR=%s name different directories: unset "
                   "the variable, or name that directory",
                   dir, cumem);
        return -EINVAL;
    }
    if (cumem || shm) {
        tool_error("run", "store memory: as %s in the environment says (%s)",
                   cumem ? "MC_STORE_CUMEM_SOCKET_DIR" : "MC_STORE_SHM_SEGMENT_DIR",
                   cumem ? "CUDA host memory" : shm);
        return 0;
    }
    bool cuda = tool_choose_cuda(library, why, sizeof(why));
    *ret_segment = cuda ? "cuda" : "memfd";
    tool_error("run", "store memory: %s (%s)", cuda ? "CUDA host memory" : "memfd", why);
    return 0;
}

static int add_segment(struct assignments *set, const char *segment, const char *dir) {
    bool cuda = strcmp(segment, "cuda") == 0;
    char *value = cuda                            ? strdup(dir)
                  : strcmp(segment, "memfd") == 0 ? strdup("memfd")
                                                  : absolute_dir(segment, false);

    if (!value) {
        return -ENOENT;
    }
    assign(set, cuda ? "MC_STORE_CUMEM_SOCKET_DIR" : "MC_STORE_SHM_SEGMENT_DIR", value);
    return 0;
}

static int add_value(struct assignments *set, const char *name, const char *value) {
    char *copy = strdup(value);

    if (!copy) {
        return -ENOMEM;
    }
    assign(set, name, copy);
    return 0;
}

static int add_store(struct assignments *set, const struct options *options, const char *library) {
    const char *segment = options->segment;
    bool folder = segment && strcmp(segment, "memfd") != 0 && strcmp(segment, "cuda") != 0;
    struct stat about;

    if (!options->store) {
        return 0;
    }
    if (folder && (stat(segment, &about) != 0 || !S_ISDIR(about.st_mode))) {
        tool_error("run",
                   "--segment %s: not a directory; expected cuda, memfd, or a directory on "
                   "hugetlbfs or tmpfs",
                   segment);
        return -ENOTDIR;
    }
    char *dir = absolute_dir(options->store, !options->print);
    if (!dir) {
        return -ENOENT;
    }
    assign(set, "TIDEPOOL_SOCKET_DIR", dir);
    int result = segment ? 0 : choose_segment(options, library, dir, &segment);
    if (!result && segment) {
        result = add_segment(set, segment, dir);
    }
    if (!result && options->hugepages) {
        result = add_value(set, "TIDEPOOL_HUGEPAGES", "1");
    }
    return result;
}

/* The user's MC_TENT_CONF as an object we may change: {} when there is none. NULL after an error
 * was printed. */
static json_t *user_engine_config(void) {
    const char *given = getenv("MC_TENT_CONF");
    json_error_t error;
    json_t *config = NULL;

    if (!given || given[strspn(given, " \t\r\n")] == '\0') {
        return json_object();
    }
    bool text = given[strspn(given, " \t\r\n")] == '{';
    config = text ? json_loads(given, JSON_REJECT_DUPLICATES, &error)
                  : json_load_file(given, JSON_REJECT_DUPLICATES, &error);
    if (!config) {
        if (text) {
            tool_error("run", "MC_TENT_CONF is not JSON: line %d: %s", error.line, error.text);
        } else {
            tool_error("run", "MC_TENT_CONF=%s: %s%s; expected a JSON file or the JSON itself",
                       given, error.line > 0 ? "not JSON: " : "", error.text);
        }
        return NULL;
    }
    if (!json_is_object(config)) {
        tool_error("run", "MC_TENT_CONF=%s: expected a JSON object", given);
        json_decref(config);
        return NULL;
    }
    return config;
}

/* The object `key` of `parent`, made when missing. Borrowed; NULL after an error was printed. */
static json_t *child_object(json_t *parent, const char *key, const char *path) {
    json_t *child = json_object_get(parent, key);

    if (!child) {
        (void)json_object_set_new(parent, key, json_object());
        child = json_object_get(parent, key);
    }
    if (!json_is_object(child)) {
        tool_error("run", "MC_TENT_CONF: %s is not an object: cannot add to it", path);
        return NULL;
    }
    return child;
}

/* The copies of one call go out together, unless the user has said otherwise. */
static int add_batched(struct assignments *set) {
    static const char *const names[] = {"MC_STORE_BATCHED_GET", "MC_STORE_BATCHED_PUT"};
    int result = 0;

    for (size_t i = 0; i < sizeof(names) / sizeof(*names) && !result; i++) {
        result = getenv(names[i]) ? 0 : add_value(set, names[i], "1");
    }
    return result;
}

static int add_engine(struct assignments *set, const struct options *options) {
    char *dir = NULL;
    char *text = NULL;
    json_t *config = NULL;
    json_t *shm = NULL;
    int result = -EINVAL;

    if (!options->engine) {
        return 0;
    }
    config = user_engine_config();
    if (!config) {
        goto out;
    }
    shm = child_object(config, "transports", "transports");
    shm = shm ? child_object(shm, "shm", "transports.shm") : NULL;
    dir = shm ? absolute_dir(options->engine, !options->print) : NULL;
    if (!dir) {
        goto out;
    }
    if (json_object_set_new(shm, "enable", json_true()) != 0 ||
        json_object_set_new(shm, "socket_dir", json_string(dir)) != 0) {
        tool_error("run", "--engine %s: the path is not UTF-8, and MC_TENT_CONF is JSON", dir);
        goto out;
    }
    text = json_dumps(config, JSON_COMPACT);
    if (!text) {
        result = -ENOMEM;
        goto out;
    }
    assign(set, "MC_TENT_CONF", text);
    result = add_batched(set);
out:
    json_decref(config);
    free(dir);
    return result;
}

/* Would the library accept this? Better asked now than found in the log of a store that failed to
 * set up. */
static int check_result(const struct assignments *set, const struct options *options) {
    struct tp_config *config = calloc(1, sizeof(*config));
    int result = config ? 0 : -ENOMEM;

    if (!config) {
        return result;
    }
    (void)tp_config_parse(future_getenv, (void *)set, config);
    if (config->store.half == TP_HALF_INVALID) {
        tool_error("run", "%s", config->store.error);
        result = -EINVAL;
    }
    if (config->engine.half == TP_HALF_INVALID) {
        tool_error("run", "%s", config->engine.error);
        result = -EINVAL;
    }
    if (!result && config->store.half == TP_HALF_OFF && config->engine.half == TP_HALF_OFF) {
        tool_error("run", "nothing is configured: give --store DIR, --engine DIR or both, or set "
                          "the variables of "
                          "tidepool(1)");
        result = -EINVAL;
    }
    free(config);
    return result;
}

static void print_assignments(const struct assignments *set) {
    for (size_t i = 0; i < set->count; i++) {
        (void)printf("export %s=", set->list[i].name);
        text_shell_quoted(stdout, set->list[i].value);
        (void)putchar('\n');
    }
}

static int become(const struct assignments *set, char **command) {
    for (size_t i = 0; i < set->count; i++) {
        if (setenv(set->list[i].name, set->list[i].value, 1) != 0) {
            tool_error("run", "cannot set %s: %s", set->list[i].name, strerror(errno));
            return TOOL_RUN_REFUSED;
        }
    }
    (void)fflush(stdout);
    (void)execvp(command[0], command);
    int error = errno;
    tool_error("run", "%s: %s", command[0], strerror(error));
    return error == ENOENT ? TOOL_RUN_NOT_FOUND : TOOL_RUN_NO_EXEC;
}

int tool_run(int argc, char **argv) {
    struct options options;
    struct assignments set = {0};
    char library[PATH_MAX];
    int status = parse_options(argc, argv, &options);

    if (status) {
        return status - 1;
    }
    status = TOOL_RUN_REFUSED;
    if (check_options(&options) || add_preload(&set, &options, library) ||
        add_stand_ins(&set, library) || add_store(&set, &options, library) ||
        add_engine(&set, &options) || check_result(&set, &options)) {
        goto out;
    }
    if (options.print) {
        print_assignments(&set);
        status = TOOL_OK;
        goto out;
    }
    status = become(&set, options.command);
out:
    free_assignments(&set);
    return status;
}
