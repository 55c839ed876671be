/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Rules between keys, checked when each key by itself has been read: what does not go together, what this
 * build does not have. Internal to the configuration modules.
 */

#include "core/config/config-problem.h"

#include <stdbool.h>

struct config;
struct config_build;

/* The reader's notes on one row of the table. */
struct config_row {
    struct config_spot spot; /* of the value, or of the key where the value is a mapping; valid when seen */
    bool seen;
    bool given; /* seen, and not null or "auto" */
    bool bad;   /* a problem was reported: do not judge it again */
};

struct config_check {
    const struct config *config;
    const struct config_row *rows; /* one per row of the table */
    unsigned active;               /* see config_key_applies */
    const struct config_build *build;
    const struct config_text *text;
    struct config_problems *problems;
};

void config_check(const struct config_check *check);
