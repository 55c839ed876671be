/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The tensors that this job has in its checkpoints (core/checkpoint/targets.h), and where this node keeps their
 * elements: of masters and moments those that it owns; of 16-bit weights, and of fp32 ones in stages 1 and 2, all,
 * because there every node has the weights of all partitions; of frozen parameters all. Pure, but for the state's
 * addresses.
 */

#include "core/checkpoint/targets.h"
#include "kernels/update.h"

struct state;

struct state_targets {
    struct targets all;
    float *counts; /* per parameter: where the counts go */
};

/* The state must outlive them. Return: 0 or -ENOMEM; then, too, state_targets_deinit() is called. */
int state_targets_init(struct state_targets *targets, const struct state *state, enum optimizer optimizer);
void state_targets_deinit(struct state_targets *targets);
