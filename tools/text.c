/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text for people and shells, and the lines with which the tool refuses something.
 */
#include "tools/tool.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void text_clean(char *ret_text, size_t bytes, const char *untrusted) {
    size_t i = 0;

    for (; i + 1 < bytes && untrusted[i]; i++) {
        unsigned char c = (unsigned char)untrusted[i];
        ret_text[i] = (char)(c >= 0x20 && c < 0x7f ? c : '?');
    }
    if (bytes) {
        ret_text[i] = '\0';
    }
}

void tool_error(const char *name, const char *format, ...) {
    char text[2048];
    char line[2048];
    va_list arguments;

    va_start(arguments, format);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false alarm of clang-tidy 14 */
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    text_clean(line, sizeof(line), text);
    (void)fprintf(stderr, "tidepool%s%s: %s\n", *name ? " " : "", name, line);
}

void tool_wrong_option(const char *name, int option, const char *argument) {
    tool_error(name, "%s '%s' (tidepool %s --help)",
               option == ':' ? "a value is missing after" : "unknown option", argument, name);
}

const char *tool_getenv(const char *name, void *arg) {
    return getenv(name);
}

const char *text_bytes(uint64_t count, char ret_text[static 16]) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)count / 1024;
    size_t unit = 0;

    if (count < 1024) {
        (void)snprintf(ret_text, 16, "%u B", (unsigned)count);
        return ret_text;
    }
    /* 1023.5 and more would be printed as 1024 */
    while (value >= 1023.5 && unit + 1 < sizeof(units) / sizeof(*units)) {
        value /= 1024;
        unit++;
    }
    (void)snprintf(ret_text, 16, value < 100 ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return ret_text;
}

const char *text_age(uint64_t seconds, char ret_text[static 16]) {
    unsigned long long s = seconds;

    if (s < 60) {
        (void)snprintf(ret_text, 16, "%llus", s);
    } else if (s < 3600) {
        (void)snprintf(ret_text, 16, "%llum%02llus", s / 60, s % 60);
    } else if (s < 86400) {
        (void)snprintf(ret_text, 16, "%lluh%02llum", s / 3600, s / 60 % 60);
    } else if (s < UINT64_C(86400) * 100000) {
        (void)snprintf(ret_text, 16, "%llud%02lluh", s / 86400, s / 3600 % 24);
    } else {
        (void)snprintf(ret_text, 16, "?");
    }
    return ret_text;
}

void text_count(FILE *out, uint64_t count, const char *noun) {
    (void)fprintf(out, "%" PRIu64 " %s%s", count, noun, count == 1 ? "" : "s");
}

void text_shell_quoted(FILE *out, const char *word) {
    static const char harmless[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+@%";

    if (*word && word[strspn(word, harmless)] == '\0') {
        (void)fputs(word, out);
        return;
    }
    (void)fputc('\'', out);
    for (; *word; word++) {
        if (*word == '\'') {
            (void)fputs("'\\''", out);
        } else {
            (void)fputc(*word, out);
        }
    }
    (void)fputc('\'', out);
}
