/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Checkpoints of the job. When a checkpoint is due, a snapshot is taken between two steps, and a thread writes it while
 * steps continue. Only one checkpoint is written at a time. If another one becomes due meanwhile, it begins when the
 * first has ended. On several nodes, node 0 decides which step all nodes save.
 */

#include <stdbool.h>
#include <stdint.h>

struct job;
struct job_rank;
struct request_save_checkpoint;

/*
 * Ends a checkpoint that was written, and begins one that is due. Called after each event, and several times a second.
 */
void save_settle(struct job *job);
/* Return: the time until save_settle() has work, unless an event comes earlier; UINT64_MAX: for ever. */
uint64_t save_rest_ns(const struct job *job);
/* Requests a checkpoint of the last committed step. Return: NULL, or why no checkpoint will be made; static. */
const char *job_save(struct job *job);
/*
 * Serves a rank's request for a checkpoint. If the rank waits (request->wait), it is answered when the checkpoint is on
 * the disk or has failed; else at once.
 */
void job_save_checkpoint(struct job *job, struct job_rank *rank, const struct request_save_checkpoint *request);
/*
 * Several nodes: messages of node 0. token: the number of the checkpoint.
 * save_take(): that step must be saved, after n_windows write windows in it.
 * save_publish(), which node 0 sends to itself: all nodes have written their parts.
 * save_end(): the checkpoint has ended. why: why it failed; "": it is on the disk.
 * save_lose(): node 0's daemon was replaced, and the new daemon does not know the checkpoint.
 */
void save_take(struct job *job, uint64_t step, uint32_t n_windows, uint64_t token);
void save_publish(struct job *job, uint64_t token);
void save_end(struct job *job, uint64_t token, const char *why);
void save_lose(struct job *job);
/* Several nodes: node 0 has reported, to this daemon or an earlier one, that the step is on the disk. */
void save_was_made(struct job *job, uint64_t step, uint32_t n_windows);
/* GPUs: is the state being copied for a checkpoint? No update may begin meanwhile. */
bool save_loads(const struct job *job);
/* Is the state being read for a checkpoint? */
bool save_reads(const struct job *job);
/* GPUs: does the checkpoint under way need the staging copy? */
bool save_has_copy(const struct job *job);
/* Several nodes: does the checkpoint wait for another node, while this node has nothing to do for it? */
bool save_waits_for_others(const struct job *job);
/* Has a checkpoint been asked for that is not complete? It may not have begun. */
bool save_is_busy(const struct job *job);
/* Return: why the last checkpoint failed, valid until the next event; NULL if it did not fail, or there was none. */
const char *save_failure(const struct job *job);
/* The progress of checkpoints, for displays and for waits. */
struct save_view {
    bool is_saved;   /* the last committed step is on the disk */
    bool is_current; /* the checkpoint under way is of the last committed step */
    bool is_saving;  /* a checkpoint is under way, described by the next fields */
    uint64_t step, n_bytes_done, n_bytes, began_ns, waited_ns;
};
void save_describe(const struct job *job, struct save_view *out);
/* Return: a number that grows while a checkpoint is written. For a watchdog, because updates may wait for the disk. */
uint64_t save_progress(const struct job *job);
/* Gives up the checkpoint under way, before the state is freed. */
void save_cancel(struct job *job);
/* Frees the data of checkpoints. Call it after save_cancel(). */
void save_forget(struct job *job);
