/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `copy_limits`: what is measured, in which order, and for how long. It must not know how
 * (gpu.c, store.c) or how it is printed (report.c).
 */
#include "tests/bench/limits/limits.h"

#include "env/env.h"
#include "tools/tool.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SECONDS_DEFAULT 10.0
#define SECONDS_MOST 600.0

struct options {
    const char *directory; /* NULL: no stores */
    bool json;
    int gpu; /* -1: all */
    double seconds;
};

static void print_help(FILE *out) {
    (void)fputs(
        "usage: copy_limits [DIR] [--json] [--gpu N] [--seconds SECONDS]\n"
        "\n"
        "What copies reach on this machine, in GB/s (10^9 bytes a second), by the library's own "
        "code:\n"
        "\n"
        "  - for each GPU, the limit: blocks of 64 MiB of pinned memory, to it and from it;\n"
        "  - for each GPU and block size, the copy engines against the copy kernel, with memory as "
        "a "
        "store has it, and\n"
        "    which of them the library would choose;\n"
        "  - for each store in DIR, copies from its memory to each GPU, or to host memory where "
        "there "
        "is none.\n"
        "\n"
        "Nothing is ever written to a store: puts are measured into scratch memory of the same "
        "kind. "
        "This program makes\n"
        "a context on each GPU that it measures, for as long as it runs, and is an engine of the "
        "stores meanwhile.\n"
        "\n"
        "  --json             the same figures as JSON (see report.c for the keys)\n"
        "  --gpu N            this GPU only\n"
        "  --seconds SECONDS  how long to measure (default 10, from 0.1 to 600); making GPUs ready "
        "comes on top\n"
        "\n"
        "Exit status: 0 all was measured; 1 there is no store in DIR, or nothing to measure, or "
        "not "
        "all could be; 2 wrong\n"
        "usage.\n",
        out);
}

static int usage_error(const char *option, const char *value, const char *expected) {
    tool_error("copy_limits", "%s %s: expected %s", option, value, expected);
    return TOOL_USAGE + 1;
}

static int parse_gpu(const char *text, struct options *options) {
    char *end = NULL;
    long value = strtol(text, &end, 10);

    if (end == text || *end || value < 0 || value > INT_MAX) {
        return usage_error("--gpu", text, "the number of a GPU, from 0 on");
    }
    options->gpu = (int)value;
    return 0;
}

static int parse_seconds(const char *text, struct options *options) {
    char *end = NULL;

    options->seconds = strtod(text, &end);
    if (end == text || *end || !(options->seconds >= 0.1 && options->seconds <= SECONDS_MOST)) {
        return usage_error("--seconds", text, "a number of seconds from 0.1 to 600");
    }
    return 0;
}

/* 0: go on; otherwise the exit status + 1. */
static int parse_options(int argc, char **argv, struct options *ret_options) {
    static const struct option known[] = {
        {"json", no_argument, NULL, 'j'},
        {"gpu", required_argument, NULL, 'g'},
        {"seconds", required_argument, NULL, 's'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct options options = {.gpu = -1, .seconds = SECONDS_DEFAULT};
    int wrong = 0;
    int option;

    opterr = 0;
    while (!wrong && (option = getopt_long(argc, argv, ":h", known, NULL)) != -1) {
        switch (option) {
        case 'j':
            options.json = true;
            break;
        case 'g':
            wrong = parse_gpu(optarg, &options);
            break;
        case 's':
            wrong = parse_seconds(optarg, &options);
            break;
        case 'h':
            print_help(stdout);
            return TOOL_OK + 1;
        default:
            tool_wrong_option("copy_limits", option, argv[optind - 1]);
            return TOOL_USAGE + 1;
        }
    }
    if (!wrong && optind + 1 < argc) {
        tool_error("copy_limits", "one directory at a time: '%s' is too much", argv[optind + 1]);
        return TOOL_USAGE + 1;
    }
    options.directory = argv[optind];
    *ret_options = options;
    return wrong;
}

/* The stores of the directory, and the engine half of the configuration for it. 0, or -errno with
 * the problem told. */
static int look_for_stores(struct bench *bench, const char *directory, struct tp_config *config) {
    char problem[512] = "";
    char absolute[PATH_MAX];

    if (!realpath(directory, absolute)) {
        int error = errno;
        tool_error("copy_limits", "%s: %s", directory, strerror(error));
        return -error;
    }
    int fd = tp_host_open_dir(absolute, false, config, problem, sizeof(problem));
    if (fd < 0) {
        tool_error("copy_limits", "%s", problem);
        return fd;
    }
    int error = bench_stores_find(bench, fd, config);
    (void)close(fd);
    if (error) {
        tool_error("copy_limits", "%s: %s", directory, strerror(-error));
    } else if (!bench->store_count) {
        tool_error(
            "copy_limits",
            "there is no store in %s: start one with 'tidepool run --store %s', or leave the "
            "directory out to measure the GPUs only",
            directory, directory);
        error = -ENOENT;
    }
    config->engine.half = TP_HALF_ON;
    config->engine.register_peer_memory = false; /* measured here, with and without */
    memcpy(config->engine.socket_dir, absolute, sizeof(absolute));
    bench->directory = directory;
    return error;
}

/* Memory as stores on CUDA host memory have it; pinned memory where the driver cannot make it. */
static int make_gpu_scratch(struct bench *bench, const struct tp_config *config) {
    uint64_t devices = 0;
    struct tp_gpu *first = NULL;

    for (unsigned i = 0; i < bench->gpu_count; i++) {
        if (bench->gpus[i].gpu) {
            devices |= UINT64_C(1) << bench->gpus[i].device;
            first = first ? first : bench->gpus[i].gpu;
        }
    }
    if (!first || bench_scratch_cumem(config, devices, &bench->gpu_scratch) == 0) {
        return 0;
    }
    return bench_scratch_pinned(first, &bench->gpu_scratch);
}

static void measure(struct bench *bench, const struct options *options,
                    const struct tp_config *config) {
    struct bench_time *time = &bench->time;
    uint64_t budget = (uint64_t)(options->seconds * 1e9);
    uint64_t start = tp_now_ns();
    unsigned usable = bench_gpus_usable(bench);

    time->most_ns = budget / 20;
    time->end_ns = start + (bench->store_count ? budget / 2 : budget);
    time->left = usable * bench_gpu_measurements();
    for (unsigned i = 0; i < bench->gpu_count; i++) {
        if (bench->gpus[i].gpu) {
            bench_gpu_measure(bench, &bench->gpus[i]);
        }
    }
    time->end_ns = start + budget;
    if (bench->store_count) {
        bench_stores_measure(bench, config);
    }
    bench->seconds = (double)(tp_now_ns() - start) * 1e-9;
}

static bool all_measured(const struct bench *bench) {
    bool all = true;

    for (unsigned i = 0; i < bench->gpu_count; i++) {
        all = all && !bench->gpus[i].problem[0];
    }
    for (unsigned i = 0; i < bench->store_count; i++) {
        const struct bench_store *store = &bench->stores[i];
        all = all && !store->problem[0];
        for (unsigned k = 0; k < store->row_count; k++) {
            all = all && !store->rows[k].problem[0];
        }
    }
    return all;
}

/* Is there anything to measure? Otherwise it is told why not. */
static bool anything(const struct bench *bench, const struct options *options) {
    if (!bench->gpu_count && options->gpu >= 0) {
        tool_error("copy_limits", "--gpu %d: %s", options->gpu, bench->no_gpu);
        return false;
    }
    if (!bench->gpu_count && !bench->store_count) {
        tool_error("copy_limits",
                   "there is no GPU (%s) and no directory was named: nothing to measure",
                   bench->no_gpu);
        return false;
    }
    return true;
}

static int run(struct bench *bench, const struct options *options, struct tp_config *config) {
    if (options->directory && look_for_stores(bench, options->directory, config) != 0) {
        return TOOL_NOT_OK;
    }
    if (bench_gpus_open(bench, options->gpu) != 0 || !anything(bench, options)) {
        return TOOL_NOT_OK;
    }
    if (make_gpu_scratch(bench, config) != 0) {
        tool_error("copy_limits", "no 64 MiB of memory can be made for the copies");
        return TOOL_NOT_OK;
    }
    measure(bench, options, config);
    bench_progress(&bench->time, NULL);
    if (options->json) {
        bench_print_json(bench, stdout);
    } else {
        bench_print_text(bench, stdout);
    }
    return all_measured(bench) ? TOOL_OK : TOOL_NOT_OK;
}

int main(int argc, char **argv) {
    struct options options;
    struct bench bench = {0};
    int status = parse_options(argc, argv, &options);

    if (status) {
        return status - 1;
    }
    struct tp_config *config = calloc(1, sizeof(*config));
    if (!config) {
        return TOOL_NOT_OK;
    }
    (void)tp_config_parse(tool_getenv, NULL, config);
    bench.time.progress = isatty(STDERR_FILENO);
    status = run(&bench, &options, config);
    bench_scratch_free(&bench.gpu_scratch);
    bench_scratch_free(&bench.host_scratch);
    bench_gpus_close(&bench);
    bench_stores_free(&bench);
    free(config); /* the peer thread has ended */
    return status;
}
