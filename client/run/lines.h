/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Cutting a stream of bytes into lines, so that the output of several
 * processes can be mixed without mixing their words. Pure: bytes in, lines out.
 *
 * A line ends with '\n'. A '\r' begins the line again, as programs do that draw a progress bar: the text before it is
 * dropped when the next text comes, so that only the line's last state is handed out. "\r\n" is a line end and stays
 * as it is. A line longer than LINE_MAX_BYTES is handed out in pieces, so that memory is bounded whatever is printed;
 * its pieces cannot be taken back, so a '\r' after them ends the line.
 *
 * A bar below another one, as tqdm draws it: '\n', the lower bar, then the command "cursor up". So the '\n' of a bar
 * may be no end, and the bar stays as a row until the program writes below it without moving up again, or
 * lines_settle().
 */

#include <stdbool.h>
#include <stddef.h>

enum {
    LINE_MAX_BYTES = 64 * 1024, /* picked: longer than any honest line, short enough for hundreds of ranks */
    LINES_MAX_ROWS = 4,         /* picked: bars below each other in one program */
    LINES_ROW_BYTES = 1024,     /* picked: a longer bar ends with its '\n' */
    LINES_ESCAPE_BYTES = 8,
};

/* text is one line with its end, or, when too long, a piece without; at the start of a line unless continued. */
typedef void lines_fn(void *context, const char *text, size_t n_bytes, bool continued);

/* A row in which the cursor is not. */
struct lines_row {
    char text[LINES_ROW_BYTES + 1]; /* room for '\n' */
    size_t n_bytes;
    bool is_bar;
};

struct lines {
    lines_fn *emit;
    void *context;
    char *held; /* n_held: the row in which the cursor is; owned */
    size_t n_held;
    bool continued; /* its first piece has been handed out */
    bool returned;  /* the next text replaces what is held */
    bool is_bar;    /* it has been drawn anew */
    bool touched;   /* it has got text since the cursor came into it */
    struct lines_row rows[LINES_MAX_ROWS];
    unsigned n_rows, row;            /* rows[row] is stale: the cursor is there */
    char escape[LINES_ESCAPE_BYTES]; /* n_escape: the beginning of a terminal's command */
    size_t n_escape;
};

/* Return: 0 or -ENOMEM. */
int lines_init(struct lines *lines, lines_fn *emit, void *context);
void lines_deinit(struct lines *lines);

void lines_feed(struct lines *lines, const char *data, size_t n_bytes);

/* The bar in row 0 to LINES_MAX_ROWS - 1, valid until the next call. Return: NULL when there is none. */
const char *lines_bar(const struct lines *lines, unsigned row, size_t *n_bytes);

/* The cursor is below a bar: it may come back. */
static inline bool lines_is_below(const struct lines *lines)
{
    return lines->row > 0;
}

/* Nothing came for a while, so the bars above the cursor are at their end. */
void lines_settle(struct lines *lines);

/* The stream has ended: hands out what is held, with the '\n' that it lacks; but not a bar that was blanked. */
void lines_flush(struct lines *lines);
