/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Traces of the last steps: for `zerodctl trace`, and by itself into files of diagnostics.trace_dir when a step is
 * aborted, a rank is lost or the job stalls. A file is written by a thread of its own, and training does not wait for
 * it.
 */

#include <stdint.h>

struct config;
struct diagnostic;
struct job;
struct uv_loop_s;

/* Return: the packed trace of the last n_steps steps and of the open one, to be freed; NULL: no memory. */
char *trace_answer(const struct job *job, uint64_t n_steps);

/* What has been written, so that a job that fails again and again does not fill the disk. Zeroed: nothing. */
struct trace_files {
    uint64_t last_ns;
    unsigned n_files;
};

/* A diagnostic was logged: if it calls for a trace, and there is a folder for it, one is written. */
void trace_note(struct trace_files *files, struct uv_loop_s *loop, const struct job *job,
                const struct diagnostic *diagnostic);
