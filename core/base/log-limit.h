/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The rate limit of log lines that a stranger can cause as often as it likes. The first line is logged at once, then
 * none for LOG_LIMIT_MS; one line then gives the number of the others. One struct is for one reason. The caller passes
 * the time.
 */

#include <stdint.h>

enum { LOG_LIMIT_MS = 10000 };

struct log_limit {
    uint64_t until_ms; /* no line is logged before */
    unsigned n_held;
    int level;
    char held[512]; /* the last held line */
};

void log_limited(struct log_limit *limit, uint64_t now_ms, int level, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Logs the number of lines that were held back, when their time is over. The caller calls it regularly. */
void log_limit_flush(struct log_limit *limit, uint64_t now_ms);
/* Return: when log_limit_flush() has a line to log, or UINT64_MAX for never. */
uint64_t log_limit_until_ms(const struct log_limit *limit);
