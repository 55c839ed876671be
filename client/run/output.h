/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An output of zerodrun, to which it writes the lines of many processes. Each line begins with its process's prefix.
 *
 * On a terminal, prefixes have colours. A progress bar, which a process redraws, keeps one row until the process ends
 * the line. The rows are below all finished lines: a new finished line is written over them, and they are
 * drawn again below it. Other files and pipes get only finished lines.
 *
 * An output has two kinds of users: sources, which are the streams of processes, and zerodrun itself. Everything runs
 * on the loop's thread.
 */

#include "client/run/sink.h"

enum output_color { OUTPUT_COLOR_AUTO, OUTPUT_COLOR_ALWAYS, OUTPUT_COLOR_NEVER };

enum {
    OUTPUT_ROW_BYTES = 1024, /* picked: more than a terminal's width, at which a row is cut */
};

/*
 * One stream of a process, or a bar in the stream. The struct is embedded in the stream. Call output_erase() before its
 * memory is freed.
 */
struct output_source {
    struct output *output;
    char prefix[48];
    char row[OUTPUT_ROW_BYTES]; /* the drawn text, if has_row */
    bool has_row;
    struct output_source *next; /* next source with a row, in the order of drawing */
};

struct output {
    struct sink sink;
    bool is_terminal; /* a terminal that obeys cursor movements */
    bool has_color;
    bool is_mid_line; /* the last text was a piece of a long line, so no rows are drawn */
    struct output_source *rows;
    unsigned n_drawn; /* number of first rows that are on the screen; the cursor is in the last of these */
};

/* The colours of a rank's prefix and of a daemon's prefix, as parameters of a terminal command (SGR). */
const char *output_rank_color(unsigned rank);
extern const char OUTPUT_DAEMON_COLOR[];

/* Return: 0 or a negative errno. Call sink_close(&output->sink) to end the output. */
int output_init(struct output *output, uv_loop_t *loop, int fd, enum output_color color,
                void (*on_drained)(void *context), void *context);

/* Return: true if both are the same terminal. Then they share one output, which must know everything below its rows. */
bool output_is_shared(int fd, int other_fd);

/* Return: true if both are the same terminal, pipe or file, so that a reader of one reads both. */
bool output_is_one_file(int fd, int other_fd);

/* label: the text in the brackets of the prefix. */
void output_source_init(struct output_source *source, struct output *output, const char *label, const char *color);

/* Writes a finished line with its '\n', or a piece of a long line without '\n'. continued: whether this is a later
 * piece of its line. The source's row stays until output_draw() or output_erase(). */
void output_line(struct output_source *source, const char *text, size_t n_bytes, bool continued);
/* Draws the present state of an unfinished line in the source's row. */
void output_draw(struct output_source *source, const char *text, size_t n_bytes);
/* Erases the source's row, if it has one. */
void output_erase(struct output_source *source);

/* Writes a line of zerodrun itself. */
void output_say(struct output *output, bool is_error, const char *text);
