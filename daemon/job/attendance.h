/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

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
};

/* Return: 0 and *out; 1: refused, *refusal is the caller's. */
int job_attach(struct job *job, const struct job_attach *attach, struct job_rank **out, struct diagnostic **refusal);

/* The peer is gone: process dead, or connection closed. */
void job_detach(struct job *job, struct job_rank *rank);
void job_leave(struct job *job, struct job_rank *rank);

/* All ranks had left, and all are expected back. own: this node's ranks, too. */
void job_all_are_back(struct job *job, bool own);

/* A rank that had left is back, and the step was summed without it. */
void job_is_back_late(struct job *job, struct job_rank *rank);

/* on_leave: stop. Refuses the ranks that wait. */
void job_stop_waiting(struct job *job);
