/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * From a configuration to the options of the plan: what a job of that
 * configuration will hold on a node. The daemon admits memory by it, zerodctl plan prints it.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/budget/plan.h"

struct config;
struct layout;

/* Slots that a rank's ring has tables for. n_parcels may be more than a layout could have. */
uint32_t budget_n_tickets(uint64_t n_parcels);

/* Has a ring room for all of a micro-batch, because its slots travel between nodes, or because GPUs fill them? */
bool budget_ring_holds_all(const struct config *config, const struct layout *layout, unsigned n_local);

struct budget_ranks {
    unsigned first_local, n_local;
};

/* n_parcels: of the layout, or of a larger model that the layout stands for. */
struct plan_options budget_options(const struct config *config, const struct layout *layout, struct budget_ranks ranks,
                                   uint64_t n_parcels);
