/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The last diagnostics. Strangers are clients that were refused before they had a rank. Ranks and strangers have
 * separate rings, so that refusals of strangers never displace a trainer's diagnostic.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/diagnosis/diagnosis.h"

enum { KEPT_OF_RANKS = 256, KEPT_OF_STRANGERS = 32, KEPT_MAX = KEPT_OF_RANKS + KEPT_OF_STRANGERS };

struct kept_diagnostics {
    struct diagnostic *of_ranks[KEPT_OF_RANKS], *of_strangers[KEPT_OF_STRANGERS]; /* rings of references */
    uint64_t n_of_ranks, n_of_strangers;
};

void kept_deinit(struct kept_diagnostics *kept);
/* Adds and numbers the diagnostic. Takes its reference. stranger: the client has no rank. */
void kept_add(struct kept_diagnostics *kept, struct diagnostic *diagnostic, bool stranger);
/* Lists the diagnostics, oldest first. list: room for KEPT_MAX. Return: their number. */
size_t kept_list(const struct kept_diagnostics *kept, const struct diagnostic **list);
/* Return: the newest diagnostic, or NULL. */
const struct diagnostic *kept_last(const struct kept_diagnostics *kept);
