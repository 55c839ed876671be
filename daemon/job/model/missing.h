/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job;

/*
 * Which parameters have been missing. A set is reported when it has been missing in three steps in a row, because a
 * program that alternates (a GAN, or one that trains its heads in turn) makes no mistake. It is reported at once if the
 * client knows the cause, or if the step is skipped.
 */
struct job_missing {
    /* One entry for each parameter; owned. */
    uint32_t *n_in_a_row; /* steps in which some rank missed it */
    uint64_t *kin;        /* hash of its name without the number of the module in its list: experts are kin */
    bool *was_pushed;     /* some rank has pushed it, in a step that this daemon has served */
    bool *is_declared;    /* diagnostics.unused */
    bool *is_said;        /* it, or one of its kin */

    uint64_t seen[64]; /* digests of the sets that were reported at once */
    unsigned n_seen;
    uint64_t n_steps;   /* of this daemon's */
    uint64_t n_missing; /* of these: in which some rank missed what is not declared */
    bool is_uneven_said;
};

/* For the job's layout. missing_deinit() in any case. Return: 0 or -ENOMEM. */
int missing_init(struct job *job);
void missing_deinit(struct job_missing *missing);

/* Warns of parameters that a rank has not pushed; any, all: a bit per parameter, who of the world has pushed it. */
void missing_report(struct job *job, const uint8_t *any, const uint8_t *all);

/*
 * Logs once that ranks of this node have ended different numbers of micro-batches in this step. That is no fault:
 * batches may be weighted by the tokens of all ranks, or be retried in halves. Numbers that the configuration forbids
 * are refused.
 */
void missing_note_counts(struct job *job);

/* Has a rank not pushed a parameter that is trained, and that diagnostics.unused does not name? */
bool missing_any(const struct job *job, const uint8_t *all);
