/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Numbers as people read them, and tables. A table is filled cell by cell, row after row, and then printed
 * with every column as wide as its widest cell.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
    PRINT_SIZE = 32, /* enough for what the next three write */
    TABLE_MAX_COLUMNS = 16,
};

/* "853 ns", "12.3 ms", "4.56 s", "3 min 20 s", "2 h 5 min", "3 d 4 h" */
char *print_duration(char *dst, uint64_t ns);
/* "512 B", "1.50 KiB", "23.4 GiB" */
char *print_bytes(char *dst, uint64_t n_bytes);
/* "950", "12.3 k", "1.20 M", "7.50 G" */
char *print_count(char *dst, uint64_t n);

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
