/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The report for people. Every string of a page goes through text_clean.
 */
#include "tools/report.h"

#include "env/env.h"
#include "tools/tool.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

static void print_clean(FILE *out, const char *untrusted) {
    char text[512];

    text_clean(text, sizeof(text), untrusted);
    (void)fputs(text, out);
}

void report_summary(const struct report *report, FILE *out) {
    char moved[16];
    char left[16];

    if (report->verdict == REPORT_EMPTY) {
        (void)fprintf(out, "NOTHING: no Tidepool process has an entry in ");
        print_clean(out, report->directory);
        return;
    }
    if (report->verdict == REPORT_ATTENTION) {
        (void)fprintf(out, "ATTENTION: %s", report->reasons[0]);
        if (report->reason_count > 1) {
            (void)fprintf(out, " (and %u more)",
                          report->reason_count - 1 + report->reasons_left_out);
        }
        return;
    }
    (void)fputs("OK: ", out);
    text_count(out, report->stores, "store");
    (void)fputs(", ", out);
    text_count(out, report->attached_engines, "engine");
    (void)fputs(" attached", out);
    if (report->pieces) {
        (void)fprintf(out, " (importing %" PRIu64 "/%" PRIu64 " pieces)", report->pieces_mapped,
                      report->pieces);
    }
    (void)fprintf(out, ", %s through shared memory, %s left to Mooncake",
                  text_bytes(report->read_bytes + report->write_bytes, moved),
                  text_bytes(report->forward_bytes, left));
}

static uint64_t counter(const struct tp_stats_page *page, enum tp_counter which) {
    return atomic_load(&page->counters[which]);
}

/* One line: who and where. */
static void print_process(const struct scan_entry *entry, const struct report *report, FILE *out) {
    const struct tp_stats_page *page = entry->page;
    char age[16];

    (void)fputs("  ", out);
    print_clean(out, page->name[0] ? page->name : "(name not known yet)");
    (void)fputs("  ", out);
    print_clean(out, page->program);
    if (entry->known_owner) {
        (void)fprintf(out, "  pid %d", entry->pid);
        if (page->pid != entry->pid) {
            (void)fprintf(out, " (%d in its container)", page->pid);
        }
        (void)fprintf(out, "  uid %u", entry->uid);
    }
    (void)fputs("  on ", out);
    print_clean(out, page->hostname);
    (void)fprintf(out, "  up %s  tidepool ",
                  text_age(report->now_s > page->start_s ? report->now_s - page->start_s : 0, age));
    print_clean(out, page->library_version);
    (void)fputc('\n', out);
}

static void print_segments(const struct tp_stats_page *page, FILE *out) {
    for (size_t i = 0; i < TP_STATS_SEGMENTS; i++) {
        const struct tp_stats_segment *segment = &page->segments[i];
        uint32_t state = atomic_load(&segment->state);
        char size[16];
        char pages[16];

        if (state != TP_SLOT_STARTING && state != TP_SLOT_LIVE) {
            continue;
        }
        (void)fprintf(out, "    %s %s (", state == TP_SLOT_LIVE ? "publishes" : "prepares",
                      text_bytes(segment->bytes, size));
        print_clean(out, segment->detail[0] ? segment->detail : report_kind_word(segment->kind));
        (void)fprintf(out, "): %s pages, ", text_bytes(segment->page_bytes, pages));
        text_count(out, segment->pieces, "piece");
        (void)fputs(" on ", out);
        text_count(out, segment->nodes, "NUMA node");
        (void)fputc('\n', out);
    }
}

static void print_clients(const struct tp_stats_page *page, const struct report *report,
                          FILE *out) {
    for (size_t i = 0; i < TP_STATS_CLIENTS; i++) {
        const struct tp_stats_client *client = &page->clients[i];
        char age[16];

        if (atomic_load(&client->state) != TP_SLOT_LIVE) {
            continue;
        }
        (void)fprintf(
            out, "    serves pid %d, uid %u, for %s: ", client->pid, client->uid,
            text_age(report->now_s > client->since_s ? report->now_s - client->since_s : 0, age));
        text_count(out, client->pieces_sent, "piece");
        (void)fputs(" sent\n", out);
    }
}

static void print_peers(const struct tp_stats_page *page, FILE *out) {
    for (size_t i = 0; i < TP_STATS_PEERS; i++) {
        const struct tp_stats_peer *peer = &page->peers[i];
        uint32_t state = atomic_load(&peer->state);
        char read[16];
        char written[16];

        if (state == TP_SLOT_EMPTY) {
            continue;
        }
        (void)fprintf(out, "    %s ", state == TP_SLOT_GONE ? "was attached to" : "attached to");
        print_clean(out, peer->name[0] ? peer->name : "(name not known yet)");
        (void)fputs(" by ", out);
        print_clean(out, peer->path[0] ? peer->path : "shared memory");
        (void)fprintf(out, ": %s%u/%u pieces, read %s, wrote %s\n",
                      state == TP_SLOT_STARTING ? "importing " : "", peer->pieces_mapped,
                      peer->pieces, text_bytes(atomic_load(&peer->read_bytes), read),
                      text_bytes(atomic_load(&peer->write_bytes), written));
    }
}

/* For whom the requests were whose target is no store that this engine is attached to. */
static void print_misses(const struct tp_stats_page *page, const struct scan *scan, FILE *out) {
    for (size_t i = 0; i < TP_STATS_MISSES; i++) {
        const struct tp_stats_miss *miss = &page->misses[i];
        char bytes[16];

        if (atomic_load(&miss->state) != TP_SLOT_LIVE) {
            continue;
        }
        (void)fprintf(out, "      of these %" PRIu64 ", %s, for ", atomic_load(&miss->requests),
                      text_bytes(atomic_load(&miss->bytes), bytes));
        print_clean(out, miss->name);
        (void)fprintf(out, ": %s\n", report_target_meaning(report_target(scan, miss->name)));
    }
}

static void print_transfers(const struct tp_stats_page *page, const struct scan *scan, FILE *out) {
    char read[16];
    char written[16];
    char left[16];

    (void)fprintf(out, "    read %s, wrote %s through shared memory; %s left to Mooncake\n",
                  text_bytes(counter(page, TP_LOCAL_READ_BYTES), read),
                  text_bytes(counter(page, TP_LOCAL_WRITE_BYTES), written),
                  text_bytes(counter(page, TP_FORWARD_BYTES), left));
    for (size_t i = 0; i < TP_COUNTER_COUNT; i++) {
        bool fallback = strncmp(tp_counter_infos[i].name, "fallback_", 9) == 0;
        if ((fallback || i == TP_COPY_FAILED) && counter(page, i)) {
            (void)fprintf(out, "    %s %" PRIu64 " %s: %s\n",
                          fallback ? "left to Mooncake" : "FAILED", counter(page, i),
                          tp_counter_infos[i].unit, tp_counter_infos[i].meaning);
        }
        if (i == TP_FALLBACK_NO_PEER) {
            print_misses(page, scan, out);
        }
    }
    if (counter(page, TP_CALLS_DIVIDED))
        (void)fprintf(out, "    %" PRIu64 " %s\n", counter(page, TP_CALLS_DIVIDED),
                      tp_counter_infos[TP_CALLS_DIVIDED].meaning);
}

static void print_registrar(const struct tp_stats_page *page, FILE *out) {
    char now[16];
    char moved[16];

    if (!counter(page, TP_REGISTRATIONS) && !counter(page, TP_REGISTER_MISSES) &&
        !counter(page, TP_REGISTER_FAILURES))
        return;
    (void)fprintf(out,
                  "    registered with CUDA %s: %" PRIu64 " copies found it so, %" PRIu64
                  " not; %" PRIu64 " registrations, %" PRIu64 " evictions, %" PRIu64
                  " failures, %" PRIu64 " times full\n",
                  text_bytes(counter(page, TP_REGISTERED_BYTES), now),
                  counter(page, TP_REGISTER_HITS), counter(page, TP_REGISTER_MISSES),
                  counter(page, TP_REGISTRATIONS), counter(page, TP_REGISTER_EVICTIONS),
                  counter(page, TP_REGISTER_FAILURES), counter(page, TP_REGISTER_FULL));
    if (counter(page, TP_STAGED_BYTES))
        (void)fprintf(out,
                      "    staged %s, what was not registered, by way of %s of pinned memory\n",
                      text_bytes(counter(page, TP_STAGED_BYTES), moved),
                      text_bytes(counter(page, TP_STAGING_BYTES), now));
}

static void print_role(const struct report *report, uint32_t role, const char *title, FILE *out) {
    bool any = false;

    for (size_t i = 0; i < report->scan->count; i++) {
        const struct scan_entry *entry = &report->scan->entries[i];
        if (entry->state != SCAN_LIVE || !(report_roles(entry) & role)) {
            continue;
        }
        if (!any) {
            (void)fprintf(out, "\n%s\n", title);
            any = true;
        }
        print_process(entry, report, out);
        if (role == TP_ROLE_STORE) {
            print_segments(entry->page, out);
            print_clients(entry->page, report, out);
        } else {
            print_peers(entry->page, out);
            print_transfers(entry->page, report->scan, out);
            print_registrar(entry->page, out);
        }
    }
}

static void print_others(const struct report *report, FILE *out) {
    bool any = false;

    for (size_t i = 0; i < report->scan->count; i++) {
        const struct scan_entry *entry = &report->scan->entries[i];
        if (entry->state == SCAN_LIVE) {
            continue;
        }
        if (!any) {
            (void)fprintf(out, "\nOTHER ENTRIES\n");
            any = true;
        }
        (void)fprintf(out, "  %c-%s  ", entry->kind, entry->id);
        if (entry->known_owner) {
            (void)fprintf(out, "pid %d  uid %u  ", entry->pid, entry->uid);
        }
        (void)fprintf(out, "%s: %s%s\n",
                      entry->state == SCAN_SILENT  ? "not answering"
                      : entry->state == SCAN_STALE ? "stale"
                                                   : scan_state_word(entry->state),
                      entry->detail, entry->swept ? "; removed" : "");
    }
}

static void print_events(const struct report *report, FILE *out) {
    bool any = false;

    for (size_t i = 0; i < report->scan->count; i++) {
        const struct scan_entry *entry = &report->scan->entries[i];
        for (size_t k = 0; entry->page && k < TP_STATS_EVENTS; k++) {
            const struct tp_stats_event *event = &entry->page->events[k];
            uint64_t time_s = atomic_load(&event->time_s);
            char age[16];

            if (!time_s) {
                continue;
            }
            if (!any) {
                (void)fprintf(out, "\nEVENTS\n");
                any = true;
            }
            (void)fprintf(out, "  %s ago, %s %d: ",
                          text_age(report->now_s > time_s ? report->now_s - time_s : 0, age),
                          report_roles(entry) & TP_ROLE_STORE ? "store" : "engine", entry->pid);
            print_clean(out, event->text);
            (void)fputc('\n', out);
        }
    }
}

void report_print_text(const struct report *report, FILE *out) {
    report_summary(report, out);
    (void)fputc('\n', out);
    for (unsigned i = 0; i < report->reason_count && report->reason_count > 1; i++) {
        (void)fprintf(out, "  - %s\n", report->reasons[i]);
    }
    if (report->verdict == REPORT_EMPTY) {
        (void)fputs("  Start a store and engines with 'tidepool run --store DIR' and '--engine "
                    "DIR', with the same DIR.\n",
                    out);
    }
    print_role(report, TP_ROLE_STORE, "STORES", out);
    print_role(report, TP_ROLE_ENGINE, "ENGINES", out);
    print_others(report, out);
    print_events(report, out);
}
