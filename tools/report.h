/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a scan of a directory means, and its two forms: for people and as JSON.
 */
#ifndef TIDEPOOL_REPORT_H
#define TIDEPOOL_REPORT_H

#include "tools/scan.h"

#include <stdio.h>

#define REPORT_REASONS 16

enum report_verdict { REPORT_OK, REPORT_ATTENTION, REPORT_EMPTY };

struct report {
    const char *directory;
    const struct scan *scan;
    uint64_t now_s; /* CLOCK_REALTIME */
    enum report_verdict verdict;
    unsigned stores, engines, attached_engines, not_answering, stale;
    uint64_t pieces, pieces_mapped; /* of the engines that are still importing */
    uint64_t read_bytes, write_bytes, forward_bytes, segment_bytes;
    unsigned reason_count, reasons_left_out;
    char reasons[REPORT_REASONS][320]; /* why attention is needed: clean text */
};

/* `directory_problem` (may be empty): why the library would refuse this directory. Borrows
 * directory and scan. */
void report_judge(const char *directory, const char *directory_problem, const struct scan *scan,
                  struct report *ret_report);

/* "store", "engine" or both: TP_ROLE_*. By its entry and its page. */
uint32_t report_roles(const struct scan_entry *entry);

/* Whom a name stands for whose requests fell back to Mooncake's transport (report_targets.c). */
enum report_target {
    REPORT_TARGET_STORE,      /* a store in this directory */
    REPORT_TARGET_ENGINE,     /* a process in this directory that shares no memory */
    REPORT_TARGET_OTHER_HOST, /* its host part is no name or address of this host */
    REPORT_TARGET_UNKNOWN,    /* of this host, and in no page of this directory */
};
enum report_target report_target(const struct scan *scan, const char *name);
const char *report_target_word(enum report_target target);
const char *report_target_meaning(enum report_target target);

/* A live process of this name that has this role, and how many there are. NULL: none. */
const struct scan_entry *report_find(const struct scan *scan, const char *name, uint32_t role,
                                     unsigned *ret_count);

/* "unnamed", "several_stores", "lends_unshared" of one bit of enum tp_condition; NULL: none such.
 */
const char *report_condition_word(uint32_t bit);

/* The first line of the text form, without its end. */
void report_summary(const struct report *report, FILE *out);
void report_print_text(const struct report *report, FILE *out);
void report_print_json(const struct report *report, bool compact, FILE *out);

const char *report_verdict_word(enum report_verdict verdict);

/* "memfd", "files", "cumem" of enum tp_segment_kind. */
const char *report_kind_word(uint32_t kind);
/* "starting", "live", "gone" of enum tp_slot_state. */
const char *report_slot_word(uint32_t state);

#endif
