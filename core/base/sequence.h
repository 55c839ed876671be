/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A sequence runs stages one after the other. A stage is over at once, or when a callback ends it.
 *
 *     static int admit(void *userdata);    returns SEQUENCE_OVER, or -errno
 *     static int reserve(void *userdata);  posts a work, returns SEQUENCE_WAITS; sequence_advance() when that is done
 *
 *     static const sequence_stage stages[] = {admit, reserve, NULL};
 *
 * One thread. ended() may free the sequence, and so may a stage that then returns SEQUENCE_WAITS.
 */

#include <stddef.h>

enum {
    SEQUENCE_WAITS, /* sequence_advance() follows */
    SEQUENCE_OVER,  /* the next stage begins */
};

/* Return: one of these, or -errno. */
typedef int (*sequence_stage)(void *userdata);

struct sequence {
    const sequence_stage *stages; /* NULL ends them; not owned */
    /* Called with 0 when all stages are over, or with -errno when one has failed; then sequence_run() may follow. */
    void (*ended)(void *userdata, int result);
    void *userdata;
    size_t at; /* the current stage, or the one that has failed */
};

/* Begins with the first stage. Return: 0 if ended() has been or will be called; or -errno if a stage failed before any
 * stage waited, and ended() is not called. */
int sequence_start(struct sequence *sequence);

/* Ends the current stage. result: 0, or -errno if it has failed. */
void sequence_advance(struct sequence *sequence, int result);

/* sequence_advance(), as a callback. */
void sequence_done(void *sequence, int result);

/* Begins the current stage: the first one, or again the one that has failed. If no stage waits, it calls ended()
 * itself. */
void sequence_run(struct sequence *sequence);
