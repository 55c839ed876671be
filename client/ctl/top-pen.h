/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Text on a pad of ncurses that grows downwards: words wrap at its right edge, and later lines are indented. What the
 * terminal would obey or cannot show (control characters, bytes that are not UTF-8, characters without a width of their
 * own) is written as \xNN.
 */

#include <ncurses.h>

/* Colours are a help only: what they say stands in the text, too. */
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
    WINDOW *pad; /* owned; NULL: out of memory, then nothing is written */
    int width;
    int indent; /* of lines that continue one */
    int row, column;
};

/* Colours unless NO_COLOR is set or the terminal has none. After newterm(). */
void pen_start_colors(void);
attr_t pen_attributes(enum pen_style style);

void pen_init(struct pen *pen, int width);
void pen_deinit(struct pen *pen);

/* A line feed in the text ends the line. */
void pen_put(struct pen *pen, enum pen_style style, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Moves right to the column, on the next row if the pen is beyond it. */
void pen_go(struct pen *pen, int column);
/* Begins a line with a label, whose text and continuation stand at PEN_TEXT_COLUMN. */
void pen_label(struct pen *pen, const char *label);
/* Ends the line, unless nothing was written on it. */
void pen_end_line(struct pen *pen);

enum { PEN_TEXT_COLUMN = 9 };

/* Rows that have been written, the open one included. */
int pen_n_rows(const struct pen *pen);
