/* SPDX-License-Identifier: Apache-2.0 */

/* Finds texts of different processes that are equal line by line (repeats.h). */

#include "client/run/repeats.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/run/torch-rank.h"
#include "core/base/base.h"

static const char traceback[] = "Traceback (most recent call last):";
static const char KIND_TRACEBACK[] = "trace", KIND_EXCEPTION[] = "notes", KIND_WARNING[] = "warning";

enum {
    LEAST_LINES = 2,   /* one line would be replaced by one line */
    PLACE_BYTES = 160, /* picked: size of the place and class of a warning */
};

void repeats_deinit(struct repeats *repeats)
{
    for (size_t i = 0; i < ARRAY_SIZE(repeats->texts); i++)
        free(repeats->texts[i].body);
    *repeats = (struct repeats){};
}

void repeats_source_init(struct repeats_source *source, struct repeats *repeats, const char *label, lines_fn *emit,
                         void *context)
{
    *source = (struct repeats_source){.repeats = repeats, .emit = emit, .context = context, .next = repeats->sources};
    snprintf(source->label, sizeof(source->label), "%s", label);
    repeats->sources = source;
}

/* ---- headlines ----------------------------------------------------------------------------------------- */

/* Return: true if a word at text[at] is a code like "E1001 ". */
static bool is_code(const char *text, size_t n_bytes, size_t at)
{
    const char *c = text + at;

    return n_bytes - at > 6 && (at == 0 || c[-1] == ' ') && c[0] == 'E' && isdigit((unsigned char)c[1]) &&
           isdigit((unsigned char)c[2]) && isdigit((unsigned char)c[3]) && isdigit((unsigned char)c[4]) && c[5] == ' ';
}

/* Return: the size of "train.py:7: UserWarning" at the start of the line; 0 if the line is not a Python warning. */
static size_t warning_length(const char *text, size_t n_bytes)
{
    static const char end[] = "Warning: ";
    const char *found = memmem(text, n_bytes, end, strlen(end)), *name = found;

    if (!found)
        return 0;
    while (name > text && isalpha((unsigned char)name[-1]))
        name--;
    if (name - text < 3 || memcmp(name - 2, ": ", 2) != 0 || !isdigit((unsigned char)name[-3]))
        return 0;
    return (size_t)(found - text) + strlen("Warning");
}

static void find_kind(const char *text, size_t n_bytes, char kind[8])
{
    kind[0] = '\0';
    if (n_bytes >= strlen(traceback) && memcmp(text, traceback, strlen(traceback)) == 0) {
        snprintf(kind, 8, "%s", KIND_TRACEBACK);
        return;
    }
    for (size_t at = 0; at < n_bytes && !kind[0]; at++)
        if (is_code(text, n_bytes, at))
            snprintf(kind, 8, "%.5s", text + at);
}

/* ---- held lines ---------------------------------------------------------------------------------------- */

static void hand_out_held(struct repeats_source *source)
{
    const char *line = source->held, *end = source->held + source->n_held;

    for (size_t n; line < end; line += n) {
        n = (size_t)((const char *)memchr(line, '\n', (size_t)(end - line)) - line) + 1;
        source->emit(source->context, line, n, false);
    }
    source->n_held = source->n_held_lines = 0;
}

/* Return: false if the text is too long, or memory is short. */
static bool hold_line(struct repeats_source *source, const char *line, size_t n_bytes)
{
    if (!source->held)
        source->held = malloc(REPEATS_TEXT_BYTES);
    if (!source->held || source->n_held + n_bytes > REPEATS_TEXT_BYTES)
        return false;
    memcpy(source->held + source->n_held, line, n_bytes);
    source->n_held += n_bytes;
    source->n_held_lines++;
    return true;
}

/* Prints the line that replaces the repeated lines of the text. The first line of a warning is its headline. */
static int describe_repeated(const struct repeats_source *source, const struct repeats_text *text, char *said,
                             size_t size)
{
    size_t n_place = MIN(warning_length(text->body, text->n_bytes), (size_t)PLACE_BYTES);

    if (strcmp(text->kind, KIND_WARNING) == 0)
        return snprintf(said, size, "%.*s, the same as [%s] above\n", (int)n_place, text->body, text->label);
    if (strcmp(source->label, text->label) == 0)
        return snprintf(said, size, "  the same %u lines as above\n", text->n_lines);
    return snprintf(said, size, "  the same %u lines as [%s] above\n", text->n_lines, text->label);
}

/*
 * Emits a line which says that the first held lines repeat the text. Drops these lines, and emits the other held lines.
 */
static void say_repeated(struct repeats_source *source, const struct repeats_text *text)
{
    char said[PLACE_BYTES + 64];
    int n = describe_repeated(source, text, said, sizeof(said));

    source->emit(source->context, said, (size_t)n, false);
    source->n_held -= text->n_bytes;
    source->n_held_lines -= text->n_lines;
    memmove(source->held, source->held + text->n_bytes, source->n_held);
    source->kind[0] = '\0';
    hand_out_held(source);
}

/* ---- texts --------------------------------------------------------------------------------------------- */

/* Return: true if the source still writes its text, and no other text has replaced the entry. */
static bool is_writing(const struct repeats_source *source)
{
    return source->text && source->text->writer == source;
}

static bool is_of_python(const char *kind)
{
    return strcmp(kind, KIND_TRACEBACK) == 0 || strcmp(kind, KIND_EXCEPTION) == 0 || strcmp(kind, KIND_WARNING) == 0;
}

/*
 * Return: true if the source's text may repeat this one. Tracebacks and warnings are only compared between processes,
 * because one process may print equal ones in each step.
 */
static bool may_repeat(const struct repeats_source *source, const struct repeats_text *text, uint64_t now_ms)
{
    return strcmp(text->kind, source->kind) == 0 && text->writer != source &&
           now_ms - text->begun_ms < REPEATS_KEEP_MS &&
           (strcmp(text->label, source->label) != 0 || !is_of_python(text->kind));
}

static void add_line(struct repeats_text *text, const char *line, size_t n_bytes)
{
    if (!text->body || text->n_bytes + n_bytes > REPEATS_TEXT_BYTES) {
        text->kind[0] = '\0';
        return;
    }
    memcpy(text->body + text->n_bytes, line, n_bytes);
    text->n_bytes += n_bytes;
    text->n_lines++;
}

/* Begins a new text with the held lines, which repeat no earlier text. */
static void begin_text(struct repeats_source *source, uint64_t now_ms)
{
    struct repeats_text *text = &source->repeats->texts[source->repeats->n_texts++ % REPEATS_MAX_TEXTS];
    char *body = text->body ? text->body : malloc(REPEATS_TEXT_BYTES);

    *text = (struct repeats_text){.body = body, .writer = source, .begun_ms = now_ms};
    source->text = text;
    if (body) {
        memcpy(text->kind, source->kind, sizeof(text->kind));
        memcpy(text->label, source->label, sizeof(text->label));
        memcpy(body, source->held, source->n_held);
        text->n_bytes = source->n_held;
        text->n_lines = source->n_held_lines;
    }
    hand_out_held(source);
}

static bool is_worth_it(const struct repeats_text *text)
{
    return text->n_lines >= LEAST_LINES || strcmp(text->kind, KIND_WARNING) == 0;
}

static bool begins_alike(const struct repeats_source *source, const struct repeats_text *text)
{
    return memcmp(text->body, source->held, MIN(text->n_bytes, source->n_held)) == 0;
}

/* Compares the held lines with all texts. Return: true if the held lines may still become a repetition. */
static bool compare_with_texts(struct repeats_source *source, uint64_t now_ms)
{
    bool may = false;

    for (size_t i = 0; i < ARRAY_SIZE(source->repeats->texts); i++) {
        const struct repeats_text *text = &source->repeats->texts[i];

        if (!may_repeat(source, text, now_ms) || !begins_alike(source, text))
            continue;
        if (text->writer || text->n_bytes > source->n_held) {
            may = true;
        } else if (is_worth_it(text)) {
            say_repeated(source, text);
            return false;
        }
    }
    return may;
}

static void settle_source(struct repeats_source *source, uint64_t now_ms)
{
    if (repeats_holds(source) && !compare_with_texts(source, now_ms) && repeats_holds(source))
        begin_text(source, now_ms);
}

/* Compares the held lines of the other sources again. Call it when the source's text has got a line or has ended. */
static void settle_others(struct repeats_source *source, uint64_t now_ms)
{
    for (struct repeats_source *other = source->repeats->sources; other; other = other->next)
        if (other != source)
            settle_source(other, now_ms);
}

/* ---- lines --------------------------------------------------------------------------------------------- */

/* Return: the text whose lines are exactly the held lines, or NULL. */
static const struct repeats_text *find_equal(const struct repeats_source *source, uint64_t now_ms)
{
    for (size_t i = 0; i < ARRAY_SIZE(source->repeats->texts); i++) {
        const struct repeats_text *text = &source->repeats->texts[i];

        if (may_repeat(source, text, now_ms) && text->n_bytes == source->n_held && is_worth_it(text) &&
            begins_alike(source, text))
            return text;
    }
    return NULL;
}

void repeats_release(struct repeats_source *source, uint64_t now_ms)
{
    const struct repeats_text *equal = repeats_holds(source) ? find_equal(source, now_ms) : NULL;

    if (equal)
        say_repeated(source, equal);
    else if (repeats_holds(source))
        begin_text(source, now_ms);
}

/* Ends the source's text. Call it before a line that does not belong to the text. */
static void end_text(struct repeats_source *source, uint64_t now_ms)
{
    repeats_release(source, now_ms);
    source->kind[0] = '\0';
    if (!is_writing(source))
        return;
    source->text->writer = NULL;
    source->text = NULL;
    settle_others(source, now_ms);
}

static void feed_body(struct repeats_source *source, const char *text, size_t n_bytes, uint64_t now_ms)
{
    if (is_writing(source)) {
        add_line(source->text, text, n_bytes);
        source->emit(source->context, text, n_bytes, false);
        settle_others(source, now_ms);
    } else if (hold_line(source, text, n_bytes)) {
        settle_source(source, now_ms);
    } else {
        end_text(source, now_ms);
        source->emit(source->context, text, n_bytes, false);
    }
}

void repeats_feed(struct repeats_source *source, const char *text, size_t n_bytes, bool continued, uint64_t now_ms)
{
    bool is_whole = !continued && text[n_bytes - 1] == '\n';
    size_t n_rank = continued ? 0 : torch_rank_length(source->label, text, n_bytes);

    text += n_rank; /* the label already names the rank */
    n_bytes -= n_rank;
    if (is_whole && text[0] == ' ' && source->kind[0]) {
        feed_body(source, text, n_bytes, now_ms);
        return;
    }
    end_text(source, now_ms);
    if (is_whole && warning_length(text, n_bytes) > 0) {
        source->in_traceback = false;
        snprintf(source->kind, sizeof(source->kind), "%s", KIND_WARNING);
        feed_body(source, text, n_bytes, now_ms);
        return;
    }
    source->emit(source->context, text, n_bytes, continued);
    if (!is_whole || text[0] == ' ')
        return;
    find_kind(text, n_bytes, source->kind);
    if (!source->kind[0] && source->in_traceback)
        snprintf(source->kind, sizeof(source->kind), "%s", KIND_EXCEPTION);
    source->in_traceback = strcmp(source->kind, KIND_TRACEBACK) == 0;
}

void repeats_source_deinit(struct repeats_source *source)
{
    struct repeats_source **link = &source->repeats->sources;

    if (is_writing(source))
        source->text->writer = NULL;
    while (*link != source)
        link = &(*link)->next;
    *link = source->next;
    free(source->held);
    *source = (struct repeats_source){};
}
