/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reduction and update of a step whose data are on GPUs. step.c decides when to reduce and update. An engine computes
 * (devices.h). The results are stored where step.c and its callers read them. Loop thread.
 */

#include <stdbool.h>

struct device_order_fetch;
struct reduction;
struct step;
struct step_ops;

/* One node: the functions of a step. step_device_reduce() is their reduction. */
extern const struct step_ops step_device_ops;
void step_device_reduce(struct reduction *reduction);

/*
 * Several nodes: carries out a step_combine(). masks[] are over the ranks of the world. sources[] and held[] are
 * indexed by local rank. All nodes order their reductions in one sequence. done() follows, with `cancelled` if the
 * engine is gone. done() must release held[]. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_combine(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                        void *userdata);

/*
 * Several nodes: gathers the weights for all ranks, or fetches some parameters into the pool of one rank. All nodes
 * give the same order. done() gets result 0, or -ECANCELED if the engine is gone. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_gather(const struct step *step, void (*done)(void *userdata, int result), void *userdata);
int step_device_fetch(const struct step *step, const struct device_order_fetch *fetch,
                      void (*done)(void *userdata, int result), void *userdata);

/*
 * Return: whether the ranks of this node gather the new weights as a part of the update. Several nodes gather when all
 * nodes have updated. In stage 3 each rank gathers the parameters that it asks for.
 */
bool step_device_gathers(const struct step *step);
