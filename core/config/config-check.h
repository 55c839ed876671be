/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Rules between keys, checked after all keys are read: values that conflict, and values that this build does not
 * support. Internal to the configuration modules.
 */

#include "core/config/config-problem.h"

#include <stdbool.h>

struct config;
struct config_build;

/* The reader's notes on one row of the table. */
struct config_row {
    struct config_spot spot; /* place of the value, or of the key if the value is a mapping; valid if seen */
    bool seen;
    bool given; /* seen, and the value is neither null nor "auto" */
    bool bad;   /* a problem was reported; later checks skip the row */
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
