/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The rate limit of log lines that a stranger can cause as often as it likes: the first is logged at once, then none
 * for LOG_LIMIT_MS; one line then gives the number of the others. One struct is one reason. The time is passed in.
 */

#include <stdint.h>

enum { LOG_LIMIT_MS = 10000 };

struct log_limit {
    uint64_t until_ms; /* nothing is logged before */
    unsigned n_held;
    int level;
    char held[512]; /* the last of them */
};

void log_limited(struct log_limit *limit, uint64_t now_ms, int level, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* To be called regularly: logs the number of lines that were held back, when their time is over. */
void log_limit_flush(struct log_limit *limit, uint64_t now_ms);
/* When log_limit_flush() has something to log; UINT64_MAX: never. */
uint64_t log_limit_until_ms(const struct log_limit *limit);
