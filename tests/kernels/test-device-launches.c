/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tests, only on the CPU, which launches the device's launchers put on a stream, and their errors when a launch is
 * refused.
 */

#include "kernels/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Launches run at once, or are refused. */
static struct {
    unsigned n_launched;
    unsigned n_freed;
    unsigned refuse_at; /* which launch to refuse, from 1; 0: none */
} stream;

/* The loaded kernels. */
static struct {
    const void *kernels[128];
    unsigned n_kernels;
    unsigned refuse_at; /* which kernel to refuse, from 1; 0: none */
} loaded;

extern __thread uint64_t sim_turns;
__thread uint64_t sim_turns;
void sim_stop(void);
int sim_load(const void *kernel);
void sim_check_loaded(const void *kernel);

void sim_stop(void)
{
    fail();
}

int sim_load(const void *kernel)
{
    if (loaded.n_kernels + 1 == loaded.refuse_at)
        return 209;
    assert_true(loaded.n_kernels < sizeof(loaded.kernels) / sizeof(*loaded.kernels));
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

/* Each kernel is loaded once. Loading ends with the first kernel that is refused. */
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

/* Launches every kernel. sim_check_loaded() asserts that each of them is loaded. */
static void test_all_launches(void **state)
{
    static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_SIGNED8};
    struct device_update_range update = {0};
    struct update_scalars scalars = {0};
    struct device_position_range position = {0};
    struct device_convert_range convert = {0};
    struct device_chunk chunk = {0, 0};
    struct position_sum sum;
    float matrix = 3, x = 0;
    double norm_sum;
    uint64_t mark = 0;
    unsigned before = stream.n_launched;

    for (unsigned i = 0; i < 6 * DEVICE_N_UPDATES; i++) {
        struct device_update_list list = {.ranges = &update,
                                          .chunks = &chunk,
                                          .scalars = &scalars,
                                          .n_chunks = 1,
                                          .optimizer = i / 6,
                                          .moments = {.dtype = types[i / 2 % 3]}};

        if (i % 2 == 1)
            list.undo = (struct device_update_undo){.marks = &mark, .tag = 1 + i, .slot_bytes = 6144};
        assert_int_equal(device_update(NULL, &list), 0);
    }
    assert_true(mark != 0); /* undo slots need no further launch */
    assert_int_equal(
        device_position_sums(NULL,
                             &(struct device_position_list){
                                 .ranges = &position, .chunks = &chunk, .sums = &sum, .n_ranges = 1, .n_chunks = 1}),
        0);
    for (unsigned i = 0; i < 2; i++)
        assert_int_equal((i ? device_convert_to_f32 : device_convert_from_f32)(
                             NULL, &(struct device_convert_list){.ranges = &convert, .chunks = &chunk, .n_chunks = 1}),
                         0);
    assert_int_equal(stream.n_launched, before + 6 * DEVICE_N_UPDATES + 2 + 2); /* each sum is cleared first */
    assert_int_equal(
        device_normalize(NULL, &(struct device_normalize){.x = &x, .matrix = &matrix, .sums = &norm_sum, .n_elems = 1}),
        0);
    assert_true(x == 1);
    assert_int_equal(stream.n_launched, before + 6 * DEVICE_N_UPDATES + 2 + 2 + 2);
}

/* An empty list launches nothing. A list of ranges without elements still sets their results. */
static void test_empty(void **state)
{
    struct device_reduce_range range = {.n_leaves = 1};
    struct device_leaf leaf = {0};
    struct exact_sum squares, zero = {0};
    struct device_finding found[2], none[2] = {0};
    struct device_reduce_list list = {.ranges = &range,
                                      .leaves = &leaf,
                                      .squares = &squares,
                                      .findings = &found[0],
                                      .overflows = &found[1],
                                      .n_ranges = 1,
                                      .n_leaves = 1};
    unsigned before = stream.n_launched;

    assert_int_equal(device_reduce(NULL, &(struct device_reduce_list){0}), 0);
    assert_int_equal(device_position_sums(NULL, &(struct device_position_list){0}), 0);
    for (unsigned i = 0; i < DEVICE_N_UPDATES; i++)
        assert_int_equal(device_update(NULL, &(struct device_update_list){.optimizer = i}), 0);
    assert_int_equal(device_convert_to_f32(NULL, &(struct device_convert_list){0}), 0);
    assert_int_equal(device_convert_from_f32(NULL, &(struct device_convert_list){0}), 0);
    assert_int_equal(device_normalize(NULL, &(struct device_normalize){0}), 0);
    assert_int_equal(stream.n_launched, before);

    memset(&squares, 0xee, sizeof(squares));
    memset(found, 0xee, sizeof(found));
    device_reduce_fill(&list, &range, &leaf, NULL);
    assert_int_equal(device_reduce(NULL, &list), 0);
    assert_memory_equal(&squares, &zero, sizeof(zero));
    assert_memory_equal(found, none, sizeof(none));
    assert_int_equal(stream.n_launched, before + 1);
}

/* The error of a refused launch is returned, and no launch follows it. */
static void test_refused(void **state)
{
    float out = 1, pushed = 2;
    struct device_reduce_range range = {.out = &out, .n_elems = 1, .n_leaves = 1, .first = true};
    struct device_leaf leaf = {.data = &pushed};
    struct device_chunk chunk;
    struct exact_sum squares;
    struct device_finding found[2];
    struct device_reduce_list list = {.ranges = &range,
                                      .leaves = &leaf,
                                      .chunks = &chunk,
                                      .squares = &squares,
                                      .findings = &found[0],
                                      .overflows = &found[1],
                                      .n_ranges = 1,
                                      .n_leaves = 1};
    unsigned before = stream.n_launched;

    device_reduce_fill(&list, &range, &leaf, &chunk);
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

/* A list of ranges with any number of leaves, at aligned or unaligned addresses. */
struct many {
    _Alignas(16) float out[8][64];
    _Alignas(16) uint16_t pushed[REDUCE_MAX_LEAVES][64 + 1];
    struct device_reduce_range ranges[8];
    struct device_leaf leaves[8 * REDUCE_MAX_LEAVES];
    struct device_chunk chunks[8];
    struct exact_sum squares[8];
    struct device_finding findings[8 * REDUCE_MAX_LEAVES], overflows[8];
    struct device_reduce_list list;
};

static void many_init(struct many *many)
{
    memset(many, 0, sizeof(*many));
    many->list = (struct device_reduce_list){.ranges = many->ranges,
                                             .leaves = many->leaves,
                                             .chunks = many->chunks,
                                             .squares = many->squares,
                                             .findings = many->findings,
                                             .overflows = many->overflows};
}

static void many_add(struct many *many, enum dtype dtype, unsigned n_leaves, const bool *present, unsigned world,
                     unsigned shift)
{
    const void *data[REDUCE_MAX_LEAVES];
    struct reduce_join joins[REDUCE_MAX_LEAVES];
    struct device_reduce_list *list = &many->list;

    assert_int_equal(reduce_joins(present, world, joins) + 1, n_leaves);
    for (unsigned i = 0; i < n_leaves; i++)
        data[i] = (const char *)many->pushed + i * 128 + shift;
    many->ranges[list->n_ranges] = (struct device_reduce_range){.out = many->out[list->n_ranges],
                                                                .n_elems = 64,
                                                                .first_leaf = list->n_leaves,
                                                                .n_leaves = (uint16_t)n_leaves,
                                                                .dtype = (uint8_t)dtype,
                                                                .first = true};
    device_leaves_fill(&many->leaves[list->n_leaves], data, n_leaves, joins);
    list->n_leaves += n_leaves;
    list->n_ranges++;
}

/*
 * Chunks of one kernel are together, whatever the order of the ranges. A list for one kernel is a clear and a launch.
 */
static void test_trees(void **state)
{
    static const bool two_of_four[4] = {true, false, false, true}, five_of_eight[8] = {true, true, true, true, true};
    static const uint32_t order[] = {2, 0, 4, 1, 3, 5, 6};
    struct many *many = test_malloc(sizeof(*many));
    unsigned before = stream.n_launched;

    many_init(many);
    for (unsigned i = 0; i < 3; i++)
        many_add(many, DTYPE_BF16, 4, NULL, 4, 0);
    device_reduce_fill(&many->list, many->ranges, many->leaves, many->chunks);
    assert_int_equal(many->list.n_chunks_of[DTYPE_BF16][DEVICE_TREE_4], 3);
    assert_int_equal(device_reduce(NULL, &many->list), 0);
    assert_int_equal(stream.n_launched, before + 2);

    many_init(many);
    many_add(many, DTYPE_BF16, 2, two_of_four, 4, 0); /* a tree of two leaves, like any other */
    many_add(many, DTYPE_BF16, 4, NULL, 4, 2);        /* unaligned */
    many_add(many, DTYPE_F32, 1, NULL, 1, 0);
    many_add(many, DTYPE_BF16, 5, five_of_eight, 8, 0);
    many_add(many, DTYPE_BF16, 2, NULL, 2, 0);
    many_add(many, DTYPE_F16, 8, NULL, 8, 0);
    many_add(many, DTYPE_F16, 1, NULL, 1, 0);
    many->ranges[6].out++;
    device_reduce_fill(&many->list, many->ranges, many->leaves, many->chunks);
    assert_int_equal(many->list.n_chunks, 7);
    for (unsigned i = 0; i < 7; i++)
        assert_int_equal(many->chunks[i].range, order[i]);
    assert_int_equal(many->list.n_chunks_of[DTYPE_F32][DEVICE_TREE_1], 1);
    assert_int_equal(many->list.n_chunks_of[DTYPE_BF16][DEVICE_TREE_2], 2);
    assert_int_equal(many->list.n_chunks_of[DTYPE_BF16][DEVICE_TREE_OTHER], 2);
    assert_int_equal(many->list.n_chunks_of[DTYPE_F16][DEVICE_TREE_8], 1);
    assert_int_equal(many->list.n_chunks_of[DTYPE_F16][DEVICE_TREE_OTHER], 1);
    before = stream.n_launched;
    assert_int_equal(device_reduce(NULL, &many->list), 0);
    assert_int_equal(stream.n_launched, before + 6);
    test_free(many);
}

/* One launch writes all words. An empty list launches nothing. */
static void test_words(void **state)
{
    uint64_t words[DEVICE_MAX_WORDS + 1] = {0};
    struct device_words list = {.n = 0};
    unsigned before = stream.n_launched;

    assert_int_equal(device_write_words(NULL, &list), 0);
    assert_int_equal(stream.n_launched, before);
    for (unsigned i = 0; i < DEVICE_MAX_WORDS; i++) {
        list.words[i].at = &words[i];
        list.words[i].value = UINT64_MAX - i;
    }
    list.words[1].at = &words[0]; /* the later word wins */
    list.n = DEVICE_MAX_WORDS;
    assert_int_equal(device_write_words(NULL, &list), 0);
    assert_int_equal(stream.n_launched, before + 1);
    assert_true(words[0] == UINT64_MAX - 1 && words[1] == 0 && words[DEVICE_MAX_WORDS] == 0);
    for (unsigned i = 2; i < DEVICE_MAX_WORDS; i++)
        assert_true(words[i] == UINT64_MAX - i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_load),    cmocka_unit_test(test_all_launches), cmocka_unit_test(test_empty),
        cmocka_unit_test(test_refused), cmocka_unit_test(test_trees),        cmocka_unit_test(test_words),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
