/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Collects the answers of all daemons of this machine. A thread for each daemon asks it, so a daemon that hangs delays
 * the text by no more than the timeout. The answers are kept for a tenth of a second, so a daemon is asked at most ten
 * times in a second, however many clients there are.
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
