/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "daemon/job/model/kept.h"

struct job;

/* The last diagnostics, and a count of refusals for each code. */
struct job_diagnostics {
    struct kept_diagnostics kept;
    struct {
        unsigned code;
        uint64_t n;
    } refused[32];
    size_t n_refused;
};

/* Logs and keeps the diagnostic. Takes the caller's reference. Return: the diagnostic, borrowed. */
struct diagnostic *job_keep(struct job *job, struct diagnostic *diagnostic);

/* job_keep() for a client that has no rank. */
struct diagnostic *job_keep_stranger(struct job *job, struct diagnostic *diagnostic);

/* Counts a refusal. For a refusal that joins an earlier fault, call this without job_keep(). */
void diagnostics_count(struct job *job, unsigned code);
