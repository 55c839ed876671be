/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The rate limit of diagnostics in the log, because a client can cause them as often as it likes. It counts for each
 * rank and code, and for each code of connections without a rank. In DIAGNOSTIC_LOG_MS, DIAGNOSTIC_LOG_BURST
 * diagnostics are logged; then one line gives the number of the others. The caller passes the time.
 */

#include <stdint.h>

#include "core/diagnosis/diagnosis.h"

enum {
    DIAGNOSTIC_LOG_MS = 10000,
    DIAGNOSTIC_LOG_BURST = 16, /* picked: a trainer with as many in 10 s is in a loop */
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
/* Logs a summary of the diagnostics that were held back, when their time is over. The caller calls it regularly. */
void diagnostic_log_flush(struct diagnostic_log *log, uint64_t now_ms);
/* Return: when diagnostic_log_flush() has a line to log, or UINT64_MAX for never. */
uint64_t diagnostic_log_until_ms(const struct diagnostic_log *log);
