/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct charge;
struct job;
struct job_rank;
struct journal_edit;
struct request_write_end;
struct request_write_state;
struct state_edits;
struct window;

/* Called by the coordinator to open the write window, to store it, and to end it. */
void job_window_open(struct job *job);
void job_window_store(struct job *job);
void job_window_closed(struct job *job);

/*
 * Prepares to send the state that rank 0 has written into the window to the other nodes. written: the list in
 * NODE_WINDOW_END. *edits: rank 0's node sends them, and the other nodes receive into them; NULL if nothing was
 * written. Return: 0; -ENOENT if no window is open; or -ENOMEM.
 */
int job_window_written(struct job *job, const uint64_t *written, size_t n, const struct state_edits **edits);

void job_write_begin(struct job *job, struct job_rank *rank);
void job_write_state(struct job *job, struct job_rank *rank, const struct request_write_state *request);
void job_write_end(struct job *job, struct job_rank *rank, const struct request_write_end *request);
void window_detach(struct job *job, struct job_rank *rank);
/*
 * Each of these replays a record: an earlier daemon opened the window, changed the edits, began to store the window,
 * began to copy the state back to the GPUs, or has stored the window. Return: 0 or -errno.
 */
int window_again(struct job *job);
int window_edit_again(struct job *job, const struct journal_edit *edit);
int window_store_again(struct job *job);
int window_bring_again(struct job *job);
int window_stored_again(struct job *job);
/* Makes the next settle repeat a commit that an earlier daemon began and did not end. */
void window_end_replay(struct job *job);

void window_settle(struct job *job);
/* Continues a commit that has waited until a checkpoint was written or given up. */
void window_go_on(struct job *job);
void window_free(struct window *window);
void window_forget(struct job *job);
/*
 * Charges the staging copy, for a window or a checkpoint. Return: 0 if the copy is charged now, or the job has none; or
 * -ENOMEM.
 */
int job_charge_copy(struct job *job, struct charge *charge);
/* Has the coordinator ordered the commit of the window? */
bool window_stores(const struct job *job);
/* Is a step or a window open, of which nothing is decided? Only then can it be aborted. */
bool job_is_undecided(const struct job *job);
bool window_is_busy(const struct window *window); /* NULL is idle */
