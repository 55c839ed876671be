/* SPDX-License-Identifier: Apache-2.0 */

/* Cuts a stream of bytes into lines. */

#include "client/run/lines.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"

static const char cursor_up[] = "\033[A";

int lines_init(struct lines *lines, lines_fn *emit, void *context)
{
    *lines = (struct lines){.emit = emit, .context = context, .n_rows = 1};
    lines->held = malloc(LINE_MAX_BYTES + strlen("\r\n"));
    return lines->held ? 0 : -ENOMEM;
}

void lines_deinit(struct lines *lines)
{
    free(lines->held);
    *lines = (struct lines){};
}

static bool is_blank(const char *text, size_t n_bytes)
{
    while (n_bytes > 0 && text[n_bytes - 1] == ' ')
        n_bytes--;
    return n_bytes == 0;
}

/* ---- rows ---------------------------------------------------------------------------------------------- */

static void row_hand_out(struct lines *lines, struct lines_row *row)
{
    if (row->is_bar && is_blank(row->text, row->n_bytes))
        return;
    row->text[row->n_bytes++] = '\n';
    lines->emit(lines->context, row->text, row->n_bytes, false);
}

/* Emits the first n rows, which are above the cursor. */
static void lines_drop_rows(struct lines *lines, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        row_hand_out(lines, &lines->rows[i]);
    memmove(lines->rows, lines->rows + n, (lines->n_rows - n) * sizeof(*lines->rows));
    lines->n_rows -= n;
    lines->row -= n;
}

void lines_settle(struct lines *lines)
{
    lines_drop_rows(lines, lines->row);
}

static void lines_leave_row(struct lines *lines)
{
    struct lines_row *row = &lines->rows[lines->row];

    row->n_bytes = MIN(lines->n_held, (size_t)LINES_ROW_BYTES);
    memcpy(row->text, lines->held, row->n_bytes);
    row->is_bar = lines->is_bar;
}

/* Moves the cursor to the row. The next text replaces all of the row's old text. */
static void lines_enter_row(struct lines *lines, unsigned row)
{
    if (row == lines->n_rows) {
        lines->rows[row].n_bytes = 0;
        lines->rows[row].is_bar = false;
        lines->n_rows++;
    }
    lines->row = row;
    lines->n_held = lines->rows[row].n_bytes;
    memcpy(lines->held, lines->rows[row].text, lines->n_held);
    lines->is_bar = lines->rows[row].is_bar;
    lines->returned = lines->n_held > 0;
    lines->touched = lines->continued = false;
}

static void lines_move_up(struct lines *lines)
{
    lines_leave_row(lines);
    lines_enter_row(lines, lines->row - 1);
}

/* Handles the '\n' of a bar, or of an empty row below a bar. */
static void lines_move_down(struct lines *lines)
{
    if (lines->touched)
        lines_settle(lines);
    lines_leave_row(lines);
    if (lines->row + 1 == LINES_MAX_ROWS)
        lines_drop_rows(lines, 1);
    lines_enter_row(lines, lines->row + 1);
}

/* ---- the row in which the cursor is -------------------------------------------------------------------- */

static void lines_hand_out_piece(struct lines *lines)
{
    lines_settle(lines);
    lines->emit(lines->context, lines->held, lines->n_held, lines->continued);
    lines->continued = true;
    lines->n_held = 0;
}

static void lines_end(struct lines *lines)
{
    lines->held[lines->n_held++] = '\n';
    lines_hand_out_piece(lines);
    lines->n_rows--;
    memmove(lines->rows, lines->rows + 1, lines->n_rows * sizeof(*lines->rows));
    lines_enter_row(lines, 0);
}

static void lines_newline(struct lines *lines)
{
    bool is_empty_below = lines->row > 0 && lines->n_held == 0 && !lines->touched && !lines->returned;

    if (lines->returned && !lines->is_bar)
        lines->held[lines->n_held++] = '\r';
    if (!lines->continued && lines->n_held <= LINES_ROW_BYTES && (lines->is_bar || is_empty_below))
        lines_move_down(lines);
    else
        lines_end(lines);
}

static void lines_return(struct lines *lines)
{
    if (lines->continued) {
        lines_end(lines);
        return;
    }
    if (lines->touched && !lines->returned && !is_blank(lines->held, lines->n_held))
        lines_settle(lines);
    lines->returned = true;
}

static void lines_add(struct lines *lines, const char *text, size_t n_bytes)
{
    if (lines->returned) {
        lines->n_held = 0;
        lines->returned = false;
        lines->is_bar = true;
    }
    lines->touched = true;
    for (size_t n; n_bytes > 0; text += n, n_bytes -= n) {
        n = MIN(n_bytes, LINE_MAX_BYTES - lines->n_held);
        memcpy(lines->held + lines->n_held, text, n);
        lines->n_held += n;
        if (lines->n_held == LINE_MAX_BYTES)
            lines_hand_out_piece(lines);
    }
}

/* ---- bytes --------------------------------------------------------------------------------------------- */

static void lines_end_escape(struct lines *lines)
{
    size_t n = lines->n_escape;

    lines->n_escape = 0;
    if (n > 0)
        lines_add(lines, lines->escape, n);
}

/* Adds the next byte of a possible "cursor up" command. Return: true if the byte belongs to the command. */
static bool lines_add_escape(struct lines *lines, char c)
{
    if (lines->row == 0 || c != cursor_up[lines->n_escape])
        return false;
    lines->escape[lines->n_escape++] = c;
    if (lines->n_escape == strlen(cursor_up)) {
        lines->n_escape = 0;
        lines_move_up(lines);
    }
    return true;
}

/* Return: the number of bytes before the next '\n', '\r' or command; at least 1. */
static size_t text_length(const char *data, const char *end)
{
    const char *c = data + 1;

    while (c < end && *c != '\n' && *c != '\r' && *c != '\033')
        c++;
    return (size_t)(c - data);
}

void lines_feed(struct lines *lines, const char *data, size_t n_bytes)
{
    const char *end = data + n_bytes;
    size_t n;

    for (; data < end; data += n) {
        n = 1;
        if (lines_add_escape(lines, *data))
            continue;
        lines_end_escape(lines);
        if (*data == '\n') {
            lines_newline(lines);
        } else if (*data == '\r') {
            lines_return(lines);
        } else if (!lines_add_escape(lines, *data)) {
            n = text_length(data, end);
            lines_add(lines, data, n);
        }
    }
}

const char *lines_bar(const struct lines *lines, unsigned row, size_t *n_bytes)
{
    const struct lines_row *other = &lines->rows[row];

    if (row >= lines->n_rows)
        return NULL;
    if (row != lines->row) {
        *n_bytes = other->n_bytes;
        return is_blank(other->text, other->n_bytes) ? NULL : other->text;
    }
    *n_bytes = lines->n_held;
    if (lines->continued || !(lines->is_bar || lines->returned) || is_blank(lines->held, lines->n_held))
        return NULL;
    return lines->held;
}

void lines_flush(struct lines *lines)
{
    lines_end_escape(lines);
    lines_settle(lines);
    for (bool is_last = false; !is_last;) {
        is_last = lines->n_rows == 1;
        if (lines->continued || !is_blank(lines->held, lines->n_held) || (lines->n_held > 0 && !lines->is_bar)) {
            lines_end(lines);
        } else if (!is_last) {
            lines_leave_row(lines);
            lines_enter_row(lines, 1);
            lines_drop_rows(lines, 1);
        }
    }
}
