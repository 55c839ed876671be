/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A sequence: stages that follow each other. A stage is over at once, or when a callback says so.
 *
 *     static int admit(void *userdata);    returns SEQUENCE_OVER, or -errno
 *     static int reserve(void *userdata);  posts a work and returns SEQUENCE_WAITS; sequence_advance() when that is done
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
    /* All stages are over: 0. Or a stage has failed: -errno, and sequence_run() may follow. */
    void (*ended)(void *userdata, int result);
    void *userdata;
    size_t at; /* the stage that is under way, or has failed */
};

/* Begins with the first stage. Return: 0, ended() follows or has been called; or -errno of a stage that failed before
 * any stage waited: ended() is not called. */
int sequence_start(struct sequence *sequence);

/* The stage that was under way is over, or has failed with -errno. */
void sequence_advance(struct sequence *sequence, int result);

/* sequence_advance(), as a callback. */
void sequence_done(void *sequence, int result);

/* Begins the stage at which the sequence stands: the first, or once more the stage that has failed. If no stage waits,
 * ended() is called from within. */
void sequence_run(struct sequence *sequence);
