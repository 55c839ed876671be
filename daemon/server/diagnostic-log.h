/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The rate limit of diagnostics in the log, because a client can cause them as often as it likes. For each rank and
 * code, and for each code of connections without a rank, DIAGNOSTIC_LOG_BURST are logged, then none until
 * DIAGNOSTIC_LOG_MS are over; one line then gives the number of the others. The time is passed in.
 */

#include <stdint.h>

#include "core/diagnosis/diagnosis.h"

enum {
    DIAGNOSTIC_LOG_MS = 10000,
    DIAGNOSTIC_LOG_BURST = 16, /* picked: a trainer that is told as often in 10 s is a loop */
    DIAGNOSTIC_LOG_KINDS = 64,
};

struct diagnostic_log {
    struct diagnostic_log_kind {
        int64_t rank; /* -1: none */
        unsigned code;
        uint64_t until_ms; /* 0: free */
        unsigned n_logged, n_held;
    } kinds[DIAGNOSTIC_LOG_KINDS];
};

void diagnostic_log_put(struct diagnostic_log *log, const struct diagnostic *diagnostic, uint64_t now_ms);
/* To be called regularly: logs a summary of the diagnostics that were held back, when their time is over. */
void diagnostic_log_flush(struct diagnostic_log *log, uint64_t now_ms);
/* When diagnostic_log_flush() has something to log; UINT64_MAX: never. */
uint64_t diagnostic_log_until_ms(const struct diagnostic_log *log);
