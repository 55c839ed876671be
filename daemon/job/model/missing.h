/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;

/*
 * Parameters that some rank has not pushed. A parameter is reported when it was missing in three steps in a row,
 * because a program that alternates (a GAN, or one that trains its heads in turn) makes no mistake. It is reported at
 * once if the client knows the cause, or if the step is skipped.
 */
struct job_missing {
    /* One entry for each parameter; owned. */
    uint32_t *n_in_a_row; /* steps in a row in which some rank did not push the parameter */
    uint64_t *kin;        /* hash of the name without its last number; equal for kin: the experts of a layer */
    bool *was_pushed;     /* some rank has pushed the parameter in a step that this daemon has served */
    bool *is_declared;    /* named in diagnostics.unused */
    bool *is_said;        /* the parameter, or one of its kin, was reported */

    uint64_t seen[64]; /* digests of the sets that were reported at once */
    unsigned n_seen;
    uint64_t n_steps;   /* steps that this daemon has served */
    uint64_t n_missing; /* number of these steps in which a rank did not push an undeclared parameter */
    bool is_uneven_said;
};

/* Sets up the arrays for the job's layout. Call missing_deinit() even after a failure. Return: 0 or -ENOMEM. */
int missing_init(struct job *job);
void missing_deinit(struct job_missing *missing);

/*
 * Warns of parameters that a rank has not pushed. any, all: a bit per parameter, set if any or all ranks of the world
 * have pushed it.
 */
void missing_report(struct job *job, const uint8_t *any, const uint8_t *all);

/*
 * Logs once, if the ranks of this node have ended different numbers of micro-batches in this step. Different numbers
 * are no fault, because batches may be weighted by the tokens of all ranks, or retried in halves. boundary.c refuses
 * numbers that the configuration forbids.
 */
void missing_note_counts(struct job *job);

/* Did some rank not push a trainable parameter that diagnostics.unused does not name? */
bool missing_any(const struct job *job, const uint8_t *all);
