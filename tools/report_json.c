/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The report as JSON. Its keys are documented in docs/tidepool.1.in and stay: add, never rename.
 */
#include "tools/report.h"

#include "env/env.h"
#include "tools/tool.h"

#include <jansson.h>
#include <stdlib.h>

static json_t *clean_string(const char *untrusted) {
    char text[512];

    text_clean(text, sizeof(text), untrusted);
    return json_string(text);
}

/* JSON has no unsigned 64-bit integers: what does not fit is a broken counter. */
static json_t *number(uint64_t value) {
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

static json_t *hex(const uint8_t id[static 16]) {
    char text[33];

    for (size_t i = 0; i < 16; i++) {
        (void)snprintf(text + 2 * i, 3, "%02x", id[i]);
    }
    return json_string(text);
}

static json_t *segments_json(const struct tp_stats_page *page) {
    json_t *list = json_array();

    for (size_t i = 0; i < TP_STATS_SEGMENTS; i++) {
        const struct tp_stats_segment *s = &page->segments[i];
        uint32_t state = atomic_load(&s->state);
        if (state != TP_SLOT_EMPTY) {
            (void)json_array_append_new(
                list, json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o}", "state",
                                report_slot_word(state), "kind", report_kind_word(s->kind), "bytes",
                                number(s->bytes), "page_bytes", number(s->page_bytes),
                                "piece_bytes", number(s->piece_bytes), "pieces", number(s->pieces),
                                "nodes", number(s->nodes), "detail", clean_string(s->detail)));
        }
    }
    return list;
}

static json_t *clients_json(const struct tp_stats_page *page) {
    json_t *list = json_array();

    for (size_t i = 0; i < TP_STATS_CLIENTS; i++) {
        const struct tp_stats_client *c = &page->clients[i];
        uint32_t state = atomic_load(&c->state);
        if (state != TP_SLOT_EMPTY) {
            (void)json_array_append_new(
                list, json_pack("{s:s, s:i, s:o, s:o, s:o}", "state", report_slot_word(state),
                                "pid", (int)c->pid, "uid", number(c->uid), "pieces_sent",
                                number(c->pieces_sent), "since_s", number(c->since_s)));
        }
    }
    return list;
}

static json_t *peers_json(const struct tp_stats_page *page) {
    json_t *list = json_array();

    for (size_t i = 0; i < TP_STATS_PEERS; i++) {
        const struct tp_stats_peer *p = &page->peers[i];
        uint32_t state = atomic_load(&p->state);
        if (state != TP_SLOT_EMPTY) {
            (void)json_array_append_new(
                list,
                json_pack("{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "state",
                          report_slot_word(state), "name", clean_string(p->name), "instance",
                          hex(p->instance), "path", clean_string(p->path), "segments",
                          number(p->segments), "pieces", number(p->pieces), "pieces_mapped",
                          number(p->pieces_mapped), "read_bytes",
                          number(atomic_load(&p->read_bytes)), "write_bytes",
                          number(atomic_load(&p->write_bytes)), "since_s", number(p->since_s)));
        }
    }
    return list;
}

static json_t *misses_json(const struct tp_stats_page *page, const struct scan *scan) {
    json_t *list = json_array();

    for (size_t i = 0; i < TP_STATS_MISSES; i++) {
        const struct tp_stats_miss *m = &page->misses[i];
        if (atomic_load(&m->state) == TP_SLOT_LIVE) {
            (void)json_array_append_new(
                list, json_pack("{s:o, s:s, s:o, s:o}", "name", clean_string(m->name), "target",
                                report_target_word(report_target(scan, m->name)), "requests",
                                number(atomic_load(&m->requests)), "bytes",
                                number(atomic_load(&m->bytes))));
        }
    }
    return list;
}

static json_t *conditions_json(const struct tp_stats_page *page) {
    json_t *list = json_array();

    for (uint32_t bit = 1; bit; bit <<= 1) {
        if (atomic_load(&page->conditions) & bit && report_condition_word(bit)) {
            (void)json_array_append_new(list, json_string(report_condition_word(bit)));
        }
    }
    return list;
}

static json_t *events_json(const struct tp_stats_page *page) {
    json_t *list = json_array();

    for (size_t i = 0; i < TP_STATS_EVENTS; i++) {
        uint64_t time_s = atomic_load(&page->events[i].time_s);
        if (time_s) {
            (void)json_array_append_new(list,
                                        json_pack("{s:o, s:o}", "time_s", number(time_s), "text",
                                                  clean_string(page->events[i].text)));
        }
    }
    return list;
}

static json_t *counters_json(const struct tp_stats_page *page) {
    json_t *object = json_object();

    for (size_t i = 0; i < TP_COUNTER_COUNT; i++) {
        (void)json_object_set_new(object, tp_counter_infos[i].name,
                                  number(atomic_load(&page->counters[i])));
    }
    return object;
}

static void add_page(json_t *process, const struct tp_stats_page *page, const struct scan *scan) {
    (void)json_object_set_new(process, "name", clean_string(page->name));
    (void)json_object_set_new(process, "program", clean_string(page->program));
    (void)json_object_set_new(process, "hostname", clean_string(page->hostname));
    (void)json_object_set_new(process, "version", clean_string(page->library_version));
    (void)json_object_set_new(process, "own_pid", json_integer(page->pid));
    (void)json_object_set_new(process, "start_s", number(page->start_s));
    (void)json_object_set_new(process, "counters", counters_json(page));
    (void)json_object_set_new(process, "segments", segments_json(page));
    (void)json_object_set_new(process, "clients", clients_json(page));
    (void)json_object_set_new(process, "peers", peers_json(page));
    (void)json_object_set_new(process, "misses", misses_json(page, scan));
    (void)json_object_set_new(process, "conditions", conditions_json(page));
    (void)json_object_set_new(process, "events", events_json(page));
}

static json_t *process_json(const struct scan_entry *entry, const struct scan *scan) {
    uint32_t roles = report_roles(entry);
    json_t *role_list = json_array();
    json_t *process =
        json_pack("{s:s, s:s, s:s, s:b}", "instance", entry->id, "state",
                  scan_state_word(entry->state), "detail", entry->detail, "removed", entry->swept);

    if (roles & TP_ROLE_STORE) {
        (void)json_array_append_new(role_list, json_string("store"));
    }
    if (roles & TP_ROLE_ENGINE) {
        (void)json_array_append_new(role_list, json_string("engine"));
    }
    (void)json_object_set_new(process, "roles", role_list);
    (void)json_object_set_new(process, "pid",
                              entry->known_owner ? json_integer(entry->pid) : json_null());
    (void)json_object_set_new(process, "uid",
                              entry->known_owner ? json_integer(entry->uid) : json_null());
    if (entry->page) {
        add_page(process, entry->page, scan);
    }
    return process;
}

static json_t *report_json(const struct report *report) {
    json_t *reasons = json_array();
    json_t *processes = json_array();

    for (unsigned i = 0; i < report->reason_count; i++) {
        (void)json_array_append_new(reasons, json_string(report->reasons[i]));
    }
    for (size_t i = 0; i < report->scan->count; i++) {
        (void)json_array_append_new(processes,
                                    process_json(&report->scan->entries[i], report->scan));
    }
    return json_pack(
        "{s:i, s:o, s:o, s:s, s:o, s:{s:i, s:i, s:i, s:i, s:i, s:o, s:o, s:o, s:o}, s:o}", "format",
        1, "directory", clean_string(report->directory), "time_s", number(report->now_s), "verdict",
        report_verdict_word(report->verdict), "reasons", reasons, "totals", "stores",
        (int)report->stores, "engines", (int)report->engines, "attached_engines",
        (int)report->attached_engines, "not_answering", (int)report->not_answering, "stale",
        (int)report->stale, "segment_bytes", number(report->segment_bytes), "read_bytes",
        number(report->read_bytes), "write_bytes", number(report->write_bytes), "forward_bytes",
        number(report->forward_bytes), "processes", processes);
}

void report_print_json(const struct report *report, bool compact, FILE *out) {
    json_t *root = report_json(report);

    if (root) {
        (void)json_dumpf(root, out, compact ? JSON_COMPACT : JSON_INDENT(2));
        (void)fputc('\n', out);
    }
    json_decref(root);
}
