/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Tables. The caller adds cells, row after row, and then prints the table. Every column is as wide as its widest cell.
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
    char **cells; /* in row order, owned */
    size_t n_cells, n_allocated;
    bool failed; /* memory was short, so nothing is printed */
};

void table_init(struct table *table, const char *const *heads, size_t n_columns);
void table_deinit(struct table *table);
void table_cell(struct table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Aligns numbers to the right, all other cells to the left. Return: 0 or -ENOMEM. */
int table_print(const struct table *table, FILE *file);
