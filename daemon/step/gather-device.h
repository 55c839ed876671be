/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on GPUs: the contents of the ranks' pools. Each rank has a pool of its own on its GPU, and copies gathered
 * parameters out of it before it sends another request. So a pool has to keep only the parameters of the current
 * request. Loop thread; the verbs are those of executor.h.
 */

#include "daemon/step/executor.h"

struct device_gather;

/* executor: its GPUs have their memory. Return: 0 or -ENOMEM. */
int device_gather_new(struct device_gather **out, const struct executor *executor);
void device_gather_free(struct device_gather *gather); /* gather may be NULL; it must not be busy */

/* Is any parameter being loaded? NULL is idle. */
bool device_gather_is_busy(const struct device_gather *gather);

bool device_gather_fits(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
void device_gather_hold(struct executor *executor, uint32_t param);
void device_gather_begin(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* Starts to load absent parameters, unless another load is in the way. */
enum gathered device_gather_find(struct executor *executor, unsigned local_rank, const uint32_t *params,
                                 size_t n_params);
bool device_gather_places(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params,
                          uint64_t *offsets_bytes);
void device_gather_hint(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* Empties the pools; parameters that are being loaded are dropped when their load ends. Return: false. */
bool device_gather_refresh(struct executor *executor, void (*done)(void *userdata), void *userdata);
