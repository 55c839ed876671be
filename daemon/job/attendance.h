/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/config/config.h"
#include "core/wire/wire.h"

struct diagnostic;
struct job;
struct job_rank;
struct request_hello;

/* Verbs of a rank. They answer through ops, now or later. */
struct job_attach {
    void *peer;
    const struct request_hello *hello;
    int64_t pid;
    uint32_t uid, gid;
    bool is_admin;
    bool all_had_left; /* every rank of the world, as this daemon, or the one before, knew when the Hello came */
};

/*
 * Must this process, which has left and attaches again, wait? Then nothing has been recorded, and the same is asked
 * again after the next event. attendance_waits_no_more(): it has gone meanwhile.
 */
bool attendance_must_wait(struct job *job, const struct job_attach *attach);
void attendance_waits_no_more(struct job *job, unsigned rank);

/* Return: 0 and *out; 1: refused, *refusal is the caller's. */
int job_attach(struct job *job, const struct job_attach *attach, struct job_rank **out, struct diagnostic **refusal);

/*
 * A process that was attached to the daemon before connects to this one. Return: false, it is none that is away.
 */
bool job_resume(struct job *job, const struct job_attach *attach, struct job_rank **out);
/* The run ends with this daemon: tells all ranks, and disconnects them. */
void attendance_end(struct job *job, const char *signal);
/* Makes the job's configuration the daemon's, with this optimizer unless the daemon's names one. */
void attendance_choose(struct job *job, const char *optimizer, double momentum);
/* Return: what it means here, never WIRE_ON_DUPLICATE_AS_CONFIGURED. */
enum wire_on_duplicate attendance_policy(const struct job *job, enum wire_on_duplicate wanted);
void job_leave(struct job *job, struct job_rank *rank);

/* All ranks had left, and all are expected back. own: this node's ranks, too. */
void job_all_are_back(struct job *job, bool own);

/* A rank that had left is back, and the step was summed without it. */
void job_is_back_late(struct job *job, struct job_rank *rank);

/* on_leave: stop. Refuses the ranks that wait. */
void job_stop_waiting(struct job *job);
