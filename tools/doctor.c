/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `tidepool doctor`: collect the findings and print them. It must not know what is examined.
 */
#include "tools/doctor.h"

#include "env/env.h"
#include "tools/tool.h"

#include <getopt.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const char *const level_words[] = {"OK", "WARN", "FAIL"};

static void print_help(FILE *out) {
    (void)fputs(
        "usage: tidepool doctor [--python PYTHON] [--json]\n"
        "\n"
        "Is this host fit for Tidepool, is what this environment configures right, and is the "
        "Mooncake that PYTHON imports\n"
        "one that Tidepool knows? One line a finding: OK, WARN (works, but see) or FAIL (will not "
        "work), what was looked\n"
        "at, what was found, and what to do. Nothing is changed.\n"
        "\n"
        "  --python PYTHON   the interpreter that runs Mooncake (default: python3 on PATH)\n"
        "  --no-python       leave Mooncake out (for hosts where it runs in containers only)\n"
        "  --json            the findings as JSON\n"
        "\n"
        "Run it in the environment of the store and in that of the engine: 'tidepool run ... -- "
        "tidepool doctor'.\n"
        "\n"
        "Exit status: 0 fit (warnings allowed), 1 not fit, 2 wrong usage.\n",
        out);
}

void finding_add(struct findings *findings, enum finding_level level, const char *what,
                 const char *advice, const char *value, ...) {
    char text[1024];
    va_list arguments;

    if (findings->count == findings->room) {
        size_t room = findings->room ? 2 * findings->room : 64;
        struct finding *list = realloc(findings->list, room * sizeof(*list));
        if (!list) {
            return;
        }
        findings->list = list;
        findings->room = room;
    }
    struct finding *finding = &findings->list[findings->count++];
    va_start(arguments, value);
    (void)vsnprintf(text, sizeof(text), value, arguments);
    va_end(arguments);
    finding->level = level;
    text_clean(finding->what, sizeof(finding->what), what);
    text_clean(finding->value, sizeof(finding->value), text);
    text_clean(finding->advice, sizeof(finding->advice), advice ? advice : "");
}

static size_t count_level(const struct findings *findings, enum finding_level level) {
    size_t count = 0;

    for (size_t i = 0; i < findings->count; i++) {
        count += findings->list[i].level == level;
    }
    return count;
}

static void print_text(const struct findings *findings) {
    size_t warnings = count_level(findings, FINDING_WARN);
    size_t failures = count_level(findings, FINDING_FAIL);

    for (size_t i = 0; i < findings->count; i++) {
        const struct finding *f = &findings->list[i];
        (void)printf("%-4s  %-18s  %s%s%s\n", level_words[f->level], f->what, f->value,
                     f->advice[0] ? " -- " : "", f->advice);
    }
    (void)printf("%s: ", failures ? "NOT FIT" : "FIT");
    text_count(stdout, failures, "failure");
    (void)fputs(", ", stdout);
    text_count(stdout, warnings, "warning");
    (void)putchar('\n');
}

static void print_json(const struct findings *findings) {
    json_t *list = json_array();
    json_t *root = NULL;

    for (size_t i = 0; i < findings->count; i++) {
        const struct finding *f = &findings->list[i];
        (void)json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "level",
                                                    level_words[f->level], "what", f->what, "value",
                                                    f->value, "advice", f->advice));
    }
    root = json_pack("{s:i, s:b, s:o}", "format", 1, "fit",
                     count_level(findings, FINDING_FAIL) == 0, "findings", list);
    if (root) {
        (void)json_dumpf(root, stdout, JSON_INDENT(2));
        (void)putchar('\n');
    }
    json_decref(root);
}

int tool_doctor(int argc, char **argv) {
    static const struct option known[] = {
        {"python", required_argument, NULL, 'p'},
        {"no-python", no_argument, NULL, 'n'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    const char *python = "python3";
    bool python_chosen = false;
    bool json = false;
    struct findings findings = {0};
    int option;

    opterr = 0;
    while ((option = getopt_long(argc, argv, ":h", known, NULL)) != -1) {
        switch (option) {
        case 'p':
            python = optarg;
            python_chosen = true;
            break;
        case 'n':
            python = NULL;
            break;
        case 'j':
            json = true;
            break;
        case 'h':
            print_help(stdout);
            return TOOL_OK;
        default:
            tool_wrong_option("doctor", option, argv[optind - 1]);
            return TOOL_USAGE;
        }
    }
    if (optind < argc) {
        tool_error("doctor", "unexpected argument '%s' (tidepool doctor --help)", argv[optind]);
        return TOOL_USAGE;
    }
    struct tp_config *config = calloc(1, sizeof(*config));
    if (!config) {
        return TOOL_USAGE;
    }
    (void)tp_config_parse(tool_getenv, NULL, config);
    doctor_host(config, &findings);
    doctor_gpu(config, &findings);
    doctor_settings(config, &findings);
    if (python) {
        doctor_mooncake(python, python_chosen, &findings);
    }
    if (json) {
        print_json(&findings);
    } else {
        print_text(&findings);
    }
    int status = count_level(&findings, FINDING_FAIL) ? TOOL_NOT_OK : TOOL_OK;
    free(findings.list);
    free(config);
    return status;
}
