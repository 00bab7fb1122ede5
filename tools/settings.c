/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `tidepool settings`: the reference of all settings and counters, printed from the tables that the
 * library itself uses, as text, JSON, or inside the manual page. It must not know any setting by
 * name.
 */
#include "tools/tool.h"

#include "env/env.h"
#include "env/stats.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static void print_help(FILE *out) {
    (void)fputs("usage: tidepool settings [--json]\n"
                "       tidepool settings --manual TEMPLATE\n"
                "\n"
                "Print every setting: its name (an environment variable, or a key of "
                "MC_TENT_CONF), what it takes, its default and\n"
                "what it does.\n"
                "\n"
                "  --json             the same as JSON\n"
                "  --manual TEMPLATE  print the manual page TEMPLATE with its lines @SETTINGS@ and "
                "@COUNTERS@ replaced\n",
                out);
}

static void print_text(void) {
    for (const struct tp_setting *s = tp_settings; s->name; s++) {
        (void)printf("%s\n    takes %s; default: %s\n    %s\n", s->name, s->expected,
                     s->default_value, s->meaning);
    }
}

static int print_json(void) {
    json_t *list = json_array();
    char *text = NULL;

    for (const struct tp_setting *s = tp_settings; s->name; s++) {
        (void)json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "name", s->name,
                                                    "expected", s->expected, "default",
                                                    s->default_value, "meaning", s->meaning));
    }
    text = json_dumps(list, JSON_INDENT(2));
    json_decref(list);
    if (!text) {
        return TOOL_USAGE;
    }
    (void)puts(text);
    free(text);
    return TOOL_OK;
}

/* Text for roff: a hyphen that can be copied, no escape, and no control line. */
static void print_roff(const char *text) {
    if (*text == '.' || *text == '\'') {
        (void)fputs("\\&", stdout);
    }
    for (; *text; text++) {
        if (*text == '\\') {
            (void)fputs("\\e", stdout);
        } else if (*text == '-') {
            (void)fputs("\\-", stdout);
        } else {
            (void)putchar(*text == '\n' ? ' ' : *text);
        }
    }
}

static void print_roff_settings(void) {
    for (const struct tp_setting *s = tp_settings; s->name; s++) {
        (void)fputs(".TP\n.B ", stdout);
        print_roff(s->name);
        (void)fputs("\nTakes ", stdout);
        print_roff(s->expected);
        (void)fputs("; default: ", stdout);
        print_roff(s->default_value);
        (void)fputs(".\n.br\n", stdout);
        print_roff(s->meaning);
        (void)putchar('\n');
    }
}

static void print_roff_counters(void) {
    for (size_t i = 0; i < TP_COUNTER_COUNT; i++) {
        (void)fputs(".TP\n.B ", stdout);
        print_roff(tp_counter_infos[i].name);
        (void)printf(" \\fR(%s)\n", tp_counter_infos[i].unit);
        print_roff(tp_counter_infos[i].meaning);
        (void)putchar('\n');
    }
}

static int print_manual(const char *template_path) {
    FILE *template = fopen(template_path, "re");
    char *line = NULL;
    size_t room = 0;

    if (!template) {
        tool_error("settings", "%s: %s", template_path, strerror(errno));
        return TOOL_USAGE;
    }
    while (getline(&line, &room, template) > 0) {
        if (strcmp(line, "@SETTINGS@\n") == 0) {
            print_roff_settings();
        } else if (strcmp(line, "@COUNTERS@\n") == 0) {
            print_roff_counters();
        } else {
            (void)fputs(line, stdout);
        }
    }
    free(line);
    (void)fclose(template);
    return TOOL_OK;
}

int tool_settings(int argc, char **argv) {
    static const struct option known[] = {
        {"json", no_argument, NULL, 'j'},
        {"manual", required_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int option;

    opterr = 0;
    while ((option = getopt_long(argc, argv, "+:h", known, NULL)) != -1) {
        switch (option) {
        case 'j':
            return print_json();
        case 'm':
            return print_manual(optarg);
        case 'h':
            print_help(stdout);
            return TOOL_OK;
        default:
            tool_error("settings", "wrong option '%s' (tidepool settings --help)",
                       argv[optind - 1]);
            return TOOL_USAGE;
        }
    }
    if (optind < argc) {
        tool_error("settings", "unexpected argument '%s' (tidepool settings --help)", argv[optind]);
        return TOOL_USAGE;
    }
    print_text();
    return TOOL_OK;
}
