/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The requests of a rank, each of which one verb of the job serves. */

#include <stddef.h>
#include <stdint.h>

struct job;
struct job_rank;
struct request;

/*
 * Serves a request that the rank may make now, and records it first if the open step depends on it. packed: as it came.
 */
void request_take(struct job *job, struct job_rank *rank, const struct request *request, const uint8_t *packed,
                  size_t n_packed_bytes);

/* Serves it. */
void request_serve(struct job *job, struct job_rank *rank, const struct request *request);
