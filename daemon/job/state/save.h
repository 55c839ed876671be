/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Checkpoints of the job: when one is due, a snapshot is taken between two steps, and a thread of its own writes it
 * while steps go on. One is under way at a time; one that becomes due meanwhile begins when it has ended. On several
 * nodes node 0 says which step all of them save.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct request_save_checkpoint;

/* Ends one that is written, and begins one that is due. After each event, and several times a second. */
void save_settle(struct job *job);
/* How long save_settle() has nothing to do, unless there is an event; UINT64_MAX: for ever. */
uint64_t save_rest_ns(const struct job *job);
/* Somebody wants one of the last committed step. Return: NULL, or why there will be none; static. */
const char *job_save(struct job *job);
/* A rank wants one. It is answered at once, or, if it waits, when that is on the disk or has failed. */
void job_save_checkpoint(struct job *job, struct job_rank *rank, const struct request_save_checkpoint *request);
/*
 * Several nodes: node 0 says that the step is to be saved, after so many windows of it; to itself, that all nodes have
 * written what they own; and what has come of it (why: "", it is on the disk). token: its number. save_lose(): node 0's
 * daemon was replaced, and does not know of it.
 */
void save_take(struct job *job, uint64_t step, uint32_t n_windows, uint64_t token);
void save_publish(struct job *job, uint64_t token);
void save_end(struct job *job, uint64_t token, const char *why);
void save_lose(struct job *job);
/* Several nodes: the step is on the disk, as this daemon, or the one before it, has heard. */
void save_was_made(struct job *job, uint64_t step, uint32_t n_windows);
/* GPUs: is the state being copied for one? No update may begin meanwhile. */
bool save_loads(const struct job *job);
/* Is the state being read for one? */
bool save_reads(const struct job *job);
/* GPUs: does one that is under way need the staging copy? */
bool save_has_copy(const struct job *job);
/* Several nodes: is one wanted, or under way, with nothing to do for this node? */
bool save_waits_for_others(const struct job *job);
/* Is one wanted, or under way? */
bool save_is_busy(const struct job *job);
/* Return: why the last one is not on the disk; NULL: it is, or none was begun. Valid until the next event. */
const char *save_failure(const struct job *job);
/* For those who show it, or wait for it. */
struct save_view {
    bool is_saved;   /* the last committed step is on the disk */
    bool is_current; /* the one under way is of the last committed step */
    bool is_saving;  /* one is under way: */
    uint64_t step, n_bytes_done, n_bytes, began_ns, waited_ns;
};
void save_describe(const struct job *job, struct save_view *out);
/* Grows while one is written. For a watchdog: updates may wait for the disk. */
uint64_t save_progress(const struct job *job);
/* Gives up the one that is under way: the state goes. */
void save_cancel(struct job *job);
/* Frees what save_cancel() leaves. */
void save_forget(struct job *job);
