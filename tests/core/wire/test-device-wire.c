/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Packing and unpacking of the messages between zerod and the engine on GPUs, and of its plans. Invalid plans are
 * refused.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/wire/device-plan.h"
#include "core/wire/device-wire.h"
#include "core/wire/frame.h"
#include "core/wire/wire-arena.h"
#include "core/wire/wire.h"
#include "tests/core/wire/device-examples.h"
#include "tests/group.h"

static struct wire_arena arena;
static uint8_t packets[2][FRAME_MAX_BYTES];
static char why[WIRE_WHY_BYTES];

static int setup(void **state)
{
    return wire_arena_init(&arena);
}

static int teardown(void **state)
{
    wire_arena_deinit(&arena);
    return 0;
}

/* Packs, unpacks and packs the command again, and asserts that both packets are equal. Return: the unpacked command. */
static struct device_command around(const struct device_command *command)
{
    int n = device_pack_command(&arena, command, packets[0], sizeof(packets[0]));
    struct device_command got;

    assert_in_range(n, 1, sizeof(packets[0]));
    assert_int_equal(device_unpack_command(&arena, packets[0], (size_t)n, &got, why, sizeof(why)), 0);
    assert_int_equal(got.type, command->type);
    assert_int_equal(device_pack_command(&arena, &got, packets[1], sizeof(packets[1])), n);
    assert_memory_equal(packets[0], packets[1], n);
    return got;
}

static void test_commands(void **state)
{
    struct device_command got;
    uint64_t tag;
    uint32_t timeout_ms;

    for (unsigned type = 1; type < N_DEVICE_COMMAND_TYPES; type++) {
        got = around(&device_example_commands[type]);
        assert_int_equal(device_command_order(&got, &tag, &timeout_ms),
                         type >= DEVICE_COMMAND_REDUCE && type <= DEVICE_COMMAND_FETCH);
    }
    got = around(&device_example_commands[DEVICE_COMMAND_SETUP]);
    assert_true(got.setup.generation == 70000 && got.setup.node == 2 && got.setup.n_nodes == 3);
    assert_true(got.setup.plan_bytes == 4096 && got.setup.inputs_bytes == 8192);
    assert_true(got.setup.results_bytes == UINT64_C(1) << 33 && got.setup.connect_timeout_ms == 15000);
    got = around(&device_example_commands[DEVICE_COMMAND_UPDATE]);
    assert_true(got.update.tag == 11 && got.update.timeout_ms == 30000 && got.update.step == 77);
    got = around(&device_example_commands[DEVICE_COMMAND_REDUCE]);
    assert_true(got.reduce.n_slots == 2 && got.reduce.slots[0].point == UINT64_C(200) << 40);
    assert_true(got.reduce.slots[1].offset_bytes == UINT64_C(1) << 33 && got.reduce.give_only);
    got = around(&device_example_commands[DEVICE_COMMAND_COPY]);
    assert_true(got.copy.aside);
    assert_true(got.copy.n_moves == 2 && got.copy.moves[0].write && got.copy.moves[0].segment == 7);
    assert_true(got.copy.moves[1].n_bytes == UINT64_C(1) << 39 && got.copy.moves[1].segment_offset_bytes == 3);
    got = around(&device_example_commands[DEVICE_COMMAND_FETCH]);
    assert_true(got.fetch.tag == 14 && got.fetch.collective == 15 && got.fetch.rank == 1023 && got.fetch.n_params == 2);
    assert_true(got.fetch.params[0].param == 3 && got.fetch.params[0].offset_bytes == 256);
    assert_true(got.fetch.params[1].param == 70000 && got.fetch.params[1].offset_bytes == UINT64_C(1) << 40);
    got = around(&device_example_commands[DEVICE_COMMAND_MEMORY]);
    assert_int_equal(device_memory_n_fds(&got.memory), 1);
}

static void test_reports(void **state)
{
    struct device_report got;

    for (unsigned type = 1; type < N_DEVICE_REPORT_TYPES; type++) {
        int n = device_pack_report(&arena, &device_example_reports[type], packets[0], sizeof(packets[0]));

        assert_in_range(n, 1, sizeof(packets[0]));
        assert_int_equal(device_unpack_report(&arena, packets[0], (size_t)n, &got, why, sizeof(why)), 0);
        assert_int_equal(got.type, type);
        assert_int_equal(device_pack_report(&arena, &got, packets[1], sizeof(packets[1])), n);
        assert_memory_equal(packets[0], packets[1], n);
        if (type == DEVICE_REPORT_FAILED) {
            assert_string_equal(got.failed.what, device_example_reports[type].failed.what);
            assert_true(got.failed.has_tag && got.failed.tag == UINT64_C(1) << 63);
        }
    }
}

static void refuse(const struct device_command *command, const char *expected)
{
    struct device_command got;
    int n = device_pack_command(&arena, command, packets[0], sizeof(packets[0]));

    assert_in_range(n, 1, sizeof(packets[0]));
    assert_int_equal(device_unpack_command(&arena, packets[0], (size_t)n, &got, why, sizeof(why)), WIRE_E_INVALID);
    assert_string_equal(why, expected);
}

static void test_refusals(void **state)
{
    struct device_command command = device_example_commands[DEVICE_COMMAND_SETUP];
    struct device_slot slots[2] = {{.local_rank = 1}, {.local_rank = 1}};
    struct device_piece pieces[2] = {{.kind = DEVICE_UNDO}, {.kind = DEVICE_UNDO}};
    struct device_fetched unaligned = {1, 128};

    command.setup.version = 1;
    refuse(&command, "DeviceSetup.version: 1, expected 4 to 4");
    command = device_example_commands[DEVICE_COMMAND_SETUP];
    command.setup.node = 3;
    refuse(&command, "DeviceSetup.node: 3, expected less than n_nodes, 3");
    command = device_example_commands[DEVICE_COMMAND_REDUCE];
    command.reduce.slots = slots;
    refuse(&command, "DeviceReduce.slots[1].local_rank: 1 twice");
    slots[0].offset_bytes = 64;
    refuse(&command, "DeviceReduce.slots[0].offset_bytes: 64, expected a multiple of 128");
    command = device_example_commands[DEVICE_COMMAND_MEMORY];
    command.memory.pieces = pieces;
    refuse(&command, "DeviceMemory.pieces[1].kind: 4 twice");
    command = device_example_commands[DEVICE_COMMAND_COPY];
    command.copy.n_moves = 0;
    refuse(&command, "DeviceCopy.moves: none, expected at least one");
    command = device_example_commands[DEVICE_COMMAND_UPDATE];
    command.update.step = 0;
    refuse(&command, "DeviceUpdate.step: 0, expected at least 1");
    command = device_example_commands[DEVICE_COMMAND_GATHER];
    command.gather.n_buckets = 0;
    refuse(&command, "DeviceGather.n_buckets: 0, expected at least 1");
    command = device_example_commands[DEVICE_COMMAND_FETCH];
    command.fetch.n_params = 0;
    refuse(&command, "DeviceFetch.params: none, expected at least one");
    command.fetch.params = &unaligned;
    command.fetch.n_params = 1;
    refuse(&command, "DeviceFetch.params[0].offset_bytes: 128, expected a multiple of 256");
    command.fetch.rank = DEVICE_MAX_WORLD;
    refuse(&command, "DeviceFetch.rank: 1024, expected 0 to 1023");
}

/* The largest order fits into a frame, as the assertions in device-wire.c claim. */
static void test_largest_fetch(void **state)
{
    struct device_fetched *fetched = calloc(DEVICE_MAX_FETCHES, sizeof(*fetched));
    struct device_command command = {.type = DEVICE_COMMAND_FETCH,
                                     .fetch = {.tag = DEVICE_MAX_TAG,
                                               .timeout_ms = UINT32_MAX,
                                               .collective = UINT64_MAX,
                                               .rank = DEVICE_MAX_WORLD - 1,
                                               .params = fetched,
                                               .n_params = DEVICE_MAX_FETCHES}};

    assert_non_null(fetched);
    for (size_t i = 0; i < DEVICE_MAX_FETCHES; i++)
        fetched[i] = (struct device_fetched){UINT32_MAX, DEVICE_MAX_BYTES};
    assert_int_equal(around(&command).fetch.n_params, DEVICE_MAX_FETCHES);
    free(fetched);
}

static void test_largest(void **state)
{
    struct device_move *moves = calloc(DEVICE_MAX_MOVES, sizeof(*moves));
    struct device_command command = {
        .type = DEVICE_COMMAND_COPY,
        .copy = {.tag = DEVICE_MAX_TAG, .timeout_ms = UINT32_MAX, .moves = moves, .n_moves = DEVICE_MAX_MOVES}};

    assert_non_null(moves);
    for (size_t i = 0; i < DEVICE_MAX_MOVES; i++)
        moves[i] = (struct device_move){true,
                                        DEVICE_MAX_LOCAL - 1,
                                        DEVICE_N_PIECES - 1,
                                        DEVICE_MAX_BYTES,
                                        DEVICE_MAX_SEGMENTS - 1,
                                        DEVICE_MAX_BYTES,
                                        DEVICE_MAX_BYTES,
                                        UINT64_MAX};
    assert_int_equal(around(&command).copy.n_moves, DEVICE_MAX_MOVES);
    free(moves);
}

/* ---- plans ----------------------------------------------------------------------------------------------- */

static struct layout *make_layout(enum dtype dtype)
{
    static const uint64_t shapes[] = {300000, 65, 1000};
    struct layout_decl decls[ARRAY_SIZE(shapes)];
    struct layout *layout;
    uint32_t bad;

    for (size_t i = 0; i < ARRAY_SIZE(shapes); i++)
        decls[i] = (struct layout_decl){.name = (const char *[]){"a", "b", "c"}[i],
                                        .name_len = 1,
                                        .trainable = i != 2,
                                        .dtype = dtype,
                                        .n_dims = 1,
                                        .shape = &shapes[i]};
    assert_int_equal(layout_new(&layout, decls, ARRAY_SIZE(shapes), 3, 1000, &bad), 0);
    return layout;
}

/* Computes places, slices and owners from an accepted plan, and asserts that all are in range. */
static void use_plan(const struct device_plan *plan)
{
    struct device_rank_places places;
    uint64_t begin, end;

    assert_int_equal(device_rank_places_init(&places, plan, 0), 0);
    device_rank_places_deinit(&places);
    for (uint32_t k = 0; k < plan->head->n_parcels; k++)
        device_parcel_slice(plan, k, plan->head->first_local, &begin, &end);
    for (uint32_t p = 0; p < plan->head->n_params; p++) {
        unsigned first, last;

        device_param_owners(plan, p, &first, &last);
        assert_true(last <= plan->head->world_size);
        device_param_slice(plan, p, plan->head->first_local, &begin, &end);
        assert_true(begin <= end && end <= plan->params[p].n_elems);
    }
}

/* Each element of a parameter has one owner. Frozen slices follow one another in the state. */
static void test_slices(void **state)
{
    struct layout *layout = make_layout(DTYPE_F32);
    struct device_plan_options options = {
        .layout = layout, .stage = 3, .n_local = 3, .moments = {true, true}, .pool_bytes = 1 << 20};
    struct device_plan plan;
    struct device_rank_places places;
    uint64_t state_bytes, *memory;

    memory = calloc(1, device_plan_bytes(&options));
    assert_non_null(memory);
    device_plan_write(&options, memory);
    assert_int_equal(device_plan_open(&plan, memory, device_plan_bytes(&options), why, sizeof(why)), 0);
    assert_int_equal(device_rank_places_init(&places, &plan, 0), 0);
    assert_true(places.piece_bytes[DEVICE_POOL] == 1 << 20);
    assert_true(places.piece_bytes[DEVICE_WEIGHTS] == DEVICE_ALIGN_BYTES);
    for (uint32_t p = 0; p < 3; p++) {
        uint64_t next = 0;
        unsigned first, last;

        device_param_owners(&plan, p, &first, &last);
        for (unsigned rank = 0; rank < 3; rank++) {
            uint64_t begin, end;

            device_param_slice(&plan, p, rank, &begin, &end);
            assert_int_equal(begin < end, rank >= first && rank < last);
            if (begin < end)
                assert_int_equal(begin, next);
            next = begin < end ? end : next;
        }
        assert_int_equal(next, plan.params[p].n_elems);
    }
    /* 1,000 elements over three ranks are at most 384 for each, in fp32. They are the last array of the state. */
    assert_true(places.frozen[0] == DEVICE_NONE && places.frozen[1] == DEVICE_NONE);
    state_bytes = places.piece_bytes[DEVICE_STATE];
    assert_int_equal(places.frozen[2] + 384 * sizeof(float), state_bytes);
    device_rank_places_deinit(&places);
    free(memory);
    layout_free(layout);
}

/* Opens a plan with these moments. Return: the places of bucket 0. Sets piece_bytes[DEVICE_N_PIECES]. */
static struct device_places places_with(const struct layout *layout, unsigned stage, struct optimizer_moments moments,
                                        uint64_t *piece_bytes)
{
    struct device_plan_options options = {.layout = layout, .stage = stage, .n_local = 3, .moments = moments};
    struct device_rank_places places;
    struct device_places first;
    struct device_plan plan;
    uint64_t *memory = calloc(1, device_plan_bytes(&options));

    assert_non_null(memory);
    device_plan_write(&options, memory);
    assert_int_equal(device_plan_open(&plan, memory, device_plan_bytes(&options), why, sizeof(why)), 0);
    assert_int_equal(device_plan_moments(&plan).dtype, moments.type.dtype);
    assert_int_equal(device_plan_moments(&plan).stochastic, moments.type.stochastic);
    assert_int_equal(device_rank_places_init(&places, &plan, 0), 0);
    first = places.buckets[0];
    memcpy(piece_bytes, places.piece_bytes, sizeof(places.piece_bytes));
    device_rank_places_deinit(&places);
    free(memory);
    return first;
}

/* Narrow moments need less state and smaller undo slots. Arrays begin at multiples of DEVICE_ALIGN_BYTES. */
static void test_moments(void **state)
{
    struct layout *layout = make_layout(DTYPE_F32);
    uint64_t fp32_bytes[DEVICE_N_PIECES], bf16_bytes[DEVICE_N_PIECES], eight_bytes[DEVICE_N_PIECES];
    struct device_places fp32, bf16, eight;

    fp32 = places_with(layout, 2, (struct optimizer_moments){true, true, {DTYPE_F32, false}}, fp32_bytes);
    bf16 = places_with(layout, 2, (struct optimizer_moments){true, true, {DTYPE_BF16, true}}, bf16_bytes);
    eight = places_with(layout, 2, (struct optimizer_moments){true, true, {DTYPE_SIGNED8, true}}, eight_bytes);
    assert_int_equal(fp32.exp_avg_sq - fp32.exp_avg, round_up(fp32.slice_elems * 4, DEVICE_ALIGN_BYTES));
    assert_int_equal(bf16.exp_avg_sq - bf16.exp_avg, round_up(bf16.slice_elems * 2, DEVICE_ALIGN_BYTES));
    assert_int_equal(eight.exp_avg_sq - eight.exp_avg, round_up(eight.slice_elems / 64 * 68, DEVICE_ALIGN_BYTES));
    assert_int_equal(bf16.exp_avg_sq % DEVICE_ALIGN_BYTES, 0);
    assert_true(bf16_bytes[DEVICE_STATE] < fp32_bytes[DEVICE_STATE] / 2 + 16 * DEVICE_ALIGN_BYTES);
    assert_int_equal(bf16_bytes[DEVICE_GRADIENT], fp32_bytes[DEVICE_GRADIENT]);
    assert_true(bf16_bytes[DEVICE_UNDO] < fp32_bytes[DEVICE_UNDO]);
    assert_true(eight_bytes[DEVICE_STATE] < bf16_bytes[DEVICE_STATE]);
    assert_true(eight_bytes[DEVICE_UNDO] < bf16_bytes[DEVICE_UNDO]);
    layout_free(layout);
}

/*
 * Masters of 24 bits are a byte each in stage 2. In stage 3 the weights are in the state as well. Only bf16 has such
 * masters.
 */
static void test_masters(void **state)
{
    const struct optimizer_moments wide = {.m = true}, narrow = {.m = true, .master24 = true};
    struct layout *layout = make_layout(DTYPE_BF16), *fp32 = make_layout(DTYPE_F32);
    uint64_t wide_bytes[DEVICE_N_PIECES], narrow_bytes[DEVICE_N_PIECES];
    struct device_places places;

    places = places_with(layout, 2, wide, wide_bytes);
    assert_true(places.lower == DEVICE_NONE && places.master != DEVICE_NONE);
    places = places_with(layout, 2, narrow, narrow_bytes);
    assert_true(places.lower != DEVICE_NONE && places.master == DEVICE_NONE);
    assert_int_equal(places.exp_avg - places.lower, round_up(places.slice_elems, DEVICE_ALIGN_BYTES));
    assert_true(narrow_bytes[DEVICE_STATE] < wide_bytes[DEVICE_STATE] * 5 / 8 + 16 * DEVICE_ALIGN_BYTES);
    places = places_with(layout, 3, narrow, narrow_bytes);
    assert_int_equal(places.lower - places.master, round_up(places.slice_elems * 2, DEVICE_ALIGN_BYTES));
    places_with(fp32, 2, wide, wide_bytes);
    places = places_with(fp32, 2, narrow, narrow_bytes);
    assert_true(places.lower == DEVICE_NONE && places.master == DEVICE_NONE);
    assert_int_equal(narrow_bytes[DEVICE_STATE], wide_bytes[DEVICE_STATE]);
    layout_free(layout);
    layout_free(fp32);
}

/* Types of moments for which there is no kernel are refused. */
static void test_unsound_moments(void **state)
{
    static const struct {
        uint32_t dtype, stochastic;
    } unsound[] = {{DTYPE_F16, 0}, {N_DTYPES, 0},      {DTYPE_BF16, 2},
                   {DTYPE_F32, 1}, {DTYPE_SIGNED8, 0}, {DTYPE_UNSIGNED8, 1}};
    struct layout *layout = make_layout(DTYPE_F32);
    struct device_plan_options options = {.layout = layout, .stage = 2, .n_local = 3, .moments = {true, true}};
    struct device_plan_header *head = calloc(1, device_plan_bytes(&options));
    struct device_plan plan;

    assert_non_null(head);
    device_plan_write(&options, head);
    for (size_t i = 0; i < ARRAY_SIZE(unsound); i++) {
        head->moments_dtype = unsound[i].dtype;
        head->stochastic = (uint8_t)unsound[i].stochastic;
        assert_int_equal(device_plan_open(&plan, head, device_plan_bytes(&options), why, sizeof(why)), -EINVAL);
    }
    device_plan_write(&options, head);
    assert_int_equal(device_plan_open(&plan, head, device_plan_bytes(&options), why, sizeof(why)), 0);
    head->master24 = 2;
    assert_int_equal(device_plan_open(&plan, head, device_plan_bytes(&options), why, sizeof(why)), -EINVAL);
    free(head);
    layout_free(layout);
}

/* Changes every byte of a plan. The plan is refused, or everything computed from it stays in range. */
static void break_plan(unsigned stage)
{
    struct layout *layout = make_layout(DTYPE_F32);
    struct device_plan_options options = {
        .layout = layout, .stage = stage, .first_local = 1, .n_local = 2, .moments = {true, true}, .ring_bytes = 4096};
    uint64_t n_bytes = device_plan_bytes(&options);
    uint8_t *memory = calloc(1, n_bytes);
    struct device_plan plan;
    unsigned n_refused = 0;

    assert_non_null(memory);
    device_plan_write(&options, memory);
    assert_int_equal(device_plan_open(&plan, memory, n_bytes, why, sizeof(why)), 0);
    assert_int_equal(device_plan_open(&plan, memory, n_bytes - 1, why, sizeof(why)), -EINVAL);
    assert_string_equal(why, "invalid plan: its header of version 7");
    for (uint64_t i = 0; i < n_bytes; i++) {
        memory[i] ^= 0x81;
        if (device_plan_open(&plan, memory, n_bytes, why, sizeof(why)) == 0)
            use_plan(&plan);
        else
            n_refused++;
        memory[i] ^= 0x81;
    }
    assert_true(n_refused > n_bytes / 4);
    free(memory);
    layout_free(layout);
}

static void test_broken_plans(void **state)
{
    break_plan(2);
    break_plan(3);
}

TEST_GROUP(device_wire)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_commands), cmocka_unit_test(test_reports),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_largest),  cmocka_unit_test(test_broken_plans), cmocka_unit_test(test_largest_fetch),
        cmocka_unit_test(test_slices),   cmocka_unit_test(test_moments),      cmocka_unit_test(test_unsound_moments),
        cmocka_unit_test(test_masters),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
