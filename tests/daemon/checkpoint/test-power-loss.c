/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Power is lost at any moment of several saves, with any part of what was not synced. The disk's calls are recorded.
 * After each call, what the disk may then have is written to a folder and loaded (recorder.h). The newest checkpoint
 * must be the last one saved, or the one in progress. All checkpoints must be whole, and the next save must succeed.
 */

#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/folder.h"
#include "tests/daemon/checkpoint/recorder.h"
#include "tests/daemon/checkpoint/sample.h"
#include "tests/group.h"
#include "tests/programs/held.h"
#include "tests/tiers.h"

enum { MAX_SAVES = 8, MAX_ITEMS = 256, NEVER = UINT32_MAX };

static const struct sample_options small = {
    .params = sample_small, .n_params = 3, .world_size = 1, .stage = 2, .bucket_elems = 1000};

/* In a job of two nodes, one node saves after the other. */
enum { N_NODES = 2 };

struct scenario {
    const char *name;
    bool several_nodes;
    unsigned save_total_limit;
    unsigned n_saves;
    struct {
        uint64_t step;
        unsigned fails_at; /* index of the call that fails */
        bool goes_on;      /* only that call fails; else the daemon is killed, and the next save is another daemon's */
    } saves[MAX_SAVES];
};

static char scratch[64], real[80], after[80], dir[96];
static size_t n_open;
static struct sample *sample, *parts[N_NODES];
static unsigned n_layouts;

static int setup(void **state)
{
    (void)state;
    n_open = count_fds();
    scratch_new(scratch);
    snprintf(real, sizeof(real), "%s/real", scratch);
    snprintf(after, sizeof(after), "%s/after", scratch);
    snprintf(dir, sizeof(dir), "%s/checkpoints", after);
    sample = sample_new(&small);
    for (unsigned node = 0; node < N_NODES; node++) {
        struct sample_options options = small;

        options.world_size = N_NODES;
        options.first_rank = node;
        options.n_local = 1;
        parts[node] = sample_new(&options);
    }
    n_layouts = 0;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_free(sample);
    for (unsigned node = 0; node < N_NODES; node++)
        sample_free(parts[node]);
    scratch_remove(scratch);
    print_message("%u layouts\n", n_layouts);
    return count_fds() == n_open ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static void empty_folder(const char *path)
{
    (void)nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    assert_int_equal(mkdir(path, 0777), 0);
}

/* ---- recording ----------------------------------------------------------------------------------------- */

static uint64_t seed_of(unsigned save)
{
    return 100 + save;
}

/* Does one save, on all nodes. Return: the result of checkpoint_write() or checkpoint_publish(). */
static int save_all(struct sample_save save, unsigned number, bool several_nodes, char *why)
{
    int r = 0;

    if (!several_nodes)
        return sample_save(sample, seed_of(number), &save, why);
    save.n_nodes = N_NODES;
    save.token = number + 1;
    for (unsigned node = 0; r == 0 && node < N_NODES; node++) {
        save.node = node;
        r = sample_save(parts[node], seed_of(number), &save, why);
    }
    save.node = 0;
    return r == 0 ? sample_publish(parts[0], &save, why) : r;
}

static struct recorder *record(const struct scenario *scenario)
{
    char why[SAMPLE_WHY_BYTES], real_dir[96];
    struct recorder *recorder;

    empty_folder(real);
    snprintf(real_dir, sizeof(real_dir), "%s/checkpoints", real);
    recorder = recorder_new(real);
    for (unsigned i = 0; i < scenario->n_saves; i++) {
        const struct sample_save save = {.dir = real_dir,
                                         .disk = &recorder->disk,
                                         .step = scenario->saves[i].step,
                                         .save_total_limit = scenario->save_total_limit};
        int r;

        recorder->n_calls = 0;
        recorder->fails_at = scenario->saves[i].fails_at;
        recorder->goes_on = scenario->saves[i].goes_on;
        recorder_note_act(recorder, ACT_BEGIN, i, false);
        r = save_all(save, i, scenario->several_nodes, why);
        if (r < 0 && recorder->fails_at == NEVER)
            fail_msg("%s, save %u: %s", scenario->name, i, why);
        recorder_note_act(recorder, ACT_RETURN, i, r == 0);
    }
    return recorder;
}

/* ---- what is left -------------------------------------------------------------------------------------- */

/* The newest checkpoint may be of any save from first to last. first -1: it may also be missing. */
struct expected {
    int first, last;
};

static void expect_more(struct expected *expected, const struct act *act)
{
    if (act->kind == ACT_BEGIN)
        expected->last = (int)act->save;
    else if (act->kind == ACT_RETURN && act->succeeded)
        expected->first = (int)act->save;
}

/* Asserts that all checkpoints are whole. Return: their number. */
static unsigned check_all_whole(const char *what)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct folder_list list;
    unsigned n;

    if (fd < 0)
        return 0;
    assert_int_equal(folder_list(fd, &list), 0);
    for (size_t i = 0; i < list.n; i++)
        if (!list.entries[i].whole)
            fail_msg("%s: step %d is not whole: %s", what, (int)list.entries[i].step, list.entries[i].why);
    n = (unsigned)list.n;
    folder_list_deinit(&list);
    close(fd);
    return n;
}

static void check_newest(const struct scenario *scenario, const struct expected *expected, const char *what)
{
    char why[SAMPLE_WHY_BYTES];
    uint64_t step = 0;
    int r = sample_load(sample, &(struct sample_load){.dir = dir, .strict = true}, &step, why);

    if (r == 1 && expected->first == -1)
        return;
    if (r != 0)
        fail_msg("%s: %d: %s", what, r, why);
    for (int i = MAX(expected->first, 0); i <= expected->last; i++)
        if (scenario->saves[i].step == step && sample_is(sample, seed_of((unsigned)i)))
            return;
    fail_msg("%s: step %d, and not what was saved of it last", what, (int)step);
}

/* Asserts that the next daemon's save succeeds, and leaves nothing but whole checkpoints. */
static void check_next_save(const struct scenario *scenario, const char *what)
{
    const struct sample_save save = {.dir = dir, .step = 1000, .save_total_limit = scenario->save_total_limit};
    char why[SAMPLE_WHY_BYTES];
    uint64_t step = 0;

    if (sample_save(sample, 7, &save, why) != 0)
        fail_msg("%s: the next save: %s", what, why);
    assert_int_equal(sample_load(sample, &(struct sample_load){.dir = dir, .strict = true}, &step, why), 0);
    assert_int_equal(step, 1000);
    assert_true(sample_is(sample, 7));
    assert_int_equal(scratch_count(dir), check_all_whole(what));
    assert_true(scratch_count(dir) <= (int)scenario->save_total_limit);
}

static void check_layout(const struct scenario *scenario, const struct machine *machine, const enum outcome *outcomes,
                         const struct expected *expected, const char *what)
{
    empty_folder(after);
    machine_lay_out(machine, outcomes, after);
    check_all_whole(what);
    check_newest(scenario, expected, what);
    if (n_layouts++ % 16 == 0)
        check_next_save(scenario, what);
}

static void set_all(enum outcome *outcomes, size_t n, enum outcome outcome)
{
    for (size_t i = 0; i < n; i++)
        outcomes[i] = outcome;
}

/* Tries the loss of one item, and the loss of all others. */
static void check_single(const struct scenario *scenario, const struct machine *machine, size_t item,
                         const struct expected *expected, const char *what)
{
    enum outcome outcomes[MAX_ITEMS];
    size_t n = machine_n_items(machine);

    for (enum outcome others = LOST; others <= KEPT; others++) {
        set_all(outcomes, n, others);
        for (enum outcome o = LOST; o < (machine_item_is_file(machine, item) ? N_OUTCOMES : ZEROES); o++) {
            outcomes[item] = o;
            if (o != others)
                check_layout(scenario, machine, outcomes, expected, what);
        }
    }
}

static void check_losses(const struct scenario *scenario, const struct machine *machine,
                         const struct expected *expected, unsigned n_random, const char *what)
{
    enum outcome outcomes[MAX_ITEMS];
    size_t n = machine_n_items(machine);
    static uint64_t random = 1;

    for (enum outcome all = LOST; all < N_OUTCOMES; all++) {
        set_all(outcomes, n, all);
        if (n > 0 || all == LOST)
            check_layout(scenario, machine, outcomes, expected, what);
    }
    for (size_t i = 0; n > 1 && i < n; i++)
        check_single(scenario, machine, i, expected, what);
    for (unsigned i = 0; n > 2 && i < n_random; i++) {
        for (size_t k = 0; k < n; k++) {
            random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
            outcomes[k] = random >> 33 & 1 ? KEPT : LOST;
            if (machine_item_is_file(machine, k))
                outcomes[k] = random >> 33 & 3;
        }
        check_layout(scenario, machine, outcomes, expected, what);
    }
}

/*
 * Tries a loss of power after each call, or after each call that follows a failed one. Return: the number of calls of
 * the last save.
 */
static unsigned check_scenario(const struct scenario *scenario, bool after_failure, unsigned n_random)
{
    struct recorder *recorder = record(scenario);
    struct machine *machine = machine_new(recorder);
    struct expected expected = {-1, -1};
    unsigned n_calls = recorder->n_calls;

    for (unsigned i = 0; i < recorder->n_acts; i++) {
        char what[64];

        snprintf(what, sizeof(what), "%s, after act %u", scenario->name, i);
        expect_more(&expected, &recorder->acts[i]);
        machine_go_on(machine);
        if (!after_failure || i >= recorder->first_failure)
            check_losses(scenario, machine, &expected, n_random, what);
    }
    machine_free(machine);
    recorder_free(recorder);
    return n_calls;
}

/* ---- scenarios ----------------------------------------------------------------------------------------- */

static unsigned n_random(void)
{
    return tests_full() ? 50 : 8;
}

static void test_three_saves(void **state)
{
    struct scenario scenario = {.name = "three saves", .n_saves = 3, .saves = {{10, NEVER}, {20, NEVER}, {30, NEVER}}};

    (void)state;
    for (unsigned limit = 1; limit <= 2; limit++) {
        scenario.save_total_limit = limit;
        assert_true(check_scenario(&scenario, false, n_random()) > 20);
    }
}

/* Each node syncs its files, and node 0 publishes them as one checkpoint. */
static void test_several_nodes(void **state)
{
    struct scenario scenario = {.name = "several nodes",
                                .several_nodes = true,
                                .save_total_limit = 1,
                                .n_saves = 2,
                                .saves = {{10, NEVER}, {20, NEVER}}};

    (void)state;
    check_scenario(&scenario, false, n_random() / 4);
    scenario.saves[1].step = 10;
    check_scenario(&scenario, false, n_random() / 4);
}

/* Each save replaces the only checkpoint. */
static void test_same_step(void **state)
{
    struct scenario scenario = {
        .name = "the same step", .save_total_limit = 1, .n_saves = 3, .saves = {{10, NEVER}, {10, NEVER}, {10, NEVER}}};

    (void)state;
    check_scenario(&scenario, false, n_random());
}

/*
 * In the second save a call fails or the daemon is killed, then a third save follows. Power is lost at any moment after
 * the failure. Without --full, the failing call is one while files are written, or one of the last calls.
 */
static void check_failing(const char *name, bool goes_on, const uint64_t steps[3], bool several_nodes)
{
    enum { IN_FILES = 10, LAST_CALLS = 8, MAX_CALLS = 200 };
    unsigned n_calls = MAX_CALLS;

    for (unsigned fails_at = tests_full() ? 0 : IN_FILES; fails_at <= n_calls; fails_at++) {
        char what[48];
        struct scenario scenario = {.name = what,
                                    .several_nodes = several_nodes,
                                    .save_total_limit = 1,
                                    .n_saves = 3,
                                    .saves = {{steps[0], NEVER}, {steps[1], fails_at, goes_on}, {steps[2], NEVER}}};

        snprintf(what, sizeof(what), "%s, call %u fails", name, fails_at);
        n_calls = check_scenario(&scenario, true, tests_full() ? 4 : 0);
        assert_true(n_calls < MAX_CALLS);
        if (fails_at == IN_FILES && !tests_full())
            fails_at = n_calls - LAST_CALLS;
    }
}

static void test_killed(void **state)
{
    (void)state;
    check_failing("the next step", false, (const uint64_t[]){10, 20, 30}, false);
    if (tests_full())
        check_failing("the step again", false, (const uint64_t[]){10, 20, 20}, false);
}

static void test_killed_at_the_same_step(void **state)
{
    (void)state;
    check_failing("the same step", false, (const uint64_t[]){10, 10, 10}, false);
}

static void test_failing_calls(void **state)
{
    (void)state;
    if (tests_full())
        check_failing("the next step", true, (const uint64_t[]){10, 20, 30}, false);
    check_failing("the same step", true, (const uint64_t[]){10, 10, 10}, false);
}

/* On several nodes, the daemon is killed, or a call fails on one node. */
static void test_failing_among_several(void **state)
{
    (void)state;
    if (!tests_full())
        skip();
    check_failing("one of several nodes", false, (const uint64_t[]){10, 20, 30}, true);
    check_failing("one of several nodes", true, (const uint64_t[]){10, 10, 10}, true);
}

TEST_GROUP(power_loss)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_three_saves, setup, teardown),
        cmocka_unit_test_setup_teardown(test_several_nodes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_same_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed_at_the_same_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failing_calls, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failing_among_several, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
