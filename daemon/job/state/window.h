/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct exchange_said;
struct job;
struct job_rank;
struct request_write_state;
struct window;

/* The write window: is open; goes to its owners (NULL, or why not: static); is stored; is done with. */
void job_window_open(struct job *job);
const char *job_window_write(struct job *job, const struct exchange_said *said, const uint64_t *written, size_t n);
void job_window_store(struct job *job);
void job_window_closed(struct job *job);
void job_write_begin(struct job *job, struct job_rank *rank);
void job_write_state(struct job *job, struct job_rank *rank, const struct request_write_state *request);
void job_write_end(struct job *job, struct job_rank *rank, bool forget);
void window_detach(struct job *job, struct job_rank *rank);
void window_settle(struct job *job);
void window_free(struct window *window);
void window_forget(struct job *job);
bool window_is_busy(const struct window *window); /* NULL is idle */
