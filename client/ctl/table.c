/* SPDX-License-Identifier: Apache-2.0 */

/* Prints tables for people. */

#include "client/ctl/table.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#include "core/base/base.h"

void table_init(struct table *table, const char *const *heads, size_t n_columns)
{
    assert(n_columns <= TABLE_MAX_COLUMNS);
    *table = (struct table){.heads = heads, .n_columns = n_columns};
}

void table_deinit(struct table *table)
{
    size_t i;

    for (i = 0; i < table->n_cells; i++)
        free(table->cells[i]);
    free(table->cells);
    *table = (struct table){};
}

void table_cell(struct table *table, const char *format, ...)
{
    size_t n = table->n_allocated ? 2 * table->n_allocated : 256;
    char **cells, *cell;
    va_list args;
    int r;

    if (table->n_cells == table->n_allocated) {
        cells = reallocarray(table->cells, n, sizeof(*cells));
        if (!cells) {
            table->failed = true;
            return;
        }
        table->cells = cells;
        table->n_allocated = n;
    }
    va_start(args, format);
    r = vasprintf(&cell, format, args);
    va_end(args);
    if (r < 0)
        table->failed = true;
    else
        table->cells[table->n_cells++] = cell;
}

/* Counts code points, which are nearly as many as columns. */
static int text_width(const char *text)
{
    int n = 0;

    for (; *text; text++)
        n += (*text & 0xc0) != 0x80;
    return n;
}

static bool column_is_number(const struct table *table, size_t column)
{
    const char *cell;
    size_t i;

    for (i = column; i < table->n_cells; i += table->n_columns) {
        cell = table->cells[i];
        if (!isdigit((unsigned char)*cell) && strcmp(cell, "-") != 0)
            return false;
        if (strpbrk(cell, " ,x"))
            return false;
    }
    return true;
}

static void print_cell(FILE *file, const char *cell, int width, bool right, bool last)
{
    int n_pad = width - text_width(cell);

    if (right)
        fprintf(file, "%*s", n_pad, "");
    fputs(cell, file);
    if (last)
        fputc('\n', file);
    else
        fprintf(file, "%*s", right ? 2 : n_pad + 2, "");
}

int table_print(const struct table *table, FILE *file)
{
    int widths[TABLE_MAX_COLUMNS];
    bool right[TABLE_MAX_COLUMNS];
    size_t i, c;

    if (table->failed)
        return -ENOMEM;
    assert(table->n_cells % table->n_columns == 0);
    for (c = 0; c < table->n_columns; c++) {
        widths[c] = text_width(table->heads[c]);
        right[c] = column_is_number(table, c);
    }
    for (i = 0; i < table->n_cells; i++)
        widths[i % table->n_columns] = MAX(widths[i % table->n_columns], text_width(table->cells[i]));
    for (c = 0; c < table->n_columns; c++)
        print_cell(file, table->heads[c], widths[c], right[c], c + 1 == table->n_columns);
    for (i = 0; i < table->n_cells; i++) {
        c = i % table->n_columns;
        print_cell(file, table->cells[i], widths[c], right[c], c + 1 == table->n_columns);
    }
    return 0;
}
