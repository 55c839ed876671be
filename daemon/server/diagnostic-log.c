/* SPDX-License-Identifier: Apache-2.0 */

/* Limits how often a client can make the daemon log the same code. */

#include "daemon/server/diagnostic-log.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <syslog.h>

#include "core/base/base.h"
#include "core/base/log.h"
#include "core/diagnosis/diagnosis-log.h"

static void end_kind(struct diagnostic_log_kind *kind)
{
    char who[48] = "a connection without a rank";

    if (kind->rank >= 0)
        snprintf(who, sizeof(who), "rank %" PRId64, kind->rank);
    if (kind->n_held > 0)
        log_line(LOG_WARNING, "E%u of %s: %u more within %d s, which are not logged", kind->code, who, kind->n_held,
                 DIAGNOSTIC_LOG_MS / 1000);
    *kind = (struct diagnostic_log_kind){0};
}

void diagnostic_log_flush(struct diagnostic_log *log, uint64_t now_ms)
{
    for (size_t i = 0; i < DIAGNOSTIC_LOG_KINDS; i++)
        if (log->kinds[i].until_ms != 0 && log->kinds[i].until_ms <= now_ms)
            end_kind(&log->kinds[i]);
}

uint64_t diagnostic_log_until_ms(const struct diagnostic_log *log)
{
    uint64_t until_ms = UINT64_MAX;

    for (size_t i = 0; i < DIAGNOSTIC_LOG_KINDS; i++)
        if (log->kinds[i].n_held > 0)
            until_ms = MIN(until_ms, log->kinds[i].until_ms);
    return until_ms;
}

/*
 * Return: the kind with this rank and code. If there is none, a free kind, or the oldest kind after ending its period.
 */
static struct diagnostic_log_kind *find_kind(struct diagnostic_log *log, int64_t rank, unsigned code)
{
    struct diagnostic_log_kind *oldest = &log->kinds[0];

    for (size_t i = 0; i < DIAGNOSTIC_LOG_KINDS; i++) {
        struct diagnostic_log_kind *kind = &log->kinds[i];

        if (kind->until_ms != 0 && kind->rank == rank && kind->code == code)
            return kind;
        if (kind->until_ms < oldest->until_ms)
            oldest = kind;
    }
    end_kind(oldest);
    return oldest;
}

void diagnostic_log_put(struct diagnostic_log *log, const struct diagnostic *diagnostic, uint64_t now_ms)
{
    int64_t rank = diagnostic->has_rank ? (int64_t)diagnostic->rank : -1;
    struct diagnostic_log_kind *kind;

    diagnostic_log_flush(log, now_ms);
    kind = find_kind(log, rank, diagnostic->code);
    if (kind->until_ms == 0)
        *kind = (struct diagnostic_log_kind){
            .rank = rank, .code = diagnostic->code, .until_ms = now_ms + DIAGNOSTIC_LOG_MS};
    assert(kind->n_logged <= DIAGNOSTIC_LOG_BURST);
    assert(kind->n_held == 0 || kind->n_logged == DIAGNOSTIC_LOG_BURST);
    if (kind->n_logged == DIAGNOSTIC_LOG_BURST) {
        kind->n_held++;
        return;
    }
    kind->n_logged++;
    log_diagnostic(diagnostic);
}
