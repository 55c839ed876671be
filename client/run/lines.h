/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Cuts a stream of bytes into lines, without I/O, so that the lines of several processes can be mixed.
 *
 * A line ends with '\n'. A '\r' begins the line again, as in a progress bar: the next text replaces the text before the
 * '\r', so only the line's last state is emitted. "\r\n" ends a line and is emitted unchanged. A line longer than
 * LINE_MAX_BYTES is emitted in pieces, so memory is bounded. A '\r' after an emitted piece ends the line, because the
 * piece cannot be replaced.
 *
 * To draw a bar below another bar, tqdm writes '\n', the lower bar, and the command "cursor up". So a '\n' after a bar
 * may not end the bar. The bar stays a row until the program writes below it without moving up again, or until
 * lines_settle().
 */

#include <stdbool.h>
#include <stddef.h>

enum {
    LINE_MAX_BYTES = 64 * 1024, /* picked: longer than any real line, short enough for hundreds of ranks */
    LINES_MAX_ROWS = 4,         /* picked: most bars of one program below each other */
    LINES_ROW_BYTES = 1024,     /* picked: a longer bar ends at its '\n' */
    LINES_ESCAPE_BYTES = 8,
};

/* Receives one line with its '\n', or a piece of a long line without '\n'. continued: whether this is a later piece of
 * its line. */
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
    char *held; /* n_held bytes of text in the cursor's row; owned */
    size_t n_held;
    bool continued; /* the first piece of the row has been emitted */
    bool returned;  /* the next text replaces the held text */
    bool is_bar;    /* the row has been redrawn */
    bool touched;   /* the row has got text since the cursor entered it */
    struct lines_row rows[LINES_MAX_ROWS];
    unsigned n_rows, row;            /* rows[row] is the cursor's row; its text is in held instead */
    char escape[LINES_ESCAPE_BYTES]; /* n_escape bytes of an incomplete terminal command */
    size_t n_escape;
};

/* Return: 0 or -ENOMEM. */
int lines_init(struct lines *lines, lines_fn *emit, void *context);
void lines_deinit(struct lines *lines);

void lines_feed(struct lines *lines, const char *data, size_t n_bytes);

/* Return: the bar in this row (0 to LINES_MAX_ROWS - 1), valid until the next call; NULL if the row has no bar. */
const char *lines_bar(const struct lines *lines, unsigned row, size_t *n_bytes);

/* Return: true if the cursor is below a bar, so that the program may move it up again. */
static inline bool lines_is_below(const struct lines *lines)
{
    return lines->row > 0;
}

/* Emits the bars above the cursor. Call it when the process has written nothing for a while. */
void lines_settle(struct lines *lines);

/* Ends the stream: emits all held text with the missing '\n', except blank bars. */
void lines_flush(struct lines *lines);
