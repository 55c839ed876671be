/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Counts how long each rank of this node has waited, at which request and for what, and how long others have waited for
 * each rank. A wait that has not ended counts, too.
 *
 *     for ranks     a rank of this node has not come as far as the waiting rank
 *     for nodes     all ranks of this node have come as far, but a rank of another node has not
 *     for daemon    all ranks have come as far: zerod reduces, exchanges, updates, reads or writes
 *
 * If zerod works for one rank, the others wait for that work and not for that rank. waits_look() finds which rank waits
 * for which. It is called when a wait begins or ends, after each event, in each tick, and before each query.
 */

#include <stdbool.h>
#include <stdint.h>

enum wait_for { WAIT_FOR_DAEMON, WAIT_FOR_RANKS, WAIT_FOR_NODES, N_WAIT_FOR };

enum { WAITS_N_KINDS = 18 }; /* number of values of enum job_wait */

struct job;
enum job_wait;

/* The waits of one rank of this node. The last waits_look() has set kind, what and is_awaited. */
struct rank_waits {
    unsigned kind; /* enum job_wait */
    enum wait_for what;
    bool is_awaited; /* other ranks wait for this rank */
    uint64_t total_ns[WAITS_N_KINDS][N_WAIT_FOR];
    uint64_t behind_step_ns;  /* how long other ranks have waited for this rank since the last commit */
    uint64_t behind_total_ns; /* the same since training began */
};

struct job_waits {
    uint64_t since_ns; /* time of the last waits_look(); 0: none yet */
    bool any;          /* in training: a rank of this node waits for ranks, of any node */
    uint64_t step_ns;  /* how long `any` was true since the last commit */
    uint64_t total_ns; /* the same since training began */
};

/* Adds the time since the last waits_look() to the waits that it found, and then finds the present waits. */
void waits_look(struct job *job, uint64_t now_ns);

/* Resets the sums of the step, after a commit. */
void waits_begin_step(struct job *job);

/* The state of a rank that waits, in one word. */
const char *waits_word(enum job_wait wait);
const char *waits_for_word(enum wait_for what);
