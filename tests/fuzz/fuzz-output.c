/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The output of zerodrun's children: lines, progress bars, repetitions and prefixes, on a terminal and in a file. Lines
 * must not depend on the pieces in which bytes arrive. Text that zerodrun quotes must have no control characters.
 *
 * An input is a series of acts. An act's first byte has the process, one of three (2 bits), what happens (2 bits), and
 * how often the following text is repeated (4 bits). A text begins with its length, one byte.
 */

#include <assert.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <xxhash.h>

#include "client/run/lines.h"
#include "client/run/output.h"
#include "client/run/plain.h"
#include "client/run/process.h"
#include "client/run/repeats.h"
#include "client/run/torch-rank.h"
#include "core/base/base.h"
#include "core/base/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PROCESSES = 3, MAX_BYTES = 1 << 16, TIMES = 16, FED_BYTES = LINE_MAX_BYTES, WAIT_MS = 100 };

/* The fields of struct process_stream. */
struct stream {
    struct output_source sources[LINES_MAX_ROWS];
    struct lines lines, bytewise;
    XXH64_hash_t sums[2]; /* hashes of the text that lines and bytewise handed out */
    struct repeats_source repeats;
    const uint64_t *now_ms;
};

static void add_piece(XXH64_hash_t *sum, const char *text, size_t n_bytes, bool continued)
{
    assert(n_bytes > 0 && n_bytes <= LINE_MAX_BYTES + 2 && !memchr(text, '\n', n_bytes - 1));
    *sum = XXH64(text, n_bytes, *sum + continued);
}

static void check_quoted(const struct stream *stream, const char *line, size_t n_bytes)
{
    char text[PROCESS_MESSAGE_BYTES];
    size_t n;

    (void)plain_text(text, sizeof(text), line, n_bytes);
    n = strlen(text);
    assert(torch_rank_length(stream->repeats.label, text, n) <= n);
    for (const char *c = text; *c; c += utf8_length(c, strlen(c)))
        assert(utf8_length(c, strlen(c)) > 0 && !utf8_is_control(c));
}

static void on_line(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct stream *stream = context;

    add_piece(&stream->sums[0], text, n_bytes, continued);
    check_quoted(stream, text, n_bytes);
    repeats_feed(&stream->repeats, text, n_bytes, continued, *stream->now_ms);
}

static void on_bytewise(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct stream *stream = context;

    add_piece(&stream->sums[1], text, n_bytes, continued);
}

static void on_text(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct stream *stream = context;

    assert(n_bytes > 0);
    output_line(&stream->sources[0], text, n_bytes, continued);
}

static void draw(struct stream *stream)
{
    for (unsigned i = 0; i < LINES_MAX_ROWS; i++) {
        size_t n;
        const char *bar = lines_bar(&stream->lines, i, &n);

        if (bar)
            output_draw(&stream->sources[i], bar, n);
        else
            output_erase(&stream->sources[i]);
    }
}

static void feed(struct stream *stream, const uint8_t *data, size_t n_bytes)
{
    lines_feed(&stream->lines, (const char *)data, n_bytes);
    for (size_t i = 0; i < n_bytes; i++)
        lines_feed(&stream->bytewise, (const char *)data + i, 1);
    assert(stream->sums[0] == stream->sums[1]);
    draw(stream);
}

static void settle(struct stream *stream)
{
    lines_settle(&stream->lines);
    lines_settle(&stream->bytewise);
    draw(stream);
}

static void end(struct stream *stream)
{
    lines_flush(&stream->lines);
    lines_flush(&stream->bytewise);
    assert(stream->sums[0] == stream->sums[1]);
    repeats_release(&stream->repeats, *stream->now_ms);
    for (unsigned i = 0; i < LINES_MAX_ROWS; i++)
        output_erase(&stream->sources[i]);
    lines_deinit(&stream->lines);
    lines_deinit(&stream->bytewise);
    repeats_source_deinit(&stream->repeats);
}

static void begin(struct stream *stream, struct output *output, struct repeats *repeats, const char *label,
                  const uint64_t *now_ms)
{
    *stream = (struct stream){.now_ms = now_ms};
    for (unsigned i = 0; i < LINES_MAX_ROWS; i++)
        output_source_init(&stream->sources[i], output, label, output_rank_color(i));
    repeats_source_init(&stream->repeats, repeats, label, on_text, stream);
    if (lines_init(&stream->lines, on_line, stream) < 0 || lines_init(&stream->bytewise, on_bytewise, stream) < 0)
        abort();
}

/* n_fed is the number of bytes fed so far. Texts are repeated until it is FED_BYTES. Return: the size of the act. */
static size_t act(struct stream *stream, uint64_t *now_ms, size_t *n_fed, const uint8_t *data, size_t size)
{
    unsigned times = 1 + data[0] / 16 * TIMES;
    size_t n = size > 1 ? MIN((size_t)data[1], size - 2) : 0;

    switch (data[0] / 4 % 4) {
    case 0:
        settle(stream);
        return 1;
    case 1:
        *now_ms += WAIT_MS * times;
        repeats_release(&stream->repeats, *now_ms);
        return 1;
    default:
        for (unsigned i = 0; i == 0 || (i < times && *n_fed < FED_BYTES); i++, *n_fed += n)
            feed(stream, data + 2, n);
        return 2 + n;
    }
}

static void on_drained(void *context)
{
    (void)context;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct stream streams[PROCESSES];
    static struct output output;
    struct repeats repeats = {0};
    uint64_t now_ms = 1000;
    size_t n_fed = 0;

    if (!output.sink.fd && output_init(&output, uv_default_loop(), open("/dev/null", O_WRONLY | O_CLOEXEC),
                                       OUTPUT_COLOR_ALWAYS, on_drained, NULL) < 0)
        abort();
    if (size == 0 || size > MAX_BYTES)
        return 0;
    output.is_terminal = data[0] % 2;
    for (unsigned i = 0; i < PROCESSES; i++)
        begin(&streams[i], &output, &repeats, i == 0 ? "zerod" : (const char[]){(char)('0' + i), '\0'}, &now_ms);
    data++;
    for (size--; size > 0;) {
        size_t n = MIN(act(&streams[data[0] % 4 % PROCESSES], &now_ms, &n_fed, data, size), size);

        data += n;
        size -= n;
    }
    for (unsigned i = 0; i < PROCESSES; i++)
        end(&streams[i]);
    repeats_deinit(&repeats);
    assert(!output.rows && output.n_drawn == 0);
    return 0;
}
