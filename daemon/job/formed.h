/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

struct job;
struct job_rank;

/* Gives a rank that waits to be formed its ring, or answers Formed. */
void formed_settle(struct job *job, struct job_rank *rank);
