/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The rate limit of diagnostics in the log, which is needed because a client can cause diagnostics as often as it
 * likes. Each pair of rank and code is a kind with its own limit. All connections without a rank count as rank -1. In a
 * period of DIAGNOSTIC_LOG_MS, DIAGNOSTIC_LOG_BURST diagnostics of a kind are logged. At the period's end, one line
 * gives the number of diagnostics that were not logged. The caller passes the time.
 */

#include <stdint.h>

#include "core/diagnosis/diagnosis.h"

enum {
    DIAGNOSTIC_LOG_MS = 10000,
    DIAGNOSTIC_LOG_BURST = 16, /* picked: a trainer with more in 10 s is in a loop */
    DIAGNOSTIC_LOG_KINDS = 64,
};

struct diagnostic_log {
    struct diagnostic_log_kind {
        int64_t rank; /* -1: connections without a rank */
        unsigned code;
        uint64_t until_ms; /* end of the period; 0: the entry is free */
        unsigned n_logged, n_held;
    } kinds[DIAGNOSTIC_LOG_KINDS];
};

void diagnostic_log_put(struct diagnostic_log *log, const struct diagnostic *diagnostic, uint64_t now_ms);
/* Logs the number of diagnostics that were not logged, for each period that is over. The caller calls it regularly. */
void diagnostic_log_flush(struct diagnostic_log *log, uint64_t now_ms);
/* Return: the time at which diagnostic_log_flush() has a line to log, or UINT64_MAX if it has none. */
uint64_t diagnostic_log_until_ms(const struct diagnostic_log *log);
