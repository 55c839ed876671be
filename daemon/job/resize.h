/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Changes the number of ranks of a job on one node in host memory while no rank is attached. The state does not move,
 * because its arrays have room for the padding of any number of ranks (core/layout/layout.h). A new layout, step and
 * ledger are made, and then one turn of the journal makes them valid. The new ranks begin the open step again. They do
 * not get the data that the old ranks stored.
 */

struct job;

enum {
    RESIZE_E_NOT_ALLOWED = 1, /* *why is a sentence without a full stop */
    RESIZE_E_BUSY = 2,        /* *why is such a sentence; the same call may succeed soon */
};

/* n_ranks: at least 1. Return: 0; or -ENOMEM or RESIZE_E_*, and then nothing has changed. The caller owns *why. */
int job_resize(struct job *job, unsigned n_ranks, char **why);
