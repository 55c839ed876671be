/* SPDX-License-Identifier: Apache-2.0 */

/* Manifests as ranks declare them: copies, limits, digests, differences, printing. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/manifest.h"
#include "tests/group.h"

static const uint64_t SHAPE[] = {64, 32};

static struct layout_decl entry(const char *name)
{
    return (struct layout_decl){
        .name = name,
        .name_len = strlen(name),
        .dtype = DTYPE_BF16,
        .trainable = true,
        .n_dims = 2,
        .shape = SHAPE,
    };
}

static void add(struct manifest *m, const char *name)
{
    struct layout_decl decl = entry(name);

    assert_int_equal(manifest_add(m, &decl), 0);
}

static void test_copies(void **state)
{
    struct manifest m = {0};
    char name[] = "layers.0.w";
    uint64_t shape[] = {64, 32};
    struct layout_decl decl = entry(name);

    (void)state;
    decl.shape = shape;
    assert_int_equal(manifest_add(&m, &decl), 0);
    name[0] = 'X';
    shape[0] = 1;
    assert_int_equal(m.n, 1);
    assert_string_equal(m.decls[0].name, "layers.0.w");
    assert_int_equal(m.decls[0].shape[0], 64);
    assert_true(m.n_bytes >= sizeof(struct layout_decl) + strlen(name) + sizeof(shape));
    manifest_deinit(&m);
    assert_null(m.decls);
    assert_int_equal(m.n_bytes, 0);
    manifest_deinit(&m); /* deinit of an empty manifest */
}

static void test_scalars_and_empty_names(void **state)
{
    struct manifest m = {0};

    (void)state;
    assert_int_equal(manifest_add(&m, &(struct layout_decl){.name = "", .n_dims = 0}), 0);
    assert_int_equal(manifest_add(&m, &(struct layout_decl){.name = NULL, .n_dims = 0}), 0);
    assert_string_equal(m.decls[1].name, "");
    assert_true(manifest_entry_equal(&m.decls[0], &m.decls[1]));
    assert_true(manifest_digest(&m) != 0);
    manifest_deinit(&m);
}

static void test_growth(void **state)
{
    struct manifest a = {0}, b = {0};
    char name[32];

    (void)state;
    for (unsigned i = 0; i < 1000; i++) {
        snprintf(name, sizeof(name), "layers.%u.w", i);
        add(&a, name);
        add(&b, name);
    }
    assert_int_equal(a.n, 1000);
    assert_string_equal(a.decls[999].name, "layers.999.w");
    assert_int_equal(manifest_digest(&a), manifest_digest(&b));
    assert_int_equal(manifest_first_difference(&a, &b), UINT32_MAX);
    manifest_deinit(&a);
    manifest_deinit(&b);
}

static void test_full_by_bytes(void **state)
{
    struct manifest m = {0};
    struct layout_decl decl = entry("w");
    uint64_t before;

    (void)state;
    add(&m, "w");
    before = m.n_bytes;
    m.n_bytes = MANIFEST_MAX_BYTES - before; /* as if other parameters filled it */
    assert_int_equal(manifest_add(&m, &decl), 0);
    assert_int_equal(m.n_bytes, MANIFEST_MAX_BYTES);
    assert_int_equal(manifest_add(&m, &decl), MANIFEST_E_FULL);
    assert_int_equal(m.n, 2);
    manifest_deinit(&m);
}

static void test_full_by_count(void **state)
{
    struct manifest m = {.n = MANIFEST_MAX_PARAMS};
    struct layout_decl decl = entry("w");

    (void)state;
    assert_int_equal(manifest_add(&m, &decl), MANIFEST_E_FULL);
    assert_null(m.decls);
}

/* Each field changes the digest, and is found as the first difference. */
static void test_every_field_counts(void **state)
{
    static const uint64_t other_shape[] = {32, 64};
    struct layout_decl variants[9];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(variants); i++)
        variants[i] = entry("w");
    variants[1].name = "v";
    variants[2].dtype = DTYPE_F16;
    variants[3].grad_dtype = DTYPE_F16;
    variants[4].group = 1;
    variants[5].trainable = false;
    variants[6].n_dims = 1;
    variants[7].shape = other_shape;
    variants[8].muon = true;
    for (size_t i = 0; i < ARRAY_SIZE(variants); i++) {
        for (size_t k = 0; k < ARRAY_SIZE(variants); k++) {
            struct manifest a = {0}, b = {0};

            add(&a, "first");
            add(&b, "first");
            assert_int_equal(manifest_add(&a, &variants[i]), 0);
            assert_int_equal(manifest_add(&b, &variants[k]), 0);
            assert_int_equal(manifest_digest(&a) == manifest_digest(&b), i == k);
            assert_int_equal(manifest_first_difference(&a, &b), i == k ? UINT32_MAX : 1);
            manifest_deinit(&a);
            manifest_deinit(&b);
        }
    }
}

/* The digest depends on where a name ends: "ab", "c" differs from "a", "bc". */
static void test_borders_count(void **state)
{
    struct manifest a = {0}, b = {0}, c = {0};

    (void)state;
    add(&a, "ab");
    add(&a, "c");
    add(&b, "a");
    add(&b, "bc");
    add(&c, "c");
    add(&c, "ab");
    assert_true(manifest_digest(&a) != manifest_digest(&b));
    assert_true(manifest_digest(&a) != manifest_digest(&c));
    assert_int_equal(manifest_first_difference(&a, &c), 0);
    manifest_deinit(&a);
    manifest_deinit(&b);
    manifest_deinit(&c);
}

static void test_prefix(void **state)
{
    struct manifest a = {0}, b = {0}, empty = {0};

    (void)state;
    add(&a, "u");
    add(&b, "u");
    add(&b, "v");
    assert_int_equal(manifest_first_difference(&a, &b), 1);
    assert_int_equal(manifest_first_difference(&b, &a), 1);
    assert_int_equal(manifest_first_difference(&empty, &a), 0);
    assert_int_equal(manifest_first_difference(&empty, &empty), UINT32_MAX);
    assert_true(manifest_digest(&a) != manifest_digest(&b));
    manifest_deinit(&a);
    manifest_deinit(&b);
}

static void test_print(void **state)
{
    struct layout_decl decl = entry("layers.0.w");
    char text[128];

    (void)state;
    manifest_print_entry(text, sizeof(text), &decl);
    assert_string_equal(text, "layers.0.w [64, 32] bf16, gradient fp32, group 0, trainable");
    decl.muon = true;
    manifest_print_entry(text, sizeof(text), &decl);
    assert_string_equal(text, "layers.0.w [64, 32] bf16, gradient fp32, group 0, trainable, by Muon");
    decl.muon = false;
    decl.n_dims = 0;
    decl.trainable = false;
    decl.group = 7;
    decl.dtype = DTYPE_F16;
    decl.grad_dtype = DTYPE_BF16;
    manifest_print_entry(text, sizeof(text), &decl);
    assert_string_equal(text, "layers.0.w [] fp16, gradient bf16, group 7, frozen");
}

/*
 * Unprintable bytes are escaped. If the text is too long, the name is cut, then the end; nothing is written beyond it.
 */
static void test_print_odd_and_long(void **state)
{
    struct layout_decl decl = entry("a\n\xff");
    char text[128];

    (void)state;
    manifest_print_entry(text, sizeof(text), &decl);
    assert_string_equal(text, "a\\x0a\\xff [64, 32] bf16, gradient fp32, group 0, trainable");
    decl = entry("a.rather.long.name");
    for (size_t size = 0; size < sizeof(text); size++) {
        memset(text, '#', sizeof(text));
        manifest_print_entry(text, size, &decl);
        assert_true(size == 0 || memchr(text, '\0', size));
        assert_int_equal(text[size], '#');
    }
    manifest_print_entry(text, 62, &decl);
    assert_string_equal(text, "a.rather.... [64, 32] bf16, gradient fp32, group 0, trainable");
}

TEST_GROUP(manifest)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),        cmocka_unit_test(test_scalars_and_empty_names),
        cmocka_unit_test(test_growth),        cmocka_unit_test(test_full_by_bytes),
        cmocka_unit_test(test_full_by_count), cmocka_unit_test(test_every_field_counts),
        cmocka_unit_test(test_borders_count), cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_print),         cmocka_unit_test(test_print_odd_and_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
