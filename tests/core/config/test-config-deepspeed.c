/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Files of DeepSpeed and accelerate: their names of keys, switches, comments, values that mean "at once" or "left to
 * the program", typing errors, and a file that names another file.
 */

#include "core/base/base.h"
#include "core/config/config.h"
#include "tests/core/config/config-text.h"
#include "tests/group.h"

#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

/* Loads a text as zerodrun -n 2 does, which gives the socket and the number of ranks. */
static int load_foreign(struct config **config, const char *text, struct config_problems *problems)
{
    struct config_source source = {
        .text = {.name = "ds.json", .text = text, .n_bytes = strlen(text)},
        .given = {.socket = "/run/a.sock", .ranks = 2},
    };

    return config_load_string(config, &source, problems);
}

static struct config *load_foreign_valid(const char *text)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    int r = load_foreign(&config, text, &problems);

    if (r != 0)
        config_problems_print(stderr, &problems);
    assert_int_equal(r, 0);
    config_problems_deinit(&problems);
    return config;
}

/* Return: whether a problem with this key has this text. `note` chooses between notes and errors. */
static bool says(const struct config_problems *problems, bool note, const char *key, const char *text)
{
    for (size_t i = 0; i < problems->n_items; i++) {
        const struct config_problem *problem = &problems->items[i];

        if (problem->note == note && problem->key && strcmp(problem->key, key) == 0 && strstr(problem->text, text))
            return true;
    }
    return false;
}

struct remark {
    const char *text; /* the file's text behind its first two keys */
    const char *key, *said;
    bool refused;
};

static void expect_remark(const struct remark *remark)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    char text[512];
    int r;

    snprintf(text, sizeof(text), "{\"train_batch_size\": \"auto\", \"gradient_clipping\": 1, %s}", remark->text);
    r = load_foreign(&config, text, &problems);
    if (r != (remark->refused ? CONFIG_E_INVALID : 0) || problems.n_items != (remark->key != NULL) ||
        (remark->key && !says(&problems, !remark->refused, remark->key, remark->said))) {
        config_problems_print(stderr, &problems);
        fail_msg("%s: returned %d", remark->text, r);
    }
    config_free(config);
    config_problems_deinit(&problems);
}

/* Each text draws exactly one remark, or none where the key is NULL. */
static void test_remarks(void **state)
{
    static const struct remark remarks[] = {
        /* comments */
        {"\"_comment\": \"a\", \"//\": 1, \"#x\": {}, \"comment\": [], \"zero_optimization\": {\"__x\": 1}"},
        /* other names */
        {"\"zero_optimization\": {\"max_reuse_distance\": 5}", "zero_optimization.stage3_max_reuse_distance",
         "has no effect here"},
        {"\"zero_optimization\": {\"gather_16bit_weights_on_model_save\": true}"},
        {"\"zero_optimization\": {\"stage3_gather_fp16_weights_on_model_save\": true}"},
        {"\"bfloat16\": {\"enabled\": true}", "bf16.enabled", "comes from the trainers"},
        {"\"zero_optimization\": {\"max_live_parameters\": 0}", "zero_optimization.stage3_max_live_parameters",
         "0 is \"at once\" for DeepSpeed"},
        {"\"zero_optimization\": {\"max_live_parameters\": 5, \"stage3_max_live_parameters\": 5}",
         "zero_optimization.stage3_max_live_parameters", "is given twice", true},
        /* values that zerod replaces by others */
        {"\"zero_optimization\": {\"stage\": 0}", "zero_optimization.stage", "as in stage 1, which has the same"},
        {"\"communication_data_type\": \"fp16\"", "communication_data_type", "nothing is rounded"},
        {"\"zero_optimization\": true", "zero_optimization", "runs as {stage: 1}"},
        {"\"zero_optimization\": false", "zero_optimization", "runs as {stage: 1}"},
        {"\"zero_optimization\": 2", "zero_optimization", "is not a section", true},
        /* switches */
        {"\"amp\": {\"enabled\": false, \"opt_level\": \"O1\"}"},
        {"\"amp\": {\"enabled\": true}", "amp", "is refused", true},
        {"\"compression_training\": {\"a\": {\"s\": {\"enabled\": false}, \"d\": {\"x\": {\"y\": 1}}}}"},
        {"\"compression_training\": {\"a\": {\"s\": {\"enabled\": false}}, \"b\": {\"s\": {\"enabled\": true}}}",
         "compression_training", "is refused", true},
        {"\"data_efficiency\": {\"enabled\": false, \"data_sampling\": {\"enabled\": true}}"},
        {"\"pipeline\": {\"seed_layers\": true}", "pipeline", "is refused", true},
        {"\"pipeline\": {}"},
        {"\"tensor_parallel\": {\"autotp_size\": 0}"},
        {"\"tensor_parallel\": {\"tp\": {\"tp_size\": 2}}", "tensor_parallel.tp.tp_size", "data-parallel", true},
        {"\"tensor_parallel\": {\"preset_model\": \"llama\"}", "tensor_parallel", "is refused", true},
        {"\"sequence_parallel_size\": 1"},
        {"\"compile\": {\"enabled\": false, \"passes\": [\"z1\", \"z3\"]}"},
        {"\"compile\": {\"enabled\": false, \"passes\": [\"z1\", \"autosp\"]}", "compile.passes", "data-parallel",
         true},
        {"\"sequence_parallel_size\": 2", "sequence_parallel_size", "is refused", true},
        /* settings that would change the training */
        {"\"optimizer\": {\"type\": \"Lamb\", \"params\": {\"max_coeff\": 1}}", "optimizer.type",
         "\"Lamb\" is another optimizer, which zerod does not have; allowed: one of AdamW, Adam, SGD, Lion, Adagrad, "
         "Muon",
         true},
        {"\"optimizer\": {\"type\": \"Adam\", \"params\": {\"amsgrad\": true}}", "optimizer.params.amsgrad",
         "is refused", true},
        {"\"optimizer\": {\"type\": \"Adam\", \"params\": {\"amsgrad\": false, \"max_grad_norm\": 0.0}}"},
        {"\"optimizer\": {\"type\": \"SGD\", \"params\": {\"max_grad_norm\": 1}}", "optimizer.params.max_grad_norm",
         "gradient_clipping", true},
        {"\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"nvme\"}}",
         "zero_optimization.offload_optimizer.device", "is a disk", true},
        /* defaults that are not DeepSpeed's */
        {"\"optimizer\": {\"type\": \"AdamW\"}", "optimizer.params.weight_decay",
         "is not given: the default is 0.01, DeepSpeed's is 0"},
        {"\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"weight_decay\": \"auto\"}}"},
        {"\"optimizer\": {\"type\": \"Adam\"}"},
        {"\"scheduler\": {\"type\": \"WarmupLR\"}", "scheduler.params.warmup_max_lr", "DeepSpeed's is 0.001"},
        /* keys that only the program reads, and typing errors */
        {"\"cuda_visible_devices\": 0", "cuda_visible_devices", "DeepSpeed ignores it, and so does zerod"},
        {"\"stage\": 2", "stage", "nearest valid key: zero_optimization.stage"},
        {"\"enabled\": true", "enabled", "and so does zerod"},
        {"\"zero_optimisation\": {}", "zero_optimisation", "nearest valid key: zero_optimization", true},
        {"\"zero_optimization\": {\"cuda_visible_devices\": 0}", "zero_optimization.cuda_visible_devices",
         "unknown key; allowed here: stage", true},
    };

    for (size_t i = 0; i < ARRAY_SIZE(remarks); i++)
        expect_remark(&remarks[i]);
}

/* zerod suggests no key that is not similar, or that belongs to another type: that key would have another meaning. */
static void test_no_far_suggestions(void **state)
{
    static const char *const texts[] = {
        "tensor: 1\n",
        "optimizer: {params: {momentum: 0.9}}\n",
        "optimizer: {params: {decay: 0.9}}\n",
        "scheduler: {type: WarmupLR, params: {warmup_min_ratio: 0}}\n",
        "optimizer: {type: RAdam}\n",
        "optimizer: {type: LBFGS}\n",
        "device: gpu\n",
        "enabled: true\n",
    };

    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config *config;
        char text[256];

        snprintf(text, sizeof(text), MINIMAL "%s", texts[i]);
        assert_int_equal(load(&config, text, NULL, &problems), CONFIG_E_INVALID);
        assert_int_equal(problems.n_errors, 1);
        if (strstr(problems.items[0].text, "nearest"))
            fail_msg("%s: %s", texts[i], problems.items[0].text);
        config_problems_deinit(&problems);
    }
}

/* A file that is zerod's own may have no unknown key. */
static void test_own_files_are_strict(void **state)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;

    assert_int_equal(load(&config, MINIMAL "steps_per_print: 5\ncuda_visible_devices: 0\n", NULL, &problems),
                     CONFIG_E_INVALID);
    assert_true(says(&problems, false, "cuda_visible_devices", "unknown key; allowed here: job"));
    assert_false(says(&problems, true, "gradient_clipping", "is not given"));
    config_problems_deinit(&problems);
}

static void test_values(void **state)
{
    struct config *config = load_foreign_valid(
        "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"adamw\", \"params\": {\"lr\": 0.5}},\n"
        "\"zero_optimization\": {\"stage\": 0, \"cpu_offload\": true, \"reduce_bucket_size\": 0},\n"
        "\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": \"auto\", "
        "\"warmup_max_lr\": 0.1, \"warmup_num_steps\": 0}},\n"
        "\"fp16\": {\"enabled\": true, \"min_loss_scale\": 0.0}}");

    assert_int_equal(config->zero.stage, 1);
    assert_int_equal(config->zero.offload_optimizer, CONFIG_OFFLOAD_CPU);
    assert_int_equal(config->zero.reduce_bucket_size, 500000);
    assert_true(config_chooses_bucket(config));
    assert_int_equal(config->optimizer.type, OPTIMIZER_ADAMW);
    assert_true(config->optimizer.hyper.lr == 0.5);
    /* The program's schedule is used, so nothing is left of the schedule in the file. */
    assert_int_equal(config->scheduler.type, SCHEDULE_NONE);
    assert_int_equal(config_configured(config) & (CONFIG_GIVES_SCHEDULER | CONFIG_GIVES_MAX_LR), 0);
    assert_true(config->fp16.scale.min_scale == 0);
    config_free(config);
}

/* JSON with comments. Text in quotes is never a comment. Places of problems are those in the file. */
static void test_json_comments(void **state)
{
    static const char text[] = "// { \"a\n/* \xc3\xa4 */ {\"train_batch_size\": 8, # \"\n"
                               "\"optimizer\": /* it's */ {\"type\": \"SGD\"},// \"x\": {\n"
                               "\"job\": \"a//b /* \"}";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;

    assert_int_equal(load_foreign(&config, text, &problems), CONFIG_E_INVALID);
    assert_int_equal(problems.n_errors, 1);
    for (size_t i = 0; i < problems.n_items; i++)
        if (!problems.items[i].note) {
            assert_string_equal(problems.items[i].place, "ds.json:4:8");
            assert_non_null(strstr(problems.items[i].text, "\"a//b /* \" has a character"));
        }
    config_problems_deinit(&problems);

    /* In YAML, // begins no comment. */
    assert_int_equal(load(&config, MINIMAL "// a: b\n", NULL, &problems), 0);
    config_free(config);
    assert_int_equal(load(&config, MINIMAL "a // b: c\n", NULL, &problems), CONFIG_E_INVALID);
    config_problems_deinit(&problems);
}

/* Without a minimum the scale halves until fp32 would lose bits of it. */
static void test_scale_without_minimum(void **state)
{
    struct lossscale scale;

    lossscale_init(&scale, &(struct lossscale_params){.initial_power = 1, .window = 1000, .hysteresis = 1});
    for (int i = 0; i < 127; i++)
        assert_int_equal(lossscale_update(&scale, true), 0);
    assert_true(scale.scale == 0x1p-126);
    assert_int_equal(lossscale_update(&scale, true), LOSSSCALE_E_AT_MINIMUM);
    assert_true(scale.scale == 0x1p-126);
}

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[128];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/*
 * accelerate's num_processes is the number of ranks unless the command line has another. deepspeed_config_file is
 * relative to the folder of accelerate's file.
 */
static void test_accelerate(void **state)
{
    static const char cover[] = "distributed_type: DEEPSPEED\nnum_processes: 3\nmixed_precision: 'no'\n";
    struct config_given given = {.socket = "/run/a.sock", .usual_ranks = 1};
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    char folder[] = "/tmp/zerod-test-config-XXXXXX", path[128], text[256];
    struct config *config;

    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/acc.yaml", folder);
    write_file(folder, "ds.json", "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3}, \"threads\": 2}");

    snprintf(text, sizeof(text), "%sdeepspeed_config: {zero_stage: 1, gradient_clipping: none}\n", cover);
    write_file(folder, "acc.yaml", text);
    assert_int_equal(config_load(&config, path, &given, &problems), 0);
    assert_int_equal(config->world.size, 3);
    assert_true(config_file_has(config, "world.size"));
    assert_int_equal(config->zero.stage, 1);
    config_free(config);
    config_problems_deinit(&problems);

    snprintf(text, sizeof(text), "%sdeepspeed_config: {deepspeed_config_file: ds.json}\n", cover);
    write_file(folder, "acc.yaml", text);
    assert_int_equal(config_load(&config, path, &given, &problems), 0);
    assert_int_equal(config->world.size, 3);
    assert_int_equal(config->zero.stage, 3);
    assert_int_equal(config->threads, 2);
    config_free(config);
    config_problems_deinit(&problems);

    /* With several machines, num_processes is not the number of ranks on this one. */
    snprintf(text, sizeof(text), "%snum_machines: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", cover);
    write_file(folder, "acc.yaml", text);
    assert_int_equal(config_load(&config, path, &given, &problems), CONFIG_E_INVALID);
    assert_int_equal(problems.n_errors, 1);
    assert_true(says(&problems, false, "num_processes", "num_machines is \"2\"; needed: zerodrun -n"));
    config_problems_deinit(&problems);

    given.ranks = 2;
    assert_int_equal(config_load(&config, path, &given, &problems), 0);
    assert_int_equal(config->world.size, 2);
    assert_false(config_file_has(config, "world.size"));
    assert_true(says(&problems, true, "num_processes", "the command line says 2, which counts"));
    config_free(config);
    config_problems_deinit(&problems);

    /* One load reports the problems of both files. */
    snprintf(text, sizeof(text), "%sdeepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2}\n", cover);
    write_file(folder, "acc.yaml", text);
    write_file(folder, "ds.json", "{\"train_batch_size\": 8, \"threads\": 0}");
    assert_int_equal(config_load(&config, path, &given, &problems), CONFIG_E_INVALID);
    assert_null(config);
    assert_int_equal(problems.n_errors, 2);
    assert_true(says(&problems, false, "zero_optimization.stage", "stands beside deepspeed_config_file"));
    assert_true(says(&problems, false, "threads", "is out of range"));
    config_problems_deinit(&problems);

    snprintf(text, sizeof(text), "%sdeepspeed_config: {deepspeed_config_file: none.json}\n", cover);
    write_file(folder, "acc.yaml", text);
    assert_int_equal(config_load(&config, path, &given, &problems), CONFIG_E_INVALID);
    assert_int_equal(problems.n_errors, 1);
    assert_non_null(strstr(problems.items[problems.n_items - 1].place, "none.json"));
    config_problems_deinit(&problems);

    snprintf(path, sizeof(path), "%s/ds.json", folder);
    assert_int_equal(unlink(path), 0);
    snprintf(path, sizeof(path), "%s/acc.yaml", folder);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

TEST_GROUP(config_deepspeed)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_remarks),
        cmocka_unit_test(test_no_far_suggestions),
        cmocka_unit_test(test_own_files_are_strict),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_json_comments),
        cmocka_unit_test(test_scale_without_minimum),
        cmocka_unit_test(test_accelerate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
