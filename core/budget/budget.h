/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns a configuration into the options of the memory plan: what a job will hold on a node. The daemon admits memory
 * by the plan, and zerodctl plan prints it.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/budget/plan.h"

struct config;
struct layout;

/* Return: the number of slots for which a rank's ring has tables. n_parcels may be more than a layout can have. */
uint32_t budget_n_tickets(uint64_t n_parcels);

/* Return: true if a ring has room for a whole micro-batch, because its slots are sent to other nodes, or because GPUs
 * fill them. */
bool budget_ring_holds_all(const struct config *config, const struct layout *layout, unsigned n_local);

struct budget_ranks {
    unsigned first_local, n_local;
};

/* n_parcels: of the layout, or of a larger model that the layout stands for. */
struct plan_options budget_options(const struct config *config, const struct layout *layout, struct budget_ranks ranks,
                                   uint64_t n_parcels);
