/* SPDX-License-Identifier: Apache-2.0 */

/* Ranges of a tensor's elements are cut into boxes. Tests every range of many shapes, element by element. */

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/box.h"
#include "tests/group.h"

enum { MAX_ELEMS = 256 };

struct shape {
    uint32_t n_dims;
    uint64_t dims[5];
};

static const struct shape shapes[] = {
    {0, {0}},       {1, {1}},       {1, {7}},          {2, {3, 5}},          {2, {1, 6}},          {2, {6, 1}},
    {3, {2, 3, 4}}, {3, {1, 4, 1}}, {4, {2, 3, 2, 3}}, {5, {2, 2, 2, 2, 2}}, {5, {1, 3, 1, 2, 3}}, {3, {5, 1, 3}},
};

static uint64_t count(const struct shape *shape)
{
    uint64_t n = 1;

    for (uint32_t d = 0; d < shape->n_dims; d++)
        n *= shape->dims[d];
    return n;
}

/* Return: whether the box contains the element. Compares its indices. */
static bool is_inside(const struct shape *shape, const struct box *box, uint64_t elem)
{
    for (uint32_t d = shape->n_dims; d-- > 0;) {
        uint64_t index = elem % shape->dims[d];

        if (index < box->offset[d] || index >= box->offset[d] + box->shape[d])
            return false;
        elem /= shape->dims[d];
    }
    return true;
}

static void check_range(const struct shape *shape, uint64_t first, uint64_t end)
{
    struct box boxes[BOX_MAX];
    size_t n = box_cut(shape->dims, shape->n_dims, first, end, boxes);
    uint64_t at = first;

    assert_true(n <= MAX(2 * shape->n_dims, 2U) - 1);
    for (size_t i = 0; i < n; i++) {
        struct box again = boxes[i];

        assert_int_equal(boxes[i].first_elem, at);
        at += boxes[i].n_elems;
        again.first_elem = again.n_elems = MAX_ELEMS;
        assert_true(box_is_range(shape->dims, shape->n_dims, &again));
        assert_memory_equal(&again, &boxes[i], sizeof(again));
        for (uint64_t elem = 0; elem < count(shape); elem++)
            assert_int_equal(is_inside(shape, &boxes[i], elem), elem >= boxes[i].first_elem && elem < at);
    }
    assert_int_equal(at, end);
}

static void test_every_range(void **state)
{
    for (size_t s = 0; s < ARRAY_SIZE(shapes); s++)
        for (uint64_t first = 0; first < count(&shapes[s]); first++)
            for (uint64_t end = first; end <= count(&shapes[s]); end++)
                check_range(&shapes[s], first, end);
}

static void test_most_boxes(void **state)
{
    uint64_t shape[LAYOUT_MAX_DIMS];
    struct box boxes[BOX_MAX];

    for (size_t d = 0; d < LAYOUT_MAX_DIMS; d++)
        shape[d] = 3;
    assert_int_equal(box_cut(shape, LAYOUT_MAX_DIMS, 1, 43046720, boxes),
                     BOX_MAX); /* all elements of 3^16 except the first and last */
}

static void test_no_ranges(void **state)
{
    static const struct box wrong[] = {
        {.offset = {0, 1, 0}, .shape = {2, 1, 4}}, /* rows of two planes */
        {.offset = {0, 0, 1}, .shape = {1, 2, 3}}, /* parts of two rows */
        {.offset = {1, 0, 0}, .shape = {2, 3, 4}}, /* beyond the end */
        {.offset = {3, 0, 0}, .shape = {0, 3, 4}},          {.offset = {UINT64_MAX, 0, 0}, .shape = {2, 3, 4}},
        {.offset = {1, 0, 0}, .shape = {UINT64_MAX, 3, 4}},
    };

    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct box box = wrong[i];

        assert_false(box_is_range((uint64_t[]){2, 3, 4}, 3, &box));
    }
}

TEST_GROUP(box)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_range),
        cmocka_unit_test(test_most_boxes),
        cmocka_unit_test(test_no_ranges),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
