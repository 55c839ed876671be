/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Limits the restarts of a daemon: `limit` restarts in RESTARTS_WINDOW_MS. */

#include <stdbool.h>
#include <stdint.h>

enum {
    RESTARTS_MAX = 100,
    RESTARTS_WINDOW_MS = 10 * 60 * 1000,
};

struct restarts {
    unsigned limit; /* at most RESTARTS_MAX */
    unsigned n;     /* restarts in the window */
    uint64_t at_ms[RESTARTS_MAX];
};

/* Return: true if a restart is allowed now. */
bool restarts_are_left(struct restarts *restarts, uint64_t now_ms);
/* Counts a restart, if it is allowed now. Return: true if it is allowed. */
bool restarts_add(struct restarts *restarts, uint64_t now_ms);
