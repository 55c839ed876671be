/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Folders of checkpoints: which are listed, whether they are complete, why not, and that verifying finds wrong bytes.
 */

#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/folder.h"
#include "core/layout/layout.h"
#include "tests/group.h"
#include "tests/programs/held.h"
#include "tests/tiers.h"

enum { MODEL_BYTES = 2 * HASH_BLOCK_BYTES + 77, OPTIMIZER_BYTES = HASH_BLOCK_BYTES, RANKS_BYTES = 100, N_FILES = 3 };

static const char *const file_names[N_FILES] = {"model.safetensors", "optimizer.safetensors", "ranks.safetensors"};
static const size_t file_bytes[N_FILES] = {MODEL_BYTES, OPTIMIZER_BYTES, RANKS_BYTES};

static char scratch[64];
static int dir;
static size_t n_open;
static struct layout *layout;

static int setup(void **state)
{
    static const uint64_t shape = 4;
    static const struct layout_decl decl = {
        .name = "w", .name_len = 1, .trainable = true, .n_dims = 1, .shape = &shape};
    uint32_t bad;

    (void)state;
    n_open = count_fds();
    snprintf(scratch, sizeof(scratch), "%s/zerod-folder.XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(scratch))
        return -1;
    dir = open(scratch, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return dir < 0 ? -1 : layout_new(&layout, &decl, 1, 1, 4, &bad);
}

static int teardown(void **state)
{
    char command[128];

    (void)state;
    layout_free(layout);
    close(dir);
    snprintf(command, sizeof(command), "rm -rf %s", scratch);
    return system(command) == 0 && count_fds() == n_open ? 0 : -1;
}

/* ---- checkpoints --------------------------------------------------------------------------------------- */

static void write_file(int folder, const char *name, const void *bytes, size_t n_bytes)
{
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n_bytes), n_bytes);
    close(fd);
}

static uint8_t *random_bytes(size_t n_bytes, uint64_t seed)
{
    uint8_t *bytes = malloc(n_bytes);

    for (size_t i = 0; i < n_bytes; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        bytes[i] = (uint8_t)(seed >> 56);
    }
    return bytes;
}

static void write_tensors(int folder, struct description *d, unsigned which)
{
    uint8_t *bytes = random_bytes(file_bytes[which], which + 1);
    struct description_file *file = description_add_file(d);
    struct hash_state *hash = hash_new(file_bytes[which]);

    write_file(folder, file_names[which], bytes, file_bytes[which]);
    hash_add(hash, bytes, file_bytes[which]);
    hash_end(hash, &file->hash);
    file->name = strdup(file_names[which]);
    file->n_bytes = file_bytes[which];
    free(bytes);
}

/* Makes a checkpoint whose description has this step. Return: the descriptor of its folder. */
static int make(const char *name, uint64_t step)
{
    struct description d = {.version = strdup("1"),
                            .job = strdup("job"),
                            .optimizer = strdup("AdamW"),
                            .configuration = strdup(""),
                            .step = step,
                            .world_size = 3};
    char *text;
    int folder;

    assert_int_equal(mkdirat(dir, name, 0777), 0);
    folder = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (unsigned i = 0; i < N_FILES; i++)
        write_tensors(folder, &d, i);
    text = description_print(&d, layout);
    write_file(folder, CHECKPOINT_DESCRIPTION, text, strlen(text));
    free(text);
    description_deinit(&d);
    return folder;
}

/* Asserts that there is one entry, and returns it. */
static struct folder_entry list_one(void)
{
    struct folder_list list;
    struct folder_entry entry;

    assert_int_equal(folder_list(dir, &list), 0);
    assert_int_equal(list.n, 1);
    entry = list.entries[0];
    folder_list_deinit(&list);
    return entry;
}

static void check_why(const char *why)
{
    struct folder_entry entry = list_one();
    struct description d;
    char same[FOLDER_WHY_BYTES];

    assert_false(entry.whole);
    assert_string_equal(entry.why, why);
    assert_true(folder_open(dir, "step-00000005", &d, same, sizeof(same)) < 0);
    assert_string_equal(same, why);
    assert_null(d.files);
}

/* ---- names --------------------------------------------------------------------------------------------- */

static void test_names(void **state)
{
    static const uint64_t steps[] = {0, 1, 99999999, 100000000, UINT64_MAX};
    static const char *const others[] = {"",
                                         "step",
                                         "step-",
                                         "step-1",
                                         "step-0000001",
                                         "step-000000001",
                                         "step-00000001x",
                                         "step-00000001 ",
                                         " step-00000001",
                                         "step-+0000001",
                                         "step--0000001",
                                         "step- 0000001",
                                         "step-0x000001",
                                         "Step-00000001",
                                         ".step-00000001",
                                         ".step-00000001.writing",
                                         "step-00000001.writing",
                                         "step-18446744073709551616",
                                         "step-99999999999999999999999999",
                                         "step-0000000a",
                                         "checkpoint-1",
                                         ".",
                                         ".."};
    char name[FOLDER_NAME_BYTES];
    uint64_t step;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
        folder_name(name, steps[i]);
        assert_true(folder_parse_name(name, &step));
        assert_true(step == steps[i]);
    }
    folder_name(name, 1000);
    assert_string_equal(name, "step-00001000");
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        assert_false(folder_parse_name(others[i], &step));
}

/* ---- listing ------------------------------------------------------------------------------------------- */

static void test_whole(void **state)
{
    int folder = make("step-00000005", 5);
    struct folder_entry entry = list_one();
    char why[FOLDER_WHY_BYTES] = "";
    struct description d;
    struct stat st;
    int fd;

    (void)state;
    assert_true(entry.whole);
    assert_string_equal(entry.why, "");
    assert_int_equal(entry.step, 5);
    assert_int_equal(entry.world_size, 3);
    assert_int_equal(entry.n_bytes, MODEL_BYTES + OPTIMIZER_BYTES + RANKS_BYTES);
    assert_int_equal(fstatat(folder, CHECKPOINT_DESCRIPTION, &st, 0), 0);
    assert_int_equal(entry.written_s, st.st_mtime);
    fd = folder_open(dir, "step-00000005", &d, why, sizeof(why));
    assert_true(fd >= 0);
    assert_int_equal(d.n_files, N_FILES);
    close(fd);
    description_deinit(&d);
    close(folder);
}

/* Entries are listed with the newest first. Other names and their contents are ignored. */
static void test_order(void **state)
{
    static const uint64_t steps[] = {7, 300000000, 12, 1};
    static const uint64_t expected[] = {300000000, 12, 7, 1};
    struct folder_list list;
    char name[FOLDER_NAME_BYTES];

    (void)state;
    assert_int_equal(folder_list(dir, &list), 0);
    assert_int_equal(list.n, 0);
    folder_list_deinit(&list);
    for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
        folder_name(name, steps[i]);
        if (i == 2)
            assert_int_equal(mkdirat(dir, name, 0777), 0);
        else
            close(make(name, steps[i]));
    }
    close(make(".step-00000009.writing", 9));
    close(make(".step-00000010.removed", 10));
    close(make("other", 11));
    assert_int_equal(folder_list(dir, &list), 0);
    assert_int_equal(list.n, 4);
    for (size_t i = 0; i < list.n; i++) {
        assert_int_equal(list.entries[i].step, expected[i]);
        assert_int_equal(list.entries[i].whole, i != 1);
    }
    folder_list_deinit(&list);
}

static void test_no_folder(void **state)
{
    struct folder_list list;
    int fd = openat(dir, "file", O_RDWR | O_CREAT | O_CLOEXEC, 0666);

    (void)state;
    assert_int_equal(folder_list(fd, &list), -ENOTDIR);
    close(fd);
    assert_int_equal(folder_list(-1, &list), -EBADF);
    assert_null(list.entries);
}

static void test_lacking_files(void **state)
{
    int folder = make("step-00000005", 5);

    (void)state;
    assert_int_equal(unlinkat(folder, "ranks.safetensors", 0), 0);
    check_why("ranks.safetensors: No such file or directory");
    assert_int_equal(unlinkat(folder, "model.safetensors", 0), 0);
    check_why("model.safetensors: No such file or directory");
    assert_int_equal(unlinkat(folder, CHECKPOINT_DESCRIPTION, 0), 0);
    check_why("zerod.json: No such file or directory");
    close(folder);
}

static void test_sizes(void **state)
{
    int folder = make("step-00000005", 5), fd = openat(folder, "optimizer.safetensors", O_WRONLY | O_CLOEXEC);

    (void)state;
    assert_int_equal(ftruncate(fd, OPTIMIZER_BYTES + 1), 0);
    check_why("optimizer.safetensors has 1048577 bytes instead of 1048576");
    assert_int_equal(ftruncate(fd, 0), 0);
    check_why("optimizer.safetensors has 0 bytes instead of 1048576");
    close(fd);
    fd = openat(folder, CHECKPOINT_DESCRIPTION, O_WRONLY | O_CLOEXEC);
    assert_int_equal(ftruncate(fd, 10), 0);
    check_why("zerod.json: its bytes are not those that were written");
    assert_int_equal(ftruncate(fd, 0), 0);
    check_why("zerod.json: its bytes are not those that were written");
    assert_int_equal(ftruncate(fd, (off_t)DESCRIPTION_MAX_BYTES + 1), 0);
    check_why("zerod.json: File too large");
    close(fd);
    close(folder);
}

/* A checkpoint that was renamed to another step. */
static void test_other_step(void **state)
{
    struct folder_entry entry;

    (void)state;
    close(make("step-00000005", 6));
    entry = list_one();
    assert_false(entry.whole);
    assert_string_equal(entry.why, "zerod.json is of step 6");
}

/* ---- links, pipes and others in place of files --------------------------------------------------------- */

static void check_instead_of(const char *name)
{
    static const char rest[] = " is a link, or not what it should be: links are not followed";
    char why[FOLDER_WHY_BYTES] = "";

    strncat(why, name, sizeof(why) - sizeof(rest));
    strcat(why, rest);
    check_why(why);
}

static void test_other_kinds(void **state)
{
    static const char *const names[] = {"model.safetensors", CHECKPOINT_DESCRIPTION};
    int folder = make("step-00000005", 5);

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        assert_int_equal(renameat(folder, names[i], folder, "other"), 0);
        assert_int_equal(symlinkat("other", folder, names[i]), 0);
        check_instead_of(names[i]);
        assert_int_equal(unlinkat(folder, names[i], 0), 0);
        assert_int_equal(mkfifoat(folder, names[i], 0666), 0);
        check_instead_of(names[i]); /* reading a pipe does not wait for its writer */
        assert_int_equal(unlinkat(folder, names[i], 0), 0);
        assert_int_equal(mkdirat(folder, names[i], 0777), 0);
        check_instead_of(names[i]);
        assert_int_equal(unlinkat(folder, names[i], AT_REMOVEDIR), 0);
        assert_int_equal(renameat(folder, "other", folder, names[i]), 0);
    }
    assert_true(list_one().whole);
    close(folder);
}

static void test_socket(void **state)
{
    int folder = make("step-00000005", 5), fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    (void)state;
    assert_int_equal(unlinkat(folder, "ranks.safetensors", 0), 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/ranks.safetensors", folder);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
    check_why("ranks.safetensors: No such device or address");
    close(fd);
    close(folder);
}

static void test_checkpoint_is_no_folder(void **state)
{
    (void)state;
    close(make("other", 5));
    assert_int_equal(symlinkat("other", dir, "step-00000005"), 0);
    check_instead_of("step-00000005");
    assert_int_equal(unlinkat(dir, "step-00000005", 0), 0);
    write_file(dir, "step-00000005", "x", 1);
    check_instead_of("step-00000005");
    assert_int_equal(unlinkat(dir, "step-00000005", 0), 0);
    assert_int_equal(mkfifoat(dir, "step-00000005", 0666), 0);
    check_instead_of("step-00000005");
}

/* ---- verifying ----------------------------------------------------------------------------------------- */

struct seen {
    char file[64];
    uint64_t block;
    unsigned n_bad;
    uint64_t n_done, n_bytes;
};

static void note_bad(void *userdata, const char *file, uint64_t block)
{
    struct seen *seen = userdata;

    assert_true(strlen(file) < sizeof(seen->file));
    memcpy(seen->file, file, strlen(file) + 1);
    seen->block = block;
    seen->n_bad++;
}

static void note_progress(void *userdata, uint64_t n_bytes_done, uint64_t n_bytes)
{
    struct seen *seen = userdata;

    assert_true(n_bytes_done > seen->n_done && n_bytes_done <= n_bytes);
    seen->n_done = n_bytes_done;
    seen->n_bytes = n_bytes;
}

static int64_t verify(int folder, const struct description *d, struct seen *seen, char *why)
{
    const struct folder_verifier verifier = {note_bad, note_progress, seen};

    *seen = (struct seen){.n_bad = 0};
    return folder_verify(folder, d, &verifier, why, FOLDER_WHY_BYTES);
}

static void test_verify(void **state)
{
    char why[FOLDER_WHY_BYTES] = "";
    struct description d;
    struct seen seen;
    int folder;

    (void)state;
    close(make("step-00000005", 5));
    folder = folder_open(dir, "step-00000005", &d, why, sizeof(why));
    assert_int_equal(verify(folder, &d, &seen, why), 0);
    assert_int_equal(seen.n_bad, 0);
    assert_int_equal(seen.n_done, MODEL_BYTES + OPTIMIZER_BYTES + RANKS_BYTES);
    assert_int_equal(seen.n_bytes, seen.n_done);
    assert_int_equal(
        folder_verify(folder, &d, &(struct folder_verifier){.bad = note_bad, .userdata = &seen}, why, sizeof(why)), 0);
    assert_int_equal(unlinkat(folder, "optimizer.safetensors", 0), 0); /* the folder is open already */
    assert_int_equal(verify(folder, &d, &seen, why), -ENOENT);
    assert_string_equal(why, "optimizer.safetensors: No such file or directory");
    close(folder);
    description_deinit(&d);
}

static void flip(int folder, const char *name, uint64_t bit)
{
    int fd = openat(folder, name, O_RDWR | O_CLOEXEC);
    uint8_t byte;

    assert_int_equal(pread(fd, &byte, 1, (off_t)(bit / 8)), 1);
    byte ^= (uint8_t)(1 << bit % 8);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)(bit / 8)), 1);
    close(fd);
}

/* Verifying finds a wrong bit in a file of tensors, and names its MiB. */
static void check_flip_found(int folder, const struct description *d, unsigned which, uint64_t bit)
{
    char why[FOLDER_WHY_BYTES];
    struct seen seen;

    flip(folder, file_names[which], bit);
    assert_int_equal(verify(folder, d, &seen, why), 1);
    assert_int_equal(seen.n_bad, 1);
    assert_string_equal(seen.file, file_names[which]);
    assert_int_equal(seen.block, bit / 8 / HASH_BLOCK_BYTES);
    flip(folder, file_names[which], bit);
}

/* A description with a wrong bit is refused when it is opened. */
static void check_flip_refused(int folder, uint64_t bit)
{
    flip(folder, CHECKPOINT_DESCRIPTION, bit);
    check_why("zerod.json: its bytes are not those that were written");
    flip(folder, CHECKPOINT_DESCRIPTION, bit);
}

static void test_flipped_bits(void **state)
{
    const unsigned n = tests_full() ? 1000 : 200;
    char why[FOLDER_WHY_BYTES] = "";
    struct description d;
    struct stat st;
    uint64_t x = 1;
    int folder;

    (void)state;
    close(make("step-00000005", 5));
    folder = folder_open(dir, "step-00000005", &d, why, sizeof(why));
    assert_int_equal(fstatat(folder, CHECKPOINT_DESCRIPTION, &st, 0), 0);
    for (unsigned i = 0; i < n; i++) {
        unsigned which = i % (N_FILES + 1);

        x = x * UINT64_C(6364136223846793005) + 1442695040888963407;
        if (which < N_FILES)
            check_flip_found(folder, &d, which, (x >> 20) % (8 * file_bytes[which]));
        else
            check_flip_refused(folder, (x >> 20) % (8 * (uint64_t)st.st_size));
    }
    assert_true(list_one().whole);
    close(folder);
    description_deinit(&d);
}

TEST_GROUP(folder)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_names, setup, teardown),
        cmocka_unit_test_setup_teardown(test_whole, setup, teardown),
        cmocka_unit_test_setup_teardown(test_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_folder, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lacking_files, setup, teardown),
        cmocka_unit_test_setup_teardown(test_sizes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_kinds, setup, teardown),
        cmocka_unit_test_setup_teardown(test_socket, setup, teardown),
        cmocka_unit_test_setup_teardown(test_checkpoint_is_no_folder, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verify, setup, teardown),
        cmocka_unit_test_setup_teardown(test_flipped_bits, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
