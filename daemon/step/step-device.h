/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The two verbs of a step that move what is computed with, for a step whose data lie on GPUs: step.c decides when, an
 * engine does it (devices.h), and what comes of it lands where step.c and everybody else look for it. Loop thread.
 */

#include <stdbool.h>

struct reduction;
struct step;
struct step_finding;

/* One node. Slots to accumulators: masks[], sources[] and held[] are set. step_reduced() follows. */
void step_device_reduce(struct reduction *reduction);

/*
 * Several nodes: the same of a step_combine(), whose masks[] are over the ranks of the world; sources[] and held[] are
 * by local rank. All nodes do it in one order. done() follows, with `cancelled` when the engine is gone, and lets go of
 * what is held. Return: 0, -ENOMEM, or -ECANCELED.
 */
int step_device_combine(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                        void *userdata);

/* Scalars and what has contributed are set. update_done() follows, when all ranks have the weights, or
 * when the job is given up. */
void step_device_update(struct step *step);

/* Do the ranks of this node gather the new weights as a part of the update? Of several nodes all do when all have
 * updated, in stage 3 each rank gathers what it asks for. */
bool step_device_gathers(const struct step *step);

/* step.c's. */
void step_reduced(struct reduction *reduction);
void step_keep_finding(struct step *step, const struct step_finding *finding);
