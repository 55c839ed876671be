/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Lists the tensors that this job has in its checkpoints (core/checkpoint/targets.h), and where this node keeps their
 * elements. It keeps the masters and moments that it owns, and all frozen parameters. In stages 1 and 2 it keeps all
 * weights, because every node has the weights of all partitions; in stage 3 only those that are part of masters. Pure,
 * except for the state's addresses.
 */

#include "core/checkpoint/targets.h"
#include "kernels/update.h"

struct state;

struct state_targets {
    struct targets all;
    float *counts; /* per parameter: its step count */
};

/* state: outlives the targets. Return: 0 or -ENOMEM. The caller calls state_targets_deinit() in either case. */
int state_targets_init(struct state_targets *targets, const struct state *state, enum optimizer optimizer);
void state_targets_deinit(struct state_targets *targets);
