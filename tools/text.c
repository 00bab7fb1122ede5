/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text for people and shells. It must not know what is being said.
 */
#include "tools/tool.h"

#include <inttypes.h>
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
