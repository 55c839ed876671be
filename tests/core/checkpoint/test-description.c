/* SPDX-License-Identifier: Apache-2.0 */

/*
 * zerod.json: a printed description reads back. A text that differs from what was printed, or has impossible values, is
 * refused.
 */

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/description.h"
#include "core/layout/layout.h"
#include "tests/group.h"

enum { WHY_BYTES = 256 };

#define NOT_AS_WRITTEN "its bytes are not those that were written"

static struct layout *make_layout(void)
{
    static const uint64_t shape[] = {3, 5};
    static const struct layout_decl decls[] = {
        {.name = "w\xff\"", .name_len = 3, .dtype = DTYPE_BF16, .trainable = true, .n_dims = 2, .shape = shape},
        {.name = "frozen", .name_len = 6, .dtype = DTYPE_F16, .n_dims = 1, .shape = shape},
        {.name = "scalar", .name_len = 6, .trainable = true, .group = 1},
    };
    struct layout *layout = NULL;
    uint32_t bad;

    assert_int_equal(layout_new(&layout, decls, ARRAY_SIZE(decls), 2, 1000, &bad), 0);
    return layout;
}

static void add_file(struct description *d, const char *name, uint64_t n_bytes)
{
    struct description_file *file = description_add_file(d);

    file->name = strdup(name);
    file->n_bytes = n_bytes;
    file->hash.n_blocks = div_round_up(n_bytes, HASH_BLOCK_BYTES);
    file->hash.blocks = calloc(file->hash.n_blocks + 1, sizeof(*file->hash.blocks));
    snprintf(file->hash.whole, sizeof(file->hash.whole), "0123456789abcdef%016" PRIx64, n_bytes);
    for (size_t i = 0; i < file->hash.n_blocks; i++)
        file->hash.blocks[i] = UINT64_C(0x9e3779b97f4a7c15) * i; /* the first block's hash is 0 */
}

static struct description make(void)
{
    struct description d = {
        .version = strdup("0.3.0"),
        .job = strdup("a \"job\""),
        .run = strdup("run"),
        .optimizer = strdup("AdamW"),
        .configuration = strdup("zero_optimization.stage: 2\nlr: [1, 2]\n"),
        .step = UINT64_C(1234567890123),
        .n_applied = 99,
        .world_size = 8,
        .n_nodes = 1,
        .stage = 2,
        .loss_scale = {true, 65536.5, 2, 100, 7},
    };

    add_file(&d, "model.safetensors", 3 * HASH_BLOCK_BYTES + 1);
    add_file(&d, "optimizer.safetensors", HASH_BLOCK_BYTES);
    add_file(&d, "ranks.safetensors", 0);
    return d;
}

static char *print(const struct description *d)
{
    struct layout *layout = make_layout();
    char *text = description_print(d, layout);

    assert_non_null(text);
    layout_free(layout);
    return text;
}

static void check_same(const struct description *a, const struct description *b)
{
    assert_string_equal(a->version, b->version);
    assert_string_equal(a->job, b->job);
    assert_string_equal(a->run ? a->run : "none", b->run ? b->run : "none");
    assert_string_equal(a->optimizer, b->optimizer);
    assert_string_equal(a->configuration, b->configuration);
    assert_true(a->step == b->step && a->n_applied == b->n_applied && a->world_size == b->world_size);
    assert_true(a->n_nodes == b->n_nodes && a->stage == b->stage);
    assert_true(a->loss_scale.dynamic == b->loss_scale.dynamic && a->loss_scale.scale == b->loss_scale.scale);
    assert_true(a->loss_scale.hysteresis_left == b->loss_scale.hysteresis_left);
    assert_true(a->loss_scale.n_steps == b->loss_scale.n_steps);
    assert_true(a->loss_scale.window_start == b->loss_scale.window_start);
    assert_int_equal(a->n_files, b->n_files);
    assert_int_equal(b->n_params, 3);
    assert_true(b->params[0].trainable && b->params[0].dtype == DTYPE_BF16 && b->params[0].n_elems == 15);
    assert_true(!b->params[1].trainable && b->params[1].n_dims == 1 && b->params[1].shape[0] == 3);
    assert_true(b->params[2].n_dims == 0 && b->params[2].n_elems == 1);
    for (size_t i = 0; i < a->n_files; i++) {
        assert_string_equal(a->files[i].name, b->files[i].name);
        assert_int_equal(a->files[i].n_bytes, b->files[i].n_bytes);
        assert_string_equal(a->files[i].hash.whole, b->files[i].hash.whole);
        assert_int_equal(a->files[i].hash.n_blocks, b->files[i].hash.n_blocks);
        assert_memory_equal(a->files[i].hash.blocks, b->files[i].hash.blocks,
                            a->files[i].hash.n_blocks * sizeof(*a->files[i].hash.blocks));
    }
}

static void check_reads_back(const struct description *d)
{
    char *text = print(d), why[WHY_BYTES] = "";
    struct description read;

    assert_int_equal(description_parse(&read, text, strlen(text), why, sizeof(why)), 0);
    check_same(d, &read);
    description_deinit(&read);
    free(text);
}

static void test_reads_back(void **state)
{
    struct description d = make();

    (void)state;
    check_reads_back(&d);
    free(steal_ptr(d.run));
    check_reads_back(&d);
    d.step = d.n_applied = d.loss_scale.n_steps = UINT64_MAX;
    d.world_size = d.n_nodes = UINT32_MAX;
    d.loss_scale.scale = 0.1;
    check_reads_back(&d);
    description_deinit(&d);
    d = (struct description){
        .version = strdup(""), .job = strdup(""), .optimizer = strdup(""), .configuration = strdup("")};
    check_reads_back(&d); /* with no files */
    description_deinit(&d);
}

static void test_find(void **state)
{
    struct description d = make();

    (void)state;
    assert_ptr_equal(description_find(&d, "optimizer.safetensors"), &d.files[1]);
    assert_null(description_find(&d, "model"));
    description_deinit(&d);
    assert_null(description_find(&d, "model.safetensors"));
}

/* ---- damage -------------------------------------------------------------------------------------------- */

/*
 * Asserts that the first n_bytes of the text are refused. A copy of exactly that size lets sanitizers find reads beyond
 * it.
 */
static void check_refused(const char *text, size_t n_bytes, const char *sentence)
{
    char *copy = malloc(n_bytes + 1), why[WHY_BYTES] = "";
    struct description d;
    int r;

    memcpy(copy, text, n_bytes);
    copy = realloc(copy, MAX(n_bytes, (size_t)1));
    r = description_parse(&d, copy, n_bytes, why, sizeof(why));
    if (r != -EINVAL || strcmp(why, sentence) != 0)
        fail_msg("%d, \"%s\" instead of \"%s\": %.*s", r, why, sentence, (int)n_bytes, text);
    assert_null(d.version);
    assert_null(d.files);
    free(copy);
}

static void test_flipped_bits(void **state)
{
    struct description d = make();
    char *text = print(&d);
    size_t n = strlen(text);

    (void)state;
    for (size_t i = 0; i < 8 * n; i++) {
        text[i / 8] ^= (char)(1 << i % 8);
        check_refused(text, n, NOT_AS_WRITTEN);
        text[i / 8] ^= (char)(1 << i % 8);
    }
    free(text);
    description_deinit(&d);
}

static void test_other_lengths(void **state)
{
    struct description d = make();
    char *text = print(&d);
    size_t n = strlen(text);

    (void)state;
    for (size_t i = 0; i < n; i++)
        check_refused(text, i, NOT_AS_WRITTEN);
    check_refused(text, n + 1, NOT_AS_WRITTEN); /* including its NUL */
    check_refused(text + 1, n - 1, NOT_AS_WRITTEN);
    free(text);
    description_deinit(&d);
}

static void test_too_large(void **state)
{
    struct description d;
    char why[WHY_BYTES];

    (void)state;
    assert_int_equal(description_parse(&d, "", (size_t)DESCRIPTION_MAX_BYTES + 1, why, sizeof(why)), -EINVAL);
    assert_string_equal(why, "it is too large");
}

/* ---- what is said, and sealed, but cannot be ----------------------------------------------------------- */

/* Return: a valid text with one part replaced and a new seal. The caller frees it. */
static char *print_with(const char *what, const char *instead)
{
    static const char seal[] = ",\"xxh128_of_the_above\":\"";
    struct description d = make();
    char *text = print(&d), *at = strstr(text, what), *changed = malloc(strlen(text) + strlen(instead) + 64);
    char hash[HASH_TEXT_BYTES];

    if (!changed)
        abort();
    if (!at)
        fail_msg("no %s in %s", what, text);
    *strstr(text, seal) = '\0';
    sprintf(changed, "%.*s%s%s", (int)(at - text), text, instead, at + strlen(what));
    hash_text(hash, changed, strlen(changed));
    sprintf(changed + strlen(changed), "%s%s\"}\n", seal, hash);
    free(text);
    description_deinit(&d);
    return changed;
}

static void check_refused_with(const char *what, const char *instead, const char *sentence)
{
    char *text = print_with(what, instead);

    check_refused(text, strlen(text), sentence);
    free(text);
}

static void test_format(void **state)
{
    (void)state;
    check_refused_with("\"format\":1", "\"format\":2", "its format is 2, and this version of zerod reads format 1");
    check_refused_with("\"format\":1", "\"format\":0", "its format is 0, and this version of zerod reads format 1");
    check_refused_with("\"format\":1", "\"format\":-1", "its \"format\" is negative");
    check_refused_with("\"format\":1", "\"format\":\"1\"", "it lacks \"format\", or that is no int");
    check_refused_with("\"format\":1,", "", "it lacks \"format\", or that is no int");
}

static void test_lacking_fields(void **state)
{
    static const char *const keys[][2] = {{"zerod", "string"},
                                          {"job", "string"},
                                          {"step", "int"},
                                          {"applied_steps", "int"},
                                          {"world_size", "int"},
                                          {"nodes", "int"},
                                          {"stage", "int"},
                                          {"optimizer", "string"},
                                          {"configuration", "string"},
                                          {"loss_scale", "object"},
                                          {"dynamic", "boolean"},
                                          {"hysteresis_left", "int"},
                                          {"steps", "int"},
                                          {"window_start", "int"},
                                          {"parameters", "array"},
                                          {"trainable", "boolean"},
                                          {"dtype", "string"},
                                          {"shape", "array"},
                                          {"files", "array"},
                                          {"name", "string"},
                                          {"bytes", "int"},
                                          {"xxh128", "string"},
                                          {"xxh64_of_each_mib", "string"}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        char what[64], sentence[128];

        if (strcmp(keys[i][0], "name") == 0)
            snprintf(what, sizeof(what), "\"name\":\"model");
        else
            snprintf(what, sizeof(what), "\"%s\":", keys[i][0]);
        snprintf(sentence, sizeof(sentence), "it lacks \"%s\", or that is no %s", keys[i][0], keys[i][1]);
        check_refused_with(what, strcmp(keys[i][0], "name") == 0 ? "\"other\":\"model" : "\"other\":", sentence);
    }
    check_refused_with("\"scale\":65536.5", "\"scale\":null", "it lacks \"scale\", or that is no number");
    check_refused_with("\"scale\":65536.5", "\"scale\":1e999", "it lacks \"scale\", or that is no number");
    check_refused_with("\"scale\":65536.5", "\"scale\":NaN", "it lacks \"scale\", or that is no number");
    check_refused_with("\"run\":\"run\"", "\"run\":1", "it lacks \"run\", or that is no string");
}

static void test_numbers(void **state)
{
    (void)state;
    check_refused_with("\"step\":1234567890123", "\"step\":-5", "its \"step\" is negative");
    check_refused_with("\"step\":1234567890123", "\"step\":1.5", "it lacks \"step\", or that is no int");
    check_refused_with("\"world_size\":8", "\"world_size\":4294967304", "its \"world_size\" is too large");
    check_refused_with("\"nodes\":1", "\"nodes\":4294967297", "its \"nodes\" is too large");
    check_refused_with("\"stage\":2", "\"stage\":4294967298", "its \"stage\" is too large");
}

static void test_parameters(void **state)
{
    (void)state;
    check_refused_with("\"dtype\":\"bf16\"", "\"dtype\":\"int8\"", "it has a parameter of a type that cannot be");
    check_refused_with("\"shape\":[3]", "\"shape\":[-3]", "its parameter \"frozen\" has a shape that cannot be");
    check_refused_with("\"shape\":[3]", "\"shape\":[\"3\"]", "its parameter \"frozen\" has a shape that cannot be");
    check_refused_with("\"shape\":[3]", "\"shape\":[4294967296,4294967296]",
                       "its parameter \"frozen\" has a shape that cannot be");
    check_refused_with("\"shape\":[3]", "\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
                       "its parameter \"frozen\" has a shape that cannot be");
}

static void test_no_json(void **state)
{
    (void)state;
    check_refused_with("{\"format\"", "[\"format\"", "it is no JSON object");
    check_refused_with("{\"format\"", "{} {\"format\"", "it is no JSON object");
    check_refused_with("\"files\":[", "\"files\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "it is no JSON object");
}

static void test_names_of_files(void **state)
{
    static const char *const names[] = {"../model", "a/b", "/etc/passwd", "..", ".", "", ".hidden", "a/"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        char instead[64], sentence[128];

        snprintf(instead, sizeof(instead), "\"name\":\"%s\"", names[i]);
        snprintf(sentence, sizeof(sentence), "its entry for file \"%s\" is invalid", names[i]);
        check_refused_with("\"name\":\"model.safetensors\"", instead, sentence);
    }
    check_refused_with("\"name\":\"optimizer.safetensors\"", "\"name\":\"model.safetensors\"",
                       "its entry for file \"model.safetensors\" is invalid"); /* the same name twice */
}

#define OF_OPTIMIZER "its entry for file \"optimizer.safetensors\" is invalid"

/* The checks of sizes and hashes, at the entry of the optimizer's file, which has one block. */
static void test_hashes_of_files(void **state)
{
    (void)state;
    check_refused_with("\"bytes\":1048576", "\"bytes\":1048577", OF_OPTIMIZER);
    check_refused_with("\"bytes\":1048576", "\"bytes\":0", OF_OPTIMIZER);
    check_refused_with("\"bytes\":1048576", "\"bytes\":18446744073709551615", OF_OPTIMIZER);
    check_refused_with("\"xxh64_of_each_mib\":\"0000000000000000\"", "\"xxh64_of_each_mib\":\"000000000000000\"",
                       OF_OPTIMIZER);
    check_refused_with("\"xxh64_of_each_mib\":\"0000000000000000\"", "\"xxh64_of_each_mib\":\"00000000000000000\"",
                       OF_OPTIMIZER);
    check_refused_with("\"xxh64_of_each_mib\":\"0000000000000000\"", "\"xxh64_of_each_mib\":\"000000000000000G\"",
                       OF_OPTIMIZER);
    check_refused_with("\"xxh64_of_each_mib\":\"0000000000000000\"", "\"xxh64_of_each_mib\":\"\"", OF_OPTIMIZER);
    check_refused_with("0123456789abcdef0000000000100000", "0123456789abcdef000000000010000", OF_OPTIMIZER);
    check_refused_with("0123456789abcdef0000000000100000", "0123456789abcdef00000000001000000", OF_OPTIMIZER);
    check_refused_with("0123456789abcdef0000000000100000", "0123456789abcdeF0000000000100000", OF_OPTIMIZER);
}

/* An entry of "files" that is not an object is refused. */
static void test_files_that_are_none(void **state)
{
    (void)state;
    check_refused_with("\"files\":[", "\"files\":[1,", "it lacks \"name\", or that is no string");
    check_refused_with("\"files\":[", "\"files\":[null,", "it lacks \"name\", or that is no string");
}

/* ---- many files ---------------------------------------------------------------------------------------- */

static double cpu_s(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* Return: the seconds that reading a description with n files takes. */
static double read_many(size_t n)
{
    struct description d = make(), read;
    _cleanup_free_ char *text = NULL;
    char name[64], why[WHY_BYTES] = "";
    double since;

    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "model-node%zu.safetensors", (i * 7919) % n);
        add_file(&d, name, 0);
    }
    text = print(&d);
    since = cpu_s();
    assert_int_equal(description_parse(&read, text, strlen(text), why, sizeof(why)), 0);
    since = cpu_s() - since;
    assert_int_equal(read.n_files, d.n_files);
    description_deinit(&read);
    description_deinit(&d);
    return since;
}

/*
 * Ten times as many files take about ten times as long. Comparing each name with all others would take a hundred times
 * as long.
 */
static void test_many_files(void **state)
{
    double few_s = read_many(6000), many_s = read_many(60000);

    (void)state;
    if (many_s > 1 && many_s > 40 * few_s)
        fail_msg("6000 files: %.3f s, 60000 files: %.3f s", few_s, many_s);
}

TEST_GROUP(description)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_files),
        cmocka_unit_test(test_reads_back),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_other_lengths),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_lacking_fields),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_no_json),
        cmocka_unit_test(test_names_of_files),
        cmocka_unit_test(test_hashes_of_files),
        cmocka_unit_test(test_files_that_are_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
