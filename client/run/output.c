/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes the lines of many processes to one terminal, pipe or file, with prefixes, colours, and rows for progress bars.
 */

#include "client/run/output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/run/plain.h"
#include "core/base/base.h"

enum {
    DEFAULT_HEIGHT = 24, /* used if a terminal does not report its height */
};

const char OUTPUT_DAEMON_COLOR[] = "1"; /* bold */
static const char error_color[] = "1;31";

const char *output_rank_color(unsigned rank)
{
    /* Red is for errors only. */
    static const char *const colors[] = {"36", "32", "33", "35", "34", "96", "92", "93", "95", "94"};

    return colors[rank % ARRAY_SIZE(colors)];
}

/* ---- the terminal -------------------------------------------------------------------------------------- */

static bool is_terminal(int fd)
{
    const char *term = getenv("TERM");

    return isatty(fd) && term && *term && strcmp(term, "dumb") != 0;
}

bool output_is_shared(int fd, int other_fd)
{
    struct stat a, b;

    return is_terminal(fd) && is_terminal(other_fd) && fstat(fd, &a) == 0 && fstat(other_fd, &b) == 0 &&
           a.st_rdev == b.st_rdev;
}

bool output_is_one_file(int fd, int other_fd)
{
    struct stat a, b;

    return fstat(fd, &a) == 0 && fstat(other_fd, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

int output_init(struct output *output, uv_loop_t *loop, int fd, enum output_color color,
                void (*on_drained)(void *context), void *context)
{
    const char *no_color = getenv("NO_COLOR");

    *output = (struct output){.is_terminal = is_terminal(fd)};
    output->has_color =
        color == OUTPUT_COLOR_ALWAYS || (color == OUTPUT_COLOR_AUTO && output->is_terminal && !(no_color && *no_color));
    return sink_init(&output->sink, loop, fd, on_drained, context);
}

static void output_put(struct output *output, const char *text)
{
    sink_put(&output->sink, text, strlen(text), NULL, 0);
}

/* ---- rows ---------------------------------------------------------------------------------------------- */

/* Return: the terminal's height, less one row for a finished line. */
static unsigned output_max_rows(const struct output *output)
{
    struct winsize size;
    unsigned height = ioctl(output->sink.fd, TIOCGWINSZ, &size) == 0 ? size.ws_row : 0;

    return MAX(height > 0 ? height : DEFAULT_HEIGHT, 2u) - 1;
}

/* Draws the row at the cursor. Wrapping is off, so the row stays one row at any terminal width. */
static void output_put_row(struct output *output, const struct output_source *source)
{
    sink_printf(&output->sink, "\r\033[K\033[?7l%s%s\033[?7h", source->prefix, source->row);
}

static void output_erase_rows(struct output *output)
{
    if (output->n_drawn > 1)
        sink_printf(&output->sink, "\033[%uA", output->n_drawn - 1);
    if (output->n_drawn > 0)
        output_put(output, "\r\033[J");
    output->n_drawn = 0;
}

/* Draws the row below the drawn rows. */
static void output_add_row(struct output *output, const struct output_source *source)
{
    if (output->is_mid_line || output->n_drawn >= output_max_rows(output))
        return;
    if (output->n_drawn > 0)
        output_put(output, "\n");
    output_put_row(output, source);
    output->n_drawn++;
}

static void output_draw_rows(struct output *output)
{
    for (const struct output_source *source = output->rows; source; source = source->next)
        output_add_row(output, source);
}

static void output_replace_row(struct output *output, const struct output_source *source)
{
    unsigned n_above = 0, n_below;

    for (const struct output_source *other = output->rows; other != source; other = other->next)
        n_above++;
    if (n_above >= output->n_drawn)
        return;
    n_below = output->n_drawn - 1 - n_above;
    if (n_below > 0)
        sink_printf(&output->sink, "\033[%uA", n_below);
    output_put_row(output, source);
    if (n_below > 0)
        sink_printf(&output->sink, "\033[%uB", n_below);
}

static struct output_source **find_end(struct output_source **link, const struct output_source *end)
{
    while (*link != end)
        link = &(*link)->next;
    return link;
}

/* ---- sources ------------------------------------------------------------------------------------------- */

void output_source_init(struct output_source *source, struct output *output, const char *label, const char *color)
{
    *source = (struct output_source){.output = output};
    if (output->has_color)
        snprintf(source->prefix, sizeof(source->prefix), "\033[%sm[%s]\033[0m ", color, label);
    else
        snprintf(source->prefix, sizeof(source->prefix), "[%s] ", label);
}

void output_line(struct output_source *source, const char *text, size_t n_bytes, bool continued)
{
    struct output *output = source->output;

    output_erase_rows(output);
    sink_put(&output->sink, source->prefix, continued ? 0 : strlen(source->prefix), text, n_bytes);
    output->is_mid_line = text[n_bytes - 1] != '\n';
    output_draw_rows(output);
}

void output_draw(struct output_source *source, const char *text, size_t n_bytes)
{
    struct output *output = source->output;

    if (!output->is_terminal)
        return;
    plain_text(source->row, sizeof(source->row), text, n_bytes);
    if (source->has_row) {
        output_replace_row(output, source);
        return;
    }
    *find_end(&output->rows, NULL) = source;
    source->has_row = true;
    output_add_row(output, source);
}

void output_erase(struct output_source *source)
{
    struct output *output = source->output;

    if (!source->has_row)
        return;
    output_erase_rows(output);
    *find_end(&output->rows, source) = source->next;
    source->has_row = false;
    source->next = NULL;
    output_draw_rows(output);
}

void output_say(struct output *output, bool is_error, const char *text)
{
    output_erase_rows(output);
    if (output->has_color && is_error)
        sink_printf(&output->sink, "\033[%smzerodrun:\033[0m %s\n", error_color, text);
    else
        sink_printf(&output->sink, "zerodrun: %s\n", text);
    output->is_mid_line = false;
    output_draw_rows(output);
}
