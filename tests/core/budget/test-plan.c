/* SPDX-License-Identifier: Apache-2.0 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/budget/plan.h"
#include "core/budget/step-sizes.h"
#include "core/layout/layout.h"
#include "core/wire/device-plan.h"
#include "tests/group.h"

/* ---- the paper ----------------------------------------------------------------------------------------- */

/* Table 1 of the ZeRO paper (arXiv 1910.02054) as printed, in GB per device. */
struct row {
    unsigned ranks;
    const char *cells[3][3]; /* model x stage 1, 2, 3 */
};

static const double models[] = {7.5e9, 128e9, 1e12};

static const struct row table1[] = {
    {1, {{"120", "120", "120"}, {"2048", "2048", "2048"}, {"16000", "16000", "16000"}}},
    {4, {{"52.5", "41.3", "30"}, {"896", "704", "512"}, {"7000", "5500", "4000"}}},
    {16, {{"35.6", "21.6", "7.5"}, {"608", "368", "128"}, {"4750", "2875", "1000"}}},
    {64, {{"31.4", "16.6", "1.88"}, {"536", "284", "32"}, {"4187", "2218", "250"}}},
    {256, {{"30.4", "15.4", "0.47"}, {"518", "263", "8"}, {"4046", "2054", "62.5"}}},
    {1024, {{"30.1", "15.1", "0.12"}, {"513", "257", "2"}, {"4011", "2013", "15.6"}}},
};

/*
 * Rounds as the table does. The columns of the 7.5B model are rounded half up to one decimal, or to two in stage 3. The
 * other columns are cut to whole numbers, the very last one to one decimal. Trailing zeros are not printed.
 */
static void print_cell(char dst[32], size_t model, unsigned stage, double gb)
{
    double unit = 1;

    if (model == 0)
        unit = stage == 3 ? 100 : 10;
    else if (model == 2 && stage == 3)
        unit = 10;
    snprintf(dst, 32, "%.10g", floor(gb * unit + (model == 0 ? 0.5 : 0)) / unit);
}

static void test_table1(void **state)
{
    size_t n_cells = 0;

    for (size_t i = 0; i < ARRAY_SIZE(table1); i++) {
        for (size_t m = 0; m < ARRAY_SIZE(models); m++) {
            for (unsigned stage = 1; stage <= 3; stage++) {
                char text[32];

                print_cell(text, m, stage, plan_model_states(models[m], table1[i].ranks, stage));
                assert_string_equal(text, table1[i].cells[m][stage - 1]);
                n_cells++;
            }
        }
    }
    assert_int_equal(n_cells, 54);
}

static void check_gb(double n_params, unsigned ranks, unsigned stage, double expected)
{
    assert_true(fabs(plan_model_states(n_params, ranks, stage) - expected) <= 1e-9 * expected);
}

/* The expected values are worked out as fractions, and are exact in decimal. */
static void test_formulas(void **state)
{
    check_gb(7.5e9, 1, 0, 120);
    check_gb(7.5e9, 64, 0, 120);
    check_gb(7.5e9, 4, 2, 41.25);
    check_gb(7.5e9, 16, 1, 35.625);
    check_gb(7.5e9, 64, 1, 31.40625);
    check_gb(7.5e9, 64, 2, 16.640625);
    check_gb(7.5e9, 64, 3, 1.875);
    check_gb(7.5e9, 1024, 3, 0.1171875);
    check_gb(128e9, 1024, 1, 513.5);
    check_gb(128e9, 1024, 2, 257.75);
    check_gb(1e12, 64, 1, 4187.5);
    check_gb(1e12, 256, 2, 2054.6875);
    check_gb(1e12, 1024, 3, 15.625);
    check_gb(1, 3, 3, 16e-9 / 3);
}

/* Figure 1: 7.5B parameters on 64 devices. */
static void test_figure1(void **state)
{
    static const char *const expected[] = {"120.0", "31.4", "16.6", "1.9"};

    for (unsigned stage = 0; stage <= 3; stage++) {
        char text[32];

        snprintf(text, sizeof(text), "%.1f", plan_model_states(7.5e9, 64, stage));
        assert_string_equal(text, expected[stage]);
    }
}

/* ---- classes ------------------------------------------------------------------------------------------- */

#define DECL(text, n, ...)                                                                                             \
    {                                                                                                                  \
        .name = text, .name_len = sizeof(text) - 1, .shape = (const uint64_t[]){n}, .n_dims = 1, __VA_ARGS__           \
    }

static uint64_t pages(uint64_t n_bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    return (n_bytes + page - 1) / page * page;
}

static struct layout *make(const struct layout_decl *decls, uint32_t n, unsigned world_size, uint64_t bucket_elems)
{
    struct layout *layout = NULL;
    uint32_t bad;

    assert_int_equal(layout_new(&layout, decls, n, world_size, bucket_elems, &bad), 0);
    return layout;
}

static struct plan_bytes plan(const struct layout *layout, struct plan_options options)
{
    struct plan_bytes bytes;

    plan_bytes_by_class(layout, &options, &bytes);
    assert_true(bytes.needed ==
                bytes.state + bytes.gradient + bytes.ring + bytes.staging + bytes.weights + bytes.pool + bytes.fixed);
    assert_true(bytes.total == bytes.needed + bytes.overflow);
    return bytes;
}

/*
 * Four ranks, two of them on this node, which therefore owns half of everything. Bucket 0 is b, 20,224 padded elements
 * with bf16 weights and gradients. Bucket 1 is a, 10,240 of fp32. f has 5,003 frozen elements of bf16.
 */
static struct layout *make_mixed(void)
{
    const struct layout_decl decls[] = {
        DECL("a", 10000, .trainable = true),
        DECL("b", 20000, .trainable = true, .dtype = DTYPE_BF16, .grad_dtype = DTYPE_BF16),
        DECL("f", 5003, .dtype = DTYPE_BF16),
    };

    return make(decls, 3, 4, 1024);
}

static void test_stages(void **state)
{
    struct layout *layout = make_mixed();
    struct plan_options options = {.stage = 1, .n_moments = 2, .first_local_rank = 2, .n_local_ranks = 2};
    struct plan_bytes bytes;

    /*
     * State: moments of a and b, masters of b. Weights: b with room for 64 ranks (24,064 elements), a from the next
     * multiple of 4096 (14,080 elements), f.
     */
    bytes = plan(layout, options);
    assert_int_equal(bytes.state, pages(2 * 4 * (10112 + 5120) + 4 * 10112));
    assert_int_equal(bytes.gradient, pages(4 * (10112 + 5120)));
    assert_int_equal(bytes.ring, 2 << 20);
    assert_int_equal(bytes.overflow, 2 * pages(2 * 20224 + 4 * 10240));
    assert_int_equal(bytes.staging, 0);
    assert_int_equal(bytes.weights, pages(49152 + 4 * 14080 + 10006));
    assert_int_equal(bytes.pool, 0);

    options.stage = 2;
    bytes = plan(layout, options);
    assert_int_equal(bytes.state, pages(2 * 4 * (10112 + 5120) + 4 * 10112));
    assert_int_equal(bytes.gradient, pages(4 * (10112 + 5120)));
    assert_int_equal(bytes.weights, pages(49152 + 4 * 14080 + 10006));
    assert_int_equal(bytes.pool, 0);

    options.stage = 3;
    options.stage3_max_live_elems = 2000;
    bytes = plan(layout, options);
    assert_int_equal(bytes.state,
                     pages(3 * 4 * (10112 + 5120) + 10048)); /* f, 10,006 bytes rounded up to 64s, is on every node */
    assert_int_equal(bytes.gradient, pages(4 * (10112 + 5120)));
    assert_int_equal(bytes.weights, 0);
    assert_int_equal(bytes.pool, pages(2 * 2000 * 4));
    layout_free(layout);
}

/* a, and m of 20,000 elements in bf16. Muon updates m. */
static struct layout *make_with_matrix(void)
{
    const uint64_t shape[] = {100, 200};
    const struct layout_decl decls[] = {
        DECL("a", 10000, .trainable = true),
        {.name = "m",
         .name_len = 1,
         .dtype = DTYPE_BF16,
         .grad_dtype = DTYPE_F32,
         .trainable = true,
         .muon = true,
         .n_dims = 2,
         .shape = shape},
    };

    return make(decls, 2, 4, 1024);
}

/* The node of rank 0 owns all of Muon's bucket, which has no exp_avg_sq. */
static void test_muon(void **state)
{
    struct layout *layout = make_with_matrix();

    for (unsigned node = 0; node < 2; node++) {
        struct plan_options options = {.stage = 2, .n_moments = 2, .first_local_rank = 2 * node, .n_local_ranks = 2};
        struct plan_bytes bytes = plan(layout, options);
        uint64_t owned = node == 0 ? 20224 : 0;

        assert_int_equal(bytes.state, pages(2 * 4 * 5120 + 2 * 4 * owned));
        assert_int_equal(bytes.gradient, pages(4 * (5120 + owned)));
    }
    layout_free(layout);
}

/* The parameters are 64 frozen ones, so that one byte too much in each adds up to a page. */
static void check_frozen(uint64_t n_elems, unsigned world_size, unsigned n_local, uint64_t expected_each)
{
    struct layout_decl decls[64] = {};
    char names[64][4];
    struct layout *layout;

    for (size_t i = 0; i < ARRAY_SIZE(decls); i++) {
        snprintf(names[i], sizeof(names[i]), "%zu", i);
        decls[i] = (struct layout_decl){
            .name = names[i],
            .name_len = strlen(names[i]),
            .dtype = DTYPE_BF16,
            .n_dims = 1,
            .shape = &n_elems,
        };
    }
    layout = make(decls, ARRAY_SIZE(decls), world_size, 1000);
    assert_int_equal(plan(layout, (struct plan_options){.stage = 3, .n_local_ranks = n_local}).state,
                     pages(64 * expected_each));
    layout_free(layout);
}

static void test_frozen(void **state)
{
    check_frozen(96, 3, 1, 192); /* all bytes, whatever the node's share */
    check_frozen(97, 3, 1, 256); /* 194, rounded up */
    check_frozen(45, 7, 5, 128); /* 90, rounded up */
    check_frozen(32, 7, 7, 64);
    check_frozen(0, 7, 7, 0);
}

static void test_options(void **state)
{
    struct layout *layout = make_mixed();
    struct plan_options options = {.stage = 2, .n_moments = 2, .n_local_ranks = 4};
    uint64_t weights = plan(layout, options).weights;

    options.private_weights = true;
    assert_int_equal(plan(layout, options).weights, 5 * weights);
    options.n_local_ranks = 1;
    assert_int_equal(plan(layout, options).weights, 2 * weights);

    /* Without moments only the masters are left. */
    options.n_moments = 0;
    assert_int_equal(plan(layout, options).state, pages(4 * 5056));
    options.n_moments = 1;
    assert_int_equal(plan(layout, options).state, pages(4 * 5056 + 4 * (5056 + 2560)));
    options.moments_dtype = DTYPE_BF16;
    assert_int_equal(plan(layout, options).state, pages(4 * 5056 + 2 * (5056 + 2560)));
    options.moments_dtype = DTYPE_SIGNED8; /* 68 bytes for 64 elements; each bucket begins on a cache line */
    assert_int_equal(plan(layout, options).state, pages(4 * 5056 + 5376 + 2752));
    options.moments_dtype = DTYPE_F32;

    /* Masters of 24 bits are a byte for each weight. In stage 3 the weights are in the state as well. */
    options.master24 = true;
    assert_int_equal(plan(layout, options).state, pages(5056 + 4 * (5056 + 2560)));
    options.stage = 3;
    assert_int_equal(plan(layout, options).state, pages(3 * 5056 + 4 * 2560 + 4 * (5056 + 2560) + 10048));
    options.stage = 2;
    options.master24 = false;

    options.staging_bytes = 12345;
    assert_int_equal(plan(layout, options).staging, 12345);

    /* A pool is never larger than all parameters. In stage 3, private_weights has no effect. */
    options.stage = 3;
    options.stage3_max_live_elems = UINT64_MAX / 2;
    assert_int_equal(plan(layout, options).pool, layout->range_bytes);
    assert_int_equal(plan(layout, options).weights, 0);
    options.stage3_max_live_elems = 1;
    assert_int_equal(plan(layout, options).pool, pages(1));
    layout_free(layout);
}

/* Sets piece_bytes[DEVICE_N_PIECES] to the size that the engine gives each piece. */
static void engine_bytes(const struct layout *layout, const struct plan_options *asked, uint64_t *piece_bytes)
{
    const struct device_plan_options options = {
        .layout = layout,
        .stage = asked->stage,
        .n_local = 4,
        .optimizer = OPTIMIZER_ADAMW,
        .moments = {.m = true,
                    .v = true,
                    .master24 = asked->master24,
                    .type = {asked->moments_dtype, asked->moments_dtype == DTYPE_SIGNED8}},
        .offload = asked->offloaded};
    uint64_t n_bytes = device_plan_bytes(&options);
    void *memory = test_calloc(1, n_bytes);
    struct device_rank_places places;
    struct device_plan plan;
    char why[128];

    device_plan_write(&options, memory);
    assert_int_equal(device_plan_open(&plan, memory, n_bytes, why, sizeof(why)), 0);
    assert_true(device_undo_places(&plan).n_blocks == 0 || !asked->offloaded);
    assert_int_equal(device_rank_places_init(&places, &plan, 0), 0);
    memcpy(piece_bytes, places.piece_bytes, sizeof(places.piece_bytes));
    device_rank_places_deinit(&places);
    test_free(memory);
}

static uint64_t engine_undo_bytes(const struct layout *layout, bool offload)
{
    const struct plan_options asked = {.stage = 2, .offloaded = offload};
    uint64_t piece_bytes[DEVICE_N_PIECES];

    engine_bytes(layout, &asked, piece_bytes);
    return piece_bytes[DEVICE_UNDO];
}

/* 16 buckets, of which each rank owns 64 elements, so that there is a gap between narrow moments and the next array. */
static struct layout *make_small_buckets(void)
{
    static const char *const names = "abcdefghijklmnop";
    const uint64_t n_elems = 256;
    struct layout_decl decls[16];

    for (size_t i = 0; i < ARRAY_SIZE(decls); i++)
        decls[i] = (struct layout_decl){.name = &names[i],
                                        .name_len = 1,
                                        .trainable = true,
                                        .dtype = DTYPE_BF16,
                                        .grad_dtype = DTYPE_BF16,
                                        .n_dims = 1,
                                        .shape = &n_elems};
    return make(decls, ARRAY_SIZE(decls), 4, n_elems);
}

/* The plan for narrow moments and masters on GPUs has the same figures as the engine. */
static void test_narrow_on_devices(void **state)
{
    static const struct {
        unsigned stage;
        enum dtype moments;
        bool master24;
    } kinds[] = {{2, DTYPE_BF16, false}, {2, DTYPE_SIGNED8, false}, {2, DTYPE_F32, true}, {3, DTYPE_SIGNED8, true}};
    struct layout *layout = make_small_buckets();
    struct plan_options options = {.n_moments = 2, .n_local_ranks = 2, .on_devices = true};
    uint64_t piece_bytes[DEVICE_N_PIECES];
    struct plan_bytes bytes;

    assert_int_equal(layout->n_buckets, 16);
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        options.stage = kinds[i].stage;
        options.moments_dtype = kinds[i].moments;
        options.master24 = kinds[i].master24;
        engine_bytes(layout, &options, piece_bytes);
        plan_bytes_by_class(layout, &options, &bytes);
        assert_int_equal(bytes.state, pages(2 * piece_bytes[DEVICE_STATE]) + 2 * piece_bytes[DEVICE_UNDO]);
    }
    layout_free(layout);
}

/*
 * The plan for Muon on GPUs: the engine's figures for two ranks, one of which owns the matrix, and its scratch memory.
 */
static void check_muon_on_devices(unsigned stage, bool master24)
{
    struct layout *layout = make_with_matrix();
    const struct device_plan_options options = {.layout = layout,
                                                .stage = stage,
                                                .n_local = 2,
                                                .optimizer = OPTIMIZER_MUON,
                                                .moments = {.m = true, .v = true, .master24 = master24}};
    const struct plan_options asked = {
        .stage = stage, .n_moments = 2, .master24 = master24, .n_local_ranks = 2, .on_devices = true};
    uint64_t n_bytes = device_plan_bytes(&options), in_state = 0, undo = 0;
    void *memory = test_calloc(1, n_bytes);
    struct device_rank_places places;
    struct device_plan plan;
    struct plan_bytes bytes;
    char why[128];

    device_plan_write(&options, memory);
    assert_int_equal(device_plan_open(&plan, memory, n_bytes, why, sizeof(why)), 0);
    assert_int_equal(plan.head->n_matrices, 1);
    for (unsigned rank = 0; rank < 2; rank++) {
        assert_int_equal(device_rank_places_init(&places, &plan, rank), 0);
        in_state += places.piece_bytes[DEVICE_STATE];
        undo += places.piece_bytes[DEVICE_UNDO];
        device_rank_places_deinit(&places);
    }
    plan_bytes_by_class(layout, &asked, &bytes);
    assert_int_equal(bytes.state, pages(in_state) + undo + 4 * step_muon_scratch_elems(layout, 0, 1));
    assert_int_equal(step_muon_scratch_elems(layout, 1, 3), 0);
    test_free(memory);
    layout_free(layout);
}

static void test_muon_on_devices(void **state)
{
    check_muon_on_devices(2, false);
    check_muon_on_devices(2, true);
    check_muon_on_devices(3, true);
}

/* The plan on GPUs, with and without offload. Offload moves bytes to another class, and loses none. */
static void test_devices(void **state)
{
    struct layout *layout = make_mixed();
    struct plan_options options = {.stage = 2, .n_moments = 2, .n_local_ranks = 4};
    struct plan_bytes host = plan(layout, options), on_gpus, offloaded;

    options.on_devices = true;
    plan_bytes_by_class(layout, &options, &on_gpus);
    assert_int_equal(on_gpus.device, on_gpus.state + on_gpus.gradient + on_gpus.ring + on_gpus.weights);
    assert_int_equal(on_gpus.needed, on_gpus.staging + on_gpus.fixed);

    options.offloaded = true;
    plan_bytes_by_class(layout, &options, &offloaded);
    assert_true(offloaded.offloaded && !on_gpus.offloaded);
    assert_int_equal(offloaded.state, host.state + host.weights);
    assert_int_equal(offloaded.needed, on_gpus.needed + offloaded.state);
    assert_int_equal(offloaded.device, offloaded.gradient + on_gpus.ring + on_gpus.weights);
    /* Memory to undo orders: the plan has the engine's figures. */
    assert_int_equal(on_gpus.state - host.state, 4 * engine_undo_bytes(layout, false));
    assert_int_equal(offloaded.gradient - on_gpus.gradient, 4 * engine_undo_bytes(layout, true));
    layout_free(layout);
}

/* Stage 3 on GPUs has no weights. Each rank has a pool with room for two of the largest parameter and 16 MiB. */
static void test_device_pools(void **state)
{
    const struct layout_decl decls[] = {
        DECL("large", 10000001, .trainable = true),                    /* 40,000,004 bytes: in a place of 40,000,256 */
        DECL("small", 3, .trainable = true, .dtype = DTYPE_BF16),      /* 256 */
        DECL("frozen", 9000000, .dtype = DTYPE_F16), DECL("none", 0)}; /* 18,000,128 */
    struct layout *layout = make(decls, 4, 2, 500000), *other = make(decls + 1, 3, 2, 500000);
    struct plan_options options = {
        .stage = 3, .n_moments = 2, .n_local_ranks = 2, .on_devices = true, .stage3_max_live_elems = 1};
    struct plan_bytes bytes;

    assert_int_equal(plan_device_pool_bytes(layout), pages(40000256 + 256 + 18000128)); /* limited to all parameters */
    assert_int_equal(plan_device_pool_bytes(other), pages(256 + 18000128));
    plan_bytes_by_class(layout, &options, &bytes);
    assert_int_equal(bytes.pool, 2 * plan_device_pool_bytes(layout));
    assert_int_equal(bytes.weights, 0);
    assert_int_equal(bytes.device, bytes.state + bytes.gradient + bytes.ring + bytes.pool);
    assert_int_equal(bytes.needed, bytes.staging + bytes.fixed);
    layout_free(layout);
    layout_free(other);
}

static void test_large_device_pool(void **state)
{
    const struct layout_decl decls[] = {DECL("a", 5000000, .trainable = true), DECL("b", 5000000, .trainable = true),
                                        DECL("c", 5000000, .trainable = true), DECL("d", 5000001, .trainable = true)};
    struct layout *layout = make(decls, 4, 1, 500000);

    assert_int_equal(plan_device_pool_bytes(layout), pages(2 * 20000256 + (16 << 20)));
    layout_free(layout);
}

/* Return: the bytes of a bucket's fp32 array that a job on one node keeps free for other numbers of ranks. */
static uint64_t spare_bytes(const struct layout *layout, uint32_t bucket)
{
    return (layout->buckets[bucket].room_elems - layout->buckets[bucket].n_elems) * sizeof(float);
}

/* The bytes of all nodes add up to the bytes of a job on one node without spare_bytes(). */
static void test_nodes_add_up(void **state)
{
    const struct layout_decl decls[] = {
        DECL("a", 1000003, .trainable = true),
        DECL("b", 77, .trainable = true),
        DECL("c", 300001, .trainable = true, .dtype = DTYPE_F16),
        DECL("d", 999, .dtype = DTYPE_F16),
    };
    struct layout *layout = make(decls, 4, 6, 500000);
    const uint64_t page = pages(1);

    for (unsigned stage = 1; stage <= 3; stage++) {
        struct plan_options options = {.stage = stage, .n_moments = 2, .n_local_ranks = 6};
        struct plan_bytes all = plan(layout, options), sum = {};

        for (unsigned first = 0; first < 6; first += 2) {
            struct plan_bytes part;

            options.first_local_rank = first;
            options.n_local_ranks = 2;
            part = plan(layout, options);
            sum.state += part.state;
            sum.gradient += part.gradient;
            sum.ring += part.ring;
            sum.overflow += part.overflow;
        }
        for (uint32_t b = 0; b < layout->n_buckets; b++) {
            bool has_master = stage == 3 || layout->buckets[b].dtype != DTYPE_F32;

            sum.state += (2 + has_master) * spare_bytes(layout, b);
            sum.gradient += spare_bytes(layout, b);
        }
        assert_in_range(pages(sum.state), all.state, all.state + 3 * page);
        assert_in_range(pages(sum.gradient), all.gradient, all.gradient + 3 * page);
        assert_int_equal(sum.ring, all.ring);
        assert_int_equal(sum.overflow, all.overflow);
    }
    layout_free(layout);
}

/* ---- ring ---------------------------------------------------------------------------------------------- */

static void check_ring(const struct layout_decl *decls, uint32_t n, bool overlap_comm, uint64_t expected)
{
    struct layout *layout = make(decls, n, 2, 1000000);

    assert_int_equal(plan_ring_bytes(layout, overlap_comm, false), pages(expected));
    assert_int_equal(plan_ring_bytes(layout, overlap_comm, true), pages(layout->arena_bytes));
    layout_free(layout);
}

/* The largest parcels have 1,000,064 elements (a multiple of 128), and so 4,000,256 bytes. A typical parcel has
 * 4,000,000 bytes. */
static void test_ring(void **state)
{
    struct layout_decl decls[] = {
        DECL("0", 1000000, .trainable = true), DECL("1", 1000000, .trainable = true),
        DECL("2", 1000000, .trainable = true), DECL("3", 1000000, .trainable = true),
        DECL("4", 1000000, .trainable = true), DECL("5", 1000000, .trainable = true),
    };
    const uint64_t large = 7000000;
    struct layout *layout;

    check_ring(decls, 6, true, 4000256 + 4 * 4000000);
    check_ring(decls, 6, false, 4000256 + 4000000);

    /* The ring is never larger than all parcels. */
    check_ring(decls, 3, true, 3 * 4000256);
    check_ring(decls, 3, false, 4000256 + 4000000);

    /* A large parameter travels in several parcels. A limit above all parameters must not make the ring larger. */
    decls[2].shape = &large;
    check_ring(decls, 6, true, 4000256 + 4 * 4000000);
    layout = make(decls, 2, 2, UINT64_MAX);
    assert_int_equal(plan_ring_bytes(layout, true, false), pages(layout->arena_bytes));
    layout_free(layout);

    /* 16-bit gradients halve the ring. */
    for (size_t i = 0; i < ARRAY_SIZE(decls); i++)
        decls[i].grad_dtype = DTYPE_BF16;
    check_ring(decls, 6, true, 2000128 + 4 * 2000000);

    /* If some gradients are fp32, in the first parcel or in the last, the typical parcel counts as fp32. */
    decls[2].shape = decls[0].shape;
    decls[5].grad_dtype = DTYPE_F32;
    check_ring(decls, 6, false, 4000256 + 4000000);
    decls[5].grad_dtype = DTYPE_BF16;
    decls[0].grad_dtype = DTYPE_F32;
    check_ring(decls, 6, false, 4000256 + 4000000);
}

static void test_small_ring(void **state)
{
    const struct layout_decl decls[] = {DECL("w", 10, .trainable = true), DECL("f", 10)};
    struct layout *layout = make(decls, 2, 2, 1000);

    assert_int_equal(plan_ring_bytes(layout, true, false), 1 << 20);
    assert_int_equal(plan_ring_bytes(layout, false, false), 1 << 20);
    layout_free(layout);

    layout = make(&decls[1], 1, 2, 1000); /* no trainable parameter */
    assert_int_equal(plan_ring_bytes(layout, true, false), 1 << 20);
    assert_int_equal(plan(layout, (struct plan_options){.stage = 1, .n_local_ranks = 2}).state, 0);
    assert_int_equal(plan(layout, (struct plan_options){.stage = 2, .n_local_ranks = 2}).gradient, 0);
    layout_free(layout);
}

/* ---- fixed --------------------------------------------------------------------------------------------- */

static void test_fixed(void **state)
{
    struct layout *layout = make_mixed();
    const struct plan_options none = {.stage = 1, .n_local_ranks = 3};
    uint64_t tables = plan(layout, none).fixed;

    /*
     * 2 buckets and 3 parameters. Each partition is one chunk, and each chunk is a parcel, because buckets hold 1,024
     * elements.
     */
    assert_int_equal(layout->n_chunks, 8);
    assert_int_equal(tables, sizeof(struct layout) + 3 * (sizeof(struct layout_param) + 4 + 2) +
                                 2 * sizeof(struct layout_bucket) + 8 * sizeof(struct layout_chunk) +
                                 8 * (sizeof(struct layout_parcel) + sizeof(struct layout_part)));

#define CHECK_FIXED(field_, value, expected)                                                                           \
    do {                                                                                                               \
        struct plan_options options = none;                                                                            \
                                                                                                                       \
        options.field_ = value;                                                                                        \
        assert_int_equal(plan(layout, options).fixed - tables, expected);                                              \
    } while (0)

    CHECK_FIXED(chunk_bytes, 10, 8 * 10);
    CHECK_FIXED(chunk_rank_bytes, 10, 8 * 3 * 10);
    CHECK_FIXED(param_bytes, 10, 3 * 10);
    CHECK_FIXED(part_rank_bytes, 10, 8 * 3 * 10);
    CHECK_FIXED(parcel_bytes, 10, 8 * 10);
    CHECK_FIXED(rank_bytes, 10, 3 * 10);
    CHECK_FIXED(credit_bytes, 10, 3 * pages(10));
    CHECK_FIXED(fixed_bytes, 10, 10);
#undef CHECK_FIXED

    layout_free(layout);
}

/* ---- sizes that no machine has ------------------------------------------------------------------------- */

static void test_no_wrap(void **state)
{
    const struct layout_decl decls[] = {
        DECL("f", UINT64_C(1) << 59, .dtype = DTYPE_F32),
        DECL("w", 3, .trainable = true),
    };
    struct layout *layout = make(decls, 2, 9, 1000);
    struct plan_options options = {
        .stage = 1,
        .n_moments = UINT32_MAX,
        .n_local_ranks = 9,
        .private_weights = true,
        .part_rank_bytes = SIZE_MAX / 4,
        .staging_bytes = UINT64_MAX - 1,
    };
    struct plan_bytes bytes;

    plan_bytes_by_class(layout, &options, &bytes);
    assert_true(bytes.weights == UINT64_MAX);
    assert_true(bytes.fixed == UINT64_MAX);
    assert_true(bytes.needed == UINT64_MAX);
    assert_true(bytes.total == UINT64_MAX);
    assert_int_equal(bytes.state, pages(UINT64_C(4) * UINT32_MAX * layout->buckets[0].room_elems));

    options.stage = 3;
    plan_bytes_by_class(layout, &options, &bytes);
    assert_true(bytes.weights == 0);
    assert_true(bytes.state > (UINT64_C(1) << 61) && bytes.state < (UINT64_C(1) << 62));
    assert_true(bytes.total == UINT64_MAX);
    layout_free(layout);
}

TEST_GROUP(plan)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table1),
        cmocka_unit_test(test_formulas),
        cmocka_unit_test(test_figure1),
        cmocka_unit_test(test_stages),
        cmocka_unit_test(test_muon),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_nodes_add_up),
        cmocka_unit_test(test_ring),
        cmocka_unit_test(test_small_ring),
        cmocka_unit_test(test_muon_on_devices),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_narrow_on_devices),
        cmocka_unit_test(test_device_pools),
        cmocka_unit_test(test_large_device_pool),
        cmocka_unit_test(test_fixed),
        cmocka_unit_test(test_no_wrap),
    };

    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
