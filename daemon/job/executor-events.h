/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The job's executor and its reports. */

struct job;

/* Makes job->executor, job->state and job->step for the layout. Return: 0 or -errno. */
int job_make_executor(struct job *job);
