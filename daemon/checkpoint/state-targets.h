/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Lists the tensors that this job has in its checkpoints (core/checkpoint/targets.h), and where this node keeps their
 * elements. A node keeps the masters and moments that it owns, and all frozen parameters. In stages 1 and 2 it keeps
 * all weights, because every node has the weights of all partitions. In stage 3 it keeps only owned weights that are
 * masters or parts of them. Pure, except that targets point into the state.
 */

#include "core/checkpoint/targets.h"
#include "kernels/update.h"

struct state;

struct state_targets {
    struct targets all;
    float *counts; /* per parameter: its step count */
};

/* state: must outlive the targets. Return: 0 or -ENOMEM. The caller calls state_targets_deinit() in either case. */
int state_targets_init(struct state_targets *targets, const struct state *state, enum optimizer optimizer);
void state_targets_deinit(struct state_targets *targets);
