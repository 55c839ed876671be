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
 */

#include <stdbool.h>
#include <stddef.h>

enum {
    LINE_MAX_BYTES = 64 * 1024, /* picked: longer than any honest line, short enough for hundreds of ranks */
};

/* text is one line with its end, or, when too long, a piece without; at the start of a line unless continued. */
typedef void lines_fn(void *context, const char *text, size_t n_bytes, bool continued);

struct lines {
    lines_fn *emit;
    void *context;
    char *held; /* owned */
    size_t n_held;
    bool continued; /* the line's first piece has been handed out */
    bool returned;  /* the last byte was '\r': the next text replaces what is held */
    bool is_bar;    /* the line has had a '\r' */
};

/* Return: 0 or -ENOMEM. */
int lines_init(struct lines *lines, lines_fn *emit, void *context);
void lines_deinit(struct lines *lines);

void lines_feed(struct lines *lines, const char *data, size_t n_bytes);

/* The present state of the line that its program redraws, valid until lines is fed again. Return: NULL when there is no
 * such line. */
const char *lines_bar(const struct lines *lines, size_t *n_bytes);

/* The stream has ended: hands out what is held, with the '\n' that it lacks; but not a bar that was blanked. */
void lines_flush(struct lines *lines);
