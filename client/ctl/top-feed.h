/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Keeps the daemon's last answers for `zerodctl top`, and an error if the daemon no longer answers. Each poll opens a
 * connection, so after a replacement it reaches the new daemon. One thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "client/control/control.h"

struct json_object;

enum {
    FEED_PATIENCE_MS = 5000, /* picked: the longest time of one poll; keys are read meanwhile */
    FEED_BASE_MS = 10000,    /* picked: feed_behind_share() covers the last 10 to 20 s */
};

/* An earlier answer to "ranks", for comparison with the last one. */
struct feed_base {
    struct json_object *ranks;
    uint64_t at_ms;
};

struct feed {
    const char *socket;                 /* not owned */
    const struct control_idle *idle;    /* not owned; NULL: no keys are read during a poll */
    struct json_object *status, *ranks; /* the last answers; NULL: none yet */
    struct json_object *diagnostics;
    uint64_t answered_ms, diagnostics_ms; /* times of these answers, control_clock_ms() */
    struct feed_base bases[2];            /* the older one first */
    int code;                             /* result of the last poll: 0, or a code of sysexits.h */
    char error[1024];                     /* a sentence, if code is not 0 */
};

void feed_deinit(struct feed *feed);

/* Polls the daemon. A failure does not change the last answers. Return: feed->code. */
int feed_look(struct feed *feed);

/* Return: the share of recent time in which other ranks waited for this rank (behind), or this rank waited for others
 * (waited); negative if it is not known yet. */
double feed_behind_share(const struct feed *feed, struct json_object *rank);
double feed_waited_share(const struct feed *feed, struct json_object *rank);
