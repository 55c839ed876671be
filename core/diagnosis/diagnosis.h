/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Diagnostics: codes, causes and texts of zerod's refusals. Pure: no I/O, no clock.
 *
 * A cause_*() function builds a diagnostic from evidence. From then on the diagnostic is immutable. The exception, the
 * log, the journal and the JSON show it. The diagnostic has copies of names, sites and numbers.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/diagnosis/push-record.h"

struct layout;

enum diagnostic_code {
    E_DUPLICATE = 1001,
    E_STALE = 1002,
    E_EARLY = 1003,
    E_AFTER_BOUNDARY = 1004,
    E_MISSING = 1005,
    E_GRAPH_CHANGED = 1006,
    E_ABANDONED = 1007,
    E_MANIFEST = 1101,
    E_GRADIENT = 1102,
    E_PARAMETER = 1103,
    E_REPOINTED = 1104,
    E_DRIFTED = 1105,
    E_WEIGHT_WRITTEN = 1106,
    E_REDUCED_TWICE = 1107,
    E_STEP_ARGS = 1108,
    E_OTHER_RUN = 1109,
    E_RELEASED_READ = 1110,
    E_ALIKE = 1111,
    E_NONFINITE = 1201,
    E_LOSS_SCALE = 1202,
    E_UNSCALED = 1203,
    E_RANK_TAKEN = 1301,
    E_RANK_LOST = 1302,
    E_STALLED = 1303,
    E_HELD = 1304,
    E_STOPPED = 1305,
    E_QUOTA = 1401,
    E_NOT_ALLOWED = 1402,
    E_BAD_MESSAGE = 1403,
    E_NODE_LOST = 1501,
    E_ENGINE = 1502,
    E_GENERATION = 1503,
    E_CONFIG = 1601,
    E_NOT_SAVED = 1701,
    E_NOT_LOADED = 1702,
};

enum {
    DIAGNOSTIC_MAX_PARAMS = 5, /* names in a text; the full list is in zerodctl diagnostics --json */
    DIAGNOSTIC_MAX_FIELDS = 16,
};

struct diagnostic_field {
    char *label;
    char *text; /* may hold newlines; printing indents them */
};

/* A push_record whose interned strings are spelled out. */
struct diagnostic_push {
    bool present;
    struct push_record record;
    char *segment, *site; /* "" if unknown */
};

struct diagnostic {
    enum diagnostic_code code;
    char cause_class[4]; /* such as "D1"; may be "" */
    bool warning;        /* a warning: no request was refused */
    char *title;         /* such as "duplicate gradient refused" */
    bool has_rank, has_step, has_micro_batch;
    uint32_t rank;
    uint64_t step;
    uint32_t micro_batch;
    char *params[DIAGNOSTIC_MAX_PARAMS];
    uint32_t n_params_named, n_params;
    uint32_t *param_ids; /* ids of all n_params parameters; may be NULL */
    struct diagnostic_push first, second;
    struct diagnostic_field fields[DIAGNOSTIC_MAX_FIELDS];
    size_t n_fields;
    char *text;           /* the complete text, as printed; set by diagnostic_finish() */
    uint64_t id, time_ns; /* set by the module that stores the diagnostic */
    unsigned n_refs;
};

/* One constant row per code: the short text, and the sentence for operators in the manual's index. */
struct diagnostic_info {
    enum diagnostic_code code;
    const char *title;   /* such as "duplicate gradient refused" */
    const char *summary; /* one sentence */
};

const struct diagnostic_info *diagnostic_info(enum diagnostic_code code); /* Return: NULL if the code does not exist */
const struct diagnostic_info *diagnostic_table(size_t *n);

/*
 * Begins a diagnostic. If title is NULL, the table's title is used. Always returns a diagnostic; without memory its
 * texts are shorter.
 */
struct diagnostic *diagnostic_new(enum diagnostic_code code, const char *title);
void diagnostic_at(struct diagnostic *d, int64_t rank, int64_t step, int64_t micro_batch); /* negative: left out */
void diagnostic_field(struct diagnostic *d, const char *label, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void diagnostic_params(struct diagnostic *d, const struct layout *layout, const uint32_t *ids, size_t n);
/* Renders the text. Fields are printed in the order of the calls that added them. */
struct diagnostic *diagnostic_finish(struct diagnostic *d);

struct diagnostic *diagnostic_ref(struct diagnostic *d);
void diagnostic_unref(struct diagnostic *d); /* d may be NULL */
