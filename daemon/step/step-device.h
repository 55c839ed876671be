/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reduction and update of a step whose data are on GPUs. step.c decides when to reduce and update, and an engine
 * computes (devices.h). Results are copied to struct step, where step.c and its callers read them. Loop thread.
 */

#include <stdbool.h>

struct device_order_fetch;
struct reduction;
struct step;
struct step_ops;

/* One node: the functions of a step. step_device_ops.reduce is step_device_reduce(). */
extern const struct step_ops step_device_ops;
void step_device_reduce(struct reduction *reduction);

/*
 * Several nodes: carries out a reduction of step_combine(). A bit of masks[] is a rank of the world. sources[] and
 * held[] are indexed by local rank. All nodes must order their reductions in the same sequence. done() follows, and
 * must release held[]. reduction->cancelled is set if the engine has ended. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_combine(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                        void *userdata);

/*
 * Several nodes: gathers the weights for all ranks, or fetches some parameters into the pool of one rank. All nodes
 * must order this in the same sequence. The result of done() is 0, or -ECANCELED if the engine has ended. Return: 0,
 * -ENOMEM, or -ECANCELED.
 */
int step_device_gather(const struct step *step, void (*done)(void *userdata, int result), void *userdata);
int step_device_fetch(const struct step *step, const struct device_order_fetch *fetch,
                      void (*done)(void *userdata, int result), void *userdata);

/*
 * Return: whether gathering the new weights is a part of the update. Several nodes gather later, when all nodes have
 * updated. In stage 3 ranks gather parameters on request.
 */
bool step_device_gathers(const struct step *step);
