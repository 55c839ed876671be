/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns daemons' JSON answers to "status" and "ranks" into metrics for Prometheus, without I/O or a clock.
 * docs/metrics.md lists the metrics, and a test compares that list with the printed metrics.
 *
 * A key that an answer lacks (an older daemon's, for example), or that has another type, has no sample. The samples of
 * a metric from all daemons are printed together, because OpenMetrics requires that.
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
    struct json_object *status; /* the daemon's answer to "status"; NULL: none */
    struct json_object *ranks;  /* the daemon's answer to "ranks"; NULL: none */
};

/* Return: the media type of a text in this format. */
const char *metrics_content_type(enum metrics_format format);

/* Appends the text to buf. If memory is short, buf->cut is set and the text is unusable. */
void metrics_print(struct strbuf *buf, enum metrics_format format, const struct metrics_source *sources, size_t n);
