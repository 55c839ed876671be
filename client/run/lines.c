/* SPDX-License-Identifier: Apache-2.0 */

/* Lines of output, cut out of a stream of bytes. */

#include "client/run/lines.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"

int lines_init(struct lines *lines, lines_fn *emit, void *context)
{
    *lines = (struct lines){.emit = emit, .context = context, .held = malloc(LINE_MAX_BYTES)};
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
    lines->after_cr = ends && lines->held[lines->n_held - 1] == '\r';
    lines->continued = !ends;
    lines->n_held = 0;
}

/* Number of bytes up to and including the first line end; all of them when there is none. */
static size_t line_length(const char *data, size_t n_bytes, bool *ends)
{
    size_t i;

    for (i = 0; i < n_bytes; i++) {
        if (data[i] == '\n' || data[i] == '\r') {
            *ends = true;
            return i + 1;
        }
    }
    *ends = false;
    return n_bytes;
}

void lines_feed(struct lines *lines, const char *data, size_t n_bytes)
{
    size_t n;
    bool ends;

    while (n_bytes > 0) {
        if (lines->after_cr) {
            lines->after_cr = false;
            if (*data == '\n') {
                lines->emit(lines->context, data++, 1, true);
                n_bytes--;
                continue;
            }
        }
        n = line_length(data, MIN(n_bytes, LINE_MAX_BYTES - lines->n_held), &ends);
        memcpy(lines->held + lines->n_held, data, n);
        lines->n_held += n;
        data += n;
        n_bytes -= n;
        if (ends || lines->n_held == LINE_MAX_BYTES)
            lines_hand_out(lines, ends);
    }
}

void lines_flush(struct lines *lines)
{
    if (lines->n_held == 0 && !lines->continued)
        return;
    lines->held[lines->n_held++] = '\n';
    lines_hand_out(lines, true);
}
