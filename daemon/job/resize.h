/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Changes the number of ranks of a job on one node in host memory while no rank is attached. The state does not move,
 * because its arrays have room for the padding of any number of ranks (core/layout/layout.h). The layout, the step and
 * the ledger are made anew; then one turn of the journal makes them valid. The new ranks begin an open step again, and
 * do not get what the old ranks had stored.
 */

struct job;

enum {
    RESIZE_E_NOT_ALLOWED = 1, /* *why is a sentence without a full stop */
    RESIZE_E_BUSY = 2,        /* *why is a sentence, too; the same call may be allowed soon */
};

/* n_ranks: at least 1. Return: 0; -ENOMEM, or RESIZE_E_*, and nothing has changed. *why: owned by the caller. */
int job_resize(struct job *job, unsigned n_ranks, char **why);
