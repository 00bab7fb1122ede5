/* SPDX-License-Identifier: Apache-2.0 */
/* Failures and delays on demand: rules of the form CALL:NTH=RESULT and CALL=MICROSECONDS. It must
 * not know what the calls do. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct rule {
    char name[64];
    unsigned long nth; /* 0: every call */
    unsigned long seen;
    int result;
};

#define MAX_RULES 64
static struct rule rules[MAX_RULES];
static size_t rule_count;
static bool loaded;

static bool parse_one(const char *text, size_t length, struct rule *ret) {
    char copy[128], *colon, *equals, *end;
    struct rule rule = {.nth = 0};

    if (length >= sizeof copy)
        return false;
    memcpy(copy, text, length);
    copy[length] = 0;
    colon = strchr(copy, ':');
    equals = colon ? strchr(colon, '=') : NULL;
    if (!equals || (size_t)(colon - copy) >= sizeof rule.name || colon == copy)
        return false;
    *colon = *equals = 0;
    memcpy(rule.name, copy, strlen(copy) + 1);
    if (strcmp(colon + 1, "*") != 0) {
        rule.nth = strtoul(colon + 1, &end, 10);
        if (*end || !rule.nth)
            return false;
    }
    rule.result = (int)strtol(equals + 1, &end, 10);
    if (*end || end == equals + 1)
        return false;
    *ret = rule;
    return true;
}

static int parse(const char *text) {
    struct rule parsed[MAX_RULES];
    size_t count = 0;

    while (*text) {
        size_t length = strcspn(text, ",");

        if (count == MAX_RULES || !parse_one(text, length, &parsed[count++]))
            return -1;
        text += length + (text[length] == ',');
    }
    memcpy(rules, parsed, sizeof parsed);
    rule_count = count;
    return 0;
}

static void load(void) {
    const char *text = getenv("FAKECUDA_FAIL");

    loaded = true;
    if (text && parse(text))
        fprintf(stderr, "fakecuda: FAKECUDA_FAIL=%s is not understood; nothing will fail\n", text);
}

/* The rule's name without a version suffix also means the versions: cuMemAlloc is cuMemAlloc_v2 in
 * the library. */
static bool means(const char *rule, const char *name) {
    size_t length = strlen(rule);

    return !strncmp(rule, name, length) && (!name[length] || !strncmp(name + length, "_v", 2));
}

bool fc_inject(const char *name, int *ret_result) {
    if (!loaded)
        load();
    for (size_t i = 0; i < rule_count; i++) {
        if (!means(rules[i].name, name))
            continue;
        rules[i].seen++;
        if (rules[i].nth && rules[i].nth != rules[i].seen)
            continue;
        *ret_result = rules[i].result;
        return true;
    }
    return false;
}

bool fakecuda_inject_runtime(const char *name, int *result) {
    bool failed;

    pthread_mutex_lock(&fc_lock);
    failed = fc_inject(name, result);
    pthread_mutex_unlock(&fc_lock);
    return failed;
}

int fakecuda_set_failures(const char *text) {
    int result;

    pthread_mutex_lock(&fc_lock);
    loaded = true;
    result = parse(text);
    pthread_mutex_unlock(&fc_lock);
    return result;
}

/* ---- slow calls ---- */

struct delay {
    char name[64];
    uint64_t ns;
};

static struct delay delays[8];
static size_t delay_count;
static bool delays_loaded;
static pthread_mutex_t delay_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;

static int parse_delays(const char *text) {
    struct delay parsed[8];
    size_t count = 0;

    while (*text) {
        size_t length = strcspn(text, "=");
        char *end;

        if (count == 8 || text[length] != '=' || !length || length >= sizeof parsed[0].name)
            return -1;
        memcpy(parsed[count].name, text, length);
        parsed[count].name[length] = 0;
        parsed[count].ns = strtoul(text + length + 1, &end, 10) * 1000;
        if (end == text + length + 1 || (*end && *end != ','))
            return -1;
        text = end + (*end == ',');
        count++;
    }
    memcpy(delays, parsed, sizeof parsed);
    delay_count = count;
    return 0;
}

static uint64_t delay_of(const char *name) {
    const char *text = getenv("FAKECUDA_SLOW");
    uint64_t ns = 0;

    pthread_mutex_lock(&delay_lock);
    if (!delays_loaded && text && parse_delays(text))
        fprintf(stderr, "fakecuda: FAKECUDA_SLOW=%s is not understood; nothing is slow\n", text);
    delays_loaded = true;
    for (size_t i = 0; i < delay_count; i++) {
        if (means(delays[i].name, name))
            ns = delays[i].ns;
    }
    pthread_mutex_unlock(&delay_lock);
    return ns;
}

void fc_slow(const char *name) {
    uint64_t ns = delay_of(name);
    struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000),
                             .tv_nsec = (long)(ns % 1000000000)};

    if (!ns)
        return;
    pthread_mutex_lock(&driver_lock);
    nanosleep(&pause, NULL);
    pthread_mutex_unlock(&driver_lock);
}

int fakecuda_set_delays(const char *text) {
    int result;

    pthread_mutex_lock(&delay_lock);
    delays_loaded = true;
    result = parse_delays(text);
    pthread_mutex_unlock(&delay_lock);
    return result;
}
