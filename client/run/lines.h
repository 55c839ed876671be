/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Cuts a stream of bytes into lines, so that the lines of several processes can be mixed. Pure: bytes in, lines out.
 *
 * A line ends with '\n'. A '\r' begins the line again, as in a progress bar: the next text replaces the text before the
 * '\r', so only the line's last state is emitted. "\r\n" is a line end and stays as it is. A line longer than
 * LINE_MAX_BYTES is emitted in pieces, so memory is bounded. Emitted pieces are final, so a '\r' after them ends the
 * line.
 *
 * tqdm draws a bar below another bar as '\n', the lower bar, and the command "cursor up". So the '\n' of a bar may not
 * end its line. The bar stays a row until the program writes below it without moving up again, or until lines_settle().
 */

#include <stdbool.h>
#include <stddef.h>

enum {
    LINE_MAX_BYTES = 64 * 1024, /* picked: longer than any real line, short enough for hundreds of ranks */
    LINES_MAX_ROWS = 4,         /* picked: the most bars that one program draws below each other */
    LINES_ROW_BYTES = 1024,     /* picked: a longer bar ends with its '\n' */
    LINES_ESCAPE_BYTES = 8,
};

/* Receives one line with its '\n', or a piece of a long line without '\n'. continued: this is not the first piece of
 * the line. */
typedef void lines_fn(void *context, const char *text, size_t n_bytes, bool continued);

/* A row above or below the cursor. */
struct lines_row {
    char text[LINES_ROW_BYTES + 1]; /* room for '\n' */
    size_t n_bytes;
    bool is_bar;
};

struct lines {
    lines_fn *emit;
    void *context;
    char *held; /* n_held bytes: the text of the cursor's row; owned */
    size_t n_held;
    bool continued; /* the first piece of the row has been emitted */
    bool returned;  /* the next text replaces the held text */
    bool is_bar;    /* the row has been redrawn */
    bool touched;   /* the row has got text since the cursor entered it */
    struct lines_row rows[LINES_MAX_ROWS];
    unsigned n_rows, row;            /* rows[row] is the cursor's row, and its text is stale */
    char escape[LINES_ESCAPE_BYTES]; /* n_escape bytes: the beginning of a terminal command */
    size_t n_escape;
};

/* Return: 0 or -ENOMEM. */
int lines_init(struct lines *lines, lines_fn *emit, void *context);
void lines_deinit(struct lines *lines);

void lines_feed(struct lines *lines, const char *data, size_t n_bytes);

/* The bar in this row, 0 to LINES_MAX_ROWS - 1, valid until the next call. Return: NULL if the row has no bar. */
const char *lines_bar(const struct lines *lines, unsigned row, size_t *n_bytes);

/* Is the cursor below a bar? Then it may move up again. */
static inline bool lines_is_below(const struct lines *lines)
{
    return lines->row > 0;
}

/* Emits the bars above the cursor. The caller has received no text for a while. */
void lines_settle(struct lines *lines);

/* Ends the stream: emits the held text with the missing '\n', except a bar that was blanked. */
void lines_flush(struct lines *lines);
