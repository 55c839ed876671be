/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The arguments with which a rank asks for the step, and what follows from them and from the configuration. */

#include <stdint.h>

struct config;
struct hyper;
struct job;
struct request_step;
struct step_args;
struct wire_hyper;

struct hyper job_plain_hyper(const struct config *config, const struct wire_hyper *h);
struct wire_hyper job_wire_hyper(const struct hyper *h);

/*
 * Checks the hyperparameters that a client sends. libzerod checks those of a step before, and names the value. Return:
 * NULL, or what is wrong. With a wrong one, kernels could write to moments that the job does not have.
 */
const char *job_check_hyper(const struct config *config, const struct wire_hyper *wanted);

/* Convert a rank's arguments to a message for another node, and back. groups: room for one per group. */
void job_describe_args(const struct job *job, const struct step_args *args, struct request_step *request,
                       struct wire_hyper *groups);
void job_keep_args(const struct job *job, struct step_args *args, const struct request_step *request);

/*
 * Returns the hyperparameters of a group for a step with these arguments. Values that the arguments lack are those of
 * the configuration and the schedule.
 */
struct hyper job_hyper(const struct job *job, const struct step_args *args, uint32_t group);

/* Return: by what the sum over ranks is divided. */
double step_divisor(const struct job *job);
/* Return: the scale of the gradients. */
double step_loss_scale(const struct job *job, const struct step_args *args);

/*
 * Fills in the hyperparameters per group that the open step is expected to have. Return: the factor of the gradients in
 * its update, if they are not clipped.
 */
double step_expect(const struct job *job, struct hyper *hypers);
