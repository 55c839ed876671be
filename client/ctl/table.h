/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Tables. A table is filled cell by cell, row after row, and then printed with every column as wide as its widest cell.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/base/print-number.h"

enum { TABLE_MAX_COLUMNS = 16 };

struct table {
    const char *const *heads; /* n_columns, static */
    size_t n_columns;
    char **cells; /* row after row, owned */
    size_t n_cells, n_allocated;
    bool failed; /* memory was short: nothing is printed */
};

void table_init(struct table *table, const char *const *heads, size_t n_columns);
void table_deinit(struct table *table);
void table_cell(struct table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Numbers to the right, the rest to the left. Return: 0 or -ENOMEM. */
int table_print(const struct table *table, FILE *file);
