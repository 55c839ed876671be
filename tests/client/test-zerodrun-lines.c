/* SPDX-License-Identifier: Apache-2.0 */

/* Output is cut into the same lines if it arrives in one piece, byte by byte, or in random pieces. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/run/lines.h"
#include "core/base/base.h"

/* The delivered text. Each piece is printed in <>, and a piece that continues a line has '+' before it. */
struct record {
    char *text;
    size_t n_bytes, n_pieces, longest;
};

static void record_piece(void *context, const char *text, size_t n_bytes, bool continued)
{
    struct record *record = context;

    memcpy(record->text + record->n_bytes, continued ? "+<" : "<", continued ? 2 : 1);
    record->n_bytes += continued ? 2 : 1;
    memcpy(record->text + record->n_bytes, text, n_bytes);
    record->n_bytes += n_bytes;
    record->text[record->n_bytes++] = '>';
    record->text[record->n_bytes] = '\0';
    record->n_pieces++;
    record->longest = MAX(record->longest, n_bytes);
}

static struct record feed(const char *data, size_t n_bytes, size_t piece)
{
    struct record record = {.text = calloc(8, n_bytes + 64)};
    struct lines lines;
    size_t i, n;

    assert_int_equal(lines_init(&lines, record_piece, &record), 0);
    for (i = 0; i < n_bytes; i += n) {
        n = piece ? piece : 1 + (size_t)rand() % 97;
        n = MIN(n, n_bytes - i);
        lines_feed(&lines, data + i, n);
    }
    lines_flush(&lines);
    lines_deinit(&lines);
    return record;
}

static void test_cases(void **state)
{
    static const char *const cases[][2] = {
        {"", ""},
        {"a\nb\n", "<a\n><b\n>"},
        {"a\n\nb", "<a\n><\n><b\n>"},
        {"10%\r20%\rdone\n", "<done\n>"},
        {"\r10%\r20%\nnext", "<20%\n><next\n>"},
        {"\r10%\r   \rnext\n", "<next\n>"},
        {"\r10%\r   \r", ""},
        {"   ", "<   \n>"},
        {"dos\r\nunix\n", "<dos\r\n><unix\n>"},
        {"\r\r\n\n", "<\r\n><\n>"},
        {"end\r", "<end\n>"},
        {"a\r\n\r\nb", "<a\r\n><\r\n><b\n>"},
        {"\r1%\r2%\n\r1%\r2%\n", "<2%\n><2%\n>"},
        {"\r9%\n\ntext\n", "<9%\n><\n><text\n>"},
        /* tqdm draws a bar below another one, and prints with tqdm.write() in between. */
        {"\r0%\n\rlow 0%\033[A\n\rlow 9%\033[A\r1%\n\r      \033[A\n", "<1%\n>"},
        {"\r0%\n\rlow 9%\033[A\r2%\n", "<2%\n><low 9%\n>"},
        {"\r0%\n\rlow 0%\033[A\r  \r\n\r      \r\033[Atext\n\r0%\n\rlow 0%\033[A", "<text\n><0%\n><low 0%\n>"},
        {"no\033[Abar\033[1m\n", "<no\033[Abar\033[1m\n>"},
        {"\r1%\n\033[\033[1mb\n", "<1%\n><\033[\033[1mb\n>"},
    };
    struct record record;
    size_t i, piece;

    for (i = 0; i < ARRAY_SIZE(cases); i++) {
        for (piece = 1; piece < 8; piece++) {
            record = feed(cases[i][0], strlen(cases[i][0]), piece);
            assert_string_equal(record.text, cases[i][1]);
            free(record.text);
        }
    }
}

static void test_long_lines_are_cut(void **state)
{
    const size_t n_bytes = 3 * (size_t)LINE_MAX_BYTES + 5;
    char *data = malloc(n_bytes);
    struct record record;

    memset(data, 'x', n_bytes);
    record = feed(data, n_bytes, 0);
    assert_int_equal(record.n_pieces, 4);
    assert_int_equal(record.longest, LINE_MAX_BYTES);
    assert_memory_equal(record.text + record.n_bytes - 9, "+<xxxxx\n>", 9);
    free(record.text);

    /*
     * The line is exactly full. Its '
     * ' is delivered as a piece, and the next byte begins a new line.
     */
    data[LINE_MAX_BYTES] = '\n';
    record = feed(data, LINE_MAX_BYTES + 2, 0);
    assert_int_equal(record.n_pieces, 3);
    assert_memory_equal(record.text + record.n_bytes - 8, "+<\n><x\n>", 8);
    free(record.text);

    /* The line's first piece is delivered already, so '\r' cannot overwrite it, and ends the line instead. */
    data[LINE_MAX_BYTES] = '\r';
    record = feed(data, LINE_MAX_BYTES + 2, 0);
    assert_int_equal(record.n_pieces, 3);
    assert_memory_equal(record.text + record.n_bytes - 8, "+<\n><x\n>", 8);
    free(record.text);
    free(data);
}

static void ignore_piece(void *context, const char *text, size_t n_bytes, bool continued)
{
}

/* Writes the bars of all rows to text, as in "[10%][]". */
static void describe_bars(const struct lines *lines, char *text)
{
    const char *bar;
    size_t n_bytes;

    *text = '\0';
    for (unsigned row = 0; row < LINES_MAX_ROWS; row++) {
        bar = lines_bar(lines, row, &n_bytes);
        if (bar)
            sprintf(text + strlen(text), "[%.*s]", (int)n_bytes, bar);
    }
}

/* A terminal shows bars before their lines are finished, and no unfinished lines of other kinds. */
static void test_bars(void **state)
{
    static const char *const cases[][2] = {
        {"text", ""},
        {"\r10%", "[10%]"},
        {"10%\r", "[10%]"},
        {"10%\r20%", "[20%]"},
        {"\r10%\r   ", ""},
        {"\r100%\n", "[100%]"},
        {"\r100%\ntext", "[100%]"},
        {"\r100%\ntext\n", ""},
        {"\r100%\n\r1%", "[100%][1%]"},
        {"\r100%\n\r1%\r2%", "[2%]"},
        {"\r10%\n\r1%\033[A", "[10%][1%]"},
        {"\r10%\n\r1%\033[A\n\r2%\033[A", "[10%][2%]"},
        {"\r10%\n\r1%\033[A\r20%", "[20%][1%]"},
        {"\r10%\n\r1%\033[A\n\n\r0%\033[A\033[A\r20%", "[20%][1%][0%]"},
        {"\r10%\n\r1%\033[A\n\r  \033[A", "[10%]"},
        {"\r1%\n\r2%\n\r3%\n\r4%\n\r5%", "[4%][5%]"},
    };
    struct lines lines;
    char bars[64];

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(lines_init(&lines, ignore_piece, NULL), 0);
        lines_feed(&lines, cases[i][0], strlen(cases[i][0]));
        describe_bars(&lines, bars);
        assert_string_equal(bars, cases[i][1]);
        lines_deinit(&lines);
    }
}

/* If nothing is printed below a bar, lines_settle() ends its line. */
static void test_settle(void **state)
{
    struct record record = {.text = calloc(1, 100)};
    struct lines lines;

    assert_int_equal(lines_init(&lines, record_piece, &record), 0);
    lines_feed(&lines, "\r100%\n", 6);
    assert_true(lines_is_below(&lines));
    assert_string_equal(record.text, "");
    lines_settle(&lines);
    assert_false(lines_is_below(&lines));
    assert_string_equal(record.text, "<100%\n>");
    lines_deinit(&lines);
    free(record.text);
}

static void test_any_pieces_give_the_same(void **state)
{
    static const char *const words[] = {"a", "b", " ", "\n", "\r", "\033[A", "\033"};
    char data[3000];
    const char *word;
    struct record whole, pieces;
    int round;
    size_t i;

    srand(1);
    for (round = 0; round < 200; round++) {
        for (i = 0; i < sizeof(data); i += strlen(word)) {
            word = words[(size_t)rand() % ARRAY_SIZE(words)];
            memcpy(data + i, word, MIN(strlen(word), sizeof(data) - i));
        }
        whole = feed(data, sizeof(data), sizeof(data));
        pieces = feed(data, sizeof(data), 0);
        assert_string_equal(whole.text, pieces.text);
        free(whole.text);
        free(pieces.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),  cmocka_unit_test(test_long_lines_are_cut),       cmocka_unit_test(test_bars),
        cmocka_unit_test(test_settle), cmocka_unit_test(test_any_pieces_give_the_same),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
