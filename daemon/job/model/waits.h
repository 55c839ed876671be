/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * How long each rank of this node has waited, at which request and for what, and how long others have waited for each
 * rank. All waits are counted, as they go on: a wait that has not ended counts as well.
 *
 *     for ranks     a rank of this node has not come as far
 *     for nodes     all of them have, and a rank of another node has not
 *     for daemon    all ranks have come: zerod reduces, exchanges, updates, reads or writes
 *
 * If zerod works for a rank meanwhile, the others wait for that work and not for the rank. A look finds who waits for
 * whom: whenever a wait begins or ends, when an event has ended, in each tick, and before each question.
 */

#include <stdbool.h>
#include <stdint.h>

enum wait_for { WAIT_FOR_DAEMON, WAIT_FOR_RANKS, WAIT_FOR_NODES, N_WAIT_FOR };

enum { WAITS_N_KINDS = 18 }; /* of enum job_wait */

struct job;
enum job_wait;

/* Of one rank of this node. What the last look has found holds until the next one. */
struct rank_waits {
    unsigned kind; /* enum job_wait */
    enum wait_for what;
    bool is_awaited; /* others wait for it */
    uint64_t total_ns[WAITS_N_KINDS][N_WAIT_FOR];
    uint64_t behind_step_ns;  /* others have waited for it, since the last commit */
    uint64_t behind_total_ns; /* since training began */
};

struct job_waits {
    uint64_t since_ns; /* the last look; 0: none yet */
    bool any;          /* in training: a rank of this node waits for ranks, of this node or of others */
    uint64_t step_ns;  /* that was so, since the last commit */
    uint64_t total_ns; /* since training began */
};

/* Counts the time since the last look, and looks again. */
void waits_look(struct job *job, uint64_t now_ns);

/* The step is committed: the sums of the next one begin. */
void waits_begin_step(struct job *job);

/* The state of a rank that waits, in one word. */
const char *waits_word(enum job_wait wait);
const char *waits_for_word(enum wait_for what);
