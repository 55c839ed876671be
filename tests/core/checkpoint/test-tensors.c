/* SPDX-License-Identifier: Apache-2.0 */

/* Names of the files and tensors of a checkpoint. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/box.h"
#include "core/checkpoint/tensors.h"
#include "tests/group.h"

static void test_file_names(void **state)
{
    static const struct {
        enum tensor_file kind;
        int node;
        size_t box;
        const char *name;
    } rows[] = {
        {TENSOR_MODEL, -1, 0, "model.safetensors"},
        {TENSOR_OPTIMIZER, -1, 0, "optimizer.safetensors"},
        {TENSOR_RANKS, -1, 0, "ranks.safetensors"},
        {TENSOR_MODEL, 0, 0, "model-node0.safetensors"},
        {TENSOR_OPTIMIZER, 12, 0, "optimizer-node12.safetensors"},
        {TENSOR_RANKS, 1, 0, "ranks-node1.safetensors"},
        {TENSOR_MODEL, 1, 1, "model-node1-2.safetensors"},
        {TENSOR_OPTIMIZER, INT32_MAX, BOX_MAX - 1, "optimizer-node2147483647-31.safetensors"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        char name[TENSOR_FILE_BYTES];

        tensor_file_name(name, rows[i].kind, rows[i].node, rows[i].box);
        assert_string_equal(name, rows[i].name);
        assert_int_equal(tensor_file_kind(name), rows[i].kind);
    }
}

static void test_file_kinds(void **state)
{
    static const char *const others[] = {"",       "zerod.json",      "mode.safetensors",     "models.safetensors",
                                         "rank.0", "optimizer_state", "my-model.safetensors", "model"};

    (void)state;
    assert_int_equal(tensor_file_kind("model-00001-of-00002.safetensors"), TENSOR_MODEL);
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        if (tensor_file_kind(others[i]) != TENSOR_N_FILES)
            fail_msg("%s", others[i]);
}

/* Moments have torch's names, for each optimizer. */
static void test_tensor_names(void **state)
{
    char *name = tensor_state_name("layers.0.weight", TENSOR_STEP), rank[16];

    (void)state;
    assert_string_equal(name, "state.layers.0.weight.step");
    assert_string_equal(tensor_moment_key(OPTIMIZER_ADAMW, true), "exp_avg_sq");
    assert_string_equal(tensor_moment_key(OPTIMIZER_SGD, false), "momentum_buffer");
    assert_null(tensor_moment_key(OPTIMIZER_SGD, true));
    assert_null(tensor_moment_key(OPTIMIZER_ADAGRAD, false));
    tensor_rank_name(rank, sizeof(rank), 3);
    assert_string_equal(rank, "rank.3");
    assert_true(tensor_is_of_model("layers.0.weight"));
    assert_true(tensor_is_of_model(""));
    assert_false(tensor_is_of_model("(buffers)"));
    free(name);
}

TEST_GROUP(tensors)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_file_names),
        cmocka_unit_test(test_file_kinds),
        cmocka_unit_test(test_tensor_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
