/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Saves and loads checkpoints. Masters, moments, weights and counts must have the same bits, also in jobs of another
 * stage, world size or bucket size. If a checkpoint does not fit the job, the message names the tensor.
 */

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/checkpoint/load-check.h"
#include "core/checkpoint/folder.h"
#include "core/checkpoint/safetensors.h"
#include "daemon/checkpoint/disk.h"
#include "kernels/convert.h"
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

/* Loads the checkpoint into a job with these parameters. Return: the result of sample_load(). */
static int load_into(const struct sample_options *options, bool strict, char *why)
{
    struct sample *s = sample_new(options);
    uint64_t step;
    int r = sample_load(s, &(struct sample_load){.dir = scratch, .strict = strict}, &step, why);

    sample_free(s);
    return r;
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

/* SGD without momentum has no state except the count. */
static void test_no_momentum(void **state)
{
    struct sample_options options = {
        .world_size = 1, .stage = 2, .bucket_elems = 1000, .optimizer = OPTIMIZER_SGD, .no_momentum = true};

    (void)state;
    save(&options, 1, 1);
    check_loads(&options, 1, 1);
}

/* Moments and masters are converted if the job has other types than the checkpoint. */
static void test_types(void **state)
{
    static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_SIGNED8};
    uint64_t step = 0;

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(types) * ARRAY_SIZE(types); i++)
        for (unsigned stage = 1; stage <= 3; stage++) {
            struct sample_options from = {.world_size = 3,
                                          .stage = stage,
                                          .bucket_elems = 100000,
                                          .moments = types[i / ARRAY_SIZE(types)],
                                          .master24 = step & 1,
                                          .short_masters = true,
                                          .short_moments = true};
            struct sample_options to = {.world_size = 2,
                                        .stage = 1 + stage % 3,
                                        .bucket_elems = 30000,
                                        .moments = types[i % ARRAY_SIZE(types)],
                                        .master24 = step & 2,
                                        .short_masters = true,
                                        .short_moments = true};

            step++;
            save(&from, step, step);
            check_loads(&to, step, step);
        }
}

/* Values that bf16 does not have are rounded to the nearest. */
static void test_moments_are_rounded(void **state)
{
    struct sample_options wide = {
        .params = sample_small, .n_params = 3, .world_size = 2, .stage = 2, .bucket_elems = 64};
    struct sample_options narrow = wide;
    struct sample *a = sample_new(&wide), *b;
    char why[SAMPLE_WHY_BYTES];
    uint64_t step;

    (void)state;
    narrow.moments = DTYPE_BF16;
    b = sample_new(&narrow);
    save(&wide, 1, 1);
    sample_fill(a, 1);
    assert_int_equal(sample_load(b, &(struct sample_load){.dir = scratch, .strict = true}, &step, why), 0);
    for (uint32_t p = 0; p < 2; p++)
        for (uint64_t i = 0; i < a->layout->params[p].n_elems; i++) {
            uint32_t bucket = a->layout->params[p].bucket;
            uint64_t elem = a->layout->params[p].offset_elems + i;
            const float *value = state_exp_avg(a->state, bucket, elem);

            assert_int_equal(*(uint16_t *)state_exp_avg(b->state, bucket, elem), bf16_from_f32(*value));
        }
    sample_free(a);
    sample_free(b);
}

/* Every stage loads the checkpoints of every stage, with other numbers of ranks and other bucket sizes. */
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

/* ---- several nodes ------------------------------------------------------------------------------------- */

/* How many ranks each node has. */
struct split {
    unsigned n_nodes, n_ranks[3];
};

static struct sample_options on_node(const struct sample_options *job, const struct split *split, unsigned node)
{
    struct sample_options options = *job;

    options.n_local = split->n_ranks[node];
    for (unsigned i = 0; i < node; i++)
        options.first_rank += split->n_ranks[i];
    return options;
}

static unsigned count_ranks(const struct split *split)
{
    unsigned n = 0;

    for (unsigned i = 0; i < split->n_nodes; i++)
        n += split->n_ranks[i];
    return n;
}

/* Each node saves its part, the last node first. Then node 0 publishes the checkpoint. */
static void save_split(const struct sample_options *job, const struct split *split, uint64_t seed, uint64_t step)
{
    char why[SAMPLE_WHY_BYTES];

    for (unsigned node = split->n_nodes; node-- > 0;) {
        const struct sample_options options = on_node(job, split, node);
        const struct sample_save order = {
            .dir = scratch, .step = step, .n_nodes = split->n_nodes, .node = node, .token = seed};
        struct sample *s = sample_new(&options);

        if (sample_save(s, seed, &order, why) != 0)
            fail_msg("node %u: %s", node, why);
        if (node == 0 && sample_publish(s, &order, why) != 0)
            fail_msg("%s", why);
        sample_free(s);
    }
}

static void check_loads_split(const struct sample_options *job, const struct split *split, uint64_t seed, uint64_t step)
{
    for (unsigned node = 0; node < split->n_nodes; node++) {
        const struct sample_options options = on_node(job, split, node);

        check_loads(&options, seed, step);
    }
}

static const struct split splits[] = {{1, {1}}, {2, {1, 1}}, {2, {1, 3}}, {3, {2, 1, 2}}};
static const uint64_t split_bucket_elems[] = {1000, 100000, 1 << 30};

/* Every split loads the checkpoints of every split, of one node and of several, with wide and narrow state. */
static void test_nodes(void **state)
{
    static const enum dtype types[] = {DTYPE_F32, DTYPE_SIGNED8, DTYPE_SIGNED8};
    uint64_t step = 0;

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (size_t i = 0; i < ARRAY_SIZE(splits); i++) {
            struct sample_options from = {.world_size = count_ranks(&splits[i]),
                                          .stage = stage,
                                          .bucket_elems = split_bucket_elems[(stage + i) % 3],
                                          .moments = types[stage % 3],
                                          .master24 = (stage + i) % 2,
                                          .short_masters = true,
                                          .short_moments = true};

            step++;
            if (i == 0)
                save(&from, step, step);
            else
                save_split(&from, &splits[i], step, step);
            for (size_t k = 0; k < tests_some(ARRAY_SIZE(splits)); k++) {
                const struct split *other = &splits[(i + k) % ARRAY_SIZE(splits)];
                struct sample_options to = {.world_size = count_ranks(other),
                                            .stage = 1 + (stage + k) % 3,
                                            .bucket_elems = split_bucket_elems[(i + k) % 3],
                                            .moments = types[(stage + k) % 3],
                                            .master24 = (i + k) % 2,
                                            .short_masters = true,
                                            .short_moments = true};

                check_loads_split(&to, other, step, step);
            }
        }
}

/* Loads into the same job, also with optimizers that have fewer moments. */
static void test_nodes_same_job(void **state)
{
    uint64_t step = 0;

    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        for (unsigned optimizer = 0; optimizer < N_OPTIMIZERS; optimizer++) {
            const struct split *split = &splits[3];
            struct sample_options options = {
                .world_size = count_ranks(split), .stage = stage, .bucket_elems = 100000, .optimizer = optimizer};

            step++;
            save_split(&options, split, step, step);
            check_loads_split(&options, split, step, step);
        }
}

/* Parameters of several dimensions that are cut inside rows and planes, and one that a single node owns. */
static void test_nodes_cut_planes(void **state)
{
    static const struct sample_param params[] = {{"planes", DTYPE_BF16, false, 3, {5, 7, 61}},
                                                 {"columns", DTYPE_F32, false, 3, {700, 1, 3}},
                                                 {"rows", DTYPE_F16, false, 2, {1, 999}},
                                                 {"small", DTYPE_F32, false, 2, {2, 2}}};
    const struct sample_options one = {
        .params = params, .n_params = ARRAY_SIZE(params), .world_size = 1, .stage = 2, .bucket_elems = 1 << 20};
    static const struct split counts[] = {{2, {1, 1}}, {2, {2, 1}}, {3, {1, 1, 1}}, {3, {3, 1, 5}}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        for (unsigned stage = 1; stage <= 3; stage++) {
            struct sample_options from = one;
            uint64_t step = 3 * i + stage;

            from.world_size = count_ranks(&counts[i]);
            from.stage = stage;
            save_split(&from, &counts[i], step, step);
            check_loads(&one, step, step);
            check_loads_split(&from, &counts[i], step, step);
        }
}

/* One of several nodes does not read a MiB in which it owns nothing. A node with all ranks reads everything. */
static void test_nodes_read_their_part(void **state)
{
    static const struct sample_param large = {"large", DTYPE_F32, false, 2, {3000, 1000}}; /* 12 MB */
    static const struct split two = {2, {1, 1}};
    const struct sample_options job = {
        .params = &large, .n_params = 1, .world_size = 2, .stage = 3, .bucket_elems = 1 << 30};
    const struct sample_options first = on_node(&job, &two, 0), second = on_node(&job, &two, 1);
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    save(&job, 1, 1);
    spoil(1, "model.safetensors", 11000000);
    check_loads(&first, 1, 1);
    assert_int_equal(load_into(&second, true, why), -EBADMSG);
    assert_string_equal(why, "model.safetensors: the MiB from byte 10485760 is not as it was written");
    assert_int_equal(load_into(&job, true, why), -EBADMSG);
}

/* In stage 3 no node keeps 16-bit weights, but a node with all ranks also compares their hashes. */
static void test_reads_what_it_does_not_keep(void **state)
{
    static const struct sample_param half = {"half", DTYPE_BF16, false, 1, {3000000}}; /* 6 MB */
    static const struct split two = {2, {1, 1}};
    const struct sample_options job = {
        .params = &half, .n_params = 1, .world_size = 2, .stage = 3, .bucket_elems = 1 << 30};
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    save(&job, 1, 1);
    spoil(1, "model.safetensors", 5000000);
    assert_int_equal(load_into(&job, true, why), -EBADMSG);
    assert_string_equal(why, "model.safetensors: the MiB from byte 4194304 is not as it was written");
    check_loads_split(&job, &two, 1, 1);
}

/* Moments that the checkpoint lacks are set to zero in the partitions of this node. */
static void test_nodes_zero(void **state)
{
    static const struct split split = {3, {2, 1, 2}};
    struct sample_options job = {.world_size = 5, .stage = 2, .bucket_elems = 100000};

    (void)state;
    save_split(&job, &split, 1, 1);
    job.optimizer = OPTIMIZER_ADAGRAD;
    for (unsigned node = 0; node < split.n_nodes; node++) {
        const struct sample_options options = on_node(&job, &split, node);
        struct sample *s = sample_new(&options);
        char why[SAMPLE_WHY_BYTES];
        uint64_t step;

        sample_fill(s, 5);
        assert_int_equal(sample_load(s, &(struct sample_load){.dir = scratch}, &step, why), 0);
        assert_string_equal(
            why, "of its tensors 20 are ignored because this job lacks them: state.layers.0.weight.exp_avg; "
                 "of this job's tensors 10 begin with zero because it lacks them: state.layers.0.weight.sum");
        for (uint32_t b = 0; b < s->layout->n_buckets; b++)
            for (uint64_t i = 0; i < s->state->buckets[b].owned_elems; i++)
                assert_true(((float *)s->state->buckets[b].exp_avg_sq)[i] == 0);
        sample_free(s);
    }
}

/* ---- files made by hand ---------------------------------------------------------------------------------- */

/* A file with one box of a tensor. */
struct hand_box {
    const char *file, *name; /* a NULL name means "t" */
    bool sharded;
    uint32_t n_dims;
    uint64_t starts[3], shape[3];
};

/* A job with only one tensor: the parameter is frozen, so it has no state. */
static const struct sample_param hand_param = {"t", DTYPE_F32, true, 2, {5, 4}};
static const struct sample_options hand_job = {
    .params = &hand_param, .n_params = 1, .world_size = 1, .stage = 2, .bucket_elems = 1000};

static void write_file(const char *name, const void *bytes, size_t n_bytes)
{
    char path[256];
    FILE *file;

    snprintf(path, sizeof(path), "%s/step-00000001/%s", scratch, name);
    file = fopen(path, "we");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

/* Writes a file with a box. Element (r, c) of the tensor is 4 r + c. */
static void write_box(struct description *d, const struct hand_box *box)
{
    struct safetensors file = {.sharded = box->sharded};
    struct description_file *described = description_add_file(d);
    struct hash_state *hash;
    uint8_t *header = NULL, *bytes;
    size_t n_header, n_elems;

    assert_int_equal(
        safetensors_add(&file, box->name ? box->name : "t", DTYPE_F32, box->shape, box->starts, box->n_dims), 0);
    assert_int_equal(safetensors_header(&file, &header, &n_header), 0);
    bytes = realloc(header, file.file_bytes);
    n_elems = (file.file_bytes - n_header) / sizeof(float);
    for (size_t i = 0; i < n_elems; i++) {
        uint64_t row = box->starts[0] + i / MAX(box->shape[1], UINT64_C(1));
        float value = (float)(4 * row + box->starts[1] + i % MAX(box->shape[1], UINT64_C(1)));

        memcpy(bytes + n_header + i * sizeof(value), &value, sizeof(value));
    }
    described->name = strdup(box->file);
    described->n_bytes = file.file_bytes;
    hash = hash_new(file.file_bytes);
    hash_add(hash, bytes, file.file_bytes);
    hash_end(hash, &described->hash);
    write_file(box->file, bytes, file.file_bytes);
    safetensors_deinit(&file);
    free(bytes);
}

/* Asserts that checkpoint_check() has the same result as loading, with "its job" instead of "this job". */
static void check_agreement(const char *path, int r, const char *why)
{
    char checked[SAMPLE_WHY_BYTES] = "", *its;
    struct description d;
    int folder = folder_open(AT_FDCWD, path, &d, checked, sizeof(checked));

    assert_true(folder >= 0);
    assert_int_equal(checkpoint_check(folder, &d, checked, sizeof(checked)), r);
    its = strstr(checked, "its job");
    if (its)
        memmove(its + strlen("this job"), its + strlen("its job"), strlen(its + strlen("its job")) + 1);
    if (its)
        memcpy(its, "this job", strlen("this job"));
    assert_string_equal(checked, why);
    close(folder);
    description_deinit(&d);
}

/*
 * Writes a checkpoint of these files, and loads it. If that succeeds, asserts that t has all its values. Return: the
 * result of sample_load().
 */
static int load_boxes(const struct hand_box *boxes, size_t n, bool strict, char *why)
{
    struct description d = {.version = strdup("0"),
                            .job = strdup("job"),
                            .optimizer = strdup("AdamW"),
                            .configuration = strdup(""),
                            .step = 1,
                            .world_size = 1,
                            .n_nodes = 1,
                            .stage = 2};
    struct sample *s = sample_new(&hand_job);
    char path[128], *text;
    uint64_t step;
    int r;

    snprintf(path, sizeof(path), "%s/step-00000001", scratch);
    assert_true(mkdir(path, 0777) == 0 || errno == EEXIST);
    for (size_t i = 0; i < n; i++)
        write_box(&d, &boxes[i]);
    text = description_print(&d, s->layout);
    write_file(CHECKPOINT_DESCRIPTION, text, strlen(text));
    r = sample_load(s, &(struct sample_load){.dir = scratch, .strict = strict}, &step, why);
    if (strict)
        check_agreement(path, r, why);
    for (unsigned i = 0; r == 0 && i < 20; i++)
        assert_true(((const float *)(const void *)state_frozen(s->state, 0))[i] == (float)i);
    sample_free(s);
    description_deinit(&d);
    free(text);
    return r;
}

static void check_boxes(const struct hand_box *boxes, size_t n, const char *sentence)
{
    char why[SAMPLE_WHY_BYTES];
    int r = load_boxes(boxes, n, true, why);

    if (r != (*sentence ? -EINVAL : 0) || strcmp(why, sentence) != 0)
        fail_msg("%d, \"%s\" instead of \"%s\"", r, why, sentence);
}

#define BOX(which, row, column, rows, columns)                                                                         \
    {                                                                                                                  \
        "model-node" which ".safetensors", NULL, true, 2, {row, column},                                               \
        {                                                                                                              \
            rows, columns                                                                                              \
        }                                                                                                              \
    }

static void test_boxes(void **state)
{
    static const struct hand_box boxes[] = {BOX("0", 0, 0, 2, 4), BOX("1", 2, 0, 1, 1), BOX("1-2", 2, 1, 1, 3),
                                            BOX("2", 3, 0, 2, 4)};
    struct hand_box twice[ARRAY_SIZE(boxes) + 1];

    (void)state;
    check_boxes(boxes, 4, "");
    check_boxes(boxes, 3, "it lacks a part of t");
    check_boxes(boxes + 1, 3, "it lacks a part of t");
    memcpy(twice, boxes, sizeof(boxes));
    twice[4] = boxes[1];
    twice[4].file = "model-node3.safetensors";
    check_boxes(twice, 5, "it has a part of t twice");
}

static void test_wrong_boxes(void **state)
{
    static const struct hand_box wrong[] = {
        BOX("1", 2, 0, 3, 3), /* columns of several rows, so not a range of elements */
        BOX("1", 2, 1, 3, 3), /* the same */
        BOX("1", 2, 0, 4, 4), /* beyond the end */
        BOX("1", 2, 1, 1, 4),
        BOX("1", 6, 0, 1, 4),
        BOX("1", UINT64_C(1) << 62, 0, 1, 4),
        {"model-node1.safetensors", NULL, true, 1, {8}, {12}},
        {"model-node1.safetensors", NULL, true, 3, {2, 0, 0}, {3, 4, 1}},
        {"model-node1.safetensors", NULL, false, 2, {0}, {3, 4}}, /* its metadata does not say that it is a box */
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        const struct hand_box boxes[] = {BOX("0", 0, 0, 2, 4), wrong[i]};

        check_boxes(boxes, 2, "t has another shape or type there than in this job");
    }
}

/* All files whose names begin with "model" belong to the model. Files of other kinds are not opened. */
static void test_file_names(void **state)
{
    static const struct hand_box other = {"other.safetensors", NULL, false, 2, {0}, {5, 4}};
    static const struct hand_box boxes[] = {{"model-00001-of-00002.safetensors", NULL, false, 2, {0}, {5, 4}},
                                            {"model-00002-of-00002.safetensors", "u", false, 2, {0}, {1, 4}},
                                            {"models.safetensors", "v", false, 2, {0}, {1, 4}}};
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    check_boxes(&other, 1, "it has no model.safetensors");
    check_boxes(boxes, 1, "");
    check_boxes(boxes, 3, "it has u, which this job lacks");
    assert_int_equal(load_boxes(boxes, 3, false, why), 0);
    assert_string_equal(why, "of its tensors 1 are ignored because this job lacks them: u");
}

/* A tensor that the job lacks counts once, even if it has several boxes. */
static void test_unknown_boxes(void **state)
{
    static const struct hand_box boxes[] = {
        {"model-node0.safetensors", NULL, false, 2, {0}, {5, 4}},
        {"optimizer-node0.safetensors", "state.u.exp_avg", true, 1, {0}, {8}},
        {"optimizer-node1.safetensors", "state.u.exp_avg", true, 1, {8}, {1}},
        {"optimizer-node1-2.safetensors", "state.u.exp_avg", true, 1, {9}, {7}},
    };
    char why[SAMPLE_WHY_BYTES];

    (void)state;
    assert_int_equal(load_boxes(boxes, ARRAY_SIZE(boxes), false, why), 0);
    assert_string_equal(why, "of its tensors 1 are ignored because this job lacks them: state.u.exp_avg");
}

/* ---- the disk ------------------------------------------------------------------------------------------ */

/* Uses the system's calls, and a file of more than one MiB. */
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

/* A trained parameter is now frozen, or a frozen one is now trained. */
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

/* A frozen fp32 parameter is now trained. Its moments begin with zero. */
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

/* State that the checkpoint lacks is set to zero, even if an earlier load filled it. */
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
    sample_fill(s, 5); /* as an earlier load with wrong bytes leaves it */
    assert_int_equal(sample_load(s, &(struct sample_load){.dir = scratch}, &step, why), 0);
    for (uint32_t p = 0; p < 2; p++) {
        const struct layout_param *param = &s->layout->params[p];

        for (uint64_t i = 0; i < param->n_elems; i++)
            assert_true(*(float *)state_exp_avg_sq(s->state, param->bucket, param->offset_elems + i) == 0);
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
    check_newest(2, 0, 1, ""); /* the daemon then tries this one */
    spoil(1, "optimizer.safetensors", 8);
    check_newest(2, -EBADMSG, 0, "optimizer.safetensors: the MiB from byte 0 is not as it was written");
    assert_int_equal(truncate(path, 5), 0);
    snprintf(path, sizeof(path), "%s/step-00000001/ranks.safetensors", scratch);
    assert_int_equal(unlink(path), 0);
    check_newest(0, -EIO, 0, "step-00000003: zerod.json: its bytes are not those that were written");
}

/* Every wrong byte is noticed during the load, before any step. */
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

/* Wrong bytes in a header are found by reading, like those behind it. So the daemon tries the checkpoint before. */
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
        cmocka_unit_test_setup_teardown(test_types, setup, teardown),
        cmocka_unit_test_setup_teardown(test_moments_are_rounded, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_jobs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nodes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nodes_same_job, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nodes_cut_planes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nodes_read_their_part, setup, teardown),
        cmocka_unit_test_setup_teardown(test_reads_what_it_does_not_keep, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nodes_zero, setup, teardown),
        cmocka_unit_test_setup_teardown(test_boxes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_boxes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_file_names, setup, teardown),
        cmocka_unit_test_setup_teardown(test_unknown_boxes, setup, teardown),
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
