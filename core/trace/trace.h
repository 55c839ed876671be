/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A trace: the recorder's records of some steps, with the names that make them readable. The daemon takes it, and
 * writes it to a file or sends it to zerodctl; either prints it in the Trace Event Format, which ui.perfetto.dev and
 * chrome://tracing open.
 * https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
 *
 * Tracks of a node: the step, each kind of collective, checkpoints; each rank; each worker; each parcel. An arrow leads
 * from the push that completed a parcel to the parcel's sum.
 *
 * Pure: no I/O but printing, no clock.
 */

#include <stdio.h>

#include "core/base/recorder.h"

struct json_object;

struct trace {
    char *job, *version; /* owned, as all that follows */
    unsigned node, n_nodes;
    unsigned first_rank, n_ranks, n_workers; /* of this node */
    uint64_t step;                           /* the open one */
    uint64_t oldest;                         /* all records from this step on are there */
    uint64_t monotonic_ns, realtime_ns;      /* the same moment on both clocks */
    char **parcels;                          /* "bucket 3: head.weight, 11 more" */
    size_t n_parcels;
    char **waits; /* what a rank waits for, by RECORD_WAIT's item */
    size_t n_waits;
    struct record *records;
    size_t n_records;
};

void trace_deinit(struct trace *trace);

/* The answer to zerodctl, as JSON. Return: to be freed; NULL: no memory. */
char *trace_pack(const struct trace *trace);
/* Return: 0 and *trace, the caller's; or a static sentence that says what is wrong with it. object: borrowed. */
const char *trace_unpack(struct trace *trace, struct json_object *object);

/* Sorts the records, and prints one object of JSON. Errors are the stream's. */
void trace_print(FILE *file, struct trace *trace);
