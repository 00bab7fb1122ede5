/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a scan means: is it working, and if not, why. It must not know how it is printed.
 */
#include "tools/report.h"

#include "env/env.h"
#include "tools/tool.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

#define NEW_S 5

/*
 * Counters that are zero when all is well, whatever else the processes do. Requests left to
 * Mooncake for other reasons are ordinary: a peer on another host, a piece that is still being
 * mapped, a store that was restarted.
 */
static const struct {
    enum tp_counter counter;
    const char *advice;
} alarms[] = {
    {TP_IMPORT_FAILURES, "requests to them go through Mooncake's transport: see its log"},
    {TP_COPY_FAILED, "a store died during a copy, or a copy failed: see its log"},
    {TP_SEGMENT_FAILURES, "see its log; run 'tidepool doctor' there"},
    {TP_CLIENTS_REFUSED,
     "see the events; 'tidepool doctor' on both sides compares user and host identity"},
    {TP_CLIENTS_MISBEHAVED, "a program that is not Tidepool, or of another version, connects here"},
    {TP_PEERS_REFUSED,
     "see the events; 'tidepool doctor' on both sides compares user and host identity"},
    {TP_FALLBACK_UNKNOWN_LAYOUT, "this Mooncake is newer than this library: upgrade Tidepool"},
    {TP_FALLBACK_BAD_REQUEST,
     "this Mooncake is not understood: run 'tidepool doctor' there and report it"},
    {TP_FALLBACK_LIMIT, "a limit of the library was reached: see the events"},
    {TP_REGISTER_FAILURES, "CUDA refuses to register the store's memory, GPU copies cost CPU time: "
                           "see its log, and ulimit -l"},
    {TP_FALLBACK_DEVICE_MEMORY,
     "GPU memory goes the slow way: device_copy is off, or this version or host cannot"},
};

/* Conditions of a process that need attention whatever it does. */
static const struct {
    enum tp_condition condition;
    const char *word, *meaning;
} conditions[] = {
    {TP_CONDITION_UNNAMED, "unnamed",
     "publishes memory, but the name by which peers open it is not known: engines use Mooncake's "
     "transport (its log says why)"},
    {TP_CONDITION_SEVERAL_STORES, "several_stores",
     "holds several stores with memory: only the one of this name is reached through shared memory "
     "(use a process for each store)"},
    {TP_CONDITION_LENDS_UNSHARED, "lends_unshared",
     "lends memory to Mooncake but is set up as an engine only: what others put there goes by "
     "Mooncake's transport (set it up as a store too: tidepool run --store DIR --engine DIR; or "
     "give it a global segment size of 0)"},
};

const char *report_condition_word(uint32_t bit) {
    for (size_t i = 0; i < sizeof(conditions) / sizeof(*conditions); i++) {
        if (conditions[i].condition == bit) {
            return conditions[i].word;
        }
    }
    return NULL;
}

const char *report_verdict_word(enum report_verdict verdict) {
    static const char *const words[] = {"ok", "attention", "empty"};
    return words[verdict];
}

const char *report_kind_word(uint32_t kind) {
    static const char *const words[] = {"none", "memfd", "files", "cumem"};
    return kind < sizeof(words) / sizeof(*words) ? words[kind] : "unknown";
}

const char *report_slot_word(uint32_t state) {
    static const char *const words[] = {"empty", "starting", "live", "gone"};
    return state < sizeof(words) / sizeof(*words) ? words[state] : "unknown";
}

static bool has_segments(const struct tp_stats_page *page) {
    for (size_t i = 0; i < TP_STATS_SEGMENTS; i++) {
        uint32_t state = atomic_load(&page->segments[i].state);
        if (state == TP_SLOT_STARTING || state == TP_SLOT_LIVE) {
            return true;
        }
    }
    return false;
}

/*
 * The entry says what the process does, the page what it is configured for: an engine that may lend
 * memory, but was set up without any, is no store.
 */
uint32_t report_roles(const struct scan_entry *entry) {
    uint32_t configured = entry->page ? atomic_load(&entry->page->roles) : 0;

    if (entry->kind == 's') {
        return TP_ROLE_STORE | (configured & TP_ROLE_ENGINE);
    }
    return TP_ROLE_ENGINE | (entry->page && has_segments(entry->page) ? TP_ROLE_STORE : 0);
}

__attribute__((format(printf, 2, 3))) static void add_reason(struct report *report,
                                                             const char *format, ...) {
    char text[512];
    va_list arguments;

    if (report->reason_count == REPORT_REASONS) {
        report->reasons_left_out++;
        return;
    }
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    text_clean(report->reasons[report->reason_count++], sizeof(report->reasons[0]), text);
}

/* "store 127.0.0.1:1234 (pid 17)" */
static const char *who(const struct scan_entry *entry, char ret_text[static 192]) {
    bool store = report_roles(entry) & TP_ROLE_STORE;
    bool named = entry->page && entry->page->name[0];
    char pid[24] = "";

    if (entry->known_owner) {
        (void)snprintf(pid, sizeof(pid), " (pid %d)", entry->pid);
    }
    (void)snprintf(ret_text, 192, "%s %s%s", store ? "store" : "engine",
                   named ? entry->page->name : entry->id, pid);
    return ret_text;
}

static void judge_alarms(const struct scan_entry *entry, struct report *report) {
    char name[192];

    for (size_t i = 0; i < sizeof(alarms) / sizeof(*alarms); i++) {
        const struct tp_counter_info *info = &tp_counter_infos[alarms[i].counter];
        uint64_t count = atomic_load(&entry->page->counters[alarms[i].counter]);
        if (count) {
            add_reason(report, "%s: %" PRIu64 " %s: %s (%s)", who(entry, name), count, info->unit,
                       info->meaning, alarms[i].advice);
        }
    }
}

static unsigned live_segments(const struct tp_stats_page *page) {
    unsigned live = 0;

    for (size_t i = 0; i < TP_STATS_SEGMENTS; i++) {
        live += atomic_load(&page->segments[i].state) == TP_SLOT_LIVE;
    }
    return live;
}

/* Stores that this engine holds a lease of: those whose memory it is still mapping as well, since
 * what is mapped is used. */
static unsigned live_peers(const struct tp_stats_page *page) {
    unsigned live = 0;

    for (size_t i = 0; i < TP_STATS_PEERS; i++) {
        uint32_t state = atomic_load(&page->peers[i].state);
        live += state == TP_SLOT_LIVE || state == TP_SLOT_STARTING;
    }
    return live;
}

static void add_importing(const struct tp_stats_page *page, struct report *report) {
    for (size_t i = 0; i < TP_STATS_PEERS; i++) {
        const struct tp_stats_peer *peer = &page->peers[i];
        if (atomic_load(&peer->state) == TP_SLOT_STARTING && peer->pieces_mapped <= peer->pieces) {
            report->pieces += peer->pieces;
            report->pieces_mapped += peer->pieces_mapped;
        }
    }
}

/* A process that has just started has not met the others yet. */
static bool is_new(const struct scan_entry *entry, const struct report *report) {
    uint64_t start_s = entry->page->start_s;

    return start_s <= report->now_s && report->now_s - start_s < NEW_S;
}

static void judge_conditions(const struct scan_entry *entry, struct report *report) {
    char name[192];

    for (size_t i = 0; i < sizeof(conditions) / sizeof(*conditions); i++) {
        if (atomic_load(&entry->page->conditions) & conditions[i].condition) {
            add_reason(report, "%s %s", who(entry, name), conditions[i].meaning);
        }
    }
}

static bool attached_to(const struct tp_stats_page *page, const char *name) {
    for (size_t i = 0; i < TP_STATS_PEERS; i++) {
        uint32_t state = atomic_load(&page->peers[i].state);
        if ((state == TP_SLOT_LIVE || state == TP_SLOT_STARTING) &&
            strcmp(page->peers[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/*
 * Requests of this engine for stores of this directory that it is not attached to. Those that came
 * before it was attached are ordinary, and so are those for other processes.
 */
static void judge_misses(const struct scan_entry *entry, struct report *report) {
    char name[192];

    for (size_t i = 0; i < TP_STATS_MISSES; i++) {
        const struct tp_stats_miss *miss = &entry->page->misses[i];
        unsigned count = 0;
        if (atomic_load(&miss->state) != TP_SLOT_LIVE || !miss->name[0] ||
            attached_to(entry->page, miss->name)) {
            continue;
        }
        const struct scan_entry *store =
            report_find(report->scan, miss->name, TP_ROLE_STORE, &count);
        if (!store || is_new(store, report) || is_new(entry, report)) {
            continue;
        }
        add_reason(
            report,
            "%s: %" PRIu64 " requests for the store %s of this directory fell back to Mooncake's "
            "transport (%s)",
            who(entry, name), atomic_load(&miss->requests), miss->name,
            count > 1 ? "several processes bear this name: give each its own"
            : strncmp(miss->name, "127.", 4) == 0
                ? "it is not attached: see the events and 'tidepool doctor' on both sides; across "
                  "network namespaces a store needs another name than a loopback address"
                : "it is not attached: see the events and 'tidepool doctor' on both sides");
    }
}

/* Engines that a store serves and whose own counters are not here. */
static void judge_clients(const struct scan_entry *store, struct report *report) {
    unsigned clients = 0;
    unsigned shown = 0;
    char name[192];

    for (size_t i = 0; i < TP_STATS_CLIENTS; i++) {
        const struct tp_stats_client *client = &store->page->clients[i];
        clients +=
            atomic_load(&client->state) == TP_SLOT_LIVE && client->since_s + NEW_S <= report->now_s;
    }
    for (size_t i = 0; i < report->scan->count; i++) {
        const struct scan_entry *entry = &report->scan->entries[i];
        bool serves = !entry->page && entry->state != SCAN_STALE; /* has a reason of its own */
        for (size_t k = 0; entry->page && k < TP_STATS_PEERS && !serves; k++) {
            const struct tp_stats_peer *peer = &entry->page->peers[k];
            uint32_t state = atomic_load(&peer->state);
            serves = (state == TP_SLOT_LIVE || state == TP_SLOT_STARTING) &&
                     memcmp(peer->instance, store->page->instance, sizeof(peer->instance)) == 0;
        }
        shown += serves;
    }
    if (clients > shown) {
        add_reason(report,
                   "%s serves %u engines, and the counters of %u of them are missing here (their "
                   "logs say why: no file descriptors, or memfd_create refused)",
                   who(store, name), clients, clients - shown);
    }
}

static void judge_live(const struct scan_entry *entry, struct report *report) {
    const struct tp_stats_page *page = entry->page;
    uint32_t roles = report_roles(entry);
    char name[192];

    if (roles & TP_ROLE_STORE) {
        report->stores++;
        report->segment_bytes += atomic_load(&page->counters[TP_SEGMENT_BYTES]);
        if (!live_segments(page) && !is_new(entry, report)) {
            add_reason(report, "%s publishes no memory", who(entry, name));
        }
        judge_clients(entry, report);
    }
    if (roles & TP_ROLE_ENGINE) {
        report->engines++;
        report->attached_engines += live_peers(page) > 0;
        add_importing(page, report);
        report->read_bytes += atomic_load(&page->counters[TP_LOCAL_READ_BYTES]);
        report->write_bytes += atomic_load(&page->counters[TP_LOCAL_WRITE_BYTES]);
        report->forward_bytes += atomic_load(&page->counters[TP_FORWARD_BYTES]);
        judge_misses(entry, report);
    }
    judge_conditions(entry, report);
    judge_alarms(entry, report);
}

static void judge_entry(const struct scan_entry *entry, struct report *report) {
    char name[192];

    switch (entry->state) {
    case SCAN_LIVE:
        judge_live(entry, report);
        break;
    case SCAN_SILENT:
        report->not_answering++;
        add_reason(report, "%s is not answering: %s", who(entry, name), entry->detail);
        break;
    case SCAN_REFUSED:
        add_reason(report, "%s refused this tool: %s", who(entry, name), entry->detail);
        break;
    case SCAN_BROKEN:
        add_reason(report, "%s: %s", who(entry, name), entry->detail);
        break;
    case SCAN_STALE:
        /* Swept is mended; what cannot be swept stays in the way of people, not of processes. */
        report->stale++;
        if (!entry->swept) {
            add_reason(report, "%s is stale: %s", who(entry, name), entry->detail);
        }
        break;
    case SCAN_FRESH:
        break;
    }
}

/* Engines and stores that are here but do not meet. */
static void judge_meeting(struct report *report) {
    char name[192];

    if (report->engines && !report->stores) {
        add_reason(report, "there is no store: the engines use Mooncake's own transport");
        return;
    }
    for (size_t i = 0; i < report->scan->count && report->stores; i++) {
        const struct scan_entry *entry = &report->scan->entries[i];
        /* A store that is an engine as well need not be attached to another. */
        if (entry->state == SCAN_LIVE && report_roles(entry) == TP_ROLE_ENGINE &&
            !live_peers(entry->page) && !is_new(entry, report)) {
            add_reason(report, "%s is attached to no store: its events may say why",
                       who(entry, name));
        }
    }
}

void report_judge(const char *directory, const char *directory_problem, const struct scan *scan,
                  struct report *ret_report) {
    struct report *report = ret_report;

    memset(report, 0, sizeof(*report));
    report->directory = directory;
    report->scan = scan;
    report->now_s = (uint64_t)time(NULL);
    if (directory_problem[0]) {
        add_reason(report, "%s", directory_problem);
    }
    for (size_t i = 0; i < scan->count; i++) {
        judge_entry(&scan->entries[i], report);
    }
    judge_meeting(report);
    if (scan->left_out) {
        add_reason(report, "%zu more entries were not asked (at most %d are)", scan->left_out,
                   SCAN_MAX);
    }
    if (report->reason_count) {
        report->verdict = REPORT_ATTENTION;
    } else {
        report->verdict = report->stores + report->engines ? REPORT_OK : REPORT_EMPTY;
    }
}
