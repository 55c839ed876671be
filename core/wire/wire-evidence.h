/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

struct rank_evidence;
struct request_evidence;

/* Replaces the evidence by the request's. Its ids must be below n_params. Without memory, parts are left out. */
void rank_evidence_set(struct rank_evidence *evidence, const struct request_evidence *request, uint32_t n_params);

/* Writes the evidence into a request without a step, which points into evidence and ids. ids has room for n_params. */
void rank_evidence_describe(const struct rank_evidence *evidence, uint32_t n_params, uint32_t *ids,
                            struct request_evidence *request);
