/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writing checkpoints: which old ones are removed, and what happens when a call fails, or the daemon is killed at it.
 * After that, earlier checkpoints must be whole, the message must name the file, and the next save must succeed and
 * leave nothing else.
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

static const struct sample_options small = {
    .params = sample_small, .n_params = 3, .world_size = 2, .stage = 2, .bucket_elems = 1000};

static char scratch[64], dir[80];
static size_t n_open;
static struct sample *sample;

static int setup(void **state)
{
    (void)state;
    n_open = count_fds();
    scratch_new(scratch);
    snprintf(dir, sizeof(dir), "%s/checkpoints", scratch);
    sample = sample_new(&small);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_free(sample);
    scratch_remove(scratch);
    return count_fds() == n_open ? 0 : -1;
}

/* Saves a checkpoint whose seed is its step. */
static void save(uint64_t step, unsigned limit)
{
    char why[SAMPLE_WHY_BYTES];

    if (sample_save(sample, step, &(struct sample_save){.dir = dir, .step = step, .save_total_limit = limit}, why) != 0)
        fail_msg("step %d: %s", (int)step, why);
}

/* Asserts that the folder has whole checkpoints of these steps, the newest first, and nothing else. */
static void check_there(const uint64_t *steps, size_t n)
{
    struct folder_list list;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    assert_int_equal(folder_list(fd, &list), 0);
    assert_int_equal(list.n, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(list.entries[i].step, steps[i]);
        assert_true(list.entries[i].whole);
    }
    folder_list_deinit(&list);
    close(fd);
    assert_int_equal(scratch_count(dir), n);
}

#define CHECK_THERE(...) check_there((const uint64_t[]){__VA_ARGS__}, ARRAY_SIZE(((const uint64_t[]){__VA_ARGS__})))

static void check_newest(uint64_t expected_step, uint64_t seed)
{
    char why[SAMPLE_WHY_BYTES];
    uint64_t step = 0;

    assert_int_equal(sample_load(sample, &(struct sample_load){.dir = dir, .strict = true, .seed = seed}, &step, why),
                     0);
    assert_int_equal(step, expected_step);
    assert_true(sample_is(sample, seed));
}

/* ---- what stays ---------------------------------------------------------------------------------------- */

static void test_limit(void **state)
{
    (void)state;
    save(1, 0);
    save(2, 0);
    save(3, 0);
    CHECK_THERE(3, 2, 1);
    save(4, 2);
    CHECK_THERE(4, 3);
    save(5, 1);
    CHECK_THERE(5);
    check_newest(5, 5);
}

/* A job that returns to step 5 writes step 6. That checkpoint is kept, although others are newer. */
static void test_went_back(void **state)
{
    (void)state;
    save(10, 0);
    save(20, 0);
    save(5, 0);
    save(6, 2);
    CHECK_THERE(20, 6);
    save(7, 1);
    CHECK_THERE(7);
}

/* Checkpoints that are not whole neither count nor are removed. */
static void test_not_whole(void **state)
{
    char path[128];

    (void)state;
    save(1, 0);
    save(2, 0);
    save(3, 0);
    snprintf(path, sizeof(path), "%s/step-00000003/model.safetensors", dir);
    assert_int_equal(truncate(path, 1), 0);
    save(4, 2);
    assert_int_equal(scratch_count(dir), 3);
    check_newest(4, 4);
    assert_int_equal(truncate(path, 0), 0);
    snprintf(path, sizeof(path), "%s/step-00000002", dir);
    assert_true(scratch_count(path) > 0);
}

/* Saving a step again replaces its checkpoint. */
static void test_same_step(void **state)
{
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    save(1, 0);
    save(2, 0);
    for (unsigned seed = 3; seed < 6; seed++) {
        assert_int_equal(sample_save(sample, seed, &(struct sample_save){.dir = dir, .step = 2}, why), 0);
        CHECK_THERE(2, 1);
        check_newest(2, seed);
    }
}

static void make_folder(const char *name, const char *file)
{
    char path[256];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof(path), "%s/%s/%s", dir, name, file);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    assert_true(fd >= 0);
    close(fd);
}

/* Remains of an earlier daemon are removed. Files of others are kept. */
static void test_left_over(void **state)
{
    static const char *const others[] = {".step-1.writing",
                                         ".step-00000001.other",
                                         ".writing",
                                         "..writing",
                                         "step-00000001.writing",
                                         ".step-00000001",
                                         ".git",
                                         "notes",
                                         ".step-18446744073709551616.writing",
                                         ".a-very-long-name-that-is-no-step.writing"};

    (void)state;
    save(5, 0);
    make_folder(".step-00000006.writing", "model.safetensors");
    make_folder(".step-00000004.removed", "zerod.json");
    make_folder(".step-300000000.removed", "zerod.json");
    save(6, 0);
    CHECK_THERE(6, 5);
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        make_folder(others[i], "file");
    save(7, 0);
    assert_int_equal(scratch_count(dir), 3 + ARRAY_SIZE(others));
}

static void test_no_parent(void **state)
{
    char why[SAMPLE_WHY_BYTES], path[128];

    (void)state;
    snprintf(path, sizeof(path), "%s/a/b", scratch);
    assert_int_equal(sample_save(sample, 1, &(struct sample_save){.dir = path, .step = 1}, why), -ENOENT);
    assert_non_null(strstr(why, "/a/b: No such file or directory"));
}

static void test_no_folder(void **state)
{
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    close(open(dir, O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    assert_int_equal(sample_save(sample, 1, &(struct sample_save){.dir = dir, .step = 1}, why), -ENOTDIR);
    assert_non_null(strstr(why, "/checkpoints: Not a directory"));
}

static void test_cancelled(void **state)
{
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    save(1, 0);
    assert_int_equal(sample_save(sample, 2, &(struct sample_save){.dir = dir, .step = 2, .cancelled = true}, why),
                     -ECANCELED);
    assert_string_equal(why, "");
    CHECK_THERE(1);
}

/* Two parameters whose names are equal in a safetensors file, and one with a name that the format reserves. */
static void test_names(void **state)
{
    static const struct sample_param pairs[][2] = {
        {{"a\xff", DTYPE_F32, false, 1, {1}}, {"a\\xff", DTYPE_F32, false, 1, {1}}},
        {{"a", DTYPE_F32, false, 1, {1}}, {"__metadata__", DTYPE_F32, false, 1, {1}}},
    };
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        struct sample_options options = {
            .params = pairs[i], .n_params = 2, .world_size = 1, .stage = 1, .bucket_elems = 64};
        struct sample *s = sample_new(&options);

        assert_int_equal(sample_save(s, 1, &(struct sample_save){.dir = dir, .step = 1}, why), -EINVAL);
        assert_string_equal(why, "model.safetensors: two parameters have the same name in UTF-8, or one has the name "
                                 "__metadata__");
        sample_free(s);
    }
}

/* The folder may be a relative path, also one without a slash. */
static void test_relative(void **state)
{
    char why[SAMPLE_WHY_BYTES], before[256];

    (void)state;
    assert_non_null(getcwd(before, sizeof(before)));
    assert_int_equal(chdir(scratch), 0);
    assert_int_equal(sample_save(sample, 1, &(struct sample_save){.dir = "checkpoints", .step = 1}, why), 0);
    assert_int_equal(sample_save(sample, 2, &(struct sample_save){.dir = "./checkpoints//", .step = 2}, why), 0);
    assert_int_equal(sample_save(sample, 3, &(struct sample_save){.dir = "other/", .step = 3}, why), 0);
    assert_int_equal(chdir(before), 0);
    CHECK_THERE(2, 1);
    snprintf(before, sizeof(before), "%s/other", scratch);
    assert_int_equal(scratch_count(before), 1);
}

/* ---- failures ------------------------------------------------------------------------------------------ */

/* A disk like disk_hasty, of which one call fails, or that call and all later ones, as if the daemon was killed. */
struct failing {
    struct disk disk;
    unsigned n_calls, fails_at;
    int result;
    bool killed;
    const char *call; /* the failed call; NULL: none yet */
};

static int fails(const struct disk *disk, const char *call)
{
    struct failing *f = (struct failing *)(uintptr_t)container_of(disk, const struct failing, disk);
    unsigned at = f->n_calls++;

    if (at != f->fails_at && !(f->killed && at > f->fails_at))
        return 0;
    f->call = f->call ? f->call : call;
    return f->result;
}

static int failing_make_folder(const struct disk *disk, int folder, const char *name)
{
    int r = fails(disk, "make_folder");

    return r < 0 ? r : disk_hasty.make_folder(disk, folder, name);
}

static int failing_open_folder(const struct disk *disk, int folder, const char *name)
{
    int r = fails(disk, "open_folder");

    return r < 0 ? r : disk_hasty.open_folder(disk, folder, name);
}

static int failing_create(const struct disk *disk, int folder, const char *name)
{
    int r = fails(disk, "create");

    return r < 0 ? r : disk_hasty.create(disk, folder, name);
}

static int failing_write(const struct disk *disk, int fd, const void *bytes, size_t n_bytes, uint64_t offset)
{
    int r = fails(disk, "write");

    return r < 0 ? r : disk_hasty.write(disk, fd, bytes, n_bytes, offset);
}

static int failing_truncate(const struct disk *disk, int fd, uint64_t n_bytes)
{
    int r = fails(disk, "truncate");

    return r < 0 ? r : disk_hasty.truncate(disk, fd, n_bytes);
}

static int failing_sync(const struct disk *disk, int fd)
{
    int r = fails(disk, "sync");

    return r < 0 ? r : disk_hasty.sync(disk, fd);
}

static int failing_rename(const struct disk *disk, int folder, const char *from, const char *to)
{
    int r = fails(disk, "rename");

    return r < 0 ? r : disk_hasty.rename(disk, folder, from, to);
}

static int failing_exchange(const struct disk *disk, int folder, const char *one, const char *other)
{
    int r = fails(disk, "exchange");

    return r < 0 ? r : disk_hasty.exchange(disk, folder, one, other);
}

static int failing_remove_folder(const struct disk *disk, int folder, const char *name)
{
    int r = fails(disk, "remove_folder");

    return r < 0 ? r : disk_hasty.remove_folder(disk, folder, name);
}

static struct failing failing(unsigned fails_at, int result, bool killed)
{
    return (struct failing){.disk = {.make_folder = failing_make_folder,
                                     .open_folder = failing_open_folder,
                                     .create = failing_create,
                                     .write = failing_write,
                                     .truncate = failing_truncate,
                                     .sync = failing_sync,
                                     .rename = failing_rename,
                                     .exchange = failing_exchange,
                                     .remove_folder = failing_remove_folder},
                            .fails_at = fails_at,
                            .result = result,
                            .killed = killed};
}

static bool names_a_file(const char *why)
{
    static const char *const names[] = {
        "/checkpoints: ",          ".step-00000003.writing: ", "step-00000003: ", "model.safetensors: ",
        "optimizer.safetensors: ", "ranks.safetensors: ",      "zerod.json: "};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (strstr(why, names[i]))
            return true;
    return false;
}

/* Asserts that the newest checkpoint is the new one or the old one. Return: whether it is the new one. */
static bool check_either(uint64_t step, uint64_t seed, uint64_t old_step, uint64_t old_seed)
{
    char why[SAMPLE_WHY_BYTES];
    uint64_t found = 0;

    if (sample_load(sample, &(struct sample_load){.dir = dir, .strict = true}, &found, why) != 0)
        fail_msg("%s", why);
    if (found == step && sample_is(sample, seed))
        return true;
    assert_int_equal(found, old_step);
    assert_true(sample_is(sample, old_seed));
    return false;
}

/*
 * Saves steps 1 and 2, then step 3 with seed 33, in which a call fails, then step 4. If `again`, step 3 is saved with
 * seed 3 first. Return: false if there were fewer calls, so that none failed.
 */
static bool check_failure(unsigned fails_at, int result, bool killed, bool again)
{
    struct failing f = failing(fails_at, result, killed);
    const struct sample_save order = {.dir = dir, .disk = &f.disk, .step = 3, .save_total_limit = 2};
    char why[SAMPLE_WHY_BYTES];
    bool is_new;
    int r;

    save(1, 0);
    save(2, 0);
    if (again)
        save(3, 0);
    r = sample_save(sample, 33, &order, why);
    is_new = check_either(3, 33, again ? 3 : 2, again ? 3 : 2);
    if (r < 0) {
        assert_int_equal(r, result);
        assert_true(names_a_file(why) && strstr(why, strerror(-result)));
        assert_true(!is_new || strcmp(f.call, "sync") == 0);
    } else {
        assert_true(is_new); /* a call failed that removes other checkpoints */
    }
    save(4, 2);
    CHECK_THERE(4, r < 0 && !is_new && !again ? 2 : 3);
    check_newest(4, 4);
    scratch_remove(dir);
    return f.call;
}

static void check_failures(bool killed, bool again)
{
    static const int results[] = {-ENOSPC, -EIO};

    for (size_t i = 0; i < ARRAY_SIZE(results); i++) {
        unsigned n = 0;

        while (check_failure(n, results[i], killed, again))
            n++;
        assert_true(n > 20);
    }
}

static void test_failures(void **state)
{
    (void)state;
    check_failures(false, false);
}

static void test_failures_of_the_same_step(void **state)
{
    (void)state;
    check_failures(false, true);
}

static void test_killed(void **state)
{
    (void)state;
    check_failures(true, false);
}

static void test_killed_at_the_same_step(void **state)
{
    (void)state;
    check_failures(true, true);
}

/* The first save of all makes the folder. Each of its calls fails in turn. */
static void test_failures_of_the_first(void **state)
{
    unsigned n = 0;
    bool failed;

    (void)state;
    do {
        struct failing f = failing(n++, -EIO, false);
        char why[SAMPLE_WHY_BYTES];
        int r = sample_save(sample, 3, &(struct sample_save){.dir = dir, .disk = &f.disk, .step = 3}, why);

        failed = f.call;
        assert_true(r == 0 ? !failed : r == -EIO && names_a_file(why));
        save(4, 1);
        CHECK_THERE(4);
        scratch_remove(dir);
    } while (failed);
    assert_true(n > 20);
}

TEST_GROUP(write)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_limit, setup, teardown),
        cmocka_unit_test_setup_teardown(test_went_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(test_same_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_left_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_parent, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_folder, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancelled, setup, teardown),
        cmocka_unit_test_setup_teardown(test_names, setup, teardown),
        cmocka_unit_test_setup_teardown(test_relative, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failures, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failures_of_the_same_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed_at_the_same_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failures_of_the_first, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
