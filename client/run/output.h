/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * An output of zerodrun with the lines of many processes, each behind the prefix of its process.
 *
 * On a terminal, prefixes have colours, and a line that its process redraws (a progress bar) has a row of its own. The
 * rows stand below all finished lines: a finished line is written in their place, and they are drawn again below it.
 * So a bar keeps its row until its process ends the line. Any other output gets a line when it is finished.
 *
 * An output has two kinds of users: sources, which are the streams of processes, and zerodrun itself.
 * Everything runs on the loop's thread.
 */

#include "client/run/sink.h"

enum output_color { OUTPUT_COLOR_AUTO, OUTPUT_COLOR_ALWAYS, OUTPUT_COLOR_NEVER };

enum {
    OUTPUT_ROW_BYTES = 1024, /* picked: wider than a terminal; what a terminal has no room for is not shown */
};

/* One stream of a process, or one of its bars. Plain, embedded in the stream; output_erase() before the memory goes
 * away. */
struct output_source {
    struct output *output;
    char prefix[48];
    char row[OUTPUT_ROW_BYTES]; /* what the process draws; meaningless when it has no row */
    bool has_row;
    struct output_source *next; /* with a row, in the order in which they began */
};

struct output {
    struct sink sink;
    bool is_terminal; /* that obeys cursor movements */
    bool has_color;
    bool is_mid_line; /* the last text was a piece of a long line: rows wait */
    struct output_source *rows;
    unsigned n_drawn; /* rows on the screen: the first ones, and the cursor is in the last of them */
};

/* The colour of rank number n's prefix, and of a daemon's: parameters of the terminal's command. */
const char *output_rank_color(unsigned rank);
extern const char OUTPUT_DAEMON_COLOR[];

/* Return: 0 or a negative errno. Ends with sink_close(). */
int output_init(struct output *output, uv_loop_t *loop, int fd, enum output_color color,
                void (*on_drained)(void *context), void *context);

/* Are both the same terminal? Then they share one output, because rows know what is below them. */
bool output_is_shared(int fd, int other_fd);

/* Are both the same terminal, pipe or file? Then who reads one reads the other. */
bool output_is_one_file(int fd, int other_fd);

/* label: what stands in brackets. */
void output_source_init(struct output_source *source, struct output *output, const char *label, const char *color);

/* A finished line with its '\n', or a piece of a long one without; continued: it is not the first piece. The source's
 * row stays until it is drawn anew or erased. */
void output_line(struct output_source *source, const char *text, size_t n_bytes, bool continued);
/* The present state of a line that is not finished. */
void output_draw(struct output_source *source, const char *text, size_t n_bytes);
/* Its row, if it has one, disappears. */
void output_erase(struct output_source *source);

/* A line of zerodrun itself. */
void output_say(struct output *output, bool is_error, const char *text);
