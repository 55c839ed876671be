/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on GPUs: what is in the pools of ranks. A rank has a pool of its own, on its GPU, and copies what it gathers
 * from there before it sends anything else; so of a pool nothing has to stay while a rank asks for something, but what
 * it asks for. Loop thread; the verbs are those of executor.h.
 */

#include "daemon/step/executor.h"

struct device_gather;

/* executor: its GPUs have their memory. Return: 0 or -ENOMEM. */
int device_gather_new(struct device_gather **out, const struct executor *executor);
void device_gather_free(struct device_gather *gather); /* NULL is fine; nothing is loaded any more */

/* Is anything being loaded? NULL is idle. */
bool device_gather_is_busy(const struct device_gather *gather);

bool device_gather_fits(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
void device_gather_hold(struct executor *executor, uint32_t param);
void device_gather_begin(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* Begins to load them, too, if nothing else is being loaded that is in the way. */
enum gathered device_gather_find(struct executor *executor, unsigned local_rank, const uint32_t *params,
                                 size_t n_params);
bool device_gather_places(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params,
                          uint64_t *offsets_bytes);
void device_gather_hint(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* What is being loaded is loaded again. */
bool device_gather_refresh(struct executor *executor, void (*done)(void *userdata), void *userdata);
