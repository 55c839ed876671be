/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's last answers, for `zerodctl top`; and an error, if the daemon does not answer any more. Each look opens a
 * connection, so it finds a daemon that was replaced. One thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "client/control/control.h"

struct json_object;

enum {
    FEED_PATIENCE_MS = 5000, /* picked: how long one look may take; keys are read meanwhile */
    FEED_BASE_MS = 10000,    /* picked: shares of time are of the last 10 to 20 s */
};

/* Earlier ranks, to which later ones are compared. */
struct feed_base {
    struct json_object *ranks;
    uint64_t at_ms;
};

struct feed {
    const char *socket;                 /* not owned */
    const struct control_idle *idle;    /* not owned; NULL: keys are not read while the daemon is asked */
    struct json_object *status, *ranks; /* the last answers; NULL: none yet */
    struct json_object *diagnostics;
    uint64_t answered_ms, diagnostics_ms; /* when they came, by control_clock_ms() */
    struct feed_base bases[2];            /* the older one first */
    int code;                             /* of the last look: 0, or one of sysexits.h */
    char error[1024];                     /* a sentence, if code is not 0 */
};

void feed_deinit(struct feed *feed);

/* Asks the daemon. On failure the last answers stay. Return: feed->code. */
int feed_look(struct feed *feed);

/* Shares of time: others have waited for this rank; it has waited for others. Return: negative, it is not known yet. */
double feed_behind_share(const struct feed *feed, struct json_object *rank);
double feed_waited_share(const struct feed *feed, struct json_object *rank);
