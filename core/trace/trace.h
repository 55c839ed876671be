/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A trace: the recorder's records of some steps, with the names that make them readable. The daemon makes a trace, and
 * writes it to a file or sends it to zerodctl. Daemon and zerodctl print it in the Trace Event Format, which
 * ui.perfetto.dev and chrome://tracing open.
 * https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
 *
 * Tracks of a node: the step, each kind of collective, checkpoints; each rank; each worker; each parcel. An arrow leads
 * from the push that completed a parcel to the parcel's sum.
 *
 * Pure, except for printing.
 */

#include <stdio.h>

#include "core/base/recorder.h"

struct json_object;

struct trace {
    char *job, *version; /* owned, like all pointers below */
    unsigned node, n_nodes;
    unsigned first_rank, n_ranks, n_workers; /* the ranks and workers of this node */
    uint64_t step;                           /* the step that was open */
    uint64_t oldest;                         /* the trace has all records from this step on */
    uint64_t monotonic_ns, realtime_ns;      /* the time of the trace on both clocks */
    char **parcels;                          /* names such as "bucket 3: head.weight, 11 more" */
    size_t n_parcels;
    char **waits; /* names of what a rank waits for, indexed by RECORD_WAIT's item */
    size_t n_waits;
    struct record *records;
    size_t n_records;
};

void trace_deinit(struct trace *trace);

/* Return: the trace as JSON, for zerodctl, which the caller frees; NULL without memory. */
char *trace_pack(const struct trace *trace);
/* Unpacks a trace from a borrowed object. Return: NULL on success, after which the caller calls trace_deinit(); else a
 * static message with the problem. */
const char *trace_unpack(struct trace *trace, struct json_object *object);

/* Sorts the records, and prints the trace as one JSON object. Errors stay in the stream. */
void trace_print(FILE *file, struct trace *trace);
