/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any JSON as a daemon's answer to "status", "ranks", "params" or "diagnostics". zerodctl prints it, `zerodctl top`
 * draws it, and zerod-exporter makes metrics, of which each line must be a comment or a sample. Seeds are the examples
 * of docs/schema. fuzz-client.c tests the packets of an answer, fuzz-trace.c the answer to "trace".
 */

#include <assert.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json-c/json.h>
#include <ncurses.h>

#include "client/ctl/metrics.h"
#include "client/ctl/show.h"
#include "client/ctl/top-feed.h"
#include "client/ctl/top-view.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void show(struct json_object *answer)
{
    static show_fn *const shows[] = {show_status, show_ranks, show_params, show_diagnostics, show_message};
    char *text = NULL;
    size_t n_bytes = 0;

    for (size_t i = 0; i < ARRAY_SIZE(shows); i++) {
        FILE *file = open_memstream(&text, &n_bytes);

        assert(file);
        (void)shows[i](file, answer);
        fclose(file);
        free(steal_ptr(text));
    }
}

static void measure(struct json_object *answer)
{
    const struct metrics_source sources[] = {{.socket = "/a", .status = answer, .ranks = answer}, {.socket = "/b"}};
    struct strbuf text = {0};

    metrics_print(&text, METRICS_OPENMETRICS, sources, ARRAY_SIZE(sources));
    assert(!text.cut && strlen(strbuf_text(&text)) == text.n_bytes);
    for (const char *line = strbuf_text(&text), *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        assert(end && end > line && (*line == '#' || strncmp(line, "zerod_", 6) == 0));
    }
    strbuf_deinit(&text);
}

static void draw(struct json_object *answer)
{
    const struct feed feed = {.socket = "/a",
                              .status = answer,
                              .ranks = answer,
                              .diagnostics = answer,
                              .answered_ms = 20000,
                              .diagnostics_ms = 20000,
                              .bases = {{answer, 1000}, {answer, 11000}}};
    static SCREEN *screen;

    if (!screen) {
        screen = newterm("xterm", fopen("/dev/null", "we"), fopen("/dev/null", "re"));
        assert(screen);
    }
    for (int lines = 5; lines <= 50; lines += 45) {
        resizeterm(lines, 4 * lines);
        for (enum view_screen kind = VIEW_JOB; kind <= VIEW_HELP; kind++)
            view_draw(&(struct view){.screen = kind, .scroll = lines % 7}, &feed, 30000);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _cleanup_free_ char *text = strndup((const char *)data, size);
    struct json_object *answer = text ? json_tokener_parse(text) : NULL;

    if (!answer)
        return 0;
    show(answer);
    measure(answer);
    draw(answer);
    json_object_put(answer);
    return 0;
}
