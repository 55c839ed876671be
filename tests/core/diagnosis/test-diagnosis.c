/* SPDX-License-Identifier: Apache-2.0 */

/* Diagnostics: their table and the manual, how they are built, the shape of the text, and how names are grouped. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/config/config.h"
#include "core/diagnosis/diagnosis-build.h"
#include "core/layout/layout.h"
#include "tests/core/diagnosis/golden-text.h"

/* ---- shape of the text --------------------------------------------------------------------------------- */

static void test_shape(void **state)
{
    struct diagnostic *d = diagnostic_new(E_QUOTA, NULL);

    (void)state;
    diagnostic_at(d, 3, 7, 0);
    diagnostic_field(d, "asked", "%d bytes", 12);
    diagnostic_field(d, "sum", "one\ntwo\n");
    diagnostic_field(d, "a label beyond the column", "text");
    diagnostic_field(d, "empty", "%s", "");
    diagnostic_finish(d);
    assert_string_equal(d->text, "E1401 over quota, refused: rank 3, step 7, micro-batch 0\n"
                                 "  asked          12 bytes\n"
                                 "  sum            one\n"
                                 "                 two\n"
                                 "  a label beyond the column text\n");
    assert_int_equal(d->n_fields, 3);
    assert_string_equal(d->title, "over quota, refused");
    assert_string_equal(d->cause_class, "");
    diagnostic_unref(d);
}

static void check_first_line(int64_t rank, int64_t step, int64_t micro_batch, const char *expected)
{
    struct diagnostic *d = diagnostic_new(E_MISSING, "2 of 3 gradients missing");

    diagnostic_at(d, rank, step, micro_batch);
    diagnostic_finish(d);
    assert_string_equal(d->text, expected);
    assert_int_equal(d->has_rank, rank >= 0);
    assert_int_equal(d->has_step, step >= 0);
    assert_int_equal(d->has_micro_batch, micro_batch >= 0);
    diagnostic_unref(d);
}

static void test_place(void **state)
{
    (void)state;
    check_first_line(-1, -1, -1, "E1005 2 of 3 gradients missing\n");
    check_first_line(2, -1, -1, "E1005 2 of 3 gradients missing: rank 2\n");
    check_first_line(-1, 9, -1, "E1005 2 of 3 gradients missing: step 9\n");
    check_first_line(-1, 9, 1, "E1005 2 of 3 gradients missing: step 9, micro-batch 1\n");
    check_first_line(0, INT64_MAX, 0,
                     "E1005 2 of 3 gradients missing: rank 0, step 9223372036854775807, micro-batch 0\n");
}

static void test_warning_and_class(void **state)
{
    struct diagnostic *d = diagnostic_new(E_MISSING, NULL);

    (void)state;
    diagnostic_warn(d);
    diagnostic_class(d, "M1");
    diagnostic_finish(d);
    assert_true(d->warning);
    assert_string_equal(d->cause_class, "M1");
    assert_string_equal(d->text, "E1005 warning, missing gradient\n");
    diagnostic_unref(d);
}

static void test_too_many_fields(void **state)
{
    struct diagnostic *d = diagnostic_new(E_MISSING, NULL);

    (void)state;
    for (unsigned i = 0; i < DIAGNOSTIC_MAX_FIELDS + 5; i++)
        diagnostic_field(d, "or", "%u", i);
    assert_int_equal(d->n_fields, DIAGNOSTIC_MAX_FIELDS);
    assert_string_equal(d->fields[DIAGNOSTIC_MAX_FIELDS - 1].text, "15");
    diagnostic_finish(d);
    diagnostic_unref(d);
}

static void test_references(void **state)
{
    struct diagnostic *d = diagnostic_new(E_MISSING, NULL);

    (void)state;
    assert_ptr_equal(diagnostic_ref(d), d);
    assert_int_equal(d->n_refs, 2);
    diagnostic_unref(d);
    assert_int_equal(d->n_refs, 1);
    diagnostic_unref(d);
    diagnostic_unref(NULL);
}

/* Call sites come from the client. Unprintable characters in them are escaped, because they must not reach the log. */
static void test_foreign_pushes(void **state)
{
    char segment[] = "block\x1b[2J", site[] = "f\xc3\xa9.py:3";
    struct diagnostic_push push = {.present = true, .record = {.sequence = 5}, .segment = segment, .site = site};
    struct diagnostic *d = diagnostic_new(E_DUPLICATE, NULL);

    (void)state;
    diagnostic_pushes(d, &push, NULL);
    segment[0] = site[0] = 'X';
    assert_true(d->first.present);
    assert_false(d->second.present);
    assert_string_equal(d->first.segment, "block\\x1b[2J");
    assert_string_equal(d->first.site, "f\\xc3\\xa9.py:3");
    assert_string_equal(d->second.segment, "");
    assert_int_equal(d->first.record.sequence, 5);
    diagnostic_unref(d);
}

static void test_strbuf(void **state)
{
    struct strbuf buf = {0};

    (void)state;
    assert_string_equal(strbuf_text(&buf), "");
    strbuf_add_foreign(&buf, NULL);
    strbuf_add_foreign(&buf, "a\tb\nc");
    assert_string_equal(strbuf_text(&buf), "a\\x09b\nc");
    strbuf_deinit(&buf);
    for (unsigned i = 0; i < 1000; i++)
        strbuf_add(&buf, "%u,", i % 10);
    assert_int_equal(buf.n_bytes, 2000);
    assert_int_equal(strlen(buf.data), 2000);
    /* A text that is too long is cut. Nothing is added after the cut, not even what would fit. */
    for (unsigned i = 0; i < 2000; i++)
        strbuf_add(&buf, "%1000u", i);
    assert_true(buf.cut);
    assert_true(buf.n_bytes < 1 << 20);
    strbuf_add(&buf, "x");
    assert_int_equal(buf.data[buf.n_bytes - 1], (buf.n_bytes - 2000) / 1000 % 10 + '0' - 1);
    strbuf_deinit(&buf);
}

/* ---- names --------------------------------------------------------------------------------------------- */

/* Makes a layout with these names; a leading '!' marks a frozen parameter. */
static struct layout *make_layout(const char *const *names, uint32_t n)
{
    struct layout_decl *decls = calloc(n, sizeof(*decls));
    struct layout *layout = NULL;
    uint32_t bad;

    assert_non_null(decls);
    for (uint32_t i = 0; i < n; i++) {
        const char *name = names[i] + (names[i][0] == '!');

        decls[i] = (struct layout_decl){.name = name, .name_len = strlen(name), .trainable = names[i][0] != '!'};
    }
    assert_int_equal(layout_new(&layout, decls, n, 2, 1 << 20, &bad), 0);
    free(decls);
    return layout;
}

static void check_names(const char *const *names, uint32_t n, const uint32_t *ids, size_t n_ids, const char *expected)
{
    struct layout *layout = make_layout(names, n);
    struct strbuf buf = {0};

    name_list_print(&buf, layout, ids, n_ids);
    assert_string_equal(strbuf_text(&buf), expected);
    strbuf_deinit(&buf);
    layout_free(layout);
}

#define CHECK_NAMES(names, ids, expected) check_names(names, ARRAY_SIZE(names), ids, ARRAY_SIZE(ids), expected)

static void test_few_names(void **state)
{
    static const char *const names[] = {"a.w", "a.b", "b\xff.w", "c", "d.e.f"};
    static const uint32_t one[] = {3}, five[] = {4, 0, 1, 2, 3}, beyond[] = {0, 77};

    (void)state;
    CHECK_NAMES(names, one, "c");
    CHECK_NAMES(names, five, "d.e.f, a.w, a.b, b\\xff.w, c");
    CHECK_NAMES(names, beyond, "a.w, number 77");
}

static const char *const tower[] = {
    "!embed.weight",  "enc.layers.0.w", "enc.layers.0.b",  "enc.layers.1.w",  "enc.layers.1.b",
    "enc.layers.2.w", "enc.layers.2.b", "enc.layers.10.w", "enc.layers.10.b", "enc.norm.w",
    "head.w",         "head.b",         "enclosure.w",
};

static void test_whole_module(void **state)
{
    static const uint32_t layers[] = {8, 7, 6, 5, 4, 3, 2, 1}, all_of_enc[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

    (void)state;
    CHECK_NAMES(tower, layers, "enc.layers.10.b and 7 more under enc.layers.*");
    CHECK_NAMES(tower, all_of_enc, "enc.layers.0.w and 8 more under enc.*");
}

/* Layers 1 and 10 are different modules, and so are enc and enclosure. */
static void test_parts_of_modules(void **state)
{
    static const uint32_t three_layers[] = {1, 2, 3, 4, 5, 6}, without_one[] = {1, 2, 3, 4, 7, 8, 10, 11};

    (void)state;
    CHECK_NAMES(tower, three_layers,
                "enc.layers.0.w and 1 more under enc.layers.0.*\n"
                "enc.layers.1.w and 1 more under enc.layers.1.*\n"
                "enc.layers.2.w and 1 more under enc.layers.2.*");
    CHECK_NAMES(tower, without_one,
                "enc.layers.0.w and 1 more under enc.layers.0.*\n"
                "enc.layers.1.w and 1 more under enc.layers.1.*\n"
                "enc.layers.10.w and 1 more under enc.layers.10.*\n"
                "head.w and 1 more under head.*");
}

static void test_everything(void **state)
{
    static const uint32_t all[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

    (void)state;
    CHECK_NAMES(tower, all, "enc.layers.0.w and 11 more: every trainable parameter");
}

/* If there are too many groups, each line shows a common prefix and how many names are under it. */
static void test_scattered(void **state)
{
    static const uint32_t weights[] = {1, 3, 5, 7, 10, 12, 9}, layers[] = {1, 3, 5, 7, 2, 4};

    (void)state;
    CHECK_NAMES(tower, weights,
                "enc.layers.0.w and 4 more under enc.*\nhead.w\nenclosure.w\n"
                "(every name: zerodctl diagnostics --json)");
    CHECK_NAMES(tower, layers,
                "enc.layers.0.w and 1 more under enc.layers.0.*\n"
                "enc.layers.1.w and 1 more under enc.layers.1.*\n"
                "enc.layers.2.w\n"
                "enc.layers.10.w");
}

static void test_no_prefix(void **state)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "f", "g", "h", "!i"};
    static const uint32_t seven[] = {0, 1, 2, 3, 4, 5, 6};

    (void)state;
    CHECK_NAMES(names, seven, "a\nb\nc\nd\ne\nand 2 more elsewhere\n(every name: zerodctl diagnostics --json)");
}

/* Names that are prefixes of others, or have empty components. No name is counted twice. */
static void test_awkward_names(void **state)
{
    static const char *const names[] = {"a", "a.b", "a.b.c", ".x", "..", "a.", "b", "c.d", "c.e"};
    struct layout *layout = make_layout(names, ARRAY_SIZE(names));
    uint32_t ids[ARRAY_SIZE(names)];

    (void)state;
    for (uint32_t set = 1; set < 1 << ARRAY_SIZE(names); set++) {
        struct name_group groups[NAME_GROUPS_MAX];
        size_t n = 0, n_groups, n_left, n_in = 0;

        for (uint32_t i = 0; i < ARRAY_SIZE(names); i++)
            if (set >> i & 1)
                ids[n++] = i;
        n_left = name_groups(groups, &n_groups, layout, ids, n);
        assert_true(n_groups >= 1 && n_groups <= NAME_GROUPS_MAX);
        for (size_t g = 0; g < n_groups; g++) {
            assert_true(groups[g].n >= 1);
            n_in += groups[g].n;
        }
        assert_int_equal(n_in + n_left, n);
    }
    layout_free(layout);
}

static void test_params(void **state)
{
    struct layout *layout = make_layout(tower, ARRAY_SIZE(tower));
    static const uint32_t ids[] = {1, 2, 1, 1, 2, 3, 4, 5, 6, 6};
    struct diagnostic *d = diagnostic_new(E_DUPLICATE, NULL);

    (void)state;
    diagnostic_params(d, layout, NULL, 0);
    assert_int_equal(d->n_fields, 0);
    diagnostic_params(d, layout, ids, ARRAY_SIZE(ids)); /* each parameter is counted once */
    assert_int_equal(d->n_params, 6);
    assert_int_equal(d->n_params_named, DIAGNOSTIC_MAX_PARAMS);
    assert_string_equal(d->params[0], "enc.layers.0.w");
    assert_string_equal(d->params[4], "enc.layers.2.w");
    assert_int_equal(d->param_ids[5], 6);
    assert_string_equal(d->fields[0].label, "parameter");
    diagnostic_unref(d);

    d = diagnostic_new(E_DUPLICATE, NULL);
    diagnostic_params(d, NULL, ids, 2);
    assert_string_equal(d->params[1], "number 2");
    assert_string_equal(d->fields[0].text, "number 1 and 1 more");
    diagnostic_unref(d);
    layout_free(layout);
}

static void test_longest_name(void **state)
{
    char name[1025];
    const char *const names[] = {name};
    struct layout *layout;
    struct diagnostic *d;
    uint32_t id = 0;

    (void)state;
    memset(name, 0xff, sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    layout = make_layout(names, 1);
    d = diagnostic_new(E_DUPLICATE, NULL);
    diagnostic_params(d, layout, &id, 1);
    assert_int_equal(strlen(d->params[0]), 4 * 1024);
    diagnostic_unref(d);
    layout_free(layout);
}

/* ---- the table and the manual -------------------------------------------------------------------------- */

static void test_table(void **state)
{
    size_t n;
    const struct diagnostic_info *infos = diagnostic_table(&n);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        assert_true(i == 0 || infos[i - 1].code < infos[i].code);
        assert_ptr_equal(diagnostic_info(infos[i].code), &infos[i]);
        assert_true(infos[i].title[0] && infos[i].summary[strlen(infos[i].summary) - 1] == '.');
    }
    assert_null(diagnostic_info((enum diagnostic_code)1000));
    /* A diagnostic can be made even without a row in the table. */
    diagnostic_unref(diagnostic_finish(diagnostic_new((enum diagnostic_code)1000, NULL)));
}

static char *manual(void)
{
    char *path = source_path("docs", "diagnostics.md"), *text = read_text(path);

    assert_non_null(text);
    free(path);
    return text;
}

/* Each code has a row in the index and an entry, with the texts of the table. */
static void test_every_code_has_an_entry(void **state)
{
    char *text = manual(), line[1024];
    size_t n;
    const struct diagnostic_info *infos = diagnostic_table(&n);

    (void)state;
    for (size_t i = 0; i < n; i++) {
        snprintf(line, sizeof(line), "\n| [E%d](#e%d) | %s | %s |\n", (int)infos[i].code, (int)infos[i].code,
                 infos[i].title, infos[i].summary);
        if (!strstr(text, line))
            fail_msg("docs/diagnostics.md has no such row in its index: %s", line);
        snprintf(line, sizeof(line), "\n<a id=\"e%d\"></a>\n### E%d %s\n\nWhat it means: ", (int)infos[i].code,
                 (int)infos[i].code, infos[i].title);
        if (!strstr(text, line))
            fail_msg("docs/diagnostics.md has no such entry: %s", line);
    }
    free(text);
}

static const char *end_of_entry(const char *entry)
{
    const char *end = strstr(entry + 1, "\n### ");

    return end ? end : entry + strlen(entry);
}

/* Each entry of the manual has a code, says what to do, and shows an example. */
static void test_every_entry_has_a_code(void **state)
{
    char *text = manual();
    unsigned n_entries = 0;
    size_t n;

    (void)state;
    diagnostic_table(&n);
    for (const char *entry = text; (entry = strstr(entry, "\n### E")); entry++) {
        int code = atoi(entry + strlen("\n### E"));
        const char *end = end_of_entry(entry), *advice = strstr(entry, "\nWhat to do: ");
        const char *example = strstr(entry, "\n<!-- golden: e");

        if (!diagnostic_info((enum diagnostic_code)code))
            fail_msg("docs/diagnostics.md has an entry of no code: %.40s", entry + 1);
        if (!advice || advice > end)
            fail_msg("E%d does not say what to do", code);
        if (!example || example > end || atoi(example + strlen("\n<!-- golden: e")) != code)
            fail_msg("E%d has no example", code);
        n_entries++;
    }
    assert_int_equal(n_entries, n);
    free(text);
}

/* Each example in the manual is a golden text, byte for byte. There are no other blocks. */
static void test_examples_are_golden(void **state)
{
    static const char mark[] = "<!-- golden: ", open[] = " -->\n```text\n", close[] = "```\n";
    char *text = manual();
    unsigned n_blocks = 0, n_fences = 0;

    (void)state;
    for (const char *at = text; (at = strstr(at, mark)); n_blocks++) {
        const char *name = at + strlen(mark), *body = strstr(name, open), *end;
        char file_name[128], *path, *golden;

        assert_non_null(body);
        snprintf(file_name, sizeof(file_name), "%.*s.txt", (int)(body - name), name);
        body += strlen(open);
        end = strstr(body, close);
        assert_non_null(end);
        path = source_path("tests/golden-texts", file_name);
        golden = read_text(path);
        if (!golden)
            fail_msg("%s is not there", path);
        if (strlen(golden) != (size_t)(end - body) || memcmp(golden, body, strlen(golden)) != 0)
            fail_msg("docs/diagnostics.md and %s differ:\n%.*s", path, (int)(end - body), body);
        free(golden);
        free(path);
        at = end;
    }
    for (const char *at = text; (at = strstr(at, "```")); at += 3)
        n_fences++;
    assert_int_equal(n_fences, 2 * n_blocks);
    assert_true(n_blocks > 25);
    free(text);
}

static void test_every_class_is_explained(void **state)
{
    static const char *const classes[] = {"D1", "D2", "D3", "D4", "D5", "M1", "M2", "M3",
                                          "M4", "M5", "M6", "M7", "X1", "X2", "U"};
    char *text = manual(), row[16];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(classes); i++) {
        snprintf(row, sizeof(row), "\n| %s | ", classes[i]);
        if (!strstr(text, row))
            fail_msg("docs/diagnostics.md does not explain class %s", classes[i]);
    }
    free(text);
}

/* The configuration prints E1601 in its own form. The manual shows one example. */
static void test_configuration_refusal(void **state)
{
    static const char yaml[] = "listen: {socket: /run/zerod/pretrain.sock}\n"
                               "world: {size: 4}\n"
                               "zero_optimization:\n"
                               "  stage: 4\n"
                               "  reduce_bucket_sise: 2000000\n";
    struct config_source source = {.text = {.name = "pretrain.yaml", .text = yaml, .n_bytes = strlen(yaml)}};
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config = NULL;
    char *text = NULL;
    size_t n_bytes;
    FILE *file = open_memstream(&text, &n_bytes);

    (void)state;
    assert_int_equal(config_load_string(&config, &source, &problems), CONFIG_E_INVALID);
    config_problems_print(file, &problems);
    assert_int_equal(fclose(file), 0);
    golden_check("e1601", text);
    free(text);
    config_problems_deinit(&problems);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shape),
        cmocka_unit_test(test_place),
        cmocka_unit_test(test_warning_and_class),
        cmocka_unit_test(test_too_many_fields),
        cmocka_unit_test(test_references),
        cmocka_unit_test(test_foreign_pushes),
        cmocka_unit_test(test_strbuf),
        cmocka_unit_test(test_few_names),
        cmocka_unit_test(test_whole_module),
        cmocka_unit_test(test_parts_of_modules),
        cmocka_unit_test(test_everything),
        cmocka_unit_test(test_scattered),
        cmocka_unit_test(test_no_prefix),
        cmocka_unit_test(test_awkward_names),
        cmocka_unit_test(test_params),
        cmocka_unit_test(test_longest_name),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_configuration_refusal),
        cmocka_unit_test(test_every_code_has_an_entry),
        cmocka_unit_test(test_every_entry_has_a_code),
        cmocka_unit_test(test_examples_are_golden),
        cmocka_unit_test(test_every_class_is_explained),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
