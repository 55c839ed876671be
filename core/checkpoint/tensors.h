/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Names of the tensors of a checkpoint. The model's file has each parameter under its own name. The optimizer's file
 * has "state.NAME.KEY", with torch's keys: exp_avg, exp_avg_sq, momentum_buffer, sum; step, fp32, without dimensions;
 * and "master", the fp32 value of a parameter whose weights have 16 bits. What a client declares as a parameter for its
 * own ends, such as "(buffers)", is no part of the model: it is in the optimizer's file, under its own name.
 */

#include <stdbool.h>
#include <stddef.h>

#include "kernels/update.h"

#define TENSOR_STEP "step"
#define TENSOR_MASTER "master"

/* torch's key of what zerod keeps as exp_avg, or, if second, as exp_avg_sq. NULL: the optimizer has no such. */
const char *tensor_moment_key(enum optimizer optimizer, bool second);

/* "state.NAME.KEY", the caller's; NULL without memory. */
char *tensor_state_name(const char *param, const char *key);
/* Is it a parameter of the model? */
bool tensor_is_of_model(const char *param);
/* "rank.3" */
void tensor_rank_name(char *dst, size_t size, unsigned rank);
