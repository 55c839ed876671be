/* SPDX-License-Identifier: Apache-2.0 */

/* The launches that the device's launchers put on a stream, and their errors when one is refused; on the CPU alone. */

#include "kernels/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Runs each launch at once, or refuses it. */
static struct {
    unsigned n_launched;
    unsigned n_freed;
    unsigned refuse_at; /* which of the launches, from 1; 0 for none */
} stream;

/* The kernels that are loaded. */
static struct {
    const void *kernels[32];
    unsigned n_kernels;
    unsigned refuse_at; /* which of them, from 1; 0 for none */
} loaded;

int sim_load(const void *kernel);
void sim_check_loaded(const void *kernel);

int sim_load(const void *kernel)
{
    if (loaded.n_kernels + 1 == loaded.refuse_at)
        return 209;
    loaded.kernels[loaded.n_kernels++] = kernel;
    return 0;
}

void sim_check_loaded(const void *kernel)
{
    bool found = false;

    for (unsigned i = 0; i < loaded.n_kernels; i++)
        found |= loaded.kernels[i] == kernel;
    assert_true(found);
}

int sim_launch(struct CUstream_st *unused, void (*run)(void *), void (*free_args)(void *), void *args);

int sim_launch(struct CUstream_st *unused, void (*run)(void *), void (*free_args)(void *), void *args)
{
    bool refused = ++stream.n_launched == stream.refuse_at;

    assert_null(unused);
    if (!refused)
        run(args);
    free_args(args);
    stream.n_freed++;
    return refused ? 719 : 0;
}

/* All kernels are loaded, each once; the first that is refused ends it. */
static void test_load(void **state)
{
    unsigned n_kernels;

    assert_int_equal(device_load_kernels(), 0);
    n_kernels = loaded.n_kernels;
    for (unsigned i = 0; i < n_kernels; i++)
        for (unsigned k = 0; k < i; k++)
            assert_ptr_not_equal(loaded.kernels[i], loaded.kernels[k]);
    for (unsigned i = 1; i <= n_kernels; i++) {
        loaded.n_kernels = 0;
        loaded.refuse_at = i;
        assert_int_equal(device_load_kernels(), 209);
        assert_int_equal(loaded.n_kernels, i - 1);
    }
    loaded.refuse_at = loaded.n_kernels = 0;
    assert_int_equal(device_load_kernels(), 0);
    assert_int_equal(loaded.n_kernels, n_kernels);
}

/* Every launch finds its kernel loaded: sim_check_loaded() */
static void test_all_launches(void **state)
{
    struct device_update_range update = {0};
    struct update_scalars scalars = {0};
    struct device_position_range position = {0};
    struct device_convert_range convert = {0};
    struct device_chunk chunk = {0, 0};
    struct position_sum sum;
    unsigned before = stream.n_launched;

    for (enum optimizer i = 0; i < N_OPTIMIZERS; i++)
        assert_int_equal(
            device_update(NULL,
                          &(struct device_update_list){
                              .ranges = &update, .chunks = &chunk, .scalars = &scalars, .n_chunks = 1, .optimizer = i}),
            0);
    assert_int_equal(
        device_position_sums(NULL,
                             &(struct device_position_list){
                                 .ranges = &position, .chunks = &chunk, .sums = &sum, .n_ranges = 1, .n_chunks = 1}),
        0);
    for (unsigned i = 0; i < 2; i++)
        assert_int_equal((i ? device_convert_to_f32 : device_convert_from_f32)(
                             NULL, &(struct device_convert_list){.ranges = &convert, .chunks = &chunk, .n_chunks = 1}),
                         0);
    assert_int_equal(stream.n_launched, before + N_OPTIMIZERS + 2 + 2); /* sums are cleared first */
}

/* Empty lists are no launch; a list of ranges without elements still gives them results. */
static void test_empty(void **state)
{
    struct device_reduce_range range = {.n_leaves = 1};
    struct device_leaf leaf = {0};
    struct exact_sum squares, zero = {0};
    struct device_reduce_list list = {
        .ranges = &range, .leaves = &leaf, .squares = &squares, .n_ranges = 1, .n_leaves = 1};
    unsigned before = stream.n_launched;

    assert_int_equal(device_reduce(NULL, &(struct device_reduce_list){0}), 0);
    assert_int_equal(device_find_nonfinite(NULL, &(struct device_reduce_list){0}, NULL, NULL), 0);
    assert_int_equal(device_position_sums(NULL, &(struct device_position_list){0}), 0);
    for (enum optimizer i = 0; i < N_OPTIMIZERS; i++)
        assert_int_equal(device_update(NULL, &(struct device_update_list){.optimizer = i}), 0);
    assert_int_equal(device_convert_to_f32(NULL, &(struct device_convert_list){0}), 0);
    assert_int_equal(device_convert_from_f32(NULL, &(struct device_convert_list){0}), 0);
    assert_int_equal(stream.n_launched, before);

    memset(&squares, 0xee, sizeof(squares));
    assert_int_equal(device_reduce(NULL, &list), 0);
    assert_memory_equal(&squares, &zero, sizeof(zero));
    assert_int_equal(stream.n_launched, before + 1);
}

/* A refused launch is the caller's to hear of, and nothing is launched behind it. */
static void test_refused(void **state)
{
    float out = 1, pushed = 2;
    struct device_reduce_range range = {.out = &out, .n_elems = 1, .n_leaves = 1, .first = true};
    struct device_leaf leaf = {.data = &pushed};
    struct device_chunk chunk = {0, 0};
    struct exact_sum squares;
    struct device_reduce_list list = {.ranges = &range,
                                      .leaves = &leaf,
                                      .chunks = &chunk,
                                      .squares = &squares,
                                      .n_ranges = 1,
                                      .n_leaves = 1,
                                      .n_chunks = 1};
    unsigned before = stream.n_launched;

    for (unsigned i = 1; i <= 2; i++) {
        stream.refuse_at = stream.n_launched + i;
        assert_int_equal(device_reduce(NULL, &list), 719);
        assert_int_equal(stream.n_launched, stream.refuse_at);
        assert_true(out == 1);
    }
    stream.refuse_at = 0;
    assert_int_equal(device_reduce(NULL, &list), 0);
    assert_true(out == 2);
    assert_int_equal(stream.n_launched, before + 5);
    assert_int_equal(stream.n_freed, stream.n_launched);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_all_launches),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
