/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whom does a name stand for whose requests fell back? It must not know how that is printed, or
 * what it means for the verdict.
 */
#include "tools/report.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <string.h>
#include <unistd.h>

#define HOST_BYTES 128

static const struct {
    const char *word, *meaning;
} targets[] = {
    [REPORT_TARGET_STORE] = {"store", "a store in this directory"},
    [REPORT_TARGET_ENGINE] = {"engine", "an engine of this host that shares no memory (transfers "
                                        "between engines, or memory that it lends unshared)"},
    [REPORT_TARGET_OTHER_HOST] = {"other_host", "not an address of this host"},
    [REPORT_TARGET_UNKNOWN] = {"unknown", "of this host, and not in this directory: a process "
                                          "without Tidepool, of another directory, or gone"},
};

const char *report_target_word(enum report_target target) {
    return targets[target].word;
}

const char *report_target_meaning(enum report_target target) {
    return targets[target].meaning;
}

/* "10.0.0.1" of "10.0.0.1:15000", "::1" of "[::1]:15000" and of "::1:15000". */
static void host_of(const char *name, char ret_host[static HOST_BYTES]) {
    const char *colon = strrchr(name, ':');
    size_t length = colon ? (size_t)(colon - name) : strlen(name);

    if (length > 1 && name[0] == '[' && name[length - 1] == ']') {
        name++;
        length -= 2;
    }
    length = length < HOST_BYTES ? length : HOST_BYTES - 1;
    memcpy(ret_host, name, length);
    ret_host[length] = '\0';
}

static bool is_interface(const char *host) {
    struct ifaddrs *list = NULL;
    bool found = false;

    if (getifaddrs(&list) != 0) {
        return false;
    }
    for (const struct ifaddrs *at = list; at && !found; at = at->ifa_next) {
        char text[INET6_ADDRSTRLEN] = "";
        const struct sockaddr *address = at->ifa_addr;
        if (address && address->sa_family == AF_INET) {
            (void)inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)address)->sin_addr,
                            text, sizeof(text));
        } else if (address && address->sa_family == AF_INET6) {
            (void)inet_ntop(AF_INET6,
                            &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, text,
                            sizeof(text));
        }
        found = text[0] && strcmp(text, host) == 0;
    }
    freeifaddrs(list);
    return found;
}

/* As far as can be seen from here: by loopback names, this machine's name and addresses, and those
 * of the processes in the directory, which may be containers with addresses of their own. */
static bool is_this_host(const struct scan *scan, const char *name) {
    char host[HOST_BYTES];
    char other[HOST_BYTES];
    char own[HOST_BYTES] = "";

    host_of(name, host);
    (void)gethostname(own, sizeof(own) - 1);
    if (strncmp(host, "127.", 4) == 0 || strcmp(host, "localhost") == 0 || strcmp(host, own) == 0 ||
        is_interface(host)) {
        return true;
    }
    for (size_t i = 0; i < scan->count; i++) {
        if (scan->entries[i].page && scan->entries[i].page->name[0]) {
            host_of(scan->entries[i].page->name, other);
            if (strcmp(host, other) == 0) {
                return true;
            }
        }
    }
    return false;
}

const struct scan_entry *report_find(const struct scan *scan, const char *name, uint32_t role,
                                     unsigned *ret_count) {
    const struct scan_entry *found = NULL;

    *ret_count = 0;
    for (size_t i = 0; i < scan->count; i++) {
        const struct scan_entry *entry = &scan->entries[i];
        if (entry->page && strcmp(entry->page->name, name) == 0 && (report_roles(entry) & role)) {
            found = entry;
            ++*ret_count;
        }
    }
    return found;
}

enum report_target report_target(const struct scan *scan, const char *name) {
    unsigned count;

    if (report_find(scan, name, TP_ROLE_STORE, &count)) {
        return REPORT_TARGET_STORE;
    }
    if (report_find(scan, name, TP_ROLE_ENGINE, &count)) {
        return REPORT_TARGET_ENGINE;
    }
    return is_this_host(scan, name) ? REPORT_TARGET_UNKNOWN : REPORT_TARGET_OTHER_HOST;
}
