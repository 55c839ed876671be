/* SPDX-License-Identifier: Apache-2.0 */

/* Lines of output, cut out of a stream of bytes. */

#include "client/run/lines.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"

int lines_init(struct lines *lines, lines_fn *emit, void *context)
{
    *lines = (struct lines){.emit = emit, .context = context, .held = malloc(LINE_MAX_BYTES + strlen("\r\n"))};
    return lines->held ? 0 : -ENOMEM;
}

void lines_deinit(struct lines *lines)
{
    free(lines->held);
    *lines = (struct lines){};
}

static void lines_hand_out(struct lines *lines, bool ends)
{
    lines->emit(lines->context, lines->held, lines->n_held, lines->continued);
    lines->continued = !ends;
    lines->n_held = 0;
    if (ends)
        lines->is_bar = false;
}

static void lines_end(struct lines *lines)
{
    lines->held[lines->n_held++] = '\n';
    lines_hand_out(lines, true);
}

static void lines_return(struct lines *lines)
{
    if (lines->continued) {
        lines_end(lines);
        return;
    }
    lines->returned = lines->is_bar = true;
}

/* next: the byte after a '\r'. */
static void lines_leave_return(struct lines *lines, char next)
{
    if (next == '\r')
        return;
    lines->returned = false;
    if (next == '\n')
        lines->held[lines->n_held++] = '\r';
    else
        lines->n_held = 0;
}

/* Number of bytes before the first '\n' or '\r'; all of them when there is none. */
static size_t text_length(const char *data, size_t n_bytes)
{
    size_t i = 0;

    while (i < n_bytes && data[i] != '\n' && data[i] != '\r')
        i++;
    return i;
}

void lines_feed(struct lines *lines, const char *data, size_t n_bytes)
{
    const char *end = data + n_bytes;
    size_t n;

    while (data < end) {
        if (lines->returned)
            lines_leave_return(lines, *data);
        if (*data == '\n') {
            lines_end(lines);
            data++;
        } else if (*data == '\r') {
            lines_return(lines);
            data++;
        } else {
            n = text_length(data, MIN((size_t)(end - data), LINE_MAX_BYTES - lines->n_held));
            memcpy(lines->held + lines->n_held, data, n);
            lines->n_held += n;
            data += n;
            if (lines->n_held == LINE_MAX_BYTES)
                lines_hand_out(lines, false);
        }
    }
}

const char *lines_bar(const struct lines *lines, size_t *n_bytes)
{
    *n_bytes = lines->n_held;
    return lines->is_bar && !lines->continued ? lines->held : NULL;
}

static bool is_blank(const char *text, size_t n_bytes)
{
    while (n_bytes > 0 && text[n_bytes - 1] == ' ')
        n_bytes--;
    return n_bytes == 0;
}

void lines_flush(struct lines *lines)
{
    if (lines->continued || !is_blank(lines->held, lines->n_held) || (lines->n_held > 0 && !lines->is_bar))
        lines_end(lines);
}
