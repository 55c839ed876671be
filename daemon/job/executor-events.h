/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The job's executor, and what that reports. */

struct job;

/* The layout stands: job->executor, job->state and job->step. Return: 0 or -errno. */
int job_make_executor(struct job *job);
