/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Makes traces of the last steps: for `zerodctl trace`, and as files in diagnostics.trace_dir when a step is aborted, a
 * rank is lost or the job stalls. A libuv thread writes each file, and training does not wait for it.
 */

#include <stdint.h>

struct config;
struct diagnostic;
struct job;
struct uv_loop_s;

/*
 * Return: the packed trace of the last n_steps steps and the open step, which the caller frees, or NULL without memory.
 */
char *trace_answer(const struct job *job, uint64_t n_steps);

/*
 * Counts the written files, so that a job that fails repeatedly does not fill the disk. Zero it before the first use.
 */
struct trace_files {
    uint64_t last_ns;
    unsigned n_files;
};

/* Writes a trace for a logged diagnostic, if its code needs one and diagnostics.trace_dir is set. */
void trace_note(struct trace_files *files, struct uv_loop_s *loop, const struct job *job,
                const struct diagnostic *diagnostic);
