/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns daemons' JSON answers to "status" and "ranks" into metrics for Prometheus. Pure: no I/O, no clock.
 * docs/metrics.md lists the metrics, and a test compares that list with the printed metrics.
 *
 * If an answer lacks a key, as that of an older daemon, or has another type there, it has no sample for it. All samples
 * of a metric are printed together, also those of different daemons, because OpenMetrics demands it.
 */

#include <stddef.h>

struct json_object;
struct strbuf;

enum metrics_format {
    METRICS_OPENMETRICS, /* version 1.0.0; Prometheus' older parser also reads it, without the counters' types */
    METRICS_PROMETHEUS,  /* text format 0.0.4 */
};

/* One daemon. All pointers are borrowed. */
struct metrics_source {
    const char *socket;
    struct json_object *status; /* its answer to "status"; NULL: it has not answered */
    struct json_object *ranks;  /* its answer to "ranks"; NULL: unknown */
};

/* The media type of a text in that format. */
const char *metrics_content_type(enum metrics_format format);

/* Appends the text to buf. If memory is short, buf->cut is set and the text is unusable. */
void metrics_print(struct strbuf *buf, enum metrics_format format, const struct metrics_source *sources, size_t n);
