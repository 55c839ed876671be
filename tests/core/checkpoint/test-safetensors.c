/* SPDX-License-Identifier: Apache-2.0 */

/* Headers of safetensors files: a written header reads back, and every kind of malformed header is refused. */

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/safetensors.h"
#include "tests/group.h"

enum { WHY_BYTES = 256 };

#define NOT_JSON "its header is no JSON object"
#define CANNOT_BE "its header says something of tensor \"a\" that cannot be"
#define TWICE "its header has two values of one name"
#define HAS_NUL "its header has a NUL in a text"
#define NO_SHARDING "its header has DCP_SHARDING_INFO that cannot be"
#define GAPS "its tensors do not fill it: it was cut short, or has gaps"

/* ---- writing, and reading it again --------------------------------------------------------------------- */

static void add(struct safetensors *file, const char *name, int dtype, uint32_t n_dims, const uint64_t *shape)
{
    assert_int_equal(safetensors_add(file, name, dtype, shape, NULL, n_dims), 0);
}

/* Return: the file's header, which the caller frees. Sets n_bytes to its size. */
static uint8_t *print(struct safetensors *file, size_t *n_bytes)
{
    uint8_t *bytes = NULL;

    assert_int_equal(safetensors_header(file, &bytes, n_bytes), 0);
    assert_int_equal(safetensors_header_bytes(bytes, file->file_bytes), *n_bytes);
    return bytes;
}

static void check_same(const struct safetensors_tensor *a, const struct safetensors_tensor *b)
{
    assert_string_equal(a->name, b->name);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->n_dims, b->n_dims);
    assert_memory_equal(a->shape, b->shape, sizeof(a->shape));
    assert_memory_equal(a->starts, b->starts, sizeof(a->starts));
    assert_int_equal(a->offset_bytes, b->offset_bytes);
    assert_int_equal(a->n_bytes, b->n_bytes);
}

/* Prints a header, parses it, and asserts that both have the same tensors. Frees `written`. */
static void check_reads_back(struct safetensors *written)
{
    struct safetensors read;
    char why[WHY_BYTES] = "";
    size_t n_bytes;
    uint8_t *bytes = print(written, &n_bytes);

    assert_int_equal(n_bytes % 64, 0);
    assert_int_equal(safetensors_parse(&read, bytes, n_bytes, written->file_bytes, why, sizeof(why)), 0);
    assert_string_equal(why, "");
    assert_int_equal(read.n, written->n);
    assert_int_equal(read.file_bytes, written->file_bytes);
    assert_int_equal(read.sharded, written->sharded);
    for (size_t i = 0; i < written->n; i++) {
        assert_non_null(safetensors_find(&read, written->tensors[i].name));
        check_same(&written->tensors[i], safetensors_find(&read, written->tensors[i].name));
        check_same(&written->tensors[i], safetensors_find(written, written->tensors[i].name));
    }
    for (size_t i = 1; i < read.n; i++)
        assert_true(read.tensors[i - 1].offset_bytes <= read.tensors[i].offset_bytes);
    assert_null(safetensors_find(&read, "no such tensor"));
    safetensors_deinit(&read);
    safetensors_deinit(written);
    free(bytes);
}

static void test_reads_back(void **state)
{
    struct safetensors file = {0};

    (void)state;
    add(&file, "scalar", DTYPE_F32, 0, NULL);
    add(&file, "matrix", DTYPE_F32, 2, (const uint64_t[]){3, 5});
    add(&file, "empty", DTYPE_F32, 1, (const uint64_t[]){0});
    add(&file, "empty in the middle", DTYPE_F32, 3, (const uint64_t[]){7, 0, 3});
    add(&file, "half", DTYPE_F16, 1, (const uint64_t[]){9});
    add(&file, "brain", DTYPE_BF16, 1, (const uint64_t[]){1});
    add(&file, "bytes", SAFETENSORS_U8, 1, (const uint64_t[]){13});
    add(&file, "no bytes", SAFETENSORS_U8, 1, (const uint64_t[]){0});
    assert_int_equal(file.n, 8);
    check_reads_back(&file);
}

/* A layout may have any shape with a dimension of 0. */
static void test_empty_of_a_large_shape(void **state)
{
    const uint64_t shape[] = {UINT64_C(1) << 40, UINT64_C(1) << 40, 0, 3};
    struct safetensors file = {0};

    (void)state;
    add(&file, "a", DTYPE_F32, 4, shape);
    add(&file, "b", DTYPE_F32, 0, NULL);
    check_reads_back(&file);
}

static void test_no_tensors(void **state)
{
    struct safetensors file = {0};

    (void)state;
    check_reads_back(&file);
}

static void test_many(void **state)
{
    struct safetensors file = {0};

    (void)state;
    for (unsigned i = 0; i < 3000; i++) {
        char name[32];

        snprintf(name, sizeof(name), "layers.%u.weight", (i * 7919) % 3000);
        add(&file, name, DTYPE_F32, 1, (const uint64_t[]){i % 5});
    }
    check_reads_back(&file);
}

static void test_most_dimensions(void **state)
{
    struct safetensors file = {0};
    uint64_t shape[LAYOUT_MAX_DIMS];

    (void)state;
    for (unsigned i = 0; i < LAYOUT_MAX_DIMS; i++)
        shape[i] = 1 + i % 2;
    add(&file, "a", DTYPE_BF16, LAYOUT_MAX_DIMS, shape);
    check_reads_back(&file);
}

/*
 * Tensors are in the order in which they were added, without gaps. Their data begins at an offset that suits any type.
 */
static void test_places(void **state)
{
    struct safetensors file = {0};
    uint64_t end;
    size_t n_bytes;
    uint8_t *bytes;

    (void)state;
    for (unsigned i = 0; i < 40; i++) {
        add(&file, (char[]){(char)('A' + i), '\0'}, i < 20 ? DTYPE_F32 : DTYPE_F16, 1, (const uint64_t[]){i % 7});
        bytes = print(&file, &n_bytes);
        assert_int_equal(n_bytes % 64, 0);
        end = n_bytes;
        for (size_t k = 0; k < file.n; k++) {
            assert_int_equal(file.tensors[k].offset_bytes, end);
            assert_int_equal(end % (k < 20 ? 4 : 2), 0);
            end += file.tensors[k].n_bytes;
        }
        assert_int_equal(file.file_bytes, end);
        free(bytes);
    }
    safetensors_deinit(&file);
}

static void test_at(void **state)
{
    struct safetensors file = {0};
    uint64_t data;
    size_t n_bytes;
    uint8_t *bytes;

    (void)state;
    assert_int_equal(safetensors_at(&file, 0), 0);
    add(&file, "a", DTYPE_F32, 0, NULL);
    add(&file, "b", DTYPE_F32, 1, (const uint64_t[]){0});
    add(&file, "c", DTYPE_F32, 1, (const uint64_t[]){2});
    bytes = print(&file, &n_bytes);
    data = n_bytes;
    assert_int_equal(safetensors_at(&file, 0), file.n);
    assert_int_equal(safetensors_at(&file, data - 1), file.n);
    assert_int_equal(safetensors_at(&file, data), 0);
    assert_int_equal(safetensors_at(&file, data + 3), 0);
    assert_int_equal(safetensors_at(&file, data + 4), 2); /* c, not the empty tensor before it */
    assert_int_equal(safetensors_at(&file, data + 11), 2);
    assert_int_equal(safetensors_at(&file, UINT64_MAX), 2);
    safetensors_deinit(&file);
    free(bytes);
}

/* ---- boxes of larger tensors --------------------------------------------------------------------------- */

static void add_box(struct safetensors *file, const char *name, uint32_t n_dims, const uint64_t *starts,
                    const uint64_t *shape)
{
    assert_int_equal(safetensors_add(file, name, DTYPE_F32, shape, starts, n_dims), 0);
    file->sharded = true;
}

static void test_boxes_read_back(void **state)
{
    struct safetensors file = {0};
    uint64_t starts[LAYOUT_MAX_DIMS], shape[LAYOUT_MAX_DIMS];

    (void)state;
    for (unsigned i = 0; i < LAYOUT_MAX_DIMS; i++) {
        starts[i] = (UINT64_C(1) << 62) - i;
        shape[i] = 1 + i % 2;
    }
    add_box(&file, "a", 2, (const uint64_t[]){7, 3}, (const uint64_t[]){2, 4});
    add_box(&file, "whole", 1, NULL, (const uint64_t[]){5});
    add_box(&file, "state.a.step", 0, NULL, NULL);
    add_box(&file, "empty", 2, (const uint64_t[]){3, 0}, (const uint64_t[]){2, 0});
    add_box(&file, "most dimensions", LAYOUT_MAX_DIMS, starts, shape);
    add_box(&file, "\"quoted\\ \xff:{'\n", 1, (const uint64_t[]){1}, (const uint64_t[]){1});
    check_reads_back(&file);
}

static void test_no_boxes(void **state)
{
    struct safetensors file = {.sharded = true};

    (void)state;
    check_reads_back(&file);
}

/*
 * The metadata that torch.distributed.checkpoint's HuggingFaceStorageReader reads: JSON in a string, with every tensor
 * of the file.
 */
static void test_text_of_boxes(void **state)
{
    static const char expected[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"DCP_SHARDING_INFO\":"
        "\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,128]},\\\"state.a.step\\\":{\\\"saved_offsets\\\":[]}}\"},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
        "\"state.a.step\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]}} ";
    struct safetensors file = {0};
    size_t n_bytes;
    uint8_t *bytes;

    (void)state;
    add_box(&file, "a", 2, (const uint64_t[]){0, 128}, (const uint64_t[]){1, 2});
    add_box(&file, "state.a.step", 0, NULL, NULL);
    bytes = print(&file, &n_bytes);
    assert_true(n_bytes >= SAFETENSORS_LENGTH_BYTES + sizeof(expected) - 1);
    if (memcmp(bytes + SAFETENSORS_LENGTH_BYTES, expected, sizeof(expected) - 1) != 0)
        fail_msg("%.*s", (int)(n_bytes - SAFETENSORS_LENGTH_BYTES), bytes + SAFETENSORS_LENGTH_BYTES);
    safetensors_deinit(&file);
    free(bytes);
}

/* ---- names --------------------------------------------------------------------------------------------- */

static void test_any_names(void **state)
{
    static const char *const names[] = {"",
                                        "a.b.c",
                                        "\"",
                                        "\\",
                                        "{}",
                                        "a:b",
                                        "\xc3\xbc",
                                        "\xf0\x9f\x98\x80",
                                        "\n\t",
                                        "broken \xff\xc3",
                                        "overlong \xc0\x80",
                                        "surrogate \xed\xa0\x80",
                                        "control \x01",
                                        "/",
                                        "metadata",
                                        "\\u0000"};
    struct safetensors file = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        add(&file, names[i], DTYPE_F32, 0, NULL);
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        assert_ptr_equal(safetensors_find(&file, names[i]), &file.tensors[i]);
    assert_string_equal(file.tensors[9].name, "broken \\xff\\xc3");
    check_reads_back(&file);
}

/* Two names that become equal when they are printed. */
static void test_duplicates(void **state)
{
    struct safetensors file = {0};

    (void)state;
    add(&file, "a", DTYPE_F32, 0, NULL);
    add(&file, "\xff", DTYPE_F32, 0, NULL);
    assert_int_equal(safetensors_add(&file, "a", DTYPE_F16, NULL, NULL, 0), SAFETENSORS_E_DUPLICATE);
    assert_int_equal(safetensors_add(&file, "\\xff", DTYPE_F16, NULL, NULL, 0), SAFETENSORS_E_DUPLICATE);
    assert_int_equal(file.n, 2);
    check_reads_back(&file);
}

/* The format reserves this name. */
static void test_reserved_name(void **state)
{
    struct safetensors file = {0};

    (void)state;
    assert_int_equal(safetensors_add(&file, "__metadata__", DTYPE_F32, NULL, NULL, 0), SAFETENSORS_E_DUPLICATE);
    assert_int_equal(file.n, 0);
    safetensors_deinit(&file);
}

static void test_too_large(void **state)
{
    enum { N_NAME = 30 * 1000 * 1000 };
    char *name = malloc(N_NAME + 1);
    struct safetensors file = {0};
    uint8_t *bytes = NULL;
    size_t n_bytes;

    (void)state;
    memset(name, 'x', N_NAME);
    name[N_NAME] = '\0';
    for (unsigned i = 0; i < 4; i++) {
        name[0] = (char)('a' + i);
        add(&file, name, DTYPE_F32, 0, NULL);
    }
    assert_int_equal(safetensors_header(&file, &bytes, &n_bytes), SAFETENSORS_E_TOO_LARGE);
    safetensors_deinit(&file);
    free(name);
}

/* ---- reading ------------------------------------------------------------------------------------------- */

/* Parses a header of n_text bytes, which may contain a NUL. The file has n_data bytes behind the header. */
static int parse_bytes(struct safetensors *out, const char *text, size_t n_text, uint64_t n_data, char *why)
{
    uint64_t n_bytes = SAFETENSORS_LENGTH_BYTES + n_text;
    _cleanup_free_ uint8_t *bytes = malloc(n_bytes); /* of the exact size, so that a sanitizer finds reads beyond it */

    for (unsigned i = 0; i < SAFETENSORS_LENGTH_BYTES; i++)
        bytes[i] = (uint8_t)((uint64_t)n_text >> 8 * i);
    memcpy(bytes + SAFETENSORS_LENGTH_BYTES, text, n_text);
    assert_int_equal(safetensors_header_bytes(bytes, n_bytes + n_data), n_bytes);
    return safetensors_parse(out, bytes, n_bytes, n_bytes + n_data, why, WHY_BYTES);
}

static void check_refused(const char *text, size_t n_text, uint64_t n_data, const char *sentence)
{
    struct safetensors file;
    char why[WHY_BYTES] = "";
    int r = parse_bytes(&file, text, n_text, n_data, why);

    if (r != SAFETENSORS_E_INVALID || strcmp(why, sentence) != 0)
        fail_msg("%.*s with %" PRIu64 " bytes: %d, \"%s\" instead of \"%s\"", (int)MIN(n_text, (size_t)200), text,
                 n_data, r, why, sentence);
    assert_int_equal(file.n, 0);
    assert_null(file.tensors);
}

static void check_taken(const char *text, uint64_t n_data, size_t n_tensors)
{
    struct safetensors file;
    char why[WHY_BYTES] = "";

    if (parse_bytes(&file, text, strlen(text), n_data, why) != 0)
        fail_msg("%s: %s", text, why);
    assert_int_equal(file.n, n_tensors);
    safetensors_deinit(&file);
}

#define F32(name, shape, from, to)                                                                                     \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" from "," to "]}"

static void test_valid(void **state)
{
    (void)state;
    check_taken("{}", 0, 0);
    check_taken("  {} \n ", 0, 0);
    check_taken("{\"__metadata__\":{}}", 0, 0);
    check_taken("{" F32("a", "[]", "0", "4") "}", 4, 1);
    check_taken("{" F32("a", "[1]", "4", "8") "," F32("b", "[1]", "0", "4") "}", 8, 2);      /* any order */
    check_taken("{" F32("a", "[1]", "0", "4") "," F32("b", "[0]", "4", "4") "}", 4, 2);      /* an empty one last */
    check_taken("{" F32("a", "[1]", "0", "4") "," F32("b", "[9,0,9]", "0", "0") "}", 4, 2);  /* an empty one first */
    check_taken("{\"a\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,16]}}", 16, 1); /* an unused type */
    check_taken("{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, 1);
    check_taken("{\"a\":{\"more\":[{}],\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, 1);
    check_taken("{\"a:b\\\":\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, 1);
    check_taken("{\"a\\\\u0000\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, 1);
}

static void test_no_json(void **state)
{
    static const char *const texts[] = {"",
                                        " ",
                                        "{",
                                        "[]",
                                        "null",
                                        "3",
                                        "\"a\"",
                                        "{\"a\"}",
                                        "{\"a\":}",
                                        "{,}",
                                        "{} {}",
                                        "{}x",
                                        "{'a':1}",
                                        "{/* */}",
                                        "{" F32("a", "[]", "0", "4"),
                                        "{" F32("a", "[]", "0", "4") ",}",
                                        "{" F32("a", "[,]", "0", "4") "}",
                                        "{" F32("a", "[]", "0", "4") "}}",
                                        "{" F32("a", "[[[[[[[[[]]]]]]]]]", "0", "4") "}",
                                        "{\"\xff\":{}}"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        check_refused(texts[i], strlen(texts[i]), 4, NOT_JSON);
    check_refused("{}\0", 3, 0, NOT_JSON);
    check_refused("\0{}", 3, 0, NOT_JSON);
}

static void test_deep(void **state)
{
    enum { DEPTH = 100000 };
    char *text = malloc(2 * DEPTH + 16);

    (void)state;
    strcpy(text, "{\"a\":");
    memset(text + 5, '[', DEPTH);
    memset(text + 5 + DEPTH, ']', DEPTH);
    text[5 + 2 * DEPTH] = '}';
    check_refused(text, 6 + 2 * DEPTH, 0, NOT_JSON);
    free(text);
}

static void test_what_cannot_be(void **state)
{
    static const char *const texts[] = {"{\"a\":1}",
                                        "{\"a\":null}",
                                        "{\"a\":[]}",
                                        "{\"a\":{}}",
                                        "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}",
                                        "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,4]}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":4}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}",
                                        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,null]}}",
                                        "{" F32("a", "[1]", "4", "0") "}",
                                        "{" F32("a", "[1]", "-4", "0") "}",
                                        "{" F32("a", "[1]", "0.0", "4") "}",
                                        "{" F32("a", "[1]", "0", "4e0") "}",
                                        "{" F32("a", "[1]", "\"0\"", "4") "}",
                                        "{" F32("a", "[2]", "0", "4") "}",
                                        "{" F32("a", "[]", "0", "0") "}",
                                        "{" F32("a", "[1]", "0", "3") "}",
                                        "{" F32("a", "[-1]", "0", "4") "}",
                                        "{" F32("a", "[-1,-1]", "0", "4") "}",
                                        "{" F32("a", "[1.0]", "0", "4") "}",
                                        "{" F32("a", "[null]", "0", "4") "}",
                                        "{" F32("a", "[[1]]", "0", "4") "}",
                                        "{" F32("a", "[4611686018427387904]", "0", "0") "}",
                                        "{" F32("a", "[4611686018427387905]", "0", "4") "}",
                                        "{" F32("a", "[4294967296,4294967296]", "0", "0") "}",
                                        "{" F32("a", "[18446744073709551615]", "0", "4") "}",
                                        "{" F32("a", "[99999999999999999999999]", "0", "4") "}",
                                        "{" F32("a", "[0,99999999999999999999999]", "0", "0") "}",
                                        "{" F32("a", "[-99999999999999999999999]", "0", "4") "}",
                                        "{" F32("a", "[1]", "0", "99999999999999999999999") "}",
                                        "{" F32("a", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "0", "4") "}"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        check_refused(texts[i], strlen(texts[i]), 4, CANNOT_BE);
}

static void test_gaps_and_overlaps(void **state)
{
    static const char *const texts[] = {
        "{}",
        "{\"__metadata__\":{}}",
        "{" F32("a", "[1]", "0", "4") "}",
        "{" F32("a", "[1]", "4", "8") "}",
        "{" F32("a", "[1]", "0", "4") "," F32("b", "[1]", "0", "4") "}",
        "{" F32("a", "[1]", "0", "4") "," F32("b", "[1]", "2", "6") "}",
        "{" F32("a", "[2]", "0", "8") "," F32("b", "[1]", "4", "8") "}",
        "{" F32("a", "[2]", "0", "8") "," F32("b", "[0]", "4", "4") "}",
        "{" F32("a", "[1]", "0", "4") "," F32("b", "[1]", "8", "12") "}",
        "{" F32("a", "[3]", "0", "12") "}",
        "{" F32("a", "[2]", "0", "8") "," F32("b", "[0]", "12", "12") "}",
        "{" F32("a", "[1]", "18446744073709551604", "18446744073709551608") "}",
        "{\"a\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,18446744073709551614]}}"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        check_refused(texts[i], strlen(texts[i]), 8, GAPS);
}

/* Names that occur twice are refused, because any JSON library would lose one of the two. */
static void test_two_of_one_name(void **state)
{
    static const char *const texts[] = {
        "{" F32("a", "[1]", "0", "4") "," F32("a", "[1]", "0", "4") "}",
        "{" F32("a", "[1]", "0", "4") "," F32("a", "[1]", "4", "8") "}",
        "{" F32("a", "[0]", "0", "0") "," F32("a", "[1]", "0", "4") "}",
        "{" F32("a", "[1]", "0", "4") "," F32("\\u0061", "[1]", "4", "8") "}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"__metadata__\":{},\"__metadata__\":{}," F32("a", "[1]", "0", "4") "}",
        "{\"__metadata__\":{\"b\":\"1\",\"b\":\"2\"}," F32("a", "[1]", "0", "4") "}"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        check_refused(texts[i], strlen(texts[i]), 4, TWICE);
}

static void test_nul_in_names(void **state)
{
    static const char *const texts[] = {"{" F32("a\\u0000", "[1]", "0", "4") "}",
                                        "{" F32("\\u0000", "[1]", "0", "4") "}",
                                        "{" F32("a\\\\\\u0000b", "[1]", "0", "4") "}"};
    static const char raw[] = "{" F32("a\0b", "[1]", "0", "4") "}";

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        check_refused(texts[i], strlen(texts[i]), 4, HAS_NUL);
    check_refused(raw, sizeof(raw) - 1, 4, NOT_JSON);
}

/* Control characters in names are escaped. Two names that become equal are refused. */
static void test_control_characters(void **state)
{
    static const char text[] = "{" F32("\\u001b[31m", "[1]", "0", "4") "}";
    static const char two[] = "{" F32("\\u001b", "[1]", "0", "4") "," F32("\\\\x1b", "[1]", "4", "8") "}";
    struct safetensors file;
    char why[WHY_BYTES];

    (void)state;
    assert_int_equal(parse_bytes(&file, text, sizeof(text) - 1, 4, why), 0);
    assert_string_equal(file.tensors[0].name, "\\x1b[31m");
    assert_ptr_equal(safetensors_find(&file, "\x1b[31m"), file.tensors);
    safetensors_deinit(&file);
    check_refused(two, sizeof(two) - 1, 8, "its header has two tensors with names like \"\\x1b\"");
}

/* A header with tensor "a" of 2 x 1 elements. `info` says where the tensor begins in a larger one. */
#define SHARDED(info) "{\"__metadata__\":{\"DCP_SHARDING_INFO\":" info "}," F32("a", "[2,1]", "0", "8") "}"
#define BEGINS_WRONG "its header has an invalid start for tensor \"a\""

static void test_boxes(void **state)
{
    static const char other[] = "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{}\"},"
                                "\"a\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8]}}";
    struct safetensors file;
    char why[WHY_BYTES] = "";

    (void)state;
    check_taken(SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[5,0]}}\""), 8, 1);
    check_taken(SHARDED("\" {\\\"b\\\":1,\\\"a\\\":{\\\"more\\\":{},\\\"saved_offsets\\\":[5,0]}}\\n\""), 8, 1);
    check_taken(SHARDED("1"), 8, 1);    /* not a string, so it is ignored */
    check_taken(SHARDED("null"), 8, 1); /* ignored as well */
    check_taken(other, 8, 1);           /* for a type that zerod does not use, no start is needed */
    assert_int_equal(parse_bytes(&file, SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[5,0]}}\""),
                                 strlen(SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[5,0]}}\"")), 8, why),
                     0);
    assert_true(file.sharded);
    assert_int_equal(file.tensors[0].starts[0], 5);
    assert_int_equal(file.tensors[0].starts[1], 0);
    safetensors_deinit(&file);
}

static void test_wrong_boxes(void **state)
{
    static const struct {
        const char *text, *sentence;
    } rows[] = {
        {SHARDED("\"\""), NO_SHARDING},
        {SHARDED("\"x\""), NO_SHARDING},
        {SHARDED("\"[]\""), NO_SHARDING},
        {SHARDED("\"{\\\"a\\\":\""), NO_SHARDING},
        {SHARDED("\"{} {}\""), NO_SHARDING},
        {SHARDED("\"{'a':{}}\""), NO_SHARDING},
        {SHARDED("\"{\\\"a\\\":[[[[[[[[]]]]]]]]}\""), NO_SHARDING},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,0]},\\\"a\\\":{\\\"saved_offsets\\\":[1,0]}}\""), NO_SHARDING},
        {SHARDED("\"{\\\"a\\\\u0000\\\":{}}\""), NO_SHARDING},
        {SHARDED("\"{}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"b\\\":{\\\"saved_offsets\\\":[0,0]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":null}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":[0,0]}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":0}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,0,0]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,-1]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,1.0]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,\\\"1\\\"]}}\""), BEGINS_WRONG},
        {SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[0,99999999999999999999]}}\""), BEGINS_WRONG},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        check_refused(rows[i].text, strlen(rows[i].text), 8, rows[i].sentence);
}

/* Lengths that are larger than the file, or than any header. */
static void test_lengths(void **state)
{
    static const struct {
        uint64_t length, file_bytes, expected;
    } rows[] = {
        {0, 0, 0},
        {0, 7, 0},
        {0, 8, 8},
        {1, 8, 0},
        {1, 9, 9},
        {100, 107, 0},
        {100, 108, 108},
        {100, UINT64_MAX, 108},
        {UINT64_MAX, 8, 0},
        {UINT64_MAX, UINT64_MAX, 0},
        {UINT64_MAX - 7, 100, 0},
        {UINT64_C(1) << 63, UINT64_MAX, 0},
        {SAFETENSORS_MAX_HEADER_BYTES, UINT64_MAX, SAFETENSORS_MAX_HEADER_BYTES + 8},
        {SAFETENSORS_MAX_HEADER_BYTES + 1, UINT64_MAX, 0},
    };
    uint8_t bytes[SAFETENSORS_LENGTH_BYTES];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        for (unsigned k = 0; k < SAFETENSORS_LENGTH_BYTES; k++)
            bytes[k] = (uint8_t)(rows[i].length >> 8 * k);
        assert_int_equal(safetensors_header_bytes(bytes, rows[i].file_bytes), rows[i].expected);
    }
}

/* Cuts the text at every byte, and changes every byte. Each result must be read or refused without harm. */
static void check_damaged(const char *text, uint64_t n_data, size_t n_tensors)
{
    const size_t n = strlen(text);
    _cleanup_free_ char *damaged = malloc(n + 1);
    struct safetensors file;
    char why[WHY_BYTES];

    check_taken(text, n_data, n_tensors);
    for (size_t i = 0; i < n; i++)
        check_refused(text, i, n_data, NOT_JSON);
    for (size_t i = 0; i < n; i++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            memcpy(damaged, text, n + 1);
            damaged[i] ^= (char)(1 << bit);
            *why = '\0';
            if (parse_bytes(&file, damaged, n, n_data, why) == 0)
                safetensors_deinit(&file);
            else
                assert_true(*why);
        }
    }
}

static void test_damaged(void **state)
{
    (void)state;
    check_damaged("{\"__metadata__\":{\"format\":\"pt\"}," F32("a", "[3]", "0", "12") "," F32(
                      "b", "[2,0]", "12", "12") ",\"c\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[12,16]}}",
                  16, 3);
    check_damaged(SHARDED("\"{\\\"a\\\":{\\\"saved_offsets\\\":[5,0]}}\""), 8, 1);
}

TEST_GROUP(safetensors)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_back),
        cmocka_unit_test(test_empty_of_a_large_shape),
        cmocka_unit_test(test_no_tensors),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_most_dimensions),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_at),
        cmocka_unit_test(test_boxes_read_back),
        cmocka_unit_test(test_no_boxes),
        cmocka_unit_test(test_text_of_boxes),
        cmocka_unit_test(test_any_names),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_reserved_name),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_valid),
        cmocka_unit_test(test_no_json),
        cmocka_unit_test(test_deep),
        cmocka_unit_test(test_what_cannot_be),
        cmocka_unit_test(test_gaps_and_overlaps),
        cmocka_unit_test(test_two_of_one_name),
        cmocka_unit_test(test_nul_in_names),
        cmocka_unit_test(test_control_characters),
        cmocka_unit_test(test_boxes),
        cmocka_unit_test(test_wrong_boxes),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_damaged),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
