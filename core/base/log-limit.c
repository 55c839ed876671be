/* SPDX-License-Identifier: Apache-2.0 */

/* Rate limits of log lines that strangers can cause. */

#include "core/base/log-limit.h"

#include <stdarg.h>
#include <stdio.h>

#include "core/base/log.h"

void log_limit_flush(struct log_limit *limit, uint64_t now_ms)
{
    if (limit->n_held == 0 || now_ms < limit->until_ms)
        return;
    if (limit->n_held == 1)
        log_line(limit->level, "%s", limit->held);
    else
        log_line(limit->level, "%s (the last of %u such in %u s)", limit->held, limit->n_held, LOG_LIMIT_MS / 1000);
    limit->n_held = 0;
    limit->until_ms = now_ms + LOG_LIMIT_MS;
}

uint64_t log_limit_until_ms(const struct log_limit *limit)
{
    return limit->n_held > 0 ? limit->until_ms : UINT64_MAX;
}

void log_limited(struct log_limit *limit, uint64_t now_ms, int level, const char *format, ...)
{
    va_list args;

    log_limit_flush(limit, now_ms);
    va_start(args, format);
    vsnprintf(limit->held, sizeof(limit->held), format, args);
    va_end(args);
    limit->level = level;
    limit->n_held++;
    log_limit_flush(limit, now_ms);
}
