/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes text on a pad of ncurses, which grows downwards. Words wrap at the right edge, and continuation lines are
 * indented. Characters that the terminal would obey or cannot show (control characters, bytes that are not UTF-8,
 * characters without a width of their own) are written as \xNN.
 */

#include <ncurses.h>

/* Colours add nothing to the text, which says the same. */
enum pen_style {
    PEN_PLAIN,
    PEN_LABEL,
    PEN_GOOD,
    PEN_WARNING,
    PEN_TROUBLE,
    PEN_TITLE,
    N_PEN_STYLES,
};

struct pen {
    WINDOW *pad; /* owned; NULL: memory was short, so nothing is written */
    int width;
    int indent; /* of continuation lines */
    int row, column;
};

/* Enables colours, unless NO_COLOR is set or the terminal has none. Call newterm() first. */
void pen_start_colors(void);
attr_t pen_attributes(enum pen_style style);

void pen_init(struct pen *pen, int width);
void pen_deinit(struct pen *pen);

/* Writes text. A line feed in the text ends the line. */
void pen_put(struct pen *pen, enum pen_style style, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Moves to the column: on this row or, if the pen is already right of the column, on the next row. */
void pen_go(struct pen *pen, int column);
/* Begins a line with a label. The text after the label, also on continuation lines, starts at PEN_TEXT_COLUMN. */
void pen_label(struct pen *pen, const char *label);
/* Ends the line, if it has text. */
void pen_end_line(struct pen *pen);

enum { PEN_TEXT_COLUMN = 9 };

/* The number of written rows, including the open one. */
int pen_n_rows(const struct pen *pen);
