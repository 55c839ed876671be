/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An output of zerodrun with the lines of many processes. Each line begins with the prefix of its process.
 *
 * On a terminal, prefixes have colours, and a line that its process redraws (a progress bar) has a row of its own. All
 * rows are below the finished lines: a new finished line replaces them, and they are drawn again below it. So a bar
 * keeps its row until its process ends the line. Other files and pipes get only finished lines.
 *
 * An output has two kinds of users: sources, which are the streams of processes, and zerodrun itself. Everything runs
 * on the loop's thread.
 */

#include "client/run/sink.h"

enum output_color { OUTPUT_COLOR_AUTO, OUTPUT_COLOR_ALWAYS, OUTPUT_COLOR_NEVER };

enum {
    OUTPUT_ROW_BYTES = 1024, /* picked: wider than a terminal; the terminal's width cuts the rest */
};

/* One stream of a process, or one of its bars. Embedded in the stream; output_erase() before the memory is freed. */
struct output_source {
    struct output *output;
    char prefix[48];
    char row[OUTPUT_ROW_BYTES]; /* the drawn text; meaningless without a row */
    bool has_row;
    struct output_source *next; /* the next source with a row, in the order of their beginnings */
};

struct output {
    struct sink sink;
    bool is_terminal; /* a terminal that obeys cursor movements */
    bool has_color;
    bool is_mid_line; /* the last text was a piece of a long line: no rows are drawn */
    struct output_source *rows;
    unsigned n_drawn; /* rows on the screen: the first ones; the cursor is in the last of them */
};

/* The colours of rank number n's prefix and of a daemon's prefix, as parameters of the terminal's command. */
const char *output_rank_color(unsigned rank);
extern const char OUTPUT_DAEMON_COLOR[];

/* Return: 0 or a negative errno. Ends with sink_close(). */
int output_init(struct output *output, uv_loop_t *loop, int fd, enum output_color color,
                void (*on_drained)(void *context), void *context);

/* Are both the same terminal? Then they share one output, because each row must know the text below it. */
bool output_is_shared(int fd, int other_fd);

/* Are both the same terminal, pipe or file? Then a reader of one reads both. */
bool output_is_one_file(int fd, int other_fd);

/* label: the text in the brackets of the prefix. */
void output_source_init(struct output_source *source, struct output *output, const char *label, const char *color);

/* Writes a finished line with its '\n', or a piece of a long line without '\n'. continued: it is not the first piece.
 * The source's row stays until it is redrawn or erased. */
void output_line(struct output_source *source, const char *text, size_t n_bytes, bool continued);
/* Draws the present state of an unfinished line. */
void output_draw(struct output_source *source, const char *text, size_t n_bytes);
/* Erases the source's row, if it has one. */
void output_erase(struct output_source *source);

/* Writes a line of zerodrun itself. */
void output_say(struct output *output, bool is_error, const char *text);
