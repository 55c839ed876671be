/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;
struct request_begin_backward;
struct request_push;
struct request_slot_request;

void job_begin_backward(struct job *job, struct job_rank *rank, const struct request_begin_backward *request);
void job_push(struct job *job, struct job_rank *rank, const struct request_push *request);
void job_slot_request(struct job *job, struct job_rank *rank, const struct request_slot_request *request);
void admit_settle(struct job *job, struct job_rank *rank);
