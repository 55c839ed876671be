/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Merges and checks hyperparameters. They must be in the ranges of torch.optim's constructors (torch 2.13), and finite
 * in fp32. Two rules are stricter than torch's, as in the configuration: betas and momentum must be below 1, and eps
 * must be above 0.
 */

#include "core/wire/wire.h"

/*
 * Return: `wanted`, with the configured settings in place of those that `wanted` does not give. `given` is unchanged.
 */
struct wire_hyper hyper_merge(const struct wire_hyper *configured, const struct wire_hyper *wanted);

struct hyper_problem {
    const char *name; /* such as "lr" */
    double value;
    const char *expected; /* such as "a number of at least 0" */
};

/*
 * Checks the settings that the optimizer reads. optimizer: its name in zerod_job. Return: true, with the first problem
 * in *problem, if a setting is wrong.
 */
bool hyper_is_wrong(const char *optimizer, const struct wire_hyper *hyper, struct hyper_problem *problem);
