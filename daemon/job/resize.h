/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Another number of ranks for a job of one node in host memory, when nobody is attached. Every array of the state has
 * room for the partitions of any number of ranks (core/layout/layout.h), so nothing of it moves: the layout, the step
 * and the ledger are made anew, and one turn of the journal says that the new ones hold. An open step is begun again,
 * and what the ranks had stored is left out.
 */

#include <stdbool.h>

struct job;

enum {
    RESIZE_E_NOT_ALLOWED = 1, /* *why is a sentence without a full stop */
    RESIZE_E_BUSY = 2,        /* likewise: it may be allowed soon */
};

/* n_ranks: at least 1. Return: 0; -ENOMEM, or RESIZE_E_*, and nothing has changed. *why: owned by the caller. */
int job_resize(struct job *job, unsigned n_ranks, char **why);
