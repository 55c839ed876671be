/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The daemon's last answers for `zerodctl top`, and an error if the daemon no longer answers. Each poll opens a
 * connection, so it finds a replaced daemon. One thread.
 */

#include <stdbool.h>
#include <stdint.h>

#include "client/control/control.h"

struct json_object;

enum {
    FEED_PATIENCE_MS = 5000, /* picked: the longest time of one poll; keys are read meanwhile */
    FEED_BASE_MS = 10000,    /* picked: shares cover the last 10 to 20 s */
};

/* Earlier ranks, for comparison with later ones. */
struct feed_base {
    struct json_object *ranks;
    uint64_t at_ms;
};

struct feed {
    const char *socket;                 /* not owned */
    const struct control_idle *idle;    /* not owned; NULL: no keys are read during a poll */
    struct json_object *status, *ranks; /* the last answers; NULL: none yet */
    struct json_object *diagnostics;
    uint64_t answered_ms, diagnostics_ms; /* when they came, by control_clock_ms() */
    struct feed_base bases[2];            /* the older one first */
    int code;                             /* of the last poll: 0, or a code of sysexits.h */
    char error[1024];                     /* a sentence, if code is not 0 */
};

void feed_deinit(struct feed *feed);

/* Asks the daemon. After a failure the last answers remain. Return: feed->code. */
int feed_look(struct feed *feed);

/* The share of time in which other ranks waited for this rank, or this rank for others. Return: negative if it is not
 * known yet. */
double feed_behind_share(const struct feed *feed, struct json_object *rank);
double feed_waited_share(const struct feed *feed, struct json_object *rank);
