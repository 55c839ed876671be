/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Limits of memory: quotas and charges; free memory of the machine and the cgroup, read from invented /proc and /sys
 * trees; and the budget for admitting a job, which must equal the real size of its tables.
 */

#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/budget/budget.h"
#include "core/budget/exchange-plan.h"
#include "core/budget/step-sizes.h"
#include "core/layout/layout.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/ring.h"
#include "daemon/step/step.h"
#include "tests/core/config/config-text.h"
#include "tests/group.h"

#define NONE UINT64_MAX
#define MIB(n) ((uint64_t)(n) << 20)

/* ---- charges ------------------------------------------------------------------------------------------- */

static void test_charge(void **state)
{
    struct quota quota = {.limit = 100};
    struct charge first = CHARGE_NULL, second = CHARGE_NULL;

    (void)state;
    assert_int_equal(quota_charge(&quota, &first, 60), 0);
    assert_int_equal(quota.used, 60);
    assert_int_equal(first.amount, 60);
    assert_int_equal(quota_charge(&quota, &second, 41), QUOTA_E_OVER);
    assert_int_equal(quota.used, 60);
    assert_null(second.quota); /* the second has no charge */
    charge_deinit(&second);
    assert_int_equal(quota.used, 60);

    assert_int_equal(quota_charge(&quota, &second, 40), 0);
    assert_int_equal(quota.used, 100);
    charge_deinit(&first);
    assert_int_equal(quota.used, 40);
    charge_deinit(&first); /* a second call does nothing */
    assert_int_equal(quota.used, 40);
    assert_int_equal(quota_charge(&quota, &first, 60), 0); /* the charge can be used again */
    charge_deinit(&first);
    charge_deinit(&second);
    assert_int_equal(quota.used, 0);
}

/* A charge may grow. If its growth is refused, the charge keeps its amount. */
static void test_charge_more(void **state)
{
    struct quota quota = {.limit = 100};
    struct charge charge = CHARGE_NULL, other = CHARGE_NULL;

    (void)state;
    assert_int_equal(quota_charge(&quota, &other, 20), 0);
    assert_int_equal(quota_charge_more(&quota, &charge, 30), 0);
    assert_int_equal(quota_charge_more(&quota, &charge, 50), 0);
    assert_int_equal(quota.used, 100);
    assert_int_equal(quota_charge_more(&quota, &charge, 1), QUOTA_E_OVER);
    assert_int_equal(quota_charge_more(&quota, &charge, UINT64_MAX), QUOTA_E_OVER);
    assert_int_equal(charge.amount, 80);
    assert_int_equal(quota_charge_more(&quota, &charge, 0), 0);
    charge_deinit(&charge);
    assert_int_equal(quota.used, 20);
    charge_deinit(&other);
}

static void test_charge_edges(void **state)
{
    struct quota none = {.limit = UINT64_MAX}, nothing = {.limit = 0};
    struct charge first = CHARGE_NULL, second = CHARGE_NULL, zero = CHARGE_NULL;

    (void)state;
    assert_int_equal(quota_charge(&none, &first, UINT64_MAX - 5), 0);
    assert_int_equal(quota_charge(&none, &second, 6), QUOTA_E_OVER); /* the sum would wrap around */
    assert_int_equal(quota_charge(&none, &second, UINT64_MAX), QUOTA_E_OVER);
    assert_int_equal(quota_charge(&none, &second, 5), 0);
    charge_deinit(&first);
    assert_int_equal(none.used, 5);
    charge_deinit(&second);
    assert_int_equal(none.used, 0);

    assert_int_equal(quota_charge(&nothing, &zero, 1), QUOTA_E_OVER);
    assert_int_equal(quota_charge(&nothing, &zero, 0), 0);
    charge_deinit(&zero);
    assert_int_equal(nothing.used, 0);
}

/* ---- the machine --------------------------------------------------------------------------------------- */

/* Each test has a folder of its own, with files instead of /proc and /sys/fs/cgroup. */
struct fixture {
    char root[64], proc[96], cgroup[96];
};

static int setup(void **state)
{
    static struct fixture f;

    snprintf(f.root, sizeof(f.root), "%s", "/tmp/zerod-quota-XXXXXX");
    if (!mkdtemp(f.root))
        return -1;
    snprintf(f.proc, sizeof(f.proc), "%s/proc", f.root);
    snprintf(f.cgroup, sizeof(f.cgroup), "%s/cgroup", f.root);
    *state = &f;
    return 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st;
    (void)type;
    (void)where;
    return remove(path);
}

static int teardown(void **state)
{
    const struct fixture *f = *state;

    return nftw(f->root, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* Writes a file, and makes the folders above it. */
static void put(const char *root, const char *name, const char *text)
{
    char path[512];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void assert_headroom(const struct fixture *f, uint64_t available_bytes, uint64_t cgroup_bytes)
{
    struct memory_headroom headroom = {1, 1};

    memory_headroom_read(&headroom, f->proc, f->cgroup);
    assert_int_equal(headroom.available_bytes, available_bytes);
    assert_int_equal(headroom.cgroup_bytes, cgroup_bytes);
}

/* A container without these files does not prevent a job. */
static void test_nothing_to_read(void **state)
{
    const struct fixture *f = *state;

    assert_headroom(f, NONE, NONE);
    put(f->proc, "meminfo", "");
    put(f->proc, "self/cgroup", "");
    assert_headroom(f, NONE, NONE);
    put(f->proc, "meminfo", "MemTotal: 1000 kB\nMemFree: 500 kB\n"); /* before Linux 3.14 */
    put(f->proc, "self/cgroup", "nonsense\n0:\n1:memory\n\n");
    assert_headroom(f, NONE, NONE);
}

static void test_available(void **state)
{
    const struct fixture *f = *state;

    put(f->proc, "meminfo",
        "MemTotal:       24684084 kB\nMemFree:        21842972 kB\nMemAvailable:   23905728 kB\n"
        "Buffers:           12345 kB\n");
    assert_headroom(f, UINT64_C(23905728) * 1024, NONE);
    put(f->proc, "meminfo", "MemAvailable: 0 kB\n");
    assert_headroom(f, 0, NONE);
}

static void test_unified(void **state)
{
    const struct fixture *f = *state;

    put(f->proc, "self/cgroup", "0::/system.slice/zerod@a.service\n");
    put(f->cgroup, "system.slice/zerod@a.service/memory.max", "10485760\n");
    assert_headroom(f, NONE, NONE); /* a limit without usage has no effect */
    put(f->cgroup, "system.slice/zerod@a.service/memory.current", "3145728\n");
    assert_headroom(f, NONE, MIB(7));
    put(f->cgroup, "system.slice/zerod@a.service/memory.current", "10485760\n");
    assert_headroom(f, NONE, 0);
    put(f->cgroup, "system.slice/zerod@a.service/memory.current", "10485761\n"); /* the limit was lowered later */
    assert_headroom(f, NONE, 0);
    put(f->cgroup, "system.slice/zerod@a.service/memory.max", "max\n");
    assert_headroom(f, NONE, NONE);
    put(f->cgroup, "system.slice/zerod@a.service/memory.max", "0\n");
    assert_headroom(f, NONE, 0);
}

/* Page cache counts as free, because the kernel drops it before it kills any process. */
static void test_inactive_file(void **state)
{
    const struct fixture *f = *state;

    put(f->proc, "self/cgroup", "0::/a\n");
    put(f->cgroup, "a/memory.max", "10485760\n");
    put(f->cgroup, "a/memory.current", "9437184\n");
    put(f->cgroup, "a/memory.stat", "anon 1048576\nfile 8388608\nactive_file 4194304\ninactive_file 4194304\nslab 9\n");
    assert_headroom(f, NONE, MIB(5));
    put(f->cgroup, "a/memory.stat", "inactive_file 99999999\n"); /* the kernel does not write both files at once */
    assert_headroom(f, NONE, MIB(10));
}

/* The tightest of the limits above the process counts. */
static void test_walk_up(void **state)
{
    const struct fixture *f = *state;

    put(f->proc, "self/cgroup", "0::/a/b/c\n");
    put(f->cgroup, "a/b/c/memory.max", "max\n");
    put(f->cgroup, "a/b/c/memory.current", "0\n");
    put(f->cgroup, "a/b/memory.max", "8388608\n");
    put(f->cgroup, "a/b/memory.current", "1048576\n");
    assert_headroom(f, NONE, MIB(7));
    put(f->cgroup, "a/memory.max", "9437184\n");
    put(f->cgroup, "a/memory.current", "5242880\n");
    assert_headroom(f, NONE, MIB(4));
    put(f->cgroup, "memory.max", "3145728\n");
    put(f->cgroup, "memory.current", "1048576\n");
    assert_headroom(f, NONE, MIB(2));
    put(f->cgroup, "../memory.max", "5\n"); /* above the root, so it does not count */
    put(f->cgroup, "../memory.current", "1\n");
    put(f->cgroup, "a/other/memory.max", "1\n"); /* a sibling does not count */
    put(f->cgroup, "a/other/memory.current", "0\n");
    assert_headroom(f, NONE, MIB(2));
}

/* In a container the host's path does not exist. The container's limit is at the root. */
static void test_container(void **state)
{
    const struct fixture *f = *state;

    put(f->cgroup, "memory.max", "2097152\n");
    put(f->cgroup, "memory.current", "1048576\n");
    put(f->proc, "self/cgroup", "0::/docker/0123456789abcdef\n");
    assert_headroom(f, NONE, MIB(1));
    put(f->proc, "self/cgroup", "0::/\n");
    assert_headroom(f, NONE, MIB(1));
}

static void test_version_1(void **state)
{
    const struct fixture *f = *state;

    put(f->proc, "self/cgroup", "12:cpu,cpuacct:/a\n9:memory:/a\n8:memoryish:/b\n1:name=systemd:/a\n");
    put(f->cgroup, "memory/a/memory.limit_in_bytes", "9223372036854771712\n"); /* means no limit */
    put(f->cgroup, "memory/a/memory.usage_in_bytes", "1048576\n");
    assert_headroom(f, NONE, NONE);
    put(f->cgroup, "memory/memory.limit_in_bytes", "10485760\n");
    put(f->cgroup, "memory/memory.usage_in_bytes", "4194304\n");
    put(f->cgroup, "memory/memory.stat", "inactive_file 1048576\ntotal_inactive_file 2097152\n");
    assert_headroom(f, NONE, MIB(8));
}

/* Both hierarchies exist. The memory controller is only in one of them, but a limit counts in either. */
static void test_hybrid(void **state)
{
    const struct fixture *f = *state;

    put(f->proc, "self/cgroup", "9:memory:/a:b\n0::/u\n");
    put(f->cgroup, "memory/a:b/memory.limit_in_bytes", "10485760\n"); /* the name has a colon */
    put(f->cgroup, "memory/a:b/memory.usage_in_bytes", "1048576\n");
    assert_headroom(f, NONE, MIB(9));
    put(f->cgroup, "u/memory.max", "4194304\n");
    put(f->cgroup, "u/memory.current", "1048576\n");
    assert_headroom(f, NONE, MIB(3));
}

/* ---- the budget ---------------------------------------------------------------------------------------- */

static void test_tickets(void **state)
{
    (void)state;
    /* A parcel may have a slot in one micro-batch while its slot of the next is filled. */
    for (uint64_t n = 0; n < 30000; n += 999)
        assert_true(budget_n_tickets(n) > 2 * n);
    assert_true(budget_n_tickets(0) > 0);
    for (uint64_t n = 1; n < 100000; n += 777)
        assert_true(budget_n_tickets(n) >= budget_n_tickets(n - 1));
    assert_int_equal(budget_n_tickets(UINT32_MAX), budget_n_tickets(UINT64_C(1) << 40)); /* limited */
    for (unsigned shift = 32; shift < 64; shift++)
        assert_int_equal(budget_n_tickets(UINT64_C(1) << shift), budget_n_tickets(UINT32_MAX));
    assert_int_equal(budget_n_tickets(UINT64_MAX), budget_n_tickets(UINT32_MAX));
}

static struct layout *make_layout(void)
{
    const uint64_t shape[] = {1000};
    struct layout_decl decls[] = {
        {.name = "w", .name_len = 1, .trainable = true, .dtype = DTYPE_BF16, .n_dims = 1, .shape = shape},
        {.name = "b", .name_len = 1, .trainable = true, .dtype = DTYPE_BF16, .n_dims = 1, .shape = shape},
    };
    struct layout *layout = NULL;
    uint32_t bad;

    assert_int_equal(layout_new(&layout, decls, ARRAY_SIZE(decls), 4, 1000, &bad), 0);
    assert_int_equal(layout->n_buckets, 2);
    return layout;
}

static struct plan_options options_of(const char *text, const struct layout *layout, struct budget_ranks ranks)
{
    struct config *config = load_valid(text);
    struct plan_options options = budget_options(config, layout, ranks, layout->n_parcels);

    config_free(config);
    return options;
}

/* With models on GPUs, a ring has room for a micro-batch if the GPU has that room, and overlap_comm is not off. */
static void test_budget_of_gpu_room(void **state)
{
    struct layout *layout = make_layout();
    const struct budget_ranks ranks = {.first_local = 1, .n_local = 2};

    (void)state;
    for (int overlaps = 0; overlaps < 2; overlaps++)
        for (enum config_gpu_room room = CONFIG_GPU_ROOM_NONE; room <= CONFIG_GPU_ROOM_MICRO_BATCH; room++) {
            struct config *config =
                load_valid(overlaps ? MINIMAL : MINIMAL "zero_optimization: {overlap_comm: false}\n");

            config_choose_gpu_room(config, room);
            assert_int_equal(budget_options(config, layout, ranks, layout->n_parcels).ring_holds_all,
                             overlaps && room == CONFIG_GPU_ROOM_MICRO_BATCH);
            config_free(config);
        }
    layout_free(layout);
}

static void test_budget_settings(void **state)
{
    struct layout *layout = make_layout();
    const struct budget_ranks ranks = {.first_local = 1, .n_local = 2};
    struct plan_options options = options_of(MINIMAL "zero_optimization: {stage: 1}\n", layout, ranks);

    (void)state;
    assert_int_equal(options.stage, 1);
    assert_int_equal(options.n_moments, 2); /* the default optimizer is AdamW */
    assert_int_equal(options.moments_dtype, DTYPE_F32);
    assert_int_equal(options_of(MINIMAL "bf16: {bf16_optimizer_states: true}\n", layout, ranks).moments_dtype,
                     DTYPE_BF16);
    assert_int_equal(options_of(MINIMAL "optimizer: {params: {optim_bits: 8}}\n", layout, ranks).moments_dtype,
                     DTYPE_SIGNED8);
    assert_false(options.master24);
    assert_true(options_of(MINIMAL "optimizer: {params: {master_weight_bits: 24}}\n", layout, ranks).master24);
    assert_false(options.private_weights);
    assert_int_equal(options.first_local_rank, 1);
    assert_int_equal(options.n_local_ranks, 2);
    assert_int_equal(options.staging_bytes, 0);
    assert_false(options.ring_holds_all);
    options = options_of(MINIMAL, layout, (struct budget_ranks){.n_local = 1});
    assert_true(options.ring_holds_all); /* a node's only rank sends its slots to other nodes */

    options = options_of(MINIMAL "zero_optimization: {stage: 2, overlap_comm: false}\nweights: private\n"
                                 "optimizer: {type: SGD, params: {lr: 0.1}}\n",
                         layout, ranks);
    assert_int_equal(options.stage, 2);
    assert_int_equal(options.n_moments, 0);
    assert_true(options.private_weights);
    assert_false(options.overlap_comm);

    options = options_of(MINIMAL "zero_optimization:\n  stage: 3\n  overlap_comm: true\n"
                                 "  stage3_max_live_parameters: 12345\n  stage3_on_one_node: gathered\n"
                                 "optimizer: {type: SGD, params: {lr: 0.1, momentum: 0.9}}\n",
                         layout, ranks);
    assert_int_equal(options.stage, 3);
    assert_int_equal(options.n_moments, 1);
    assert_int_equal(options.stage3_max_live_elems, 12345);
    assert_true(options.overlap_comm);
    layout_free(layout);
}

/*
 * Several nodes on GPUs stage a copy of the initial weights and of the masters. Two ranks own half of 2,048 elements.
 */
static void test_budget_of_staging(void **state)
{
    static const struct {
        unsigned stage, bits;
        uint64_t master_bytes;
    } cases[] = {{2, 32, 4}, {2, 24, 1}, {3, 32, 4}, {3, 24, 3}};
    struct layout *layout = make_layout();
    uint64_t staging[ARRAY_SIZE(cases)];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config *config;
        char text[512];

        snprintf(text, sizeof(text),
                 "listen: {socket: /a}\ndevice: cuda\ncollective: nccl\n"
                 "world: {size: 4, node: 0, key_file: /k, nodes: [{address: \"a:1\", ranks: 2}, {address: \"b:1\", "
                 "ranks: 2}]}\n"
                 "zero_optimization: {stage: %u}\noptimizer: {params: {master_weight_bits: %u}}\n",
                 cases[i].stage, cases[i].bits);
        config = load_valid_with(text, &both_engines);
        staging[i] = exchange_plan_bytes(config, layout);
        assert_int_equal(staging[0] - staging[i], 1024 * (4 - cases[i].master_bytes));
        config_free(config);
    }
    layout_free(layout);
}

/* The budget for a rank's tables is exactly what ring_new() allocates. */
static void test_budget_tables(void **state)
{
    struct layout *layout = make_layout();
    const struct budget_ranks ranks = {.n_local = 4};
    struct plan_options options = options_of(MINIMAL, layout, ranks);
    uint32_t n_tickets = budget_n_tickets(layout->n_parcels);
    struct ring_options ring_options = {
        .ring_bytes = 4096, .overflow_bytes = 4096, .n_parcels = layout->n_parcels, .n_tickets = n_tickets};
    struct ring *ring;

    (void)state;
    assert_int_equal(ring_new(&ring, &ring_options), 0);
    assert_int_equal(round_up(options.credit_bytes, page_size()), ring->credit.n_bytes);
    assert_int_equal(options.rank_bytes, n_tickets * (sizeof(*ring->slots) + sizeof(*ring->extents)));
    assert_int_equal(options.parcel_bytes, ranks.n_local * sizeof(*ring->heads));
    assert_int_equal(options.part_rank_bytes, sizeof(struct ledger_entry));
    assert_int_equal(options.fixed_bytes, step_fixed_bytes(layout, ranks.n_local));
    ring_orphan(ring);
    layout_free(layout);
}

/* A layout can stand for a larger model. Its rings then have the larger model's size. */
static void test_budget_of_a_larger_model(void **state)
{
    struct layout *layout = make_layout();
    struct config *config = load_valid(MINIMAL);
    struct plan_options options = budget_options(config, layout, (struct budget_ranks){.n_local = 4}, 5000);
    uint32_t n_tickets = budget_n_tickets(5000);

    (void)state;
    assert_int_equal(options.credit_bytes, credit_page_bytes(n_tickets));
    assert_int_equal(options.rank_bytes, n_tickets * (sizeof(struct ring_slot) + sizeof(struct ring_extent)));
    config_free(config);
    layout_free(layout);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

TEST_GROUP(quota)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_charge),
        cmocka_unit_test(test_charge_more),
        cmocka_unit_test(test_charge_edges),
        TEST(test_nothing_to_read),
        TEST(test_available),
        TEST(test_unified),
        TEST(test_inactive_file),
        TEST(test_walk_up),
        TEST(test_container),
        TEST(test_version_1),
        TEST(test_hybrid),
        cmocka_unit_test(test_tickets),
        cmocka_unit_test(test_budget_of_gpu_room),
        cmocka_unit_test(test_budget_settings),
        cmocka_unit_test(test_budget_of_staging),
        cmocka_unit_test(test_budget_tables),
        cmocka_unit_test(test_budget_of_a_larger_model),
    };

    return cmocka_run_group_tests_name("quota", tests, NULL, NULL);
}
