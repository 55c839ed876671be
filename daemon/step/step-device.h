/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reduction and update of a step whose data lie on GPUs. step.c decides when, an engine computes (devices.h), and the
 * results are stored where step.c and its callers read them. Loop thread.
 */

#include <stdbool.h>

struct device_order_fetch;
struct reduction;
struct step;
struct step_ops;

/* One node: the verbs; step_device_reduce() is their reduction. */
extern const struct step_ops step_device_ops;
void step_device_reduce(struct reduction *reduction);

/*
 * Several nodes: carries out a step_combine() whose masks[] are over the ranks of the world; sources[] and held[] are
 * by local rank. All nodes order their reductions in one sequence. done() follows, with `cancelled` when the engine is
 * gone; it must release held[]. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_combine(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                        void *userdata);

/*
 * Several nodes, all of which give the same order: gathers the weights for all ranks, or fetches some parameters into
 * the pool of one rank. done(): result 0, or -ECANCELED: the engine is gone. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_gather(const struct step *step, void (*done)(void *userdata, int result), void *userdata);
int step_device_fetch(const struct step *step, const struct device_order_fetch *fetch,
                      void (*done)(void *userdata, int result), void *userdata);

/*
 * Do the ranks of this node gather the new weights as a part of the update? Several nodes gather when all of them have
 * updated, and in stage 3 each rank gathers the parameters that it asks for.
 */
bool step_device_gathers(const struct step *step);
