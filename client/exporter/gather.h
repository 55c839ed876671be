/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * What all daemons of this machine say. Each is asked in a thread of its own, within the timeout, so that one that
 * hangs delays nobody for longer. The answers are kept for a moment: however many readers there are, a daemon is asked
 * at most ten times in a second.
 *
 * Any thread may call gather_print(). A socket that is not asked, or has no answer, is said once on stderr.
 */

#include <sys/types.h>

#include "client/ctl/metrics.h"

struct gather;

struct gather_options {
    const char *pattern; /* of sockets, as in glob(7); not consumed, must outlive the gather */
    unsigned timeout_ms;
    uid_t zerod; /* that user; (uid_t)-1: there is none */
};

/* Return: NULL when out of memory. */
struct gather *gather_new(const struct gather_options *options);
void gather_free(struct gather *gather);

/* Appends the metrics; buf->cut: memory was short. */
void gather_print(struct gather *gather, enum metrics_format format, struct strbuf *buf);
