/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `tidepool status`: which directory, how often, in which form. It must not know how processes are
 * asked (scan) or what the answers mean (report).
 */
#include "env/env.h"
#include "tools/report.h"
#include "tools/scan.h"
#include "tools/tool.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_MS 1000

struct options {
    const char *directory; /* NULL: from the environment */
    bool json;
    double watch_s; /* 0: once */
};

static void print_help(FILE *out) {
    (void)fputs(
        "usage: tidepool status [DIR] [--json] [--watch SECONDS]\n"
        "\n"
        "Ask every process that shares DIR what it is doing. DIR defaults to the one that this "
        "environment configures:\n"
        "TIDEPOOL_SOCKET_DIR, the engine's in MC_TENT_CONF, or the store's. Processes that do not "
        "answer within a second are\n"
        "shown as such; what dead processes left behind is removed.\n"
        "\n"
        "  --json            everything, as JSON (tidepool(1) lists the keys)\n"
        "  --watch SECONDS   again and again, until interrupted; with --json one line each time\n"
        "\n"
        "Exit status: 0 something is there and nothing is wrong; 1 nothing is there, or something "
        "needs attention; 2 wrong\n"
        "usage, or DIR cannot be read.\n",
        out);
}

/* 0: go on; otherwise the exit status + 1. */
static int parse_options(int argc, char **argv, struct options *ret_options) {
    static const struct option known[] = {
        {"json", no_argument, NULL, 'j'},
        {"watch", required_argument, NULL, 'w'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct options options = {0};
    char *end = NULL;
    int option;

    opterr = 0;
    while ((option = getopt_long(argc, argv, ":h", known, NULL)) != -1) {
        switch (option) {
        case 'j':
            options.json = true;
            break;
        case 'w':
            options.watch_s = strtod(optarg, &end);
            if (end == optarg || *end || !(options.watch_s >= 0.05 && options.watch_s <= 86400)) {
                tool_error("status", "--watch %s: expected a number of seconds from 0.05 to 86400",
                           optarg);
                return TOOL_USAGE + 1;
            }
            break;
        case 'h':
            print_help(stdout);
            return TOOL_OK + 1;
        default:
            tool_wrong_option("status", option, argv[optind - 1]);
            return TOOL_USAGE + 1;
        }
    }
    if (optind + 1 < argc) {
        tool_error("status", "one directory at a time: '%s' is too much", argv[optind + 1]);
        return TOOL_USAGE + 1;
    }
    options.directory = argv[optind];
    *ret_options = options;
    return 0;
}

static const char *default_directory(const struct tp_config *config) {
    const char *own = getenv("TIDEPOOL_SOCKET_DIR");

    if (own && *own) {
        return own;
    }
    if (config->engine.socket_dir[0]) {
        return config->engine.socket_dir;
    }
    return config->store.socket_dir[0] ? config->store.socket_dir : NULL;
}

/*
 * Opened as it is: looking is allowed where the library would refuse to work, and then it is the
 * first thing to say. Only root sees the directories of others; those follow the rules for their
 * owner.
 */
static int open_directory(const char *path, const struct tp_config *config, char *ret_problem,
                          size_t problem_bytes) {
    struct stat about;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0) {
        int error = errno;
        bool known = stat(path, &about) == 0;
        if (error == EACCES && known) {
            tool_error("status",
                       "%s: permission denied: it belongs to uid %u with mode %04o, and this is "
                       "uid %u; run as that user or as root",
                       path, about.st_uid, about.st_mode & 07777, geteuid());
        } else {
            tool_error("status", "%s: %s", path, strerror(error));
        }
        return -error;
    }
    char absolute[PATH_MAX];
    ret_problem[0] = '\0';
    bool foreign = fstat(fd, &about) == 0 && about.st_uid != geteuid() && geteuid() == 0;
    if ((!foreign || (about.st_mode & S_IWOTH)) && realpath(path, absolute)) {
        int checked = tp_host_open_dir(absolute, false, config, ret_problem, problem_bytes);
        if (checked >= 0) {
            (void)close(checked);
        }
    }
    return fd;
}

/* A connection for each entry, up to SCAN_MAX of them. */
static void allow_many_fds(void) {
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < SCAN_MAX + 64) {
        limit.rlim_cur = limit.rlim_max < SCAN_MAX + 64 ? limit.rlim_max : SCAN_MAX + 64;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int look_once(const char *directory, const struct tp_config *config,
                     const struct options *options) {
    struct report *report = calloc(1, sizeof(*report));
    struct scan scan = {0};
    char problem[512] = "";
    int status = TOOL_USAGE;
    int fd = report ? open_directory(directory, config, problem, sizeof(problem)) : -ENOMEM;
    int error = fd < 0 ? fd : scan_directory(fd, config, ANSWER_MS, &scan);

    if (fd >= 0 && error) {
        tool_error("status", "%s: %s", directory, strerror(-error));
    }
    if (error) {
        goto out;
    }
    report_judge(directory, problem, &scan, report);
    if (options->watch_s > 0 && !options->json && isatty(STDOUT_FILENO)) {
        (void)fputs("\033[H\033[J", stdout);
    }
    if (options->json) {
        report_print_json(report, options->watch_s > 0, stdout);
    } else {
        report_print_text(report, stdout);
    }
    status = report->verdict == REPORT_OK ? TOOL_OK : TOOL_NOT_OK;
out:
    scan_free(&scan);
    free(report);
    if (fd >= 0) {
        (void)close(fd);
    }
    return status;
}

static int watch(const char *directory, const struct tp_config *config,
                 const struct options *options) {
    struct timespec pause = {.tv_sec = (time_t)options->watch_s};
    int status;

    pause.tv_nsec = (long)((options->watch_s - (double)pause.tv_sec) * 1e9);
    do {
        status = look_once(directory, config, options);
        if (!options->json && !isatty(STDOUT_FILENO)) {
            (void)putchar('\n');
        }
        if (fflush(stdout) != 0) {
            return TOOL_USAGE;
        }
    } while (status != TOOL_USAGE && nanosleep(&pause, NULL) == 0);
    return status;
}

int tool_status(int argc, char **argv) {
    struct options options;
    struct tp_config *config = NULL;
    int status = parse_options(argc, argv, &options);

    if (status) {
        return status - 1;
    }
    config = calloc(1, sizeof(*config));
    if (!config) {
        return TOOL_USAGE;
    }
    (void)tp_config_parse(tool_getenv, NULL, config);
    const char *directory = options.directory ? options.directory : default_directory(config);
    if (!directory) {
        tool_error("status", "no directory: name one, or set TIDEPOOL_SOCKET_DIR as the store and "
                             "the engines have it");
        status = TOOL_USAGE;
    } else {
        allow_many_fds();
        status = options.watch_s > 0 ? watch(directory, config, &options)
                                     : look_once(directory, config, &options);
    }
    free(config);
    return status;
}
