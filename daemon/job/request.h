/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Serves the requests of ranks. Each type of request has one verb of the job. */

#include <stddef.h>
#include <stdint.h>

struct job;
struct job_rank;
struct request;

/*
 * Serves a request that the rank may make now. If the open step depends on the request, records it first. packed: the
 * request as received.
 */
void request_take(struct job *job, struct job_rank *rank, const struct request *request, const uint8_t *packed,
                  size_t n_packed_bytes);

/* Serves the request without recording it. */
void request_serve(struct job *job, struct job_rank *rank, const struct request *request);
