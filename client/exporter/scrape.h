/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Collects the answers of all daemons of this machine. Each daemon is asked in its own thread, so a daemon that hangs
 * delays the text by no more than the timeout. The answers are used again for a tenth of a second, so any number of
 * clients asks a daemon at most ten times per second.
 *
 * Any thread may call gather_print(). A socket that is not asked, or does not answer, is reported once on stderr.
 */

#include <sys/types.h>

#include "client/ctl/metrics.h"

struct gather;

struct gather_options {
    const char *pattern; /* pattern of sockets for glob(7); not owned, must outlive the gather */
    unsigned timeout_ms;
    uid_t zerod; /* the uid of the user zerod; (uid_t)-1 if that user does not exist */
};

/* Return: NULL when out of memory. */
struct gather *gather_new(const struct gather_options *options);
void gather_free(struct gather *gather);

/* Appends the metrics. If memory is short, buf->cut is set. */
void gather_print(struct gather *gather, enum metrics_format format, struct strbuf *buf);
