/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The two verbs of a step that move what is computed with, for a step whose data lie on GPUs: step.c decides when, an
 * engine does it (devices.h), and what comes of it lands where step.c and everybody else look for it. Loop thread.
 */

#include <stdbool.h>

struct device_order_fetch;
struct reduction;
struct step;
struct step_ops;

/* One node: step_device_reduce() is the reduction. */
extern const struct step_ops step_device_ops;
void step_device_reduce(struct reduction *reduction);

/*
 * Several nodes: the same of a step_combine(), whose masks[] are over the ranks of the world; sources[] and held[] are
 * by local rank. All nodes do it in one order. done() follows, with `cancelled` when the engine is gone, and lets go of
 * what is held. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_combine(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                        void *userdata);

/* Several nodes, each order on all of them: the weights to all ranks, or some parameters to the pool of one rank.
 * done(): result 0, or -ECANCELED: the engine is gone. Return: 0, -ENOMEM, or -ECANCELED. */
int step_device_gather(const struct step *step, void (*done)(void *userdata, int result), void *userdata);
int step_device_fetch(const struct step *step, const struct device_order_fetch *fetch,
                      void (*done)(void *userdata, int result), void *userdata);

/* Do the ranks of this node gather the new weights as a part of the update? Of several nodes all do when all have
 * updated, in stage 3 each rank gathers what it asks for. */
bool step_device_gathers(const struct step *step);
