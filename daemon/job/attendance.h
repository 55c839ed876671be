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

/* A Hello and its sender. */
struct job_attach {
    void *peer;
    const struct request_hello *hello;
    int64_t pid;
    uint32_t uid, gid;
    bool is_admin;
    bool all_had_left; /* every rank had left when this daemon, or an earlier one, received the Hello */
};

/*
 * Must this process wait before it attaches again? If so, the caller does not record the Hello, and calls this again
 * after the next event. attendance_waits_no_more() is called when the connection of the waiting process has closed.
 */
bool attendance_must_wait(struct job *job, const struct job_attach *attach);
void attendance_waits_no_more(struct job *job, unsigned rank);

/* Return: 0, and the rank in *out; or 1, and the refusal in *refusal, which the caller owns. */
int job_attach(struct job *job, const struct job_attach *attach, struct job_rank **out, struct diagnostic **refusal);

/* Connects a process that was attached to an earlier daemon. Return: false if its rank is not away. */
bool job_resume(struct job *job, const struct job_attach *attach, struct job_rank **out);
/* Called before this daemon ends. Sends all ranks a diagnostic, and disconnects them. */
void attendance_end(struct job *job, const char *signal);
/* Copies the daemon's configuration to the job. Then sets this optimizer, if the configuration names none. */
void attendance_choose(struct job *job, const char *optimizer, double momentum);
/* Return: `wanted`, or the configured policy for WIRE_ON_DUPLICATE_AS_CONFIGURED. */
enum wire_on_duplicate attendance_policy(const struct job *job, enum wire_on_duplicate wanted);
void job_leave(struct job *job, struct job_rank *rank);

/*
 * Called when all ranks had left and are back. Marks the ranks of other nodes as back. own: also marks those of this
 * node.
 */
void job_all_are_back(struct job *job, bool own);

/* Aborts the step, because a rank that had left is back, and its gradients are not in the sums. */
void job_is_back_late(struct job *job, struct job_rank *rank);

/* Refuses the ranks that wait, if a rank has left under "on_leave: stop". */
void job_stop_waiting(struct job *job);
