/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checkpoints that are written and loaded: masters, moments, weights and counts come back bit for bit, into other
 * stages, world sizes and bucket sizes too; and what does not fit is named.
 */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/folder.h"
#include "daemon/checkpoint/disk.h"
#include "tests/daemon/checkpoint/sample.h"
#include "tests/group.h"
#include "tests/programs/held.h"
#include "tests/tiers.h"

static char scratch[64];
static size_t n_open;

static int setup(void **state)
{
    (void)state;
    n_open = count_fds();
    scratch_new(scratch);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    scratch_remove(scratch);
    return count_fds() == n_open ? 0 : -1;
}

static void save(const struct sample_options *options, uint64_t seed, uint64_t step)
{
    struct sample *s = sample_new(options);
    char why[SAMPLE_WHY_BYTES];

    if (sample_save(s, seed, &(struct sample_save){.dir = scratch, .step = step}, why) != 0)
        fail_msg("%s", why);
    sample_free(s);
}

/* ---- round trips --------------------------------------------------------------------------------------- */

static void check_loads(const struct sample_options *options, uint64_t seed, uint64_t expected_step)
{
    struct sample *s = sample_new(options);
    char why[SAMPLE_WHY_BYTES];
    uint64_t step = 0;

    if (sample_load(s, &(struct sample_load){.dir = scratch, .strict = true, .seed = seed}, &step, why) != 0)
        fail_msg("%s", why);
    assert_string_equal(why, "");
    assert_int_equal(step, expected_step);
    assert_true(sample_is(s, seed));
    assert_false(sample_is(s, seed + 1));
    sample_free(s);
}

static void test_same_job(void **state)
{
    uint64_t step = 0;

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (unsigned optimizer = 0; optimizer < N_OPTIMIZERS; optimizer++) {
            struct sample_options options = {
                .world_size = 3, .stage = stage, .bucket_elems = 100000, .optimizer = optimizer};

            step++;
            save(&options, step, step);
            check_loads(&options, step, step);
        }
}

/* Of SGD without momentum nothing but the count is kept. */
static void test_no_momentum(void **state)
{
    struct sample_options options = {
        .world_size = 1, .stage = 2, .bucket_elems = 1000, .optimizer = OPTIMIZER_SGD, .no_momentum = true};

    (void)state;
    save(&options, 1, 1);
    check_loads(&options, 1, 1);
}

/* From every stage to every stage, with other numbers of ranks and other buckets. */
static void test_other_jobs(void **state)
{
    static const struct {
        unsigned world_size;
        uint64_t bucket_elems;
    } from[] = {{1, 1 << 30}, {4, 1000}, {3, 100000}}, to[] = {{3, 1000}, {1, 70000}, {8, 1 << 30}};
    uint64_t step = 0;

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (size_t i = 0; i < tests_some(ARRAY_SIZE(from)); i++) {
            save(&(struct sample_options){.world_size = from[i].world_size,
                                          .stage = stage,
                                          .bucket_elems = from[i].bucket_elems},
                 step + 1, step + 1);
            step++;
            for (unsigned other = 1; other <= 3; other++)
                for (size_t k = 0; k < ARRAY_SIZE(to); k++)
                    check_loads(&(struct sample_options){.world_size = to[k].world_size,
                                                         .stage = other,
                                                         .bucket_elems = to[k].bucket_elems},
                                step, step);
        }
}

/* With the system's calls, and more than one MiB in a file. */
static void test_disk_system(void **state)
{
    struct sample_options options = {.world_size = 2, .stage = 2, .bucket_elems = 100000};
    struct sample *s = sample_new(&options);
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    assert_int_equal(sample_save(s, 7, &(struct sample_save){.dir = scratch, .disk = &disk_system, .step = 7}, why), 0);
    sample_free(s);
    check_loads(&options, 7, 7);
}

/* ---- what does not fit --------------------------------------------------------------------------------- */

static const struct sample_options small = {
    .params = sample_small, .n_params = 3, .world_size = 2, .stage = 2, .bucket_elems = 1000};

/* Loads into a job with these parameters. Return: as loading_open(). */
static int load_into(const struct sample_options *options, bool strict, char *why)
{
    struct sample *s = sample_new(options);
    uint64_t step;
    int r = sample_load(s, &(struct sample_load){.dir = scratch, .strict = strict}, &step, why);

    sample_free(s);
    return r;
}

static void check_refused(const struct sample_options *options, bool strict, const char *sentence)
{
    char why[SAMPLE_WHY_BYTES];

    assert_int_equal(load_into(options, strict, why), -EINVAL);
    assert_string_equal(why, sentence);
}

static void check_noted(const struct sample_options *options, const char *note)
{
    char why[SAMPLE_WHY_BYTES];

    if (load_into(options, false, why) != 0)
        fail_msg("%s", why);
    assert_string_equal(why, note);
}

#define OTHER_SHAPE "w has another shape or type there than in this job"

static void test_other_shapes(void **state)
{
    static const struct sample_param w[] = {{"w", DTYPE_BF16, false, 1, {41}},    {"w", DTYPE_BF16, false, 2, {8, 5}},
                                            {"w", DTYPE_BF16, false, 2, {40, 1}}, {"w", DTYPE_F16, false, 1, {40}},
                                            {"w", DTYPE_F32, false, 1, {40}},     {"w", DTYPE_BF16, false, 0, {0}}};

    (void)state;
    save(&small, 1, 1);
    for (size_t i = 0; i < ARRAY_SIZE(w); i++) {
        struct sample_param params[] = {w[i], sample_small[1], sample_small[2]};
        struct sample_options options = small;

        options.params = params;
        check_refused(&options, true, OTHER_SHAPE);
        check_refused(&options, false, OTHER_SHAPE);
    }
}

static void test_lacking(void **state)
{
    struct sample_param params[] = {
        sample_small[0], sample_small[1], sample_small[2], {"more", DTYPE_F32, false, 1, {3}}};
    struct sample_options options = small;

    (void)state;
    save(&small, 1, 1);
    options.params = params;
    options.n_params = ARRAY_SIZE(params);
    check_refused(&options, true, "it lacks more, which this job has");
    check_refused(&options, false, "it lacks more, which this job has");
    params[3].frozen = true;
    check_refused(&options, true, "it lacks more, which this job has");
    check_refused(&options, false, "it lacks more, which this job has");
}

static void test_more_than_needed(void **state)
{
    struct sample_options options = small;

    (void)state;
    save(&small, 1, 1);
    options.n_params = 1;
    check_refused(&options, true, "it has b, which this job lacks");
    check_noted(&options, "of its tensors 5 are ignored because this job lacks them: b");
}

/* A parameter that was trained is frozen now, or the other way round. */
static void test_frozen(void **state)
{
    struct sample_param params[] = {sample_small[0], sample_small[1], sample_small[2]};
    struct sample_options options = small;

    (void)state;
    save(&small, 1, 1);
    options.params = params;
    params[1].frozen = true;
    check_refused(&options, true, "it has state.b.exp_avg, which this job lacks");
    check_noted(&options, "of its tensors 3 are ignored because this job lacks them: state.b.exp_avg");
    params[1].frozen = params[2].frozen = false;
    check_refused(&options, true, "it lacks state.f.exp_avg, which this job has");
    check_refused(&options, false, "it lacks state.f.master, which this job has");
    params[2].frozen = true;
    params[0].frozen = true;
    check_noted(&options, "of its tensors 4 are ignored because this job lacks them: state.w.exp_avg");
}

/* One that begins to be trained, in fp32, begins with moments of zero. */
static void test_thawed(void **state)
{
    static const struct sample_param frozen = {"a", DTYPE_F32, true, 1, {3}}, trained = {"a", DTYPE_F32, false, 1, {3}};
    struct sample_options from = small, to = small;

    (void)state;
    from.params = &frozen;
    to.params = &trained;
    from.n_params = to.n_params = 1;
    save(&from, 1, 1);
    check_refused(&to, true, "it lacks state.a.exp_avg, which this job has");
    check_noted(&to, "of this job's tensors 3 begin with zero because it lacks them: state.a.exp_avg");
}

static void test_other_optimizer(void **state)
{
    struct sample_options options = small;

    (void)state;
    save(&small, 1, 1);
    options.optimizer = OPTIMIZER_SGD;
    check_refused(&options, true, "it is of a run with AdamW, and this job has SGD");
    check_noted(&options, "of its tensors 4 are ignored because this job lacks them: state.w.exp_avg; "
                          "of this job's tensors 2 begin with zero because it lacks them: state.w.momentum_buffer");
    options.optimizer = OPTIMIZER_LION;
    check_noted(&options, "of its tensors 2 are ignored because this job lacks them: state.w.exp_avg_sq");
}

/* What a checkpoint lacks begins with zero, also where another one was loaded before. */
static void test_zero_again(void **state)
{
    struct sample_options options = small;
    char why[SAMPLE_WHY_BYTES];
    struct sample *s;
    uint64_t step;

    (void)state;
    save(&small, 1, 1);
    options.optimizer = OPTIMIZER_ADAGRAD;
    s = sample_new(&options);
    sample_fill(s, 5); /* something of one whose bytes were wrong */
    assert_int_equal(sample_load(s, &(struct sample_load){.dir = scratch}, &step, why), 0);
    for (uint32_t p = 0; p < 2; p++) {
        const struct layout_param *param = &s->layout->params[p];

        for (uint64_t i = 0; i < param->n_elems; i++)
            assert_true(state_exp_avg_sq(s->state, param->bucket, param->offset_elems)[i] == 0);
    }
    sample_free(s);
}

/* ---- which one ----------------------------------------------------------------------------------------- */

static void test_none(void **state)
{
    char why[SAMPLE_WHY_BYTES], path[128];
    struct sample *s = sample_new(&small);
    uint64_t step;

    (void)state;
    assert_int_equal(sample_load(s, &(struct sample_load){.dir = scratch}, &step, why), 1);
    snprintf(path, sizeof(path), "%s/none", scratch);
    assert_int_equal(sample_load(s, &(struct sample_load){.dir = path}, &step, why), 1);
    assert_int_equal(sample_load(s, &(struct sample_load){.path = path}, &step, why), -ENOENT);
    assert_non_null(strstr(why, "/none: No such file or directory"));
    sample_free(s);
}

static void spoil(unsigned step, const char *file, off_t at)
{
    char path[256];
    uint8_t byte;
    int fd;

    snprintf(path, sizeof(path), "%s/step-%08u/%s", scratch, step, file);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void check_newest(uint64_t before_step, int expected, uint64_t expected_step, const char *end_of_why)
{
    char why[SAMPLE_WHY_BYTES];
    struct sample *s = sample_new(&small);
    uint64_t step = 0;
    int r =
        sample_load(s, &(struct sample_load){.dir = scratch, .before_step = before_step, .strict = true}, &step, why);

    assert_int_equal(r, expected);
    assert_int_equal(step, expected_step);
    assert_true(strlen(why) >= strlen(end_of_why));
    assert_string_equal(why + strlen(why) - strlen(end_of_why), end_of_why);
    if (r == 0)
        assert_true(sample_is(s, step));
    sample_free(s);
}

static void test_newest(void **state)
{
    struct stat st;
    char path[256];

    (void)state;
    for (unsigned step = 1; step <= 3; step++)
        save(&small, step, step);
    check_newest(0, 0, 3, "");
    check_newest(3, 0, 2, "");
    check_newest(1, -EIO, 0, "step-00000003: its bytes are not those that were written");
    spoil(3, "zerod.json", 0);
    check_newest(0, 0, 2, "");
    snprintf(path, sizeof(path), "%s/step-00000002/model.safetensors", scratch);
    assert_int_equal(stat(path, &st), 0);
    spoil(2, "model.safetensors", st.st_size - 1);
    check_newest(0, -EBADMSG, 0, "model.safetensors: the MiB from byte 0 is not as it was written");
    check_newest(2, 0, 1, ""); /* the daemon tries that then */
    spoil(1, "optimizer.safetensors", 8);
    check_newest(2, -EBADMSG, 0, "optimizer.safetensors: the MiB from byte 0 is not as it was written");
    assert_int_equal(truncate(path, 5), 0);
    snprintf(path, sizeof(path), "%s/step-00000001/ranks.safetensors", scratch);
    assert_int_equal(unlink(path), 0);
    check_newest(0, -EIO, 0, "of step-00000003: zerod.json: its bytes are not those that were written");
}

/* Every wrong byte is noticed before a step is made with it. */
static void test_wrong_bytes(void **state)
{
    static const char *const files[] = {"model.safetensors", "optimizer.safetensors", "ranks.safetensors"};
    struct sample *s = sample_new(&small);
    char why[SAMPLE_WHY_BYTES], path[256], expected[128];
    struct stat st;
    uint64_t step;

    (void)state;
    save(&small, 1, 1);
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        snprintf(path, sizeof(path), "%s/step-00000001/%s", scratch, files[i]);
        assert_int_equal(stat(path, &st), 0);
        for (off_t at = 0; at < st.st_size; at += tests_full() ? 1 : 7) {
            spoil(1, files[i], at);
            assert_int_equal(sample_load(s, &(struct sample_load){.dir = scratch}, &step, why), -EBADMSG);
            snprintf(expected, sizeof(expected), "%s: the MiB from byte 0 is not as it was written", files[i]);
            assert_string_equal(why, expected);
            spoil(1, files[i], at);
        }
    }
    assert_int_equal(sample_load(s, &(struct sample_load){.dir = scratch, .strict = true}, &step, why), 0);
    sample_free(s);
}

/* Wrong bytes in a header are found like those behind it: by reading, so that the daemon tries the one before it. */
static void test_wrong_header(void **state)
{
    struct sample *s = sample_new(&small);
    const struct loading_options options = {
        .dir = scratch, .before_step = UINT64_MAX, .state = s->state, .optimizer_name = "AdamW", .strict = true};
    struct loading *loading = NULL;
    char why[LOADING_WHY_BYTES] = "";

    (void)state;
    save(&small, 1, 1);
    spoil(1, "optimizer.safetensors", 20);
    assert_int_equal(loading_open(&loading, &options, why), 0);
    assert_int_equal(loading_description(loading)->step, 1);
    assert_true(loading_n_pieces(loading) > 0);
    for (uint32_t i = 0; i < loading_n_pieces(loading); i++)
        assert_int_equal(loading_read(loading, i), -EBADMSG);
    assert_string_equal(loading_why(loading), "optimizer.safetensors: the MiB from byte 0 is not as it was written");
    loading_free(loading);
    sample_free(s);
}

static void test_path(void **state)
{
    char why[SAMPLE_WHY_BYTES], path[128];
    struct sample *s = sample_new(&small);
    uint64_t step;

    (void)state;
    save(&small, 1, 1);
    save(&small, 2, 2);
    snprintf(path, sizeof(path), "%s/step-00000001", scratch);
    assert_int_equal(sample_load(s, &(struct sample_load){.path = path, .strict = true, .seed = 1}, &step, why), 0);
    assert_int_equal(step, 1);
    assert_true(sample_is(s, 1));
    sample_free(s);
}

TEST_GROUP(load)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_same_job, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_momentum, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_jobs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_disk_system, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_shapes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lacking, setup, teardown),
        cmocka_unit_test_setup_teardown(test_more_than_needed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_frozen, setup, teardown),
        cmocka_unit_test_setup_teardown(test_thawed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_optimizer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_zero_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_none, setup, teardown),
        cmocka_unit_test_setup_teardown(test_newest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_header, setup, teardown),
        cmocka_unit_test_setup_teardown(test_path, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
