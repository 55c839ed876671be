/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Converts one scalar of a configuration from text to the field that a row of the table names, and from the field to
 * text. Pure, except for the strings that the functions allocate.
 *
 * Whole numbers, sizes and durations are read exactly, by decimal arithmetic. 5e8, 1.5GiB and 2.5s are whole in their
 * unit. 0.3 ranks and 1.00001s are not whole, and are refused rather than rounded.
 */

#include "core/config/config-table.h"

#include <stdio.h>

enum {
    CONFIG_VALUE_E_BAD = 1, /* the value is not valid; *why has the reason */
};

struct config_value {
    const char *text; /* NUL-terminated; no NUL inside */
    bool quoted;      /* a quoted "5" is not a number */
};

/*
 * Stores the value into its field of `base`, and frees the old string of the field. *why: a constant, such as "is not a
 * whole number". Not for sections and lists: call it for each of their scalars. Return: 0, CONFIG_VALUE_E_BAD, or
 * -ENOMEM.
 */
int config_value_store(const struct config_key *key, const struct config_value *value, void *base, const char **why);

/* Prints the field of base as YAML on one line, with lists in brackets. */
void config_value_print(FILE *file, const struct config_key *key, const void *base);

/* Prints the allowed values: "a whole number from 1 to 1024 (ranks)", "one of shared, private". */
void config_value_allowed(FILE *file, const struct config_key *key);

/* Frees the memory that the field of base owns, and empties the field. */
void config_value_deinit(const struct config_key *key, void *base);
