/* SPDX-License-Identifier: Apache-2.0 */

/* Writes text on a pad of ncurses. */

#include "client/ctl/top-pen.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>
#include <wctype.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"

enum {
    FIRST_ROWS = 16,
    MAX_ROWS = 20000, /* picked: the longest text; further rows are not shown */
    WORD_CELLS = 64,  /* longer words are broken */
};

/* ---- colours ------------------------------------------------------------------------------------------- */

static const struct {
    short color; /* negative: the terminal's default colour */
    attr_t attributes;
} styles[N_PEN_STYLES] = {
    [PEN_PLAIN] = {-1, A_NORMAL},           [PEN_LABEL] = {COLOR_CYAN, A_NORMAL}, [PEN_GOOD] = {COLOR_GREEN, A_NORMAL},
    [PEN_WARNING] = {COLOR_YELLOW, A_BOLD}, [PEN_TROUBLE] = {COLOR_RED, A_BOLD},  [PEN_TITLE] = {-1, A_REVERSE},
};

void pen_start_colors(void)
{
    const char *no_color = getenv("NO_COLOR");

    if ((no_color && *no_color) || !has_colors() || start_color() == ERR)
        return;
    (void)use_default_colors();
    for (short i = 0; i < N_PEN_STYLES; i++)
        if (styles[i].color >= 0)
            (void)init_pair(i, styles[i].color, -1);
}

attr_t pen_attributes(enum pen_style style)
{
    attr_t attributes = styles[style].attributes;

    /* Colour pairs exist only after start_color(). */
    return styles[style].color >= 0 && COLOR_PAIRS > 0 ? attributes | (attr_t)COLOR_PAIR(style) : attributes;
}

/* ---- the pad ------------------------------------------------------------------------------------------- */

void pen_init(struct pen *pen, int width)
{
    *pen = (struct pen){.pad = newpad(FIRST_ROWS, MAX(width, 1)), .width = MAX(width, 1)};
}

void pen_deinit(struct pen *pen)
{
    if (pen->pad)
        (void)delwin(pen->pad);
    *pen = (struct pen){};
}

int pen_n_rows(const struct pen *pen)
{
    return pen->pad ? pen->row + (pen->column > 0) : 0;
}

static void next_row(struct pen *pen, int column)
{
    pen->row++;
    pen->column = MIN(column, pen->width - 1);
    if (pen->row >= getmaxy(pen->pad) && pen->row < MAX_ROWS)
        (void)wresize(pen->pad, MIN(2 * pen->row, MAX_ROWS), pen->width);
}

void pen_end_line(struct pen *pen)
{
    if (pen->pad && pen->column > 0)
        next_row(pen, 0);
    pen->indent = 0;
}

void pen_go(struct pen *pen, int column)
{
    if (!pen->pad)
        return;
    if (pen->column > column)
        next_row(pen, 0);
    pen->column = MIN(column, pen->width - 1);
}

void pen_label(struct pen *pen, const char *label)
{
    pen_end_line(pen);
    pen_put(pen, PEN_LABEL, "%s", label);
    pen->indent = PEN_TEXT_COLUMN;
    pen_go(pen, PEN_TEXT_COLUMN);
}

/* ---- words --------------------------------------------------------------------------------------------- */

/* A word that is only partly read. */
struct word {
    wchar_t cells[WORD_CELLS + 1];
    size_t n;
    int width;
};

static void put_word(struct pen *pen, struct word *word, attr_t attributes)
{
    if (word->n == 0)
        return;
    if (pen->column + word->width > pen->width && pen->column > pen->indent)
        next_row(pen, pen->indent);
    word->cells[word->n] = L'\0';
    if (pen->row < MAX_ROWS) {
        (void)wattrset(pen->pad, (int)attributes);
        (void)mvwaddnwstr(pen->pad, pen->row, pen->column, word->cells, (int)word->n);
    }
    pen->column += word->width;
    *word = (struct word){};
}

static void add_cell(struct pen *pen, struct word *word, wchar_t c, int width, attr_t attributes)
{
    int room = pen->width - pen->indent;

    if (word->n == WORD_CELLS || word->width + width > MAX(room, 1))
        put_word(pen, word, attributes);
    word->cells[word->n++] = c;
    word->width += width;
}

static void add_escaped(struct pen *pen, struct word *word, const char *bytes, size_t n, attr_t attributes)
{
    for (size_t i = 0; i < n; i++) {
        char escaped[5];

        snprintf(escaped, sizeof(escaped), "\\x%02x", (unsigned char)bytes[i]);
        for (const char *c = escaped; *c; c++)
            add_cell(pen, word, (wchar_t)*c, 1, attributes);
    }
}

static void put_space(struct pen *pen, struct word *word, char c, attr_t attributes)
{
    put_word(pen, word, attributes);
    if (c == '\n')
        next_row(pen, pen->indent);
    else if (pen->column < pen->width) { /* at the right edge no space is needed, because the next word wraps */
        (void)wattrset(pen->pad, (int)attributes);
        (void)mvwaddch(pen->pad, pen->row, pen->column++, ' ');
    }
}

static void put_text(struct pen *pen, attr_t attributes, const char *text, size_t n_bytes)
{
    struct word word = {};
    mbstate_t state = {};
    wchar_t c;

    for (size_t i = 0, n; i < n_bytes; i += n) {
        n = mbrtowc(&c, text + i, n_bytes - i, &state);
        if (n == 0 || n > n_bytes - i) { /* not a character, or an incomplete one */
            state = (mbstate_t){};
            n = 1;
            c = L'\0';
        }
        if (text[i] == ' ' || text[i] == '\n' || text[i] == '\t')
            put_space(pen, &word, text[i], attributes);
        else if (iswprint((wint_t)c) && wcwidth(c) > 0)
            add_cell(pen, &word, c, wcwidth(c), attributes);
        else
            add_escaped(pen, &word, text + i, n, attributes);
    }
    put_word(pen, &word, attributes);
}

void pen_put(struct pen *pen, enum pen_style style, const char *format, ...)
{
    struct strbuf text = {0};
    va_list args;

    if (!pen->pad)
        return;
    va_start(args, format);
    strbuf_vadd(&text, format, args);
    va_end(args);
    put_text(pen, pen_attributes(style), strbuf_text(&text), text.n_bytes);
    strbuf_deinit(&text);
}
