/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A sequence runs stages one after the other. A stage is over when it returns, or when a callback says so.
 *
 *     static int admit(void *userdata);    returns SEQUENCE_OVER, or -errno
 *     static int reserve(void *userdata);  posts a work, returns SEQUENCE_WAITS; sequence_advance() when that is done
 *
 *     static const sequence_stage stages[] = {admit, reserve, NULL};
 *
 * One thread calls all functions. ended() may free the sequence, and so may a stage that then returns SEQUENCE_WAITS.
 */

#include <stddef.h>

enum {
    SEQUENCE_WAITS, /* the stage ends with sequence_advance() */
    SEQUENCE_OVER,  /* the next stage begins */
};

/* Return: SEQUENCE_WAITS, SEQUENCE_OVER or -errno. */
typedef int (*sequence_stage)(void *userdata);

struct sequence {
    const sequence_stage *stages; /* ends with NULL; not owned */
    /* Called with 0 when all stages are over, or with -errno when a stage has failed. sequence_run() may then repeat
     * that stage. */
    void (*ended)(void *userdata, int result);
    void *userdata;
    size_t at; /* index of the current stage, or of the stage that has failed */
};

/* Begins with the first stage. Return: 0 if ended() has been or will be called; -errno, without a call of ended(), if a
 * stage failed before any stage waited. */
int sequence_start(struct sequence *sequence);

/* Ends the current stage. result: 0, or -errno if it has failed. */
void sequence_advance(struct sequence *sequence, int result);

/* sequence_advance(), as a callback. */
void sequence_done(void *sequence, int result);

/* Begins the current stage: the first stage, or again a stage that has failed. Calls ended() itself if no stage
 * waits. */
void sequence_run(struct sequence *sequence);
