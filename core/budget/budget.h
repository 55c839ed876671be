/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns a configuration into the options of the memory plan, which says how much memory a job will need on a node. The
 * daemon admits memory by the plan, and zerodctl plan prints it.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/budget/plan.h"

struct config;
struct layout;

/* Return: the number of slots for which a rank's ring has tables. n_parcels may be more than a layout can have. */
uint32_t budget_n_tickets(uint64_t n_parcels);

/* Return: true if a ring has room for a whole micro-batch. It has if its slots are sent to other nodes, or if GPUs fill
 * them. */
bool budget_ring_holds_all(const struct config *config, const struct layout *layout, unsigned n_local);

struct budget_ranks {
    unsigned first_local, n_local;
};

/* Return: the options of the plan. n_parcels: of the layout, or of a larger model that the layout represents. */
struct plan_options budget_options(const struct config *config, const struct layout *layout, struct budget_ranks ranks,
                                   uint64_t n_parcels);
