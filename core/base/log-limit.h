/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The rate limit of log lines that a stranger can cause. The first line is logged at once. For LOG_LIMIT_MS after it,
 * lines are held; then the last of them is logged with their number. Each reason for a line has a struct of its own.
 * The caller passes the time.
 */

#include <stdint.h>

enum { LOG_LIMIT_MS = 10000 };

struct log_limit {
    uint64_t until_ms; /* no line is logged before this time */
    unsigned n_held;
    int level;
    char held[512]; /* the last held line */
};

void log_limited(struct log_limit *limit, uint64_t now_ms, int level, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Logs the last held line, with the number of held lines, if LOG_LIMIT_MS is over. The caller calls it regularly. */
void log_limit_flush(struct log_limit *limit, uint64_t now_ms);
/* Return: the time when log_limit_flush() will have a line to log, or UINT64_MAX for never. */
uint64_t log_limit_until_ms(const struct log_limit *limit);
