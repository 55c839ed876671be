/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;
struct request_evidence;
struct request_intern;
struct request_report;

void job_intern(struct job *job, struct job_rank *rank, const struct request_intern *request);
void job_clear_fault(struct job *job, struct job_rank *rank);
void job_report(struct job *job, struct job_rank *rank, const struct request_report *request);
void job_evidence(struct job *job, struct job_rank *rank, const struct request_evidence *request);
