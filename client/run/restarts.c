/* SPDX-License-Identifier: Apache-2.0 */

/* Counts the restarts of a daemon. */

#include "client/run/restarts.h"

#include <string.h>

static void forget_old(struct restarts *restarts, uint64_t now_ms)
{
    unsigned n_old = 0;

    while (n_old < restarts->n && now_ms - restarts->at_ms[n_old] >= RESTARTS_WINDOW_MS)
        n_old++;
    restarts->n -= n_old;
    memmove(restarts->at_ms, restarts->at_ms + n_old, restarts->n * sizeof(*restarts->at_ms));
}

bool restarts_are_left(struct restarts *restarts, uint64_t now_ms)
{
    forget_old(restarts, now_ms);
    return restarts->n < restarts->limit;
}

bool restarts_add(struct restarts *restarts, uint64_t now_ms)
{
    if (!restarts_are_left(restarts, now_ms))
        return false;
    restarts->at_ms[restarts->n++] = now_ms;
    return true;
}
