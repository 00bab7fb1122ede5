/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `tidepool`: which subcommand. It must not know what they do.
 */
#include "tools/tool.h"

#include "env/env.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    int (*main)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"run", tool_run, "start a program with the library preloaded, as store, engine or both"},
    {"status", tool_status, "what the processes that share a directory are doing"},
    {"doctor", tool_doctor, "is this host, this configuration and this Mooncake fit?"},
    {"settings", tool_settings, "every setting: what it takes, its default, what it does"},
};

#define COMMAND_COUNT (sizeof(commands) / sizeof(*commands))

static void print_help(FILE *out) {
    (void)fputs(
        "usage: tidepool COMMAND [ARGUMENTS]\n"
        "\n"
        "Shared memory between the Mooncake processes of one host, without changing Mooncake.\n"
        "\n",
        out);
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        (void)fprintf(out, "  %-9s %s\n", commands[i].name, commands[i].summary);
    }
    (void)fputs("\n"
                "  tidepool COMMAND --help   the arguments of one command\n"
                "  tidepool --version        the version\n"
                "\n"
                "The manual: tidepool(1).\n",
                out);
}

static int find_command(const char *name) {
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(name, commands[i].name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

/* `tidepool help run` is `tidepool run --help`. */
static int help(const char *topic) {
    int command = topic ? find_command(topic) : -1;
    char option[] = "--help";
    char *arguments[3] = {NULL, option, NULL};
    char name[16];

    if (command < 0) {
        print_help(stdout);
        return TOOL_OK;
    }
    (void)snprintf(name, sizeof(name), "%s", commands[command].name);
    arguments[0] = name;
    return commands[command].main(2, arguments);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return TOOL_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        return help(argv[2]);
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        (void)puts("tidepool " TP_VERSION);
        return TOOL_OK;
    }
    int command = find_command(argv[1]);
    if (command < 0) {
        tool_error("",
                   "there is no command '%s'; the commands are run, status, doctor and settings "
                   "(tidepool --help)",
                   argv[1]);
        return TOOL_USAGE;
    }
    int status = commands[command].main(argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        tool_error(argv[1], "cannot write the output: %s", strerror(errno));
        return TOOL_USAGE;
    }
    return status;
}
