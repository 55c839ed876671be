/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Cutting a stream of bytes into lines, so that the output of several
 * processes can be mixed without mixing their words. Pure: bytes in, lines out.
 *
 * A line ends with '\n', or with '\r' (progress bars, which then still overwrite
 * themselves on a terminal); the '\n' of "\r\n" belongs to its '\r'. A line
 * longer than LINE_MAX_BYTES is handed out in pieces, so that memory is bounded
 * whatever is printed.
 */

#include <stdbool.h>
#include <stddef.h>

enum {
    LINE_MAX_BYTES = 64 * 1024, /* picked: longer than any honest line, short enough for hundreds of ranks */
};

/* text is one line with its end, or, when flushed or too long, without; at the start of a line unless
 * continued. */
typedef void lines_fn(void *context, const char *text, size_t n_bytes, bool continued);

struct lines {
    lines_fn *emit;
    void *context;
    char *held; /* LINE_MAX_BYTES, owned */
    size_t n_held;
    bool continued; /* the line's first piece has been handed out */
    bool after_cr;  /* the last byte handed out was '\r' */
};

/* Return: 0 or -ENOMEM. */
int lines_init(struct lines *lines, lines_fn *emit, void *context);
void lines_deinit(struct lines *lines);

void lines_feed(struct lines *lines, const char *data, size_t n_bytes);

/* The stream has ended: hands out what is held, with the '\n' that it lacks. */
void lines_flush(struct lines *lines);
