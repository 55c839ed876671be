/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The ranks' own time in a step, by phase. Time in which a rank waits for others is in no phase except "room". No rank
 * is blamed for "room", because the ring of a rank that is ahead is full until the others push.
 *
 *     forward    from the step's begin, or the end of the micro-batch before, to the first gradient of a backward
 *     backward   from the first gradient of a backward to the last
 *     room       waits for a free slot in a backward
 *     rest       from the last gradient to the request that ends the micro-batch or the step
 *
 * A rank is called slow if it has needed more time than every other rank of this node in many steps in a row.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/job/model/finding.h"

enum rank_phase { PHASE_FORWARD, PHASE_BACKWARD, PHASE_ROOM, PHASE_REST, N_RANK_PHASES };

enum job_wait;
struct job;
struct job_rank;

/* The clock of one rank. */
struct rank_phases {
    bool is_known; /* this daemon has timed the same process since the step began */
    bool is_in_backward;
    uint64_t since_ns;                   /* when the time began that is not counted yet; 0: the rank waits for others */
    uint64_t step_ns[N_RANK_PHASES];     /* of the open step */
    uint64_t total_ns[N_RANK_PHASES];    /* of all committed steps in which the times of all ranks are known */
    uint64_t compared_ns[N_RANK_PHASES]; /* of the steps that job_slow sums up */
};

/* The slowest rank of the last steps. */
struct job_slow {
    unsigned rank;
    uint32_t n_in_a_row;
    uint32_t n_compared; /* steps in behind_ns and own_ns; all three are halved together */
    uint64_t behind_ns;  /* sum of the times by which the rank was slower than the next slowest rank */
    uint64_t own_ns;     /* sum of the rank's own times */
};

/* Called when a step is committed, and all ranks of this node begin the next step. */
void phases_begin_step(struct job *job, uint64_t now_ns);

/*
 * Excludes the rank's open step from the times. Called when the step begins again, or the rank's process is replaced.
 */
void phases_forget(struct job_rank *rank);

/* Called when the rank begins a backward, or pushes a gradient. */
void phases_begin_backward(struct job_rank *rank, uint64_t now_ns);
void phases_push(struct job_rank *rank, uint64_t now_ns);

/* Called when the rank's wait begins, and when it ends. */
void phases_wait(struct job_rank *rank, enum job_wait wait, uint64_t now_ns);
void phases_go_on(struct job_rank *rank, uint64_t now_ns);

/* Called when a step is decided. */
void phases_note_step(struct job *job);

void phases_find(const struct job *job, struct findings *findings);
