/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Stage 3 on GPUs: the contents of the ranks' pools. Each rank has its own pool on its GPU. A rank copies gathered
 * parameters from its pool before it sends another request. So a pool keeps only the parameters of the current request.
 * Loop thread. executor.h describes the functions that have no comment.
 */

#include "daemon/step/executor.h"

struct device_gather;

/* Call it when the engine has allocated the GPU memory. Return: 0 or -ENOMEM. */
int device_gather_new(struct device_gather **out, const struct executor *executor);
void device_gather_free(struct device_gather *gather); /* NULL is fine; must not be busy */

/* Return: whether a parameter is being loaded. NULL is idle. */
bool device_gather_is_busy(const struct device_gather *gather);

bool device_gather_fits(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
void device_gather_hold(struct executor *executor, uint32_t param);
void device_gather_begin(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* executor_find(), but also starts to load absent parameters, unless another load must end first. */
enum gathered device_gather_find(struct executor *executor, unsigned local_rank, const uint32_t *params,
                                 size_t n_params);
bool device_gather_places(const struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params,
                          uint64_t *offsets_bytes);
void device_gather_hint(struct executor *executor, unsigned local_rank, const uint32_t *params, size_t n_params);
/* Empties the pools. Parameters that are being loaded are dropped when their load ends. Return: false. */
bool device_gather_refresh(struct executor *executor, void (*done)(void *userdata), void *userdata);
