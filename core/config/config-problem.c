/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps problems with their places in the file, and prints them with the source line and a caret. */

#include "core/config/config-problem.h"

#include "core/base/base.h"
#include "core/base/utf8.h"

#include <assert.h>
#include <string.h>

enum {
    SOURCE_COLUMNS = 100, /* a longer line is shown only in part */
    SOURCE_BEFORE = 40,   /* columns before the place in such a partial line */
};

static void config_problem_deinit(struct config_problem *problem)
{
    free(problem->place);
    free(problem->key);
    free(problem->text);
    free(problem->source);
}

void config_problems_deinit(struct config_problems *problems)
{
    for (size_t i = 0; i < problems->n_items; i++)
        config_problem_deinit(&problems->items[i]);
    free(problems->items);
    *problems = CONFIG_PROBLEMS_NULL;
}

/* Return: the start of the line with this number, or NULL. *n_bytes: its length without the line ending. */
static const char *find_line(const struct config_text *text, unsigned line, size_t *n_bytes)
{
    const char *at = text->text;
    const char *end = text->text + text->n_bytes;

    assert(line > 0);
    while (--line > 0) {
        const char *next = memchr(at, '\n', (size_t)(end - at));

        if (!next)
            return NULL;
        at = next + 1;
    }
    const char *feed = memchr(at, '\n', (size_t)(end - at));

    *n_bytes = (size_t)((feed ? feed : end) - at);
    if (*n_bytes > 0 && at[*n_bytes - 1] == '\r')
        (*n_bytes)--;
    return at;
}

/* Prints columns [first, first + n) of a line, with '?' for control characters. */
static void print_columns(FILE *file, const char *line, size_t n_bytes, size_t first, size_t n)
{
    size_t column = 0;

    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)line[i];

        if (utf8_begins(line[i]))
            column++;
        if (column > first + n)
            break;
        if (column > first)
            fputc((c < ' ' && c != '\t') || c == 0x7f ? '?' : c, file);
    }
}

/* Prints blanks below the columns before the caret. A tab stays a tab, so that the caret is in the right column. */
static void print_padding(FILE *file, const char *line, size_t n_bytes, size_t first, size_t n)
{
    size_t column = 0;

    for (size_t i = 0; i < n_bytes && column < first + n; i++) {
        if (!utf8_begins(line[i]))
            continue;
        if (column++ >= first)
            fputc(line[i] == '\t' ? '\t' : ' ', file);
    }
}

static void print_source(FILE *file, const struct config_text *text, const struct config_spot *spot)
{
    size_t n_bytes, column = spot->column - 1, first = 0;
    const char *line = find_line(text, spot->line, &n_bytes);

    if (!line || n_bytes == 0)
        return;
    if (column > SOURCE_COLUMNS - SOURCE_BEFORE / 2)
        first = column - SOURCE_BEFORE;

    fprintf(file, "    %s", first > 0 ? "..." : "");
    print_columns(file, line, n_bytes, first, SOURCE_COLUMNS);
    fprintf(file, "\n    %s", first > 0 ? "   " : "");
    print_padding(file, line, n_bytes, first, column - first);
    fputc('^', file);
    for (size_t i = 1; i < spot->n_columns && column - first + i < SOURCE_COLUMNS; i++)
        fputc('~', file);
    fputc('\n', file);
}

/* Return: the source line with a caret, which the caller frees, or NULL. */
static char *source_text(const struct config_text *text, const struct config_spot *spot)
{
    char *result = NULL;
    size_t n_bytes;
    FILE *file = open_memstream(&result, &n_bytes);

    if (!file)
        return NULL;
    print_source(file, text, spot);
    if (fclose(file) != 0) {
        free(result);
        return NULL;
    }
    return result;
}

__attribute__((format(printf, 5, 0))) static int config_problem_init(struct config_problem *problem,
                                                                     const struct config_text *text,
                                                                     const struct config_spot *spot, const char *key,
                                                                     const char *format, va_list ap)
{
    int r;

    problem->line = spot->line;
    problem->column = spot->column;
    if (vasprintf(&problem->text, format, ap) < 0) {
        problem->text = NULL;
        return -ENOMEM;
    }
    if (spot->line > 0)
        r = asprintf(&problem->place, "%s:%u:%u", text->name, spot->line, spot->column);
    else
        r = asprintf(&problem->place, "%s", text->name);
    if (r < 0) {
        problem->place = NULL;
        return -ENOMEM;
    }
    if (key && !(problem->key = strdup(key)))
        return -ENOMEM;
    if (text->text && spot->line > 0 && !(problem->source = source_text(text, spot)))
        return -ENOMEM;
    return 0;
}

__attribute__((format(printf, 6, 0))) static int config_problems_append(struct config_problems *problems,
                                                                        const struct config_text *text,
                                                                        const struct config_spot *spot, bool note,
                                                                        const char *key, const char *format, va_list ap)
{
    struct config_problem problem = {.note = note}, *items;
    int r;

    assert(problems->n_errors <= problems->n_items);
    /* Errors are dropped when errors alone reach the limit. Notes are dropped when both together reach it. */
    if (note ? problems->n_items >= CONFIG_MAX_PROBLEMS : problems->n_errors >= CONFIG_MAX_PROBLEMS) {
        problems->n_dropped += !note;
        return 0;
    }
    items = reallocarray(problems->items, problems->n_items + 1, sizeof(*items));
    if (!items)
        return -ENOMEM;
    problems->items = items;

    r = config_problem_init(&problem, text, spot, key, format, ap);
    if (r < 0) {
        config_problem_deinit(&problem);
        return r;
    }
    items[problems->n_items++] = problem;
    problems->n_errors += !note;
    return 0;
}

void config_problems_add(struct config_problems *problems, const struct config_text *text,
                         const struct config_spot *spot, const char *key, const char *format, ...)
{
    va_list ap;
    int r;

    va_start(ap, format);
    r = config_problems_append(problems, text, spot, false, key, format, ap);
    va_end(ap);
    if (r < 0)
        problems->r = r;
}

void config_problems_note(struct config_problems *problems, const struct config_text *text,
                          const struct config_spot *spot, const char *key, const char *format, ...)
{
    va_list ap;
    int r;

    va_start(ap, format);
    r = config_problems_append(problems, text, spot, true, key, format, ap);
    va_end(ap);
    if (r < 0)
        problems->r = r;
}

static bool stands_after(const struct config_problem *a, const struct config_problem *b)
{
    return a->line != b->line ? a->line > b->line : a->column > b->column;
}

void config_problems_sort(struct config_problems *problems, size_t first)
{
    assert(first <= problems->n_items);
    /* Insertion sort, because it is stable, and the list is short and nearly sorted. */
    for (size_t i = first + 1; i < problems->n_items; i++) {
        struct config_problem problem = problems->items[i];
        size_t j = i;

        for (; j > first && stands_after(&problems->items[j - 1], &problem); j--)
            problems->items[j] = problems->items[j - 1];
        problems->items[j] = problem;
    }
}

static void config_problem_print(FILE *file, const struct config_problem *problem)
{
    fprintf(file, "%s config: %s: %s%s%s\n%s", problem->note ? "note" : "E1601", problem->place,
            problem->key ? problem->key : "", problem->key ? ": " : "", problem->text,
            problem->source && !problem->note ? problem->source : "");
}

void config_problems_print(FILE *file, const struct config_problems *problems)
{
    for (size_t i = 0; i < problems->n_items; i++)
        config_problem_print(file, &problems->items[i]);
    if (problems->n_dropped > 0)
        fprintf(file, "E1601 config: and %zu more; these come first\n", problems->n_dropped);
}
