/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Which hyperparameters count, and which an optimizer takes: the ranges of torch.optim's constructors (torch 2.13), and
 * finite in fp32. Beyond torch, betas and momentum end below 1 and eps begins above 0, as in the configuration.
 */

#include "core/wire/wire.h"

/* The settings that are given, and the configured ones in the places of the others. given: stays as it is. */
struct wire_hyper hyper_merge(const struct wire_hyper *configured, const struct wire_hyper *wanted);

struct hyper_problem {
    const char *name;     /* "lr" */
    double value;
    const char *expected; /* "a number of at least 0" */
};

/* optimizer: zerod_job's name of it. Return: true and the first problem, if there is one. What the optimizer does not
 * read is not looked at. */
bool hyper_is_wrong(const char *optimizer, const struct wire_hyper *hyper, struct hyper_problem *problem);
