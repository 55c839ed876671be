/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The configuration: how it is read, units and numbers, the output of --print-config, and help.
 */

#include "client/include/zerod/client.h"
#include "core/base/base.h"
#include "core/config/config-table.h"
#include "core/config/config-value.h"
#include "core/config/config.h"
#include "tests/core/config/config-text.h"
#include "tests/group.h"

#include <errno.h>
#include <sys/stat.h>
#include <syslog.h>

/* The program gets the daemon's CONFIG_GIVES_ bits unchanged, in Welcome.configured. */
#define SAME_BIT(name) _Static_assert((int)CONFIG_GIVES_##name == (int)ZEROD_CONFIGURED_##name, "bits of " #name)
SAME_BIT(LEAVE_CONTINUES);
SAME_BIT(OPTIMIZER);
SAME_BIT(LR);
SAME_BIT(BETAS);
SAME_BIT(EPS);
SAME_BIT(WEIGHT_DECAY);
SAME_BIT(MOMENTUM);
SAME_BIT(DAMPENING);
SAME_BIT(NESTEROV);
SAME_BIT(LR_DECAY);
SAME_BIT(SCHEDULER);

/* Where the file leaves a key open, its value depends on where the job runs: on one node, on several, or on GPUs. */
static void test_chosen(void **state)
{
    static const char nodes[] = "listen: {socket: /a}\nworld: {size: 2, key_file: /k,\n"
                                "  nodes: [{address: \"a:1\", ranks: 1}, {address: \"b:1\", ranks: 1}]}\n"
                                "collective: gloo\nzero_optimization: {stage: 3}\n";
    static const char gpus[] = MINIMAL "device: cuda\ncollective: nccl\nzero_optimization: {stage: 3}\n";
    static const struct {
        const char *text;
        uint64_t bucket_elems;
        bool chooses;
        unsigned stage;
    } cases[] = {
        {MINIMAL "zero_optimization: {stage: 3}\n", 500000, true, 2},
        {MINIMAL "zero_optimization: {stage: 3, reduce_bucket_size: auto}\n", 500000, true, 2},
        {MINIMAL "zero_optimization: {stage: 3, reduce_bucket_size: 7}\n", 7, false, 2},
        {MINIMAL "zero_optimization: {stage: 3, stage3_on_one_node: gathered}\n", 500000, true, 3},
        {MINIMAL "zero_optimization: {stage: 1}\n", 500000, true, 1},
        {nodes, 8000000, true, 3},
        {gpus, 50000000, true, 3},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config *c = load_valid_with(cases[i].text, &both_engines);

        assert_int_equal(c->zero.reduce_bucket_size, cases[i].bucket_elems);
        assert_int_equal(config_chooses_bucket(c), cases[i].chooses);
        assert_int_equal(config_stage(c), cases[i].stage);
        config_free(c);
    }
}

/* The default bucket size with models on GPUs and the optimizer in host memory. A size in the file is kept. */
static void test_bucket_for_gpus(void **state)
{
    static const struct {
        const char *text;
        uint64_t bucket_elems;
    } cases[] = {
        {MINIMAL, 50000000},
        {MINIMAL "optimizer: {type: Muon}\n", 8000000},
        {MINIMAL "zero_optimization: {reduce_bucket_size: 7}\n", 7},
        {"listen: {socket: /a}\nworld: {size: 2, key_file: /k,\n"
         "  nodes: [{address: \"a:1\", ranks: 1}, {address: \"b:1\", ranks: 1}]}\ncollective: gloo\n",
         50000000},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config *c = load_valid_with(cases[i].text, &both_engines);
        uint64_t before = c->zero.reduce_bucket_size;

        assert_int_equal(c->zero.gpu_room, CONFIG_GPU_ROOM_NONE);
        for (enum config_gpu_room room = CONFIG_GPU_ROOM_BUCKETS; room <= CONFIG_GPU_ROOM_MICRO_BATCH; room++) {
            config_choose_gpu_room(c, room);
            assert_int_equal(c->zero.reduce_bucket_size, cases[i].bucket_elems);
        }
        config_choose_gpu_room(c, CONFIG_GPU_ROOM_NONE);
        assert_int_equal(c->zero.reduce_bucket_size, before);
        config_free(c);
    }
}

static void test_defaults(void **state)
{
    struct config *c = load_valid(MINIMAL);

    assert_string_equal(c->job, "train");
    assert_int_equal(c->log_level, LOG_INFO);
    assert_string_equal(c->listen.socket, "/run/zerod/a.sock");
    assert_int_equal(c->listen.mode, 0660);
    assert_int_equal(c->listen.allow_groups.n_items, 0);
    assert_int_equal(c->listen.admin_users.n_items, 0);
    assert_int_equal(c->world.size, 4);
    assert_int_equal(c->world.nodes.n_items, 0);
    assert_null(c->world.key_file);
    assert_int_equal(config_local_ranks(c), 4);
    assert_int_equal(config_first_rank(c), 0);
    assert_int_equal(c->zero.stage, 2);
    assert_int_equal(c->zero.reduce_bucket_size, 500000);
    assert_true(c->zero.overlap_comm);
    assert_int_equal(c->zero.stage3_max_live_parameters, 1000000000);
    assert_int_equal(c->device, CONFIG_DEVICE_CPU);
    assert_int_equal(c->collective, CONFIG_COLLECTIVE_LOCAL);
    assert_true(c->deterministic);
    assert_int_equal(c->optimizer.type, OPTIMIZER_ADAMW);
    assert_true(c->optimizer.hyper.lr == 1e-3 && c->optimizer.hyper.beta1 == 0.9);
    assert_true(c->optimizer.hyper.beta2 == 0.999 && c->optimizer.hyper.eps == 1e-8);
    assert_true(c->optimizer.hyper.weight_decay == 0.01);
    assert_int_equal(c->scheduler.type, SCHEDULE_NONE);
    assert_int_equal(c->gradient_accumulation_steps, 0);
    assert_true(c->gradient_clipping == 0);
    assert_int_equal(c->gradient_allreduce_op, CONFIG_ALLREDUCE_MEAN);
    assert_int_equal(c->communication_data_type, DTYPE_F32);
    assert_false(c->fp16.enabled);
    assert_true(c->fp16.scale.static_scale == 0 && c->fp16.scale.min_scale == 1);
    assert_int_equal(c->fp16.scale.initial_power, 16);
    assert_int_equal(c->fp16.scale.window, 1000);
    assert_int_equal(c->fp16.scale.hysteresis, 2);
    assert_false(c->fp16.scale.consecutive_hysteresis);
    assert_int_equal(c->weights, CONFIG_WEIGHTS_SHARED);
    assert_int_equal(c->threads, 0);
    assert_int_equal(c->diagnostics.on_duplicate, CONFIG_DUPLICATE_REJECT);
    assert_int_equal(c->diagnostics.on_missing, CONFIG_MISSING_ZERO);
    assert_int_equal(c->diagnostics.on_nonfinite, CONFIG_NONFINITE_SKIP);
    assert_int_equal(c->diagnostics.on_leave, CONFIG_LEAVE_STOP);
    assert_false(c->diagnostics.static_graph);
    assert_int_equal(c->diagnostics.stall_warning_ms, 5000);
    assert_int_equal(c->diagnostics.stall_timeout_ms, 600000);
    assert_int_equal(c->limits.memory_bytes, 0);
    assert_int_equal(c->limits.clients, 64);
    assert_int_equal(c->limits.handshake_timeout_ms, 10000);
    assert_int_equal(c->limits.reattach_timeout_ms, 600000);
    config_free(c);
}

static void test_every_section(void **state)
{
    struct config *c = load_valid_with(
        "job: pretrain\nlog_level: debug\n"
        "listen: {socket: /run/zerod/p.sock, mode: \"0600\", allow_users: [ann], allow_groups: [zerod, "
        "1000],\n"
        "         admin_users: [0], admin_groups: [zerod-admin]}\n"
        "world:\n  size: 5\n  nodes: [{address: \"node0:7700\", ranks: 2}, {address: \"[::1]:1\", ranks: "
        "3}]\n"
        "  node: 1\n  key_file: /etc/zerod/p.key\n"
        "zero_optimization: {stage: 3, reduce_bucket_size: 5e8, overlap_comm: false,\n"
        "  stage3_max_live_parameters: 1.0e+9, offload_optimizer: {device: cpu}}\n"
        "device: cpu\ncollective: gloo\ndeterministic: false\n"
        "optimizer: {type: SGD, params: {lr: 0.5, momentum: 0.9, weight_decay: 1.0e-4, nesterov: true}}\n"
        "scheduler: {type: WarmupDecayLR, params: {warmup_min_lr: [0, 1e-5], warmup_max_lr: [1e-3, 2e-3],\n"
        "  warmup_num_steps: 10, total_num_steps: 1e4, warmup_type: linear}}\n"
        "gradient_accumulation_steps: 8\ngradient_clipping: 0\ngradient_allreduce_op: sum\n"
        "communication_data_type: fp32\n"
        "fp16: {enabled: true, loss_scale: 128, initial_scale_power: 12, loss_scale_window: 500, hysteresis: "
        "1,\n"
        "  consecutive_hysteresis: true, min_loss_scale: 0.25}\nweights: shared\nthreads: 3\n"
        "diagnostics: {on_duplicate: abort_step, on_missing: skip, on_nonfinite: error, on_leave: continue,\n"
        "  static_graph: true, stall_warning: 1.5s, stall_timeout: 2h}\n"
        "limits: {memory: 1.5GiB, clients: 7, handshake_timeout: 500ms, reattach_timeout: 1d}\n",
        &both_engines);

    assert_string_equal(c->job, "pretrain");
    assert_int_equal(c->log_level, LOG_DEBUG);
    assert_int_equal(c->listen.mode, 0600);
    assert_string_equal(c->listen.allow_users.items[0], "ann");
    assert_int_equal(c->listen.allow_groups.n_items, 2);
    assert_string_equal(c->listen.allow_groups.items[1], "1000");
    assert_string_equal(c->listen.admin_users.items[0], "0");
    assert_string_equal(c->listen.admin_groups.items[0], "zerod-admin");
    assert_int_equal(c->world.nodes.n_items, 2);
    assert_string_equal(c->world.nodes.items[0].address, "node0:7700");
    assert_string_equal(c->world.nodes.items[1].address, "[::1]:1");
    assert_int_equal(c->world.node, 1);
    assert_string_equal(c->world.key_file, "/etc/zerod/p.key");
    assert_int_equal(config_local_ranks(c), 3);
    assert_int_equal(config_first_rank(c), 2);
    assert_int_equal(c->zero.stage, 3);
    assert_int_equal(c->zero.reduce_bucket_size, 500000000);
    assert_false(c->zero.overlap_comm);
    assert_int_equal(c->zero.stage3_max_live_parameters, 1000000000);
    assert_int_equal(c->zero.offload_optimizer, CONFIG_OFFLOAD_CPU);
    assert_int_equal(c->collective, CONFIG_COLLECTIVE_GLOO);
    assert_false(c->deterministic);
    assert_int_equal(c->optimizer.type, OPTIMIZER_SGD);
    assert_true(c->optimizer.hyper.lr == 0.5 && c->optimizer.hyper.momentum == 0.9);
    assert_true(c->optimizer.hyper.weight_decay == 1e-4 && c->optimizer.hyper.dampening == 0);
    assert_true(c->optimizer.hyper.nesterov);
    assert_int_equal(c->scheduler.type, SCHEDULE_WARMUP_DECAY);
    assert_int_equal(c->scheduler.warmup_type, SCHEDULE_WARMUP_LINEAR);
    assert_int_equal(c->scheduler.warmup_num_steps, 10);
    assert_int_equal(c->scheduler.total_num_steps, 10000);
    assert_int_equal(c->scheduler.warmup_min_lr.n_items, 2);
    assert_true(c->scheduler.warmup_min_lr.items[1] == 1e-5 && c->scheduler.warmup_max_lr.items[1] == 2e-3);
    assert_int_equal(c->gradient_accumulation_steps, 8);
    assert_true(c->gradient_clipping == 0);
    assert_int_equal(c->gradient_allreduce_op, CONFIG_ALLREDUCE_SUM);
    assert_int_equal(c->communication_data_type, DTYPE_F32);
    assert_true(c->fp16.enabled && c->fp16.scale.static_scale == 128 && c->fp16.scale.min_scale == 0.25);
    assert_int_equal(c->fp16.scale.initial_power, 12);
    assert_int_equal(c->fp16.scale.window, 500);
    assert_int_equal(c->fp16.scale.hysteresis, 1);
    assert_true(c->fp16.scale.consecutive_hysteresis);
    assert_int_equal(c->threads, 3);
    assert_int_equal(c->diagnostics.on_duplicate, CONFIG_DUPLICATE_ABORT_STEP);
    assert_int_equal(c->diagnostics.on_missing, CONFIG_MISSING_SKIP);
    assert_int_equal(c->diagnostics.on_nonfinite, CONFIG_NONFINITE_ERROR);
    assert_int_equal(c->diagnostics.on_leave, CONFIG_LEAVE_CONTINUE);
    assert_true(c->diagnostics.static_graph);
    assert_int_equal(c->diagnostics.stall_warning_ms, 1500);
    assert_int_equal(c->diagnostics.stall_timeout_ms, 7200000);
    assert_int_equal(c->limits.memory_bytes, UINT64_C(3) << 29);
    assert_int_equal(c->limits.clients, 7);
    assert_int_equal(c->limits.handshake_timeout_ms, 500);
    assert_int_equal(c->limits.reattach_timeout_ms, 86400000);
    config_free(c);
}

static void test_optimizer_defaults(void **state)
{
    static const struct {
        const char *type;
        struct hyper hyper; /* torch's defaults; for Lion those of its paper */
    } cases[] = {
        {"AdamW", {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01}},
        {"Adam", {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .adam_w_mode = true}},
        {"SGD", {.lr = 1e-3}},
        {"Lion", {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99}},
        {"Adagrad", {.lr = 1e-2, .eps = 1e-10}},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[256];
        struct config *c;

        snprintf(text, sizeof(text), MINIMAL "optimizer: {type: %s}\n", cases[i].type);
        c = load_valid(text);
        assert_int_equal(c->optimizer.type, i);
        assert_true(c->optimizer.hyper.lr == cases[i].hyper.lr);
        assert_true(c->optimizer.hyper.beta1 == cases[i].hyper.beta1);
        assert_true(c->optimizer.hyper.beta2 == cases[i].hyper.beta2);
        assert_true(c->optimizer.hyper.eps == cases[i].hyper.eps);
        assert_true(c->optimizer.hyper.weight_decay == cases[i].hyper.weight_decay);
        assert_true(c->optimizer.hyper.momentum == 0 && c->optimizer.hyper.lr_decay == 0);
        assert_false(c->optimizer.hyper.nesterov);
        assert_int_equal(c->optimizer.hyper.adam_w_mode, cases[i].hyper.adam_w_mode);
        config_free(c);
    }
}

/* If the file names no optimizer, the program chooses it, and its settings are that optimizer's defaults. */
static void test_chosen_optimizers(void **state)
{
    static const char *const names[] = {"AdamW", "Adam", "SGD", "Lion", "Adagrad"};
    static const enum optimizer types[] = {OPTIMIZER_ADAMW, OPTIMIZER_ADAM, OPTIMIZER_SGD, OPTIMIZER_LION,
                                           OPTIMIZER_ADAGRAD};
    static const double rates[] = {1e-3, 1e-3, 1e-3, 1e-4, 1e-2};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct config *c = load_valid(MINIMAL);

        assert_true(config_choose_optimizer(c, names[i], 0.5));
        assert_int_equal(c->optimizer.type, types[i]);
        assert_string_equal(config_optimizer_name(&c->optimizer), names[i]);
        assert_true(c->optimizer.hyper.lr == rates[i]);
        assert_true(c->optimizer.hyper.momentum == (types[i] == OPTIMIZER_SGD ? 0.5 : 0));
        assert_int_equal(config_configured(c), 0);
        config_free(c);
    }
    (void)state;
}

static void test_configured_optimizers_stay(void **state)
{
    static const char *const texts[] = {MINIMAL "optimizer: {type: AdamW}", MINIMAL "optimizer: {params: {lr: 0.1}}",
                                        MINIMAL "optimizer: {params: {betas: [0.8, 0.9], weight_decay: 0}}", MINIMAL};
    static const unsigned bits[] = {CONFIG_GIVES_OPTIMIZER, CONFIG_GIVES_LR,
                                    CONFIG_GIVES_BETAS | CONFIG_GIVES_WEIGHT_DECAY, 0};
    static const char *const wanted[] = {"SGD", "SGD", "SGD", "AdamW, params: {}"};

    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        struct config *c = load_valid(texts[i]);

        assert_false(config_choose_optimizer(c, wanted[i], 0));
        assert_false(config_choose_optimizer(c, "", 0));
        assert_int_equal(c->optimizer.type, OPTIMIZER_ADAMW);
        assert_int_equal(config_configured(c), bits[i]);
        c->diagnostics.on_leave = CONFIG_LEAVE_CONTINUE;
        assert_int_equal(config_configured(c), bits[i] | CONFIG_GIVES_LEAVE_CONTINUES);
        config_free(c);
    }
    (void)state;
}

static void test_schedulers(void **state)
{
    struct config *c = load_valid(MINIMAL "scheduler: {type: WarmupLR}\noptimizer: {type: SGD}\n");

    assert_int_equal(c->scheduler.type, SCHEDULE_WARMUP);
    assert_int_equal(c->scheduler.warmup_num_steps, 1000);
    assert_int_equal(c->scheduler.warmup_max_lr.n_items, 0);
    assert_true(c->scheduler.warmup_min_lr.n_items == 1 && c->scheduler.warmup_min_lr.items[0] == 0);
    config_free(c);

    c = load_valid(MINIMAL "scheduler: {type: WarmupDecayLR, params: {total_num_steps: 5000}}\n");
    assert_true(c->scheduler.warmup_max_lr.n_items == 1 && c->scheduler.warmup_max_lr.items[0] == 1e-3);
    config_free(c);

    c = load_valid(MINIMAL "scheduler: {type: WarmupCosineLR, params: {total_num_steps: 5000}}\n");
    assert_true(c->scheduler.cos_min_ratio == 1e-4 && c->scheduler.warmup_min_ratio == 0);
    assert_int_equal(c->scheduler.warmup_type, SCHEDULE_WARMUP_LOG);
    config_free(c);

    c = load_valid(MINIMAL "scheduler: null\n");
    assert_int_equal(c->scheduler.type, SCHEDULE_NONE);
    config_free(c);
}

static void test_whole_numbers(void **state)
{
    static const struct {
        const char *text;
        uint64_t value; /* 0: refused */
    } cases[] = {
        {"5e8", 500000000},
        {"5E+8", 500000000},
        {"0.5e1", 5},
        {"12.0", 12},
        {"1200e-2", 12},
        {"+1", 0},
        {"1000000000000", 1000000000000},
        {"1000000000001", 0},
        {"1e12", 1000000000000},
        {"1e13", 0},
        {"1e400", 0},
        {"1e-400", 0},
        {"2_000_000", 0},
        {"0x10", 0},
        {"1.5", 0},
        {"15e-1", 0},
        {"-1", 0},
        {"e5", 0},
        {"5e", 0},
        {".", 0},
        {"5 elements", 0},
        {"0", 500000}, /* means "at once" in DeepSpeed; the default is used */
        {"007", 7},
        {"1.", 1},
        {"99999999999999999999", 0},
        {"1e99999999999", 0},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config *config;
        char text[256];
        int r;

        snprintf(text, sizeof(text), MINIMAL "zero_optimization: {reduce_bucket_size: %s}\n", cases[i].text);
        r = load(&config, text, NULL, &problems);
        if (cases[i].value == 0 ? r != CONFIG_E_INVALID : r != 0)
            fail_msg("%s: returned %d", cases[i].text, r);
        if (r == 0)
            assert_int_equal(config->zero.reduce_bucket_size, cases[i].value);
        config_free(config);
        config_problems_deinit(&problems);
    }
}

static void test_sizes_and_times(void **state)
{
    static const struct {
        const char *key, *text;
        int64_t value; /* -1: refused */
    } cases[] = {
        {"memory", "64GiB", INT64_C(64) << 30},
        {"memory", "512MB", 512000000},
        {"memory", "1.5TiB", INT64_C(3) << 39},
        {"memory", "4096", 4096},
        {"memory", "1e9", 1000000000},
        {"memory", "\"2 KiB\"", 2048},
        {"memory", "0", 0},
        {"memory", "7B", 7},
        {"memory", "1kB", 1000},
        {"memory", "64gb", -1},
        {"memory", "0.3B", -1},
        {"memory", "GiB", -1},
        {"memory", "-1GiB", -1},
        {"memory", "1EiB", -1},
        {"reattach_timeout", "10s", 10000},
        {"reattach_timeout", "10min", 600000},
        {"reattach_timeout", "1500ms", 1500},
        {"reattach_timeout", "1.5s", 1500},
        {"reattach_timeout", "2h", 7200000},
        {"reattach_timeout", "1d", 86400000},
        {"reattach_timeout", "10", -1},
        {"reattach_timeout", "10m", -1},
        {"reattach_timeout", "1.00001s", -1},
        {"reattach_timeout", "31d", -1},
        {"reattach_timeout", "0", -1},
        {"reattach_timeout", "s", -1},
        {"reattach_timeout", "never", -1},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config *config;
        char text[256];
        int r;

        snprintf(text, sizeof(text), MINIMAL "limits: {%s: %s}\n", cases[i].key, cases[i].text);
        r = load(&config, text, NULL, &problems);
        if (cases[i].value < 0 ? r != CONFIG_E_INVALID : r != 0)
            fail_msg("%s: returned %d", cases[i].text, r);
        if (r == 0)
            assert_int_equal(*cases[i].key == 'm' ? config->limits.memory_bytes : config->limits.reattach_timeout_ms,
                             cases[i].value);
        config_free(config);
        config_problems_deinit(&problems);
    }
}

/* A configuration as in DeepSpeed's documentation: JSON, "auto", and keys without effect. */
static void test_deepspeed_file(void **state)
{
    static const char text[] =
        "{\"listen\": {\"socket\": \"/a\"}, \"world\": {\"size\": 2},\n"
        " \"train_batch_size\": \"auto\", \"gradient_accumulation_steps\": \"auto\", \"gradient_clipping\": "
        "\"auto\",\n"
        " \"fp16\": {\"enabled\": \"auto\", \"loss_scale\": 0, \"auto_cast\": false},\n"
        " \"bf16\": {\"enabled\": true}, \"steps_per_print\": 2000, \"wall_clock_breakdown\": false,\n"
        " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \"auto\", \"betas\": \"auto\", \"eps\": "
        "1e-6,\n"
        "   \"bias_correction\": true, \"torch_adam\": true}},\n"
        " \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_min_lr\": \"auto\", "
        "\"warmup_max_lr\": \"auto\",\n"
        "   \"warmup_num_steps\": \"auto\", \"last_batch_iteration\": -1}},\n"
        " \"zero_optimization\": {\"stage\": 2, \"allgather_partitions\": true, \"allgather_bucket_size\": "
        "2e8,\n"
        "   \"overlap_comm\": null, \"reduce_scatter\": true, \"reduce_bucket_size\": 2e8,\n"
        "   \"zero_quantized_weights\": false, \"mics_shard_size\": -1, \"contiguous_gradients\": true,\n"
        "   \"offload_optimizer\": {\"device\": \"cpu\", \"pin_memory\": true, \"ratio\": 1}}}\n";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    size_t n_auto = 0, n_overruled = 0, n_inert = 0;

    assert_int_equal(load(&config, text, NULL, &problems), 0);
    assert_int_equal(problems.n_errors, 0);
    for (size_t i = 0; i < problems.n_items; i++) {
        assert_true(problems.items[i].note);
        n_auto += strstr(problems.items[i].text, "nothing fills in \"auto\" here; the default is used") != NULL;
        n_overruled +=
            strstr(problems.items[i].text, "nothing fills in \"auto\" here; the program's value counts if it "
                                           "sets one, else the default") != NULL;
        n_inert += strstr(problems.items[i].text, "has no effect here: ") != NULL;
    }
    /* A note says that the default replaces "auto". Keys that are off or already have this value get no note. */
    assert_int_equal(n_auto, 1);
    assert_int_equal(n_overruled, 4); /* clipping and the schedule */
    assert_int_equal(n_inert, 4);
    assert_int_equal(problems.n_items, n_auto + n_overruled + n_inert);
    assert_int_equal(config_configured(config) & CONFIG_GIVES_SCHEDULER, 0);
    assert_int_equal(config->zero.reduce_bucket_size, 200000000);
    assert_true(config->zero.overlap_comm);
    assert_true(config->optimizer.hyper.lr == 1e-3 && config->optimizer.hyper.beta2 == 0.999);
    assert_true(config->optimizer.hyper.eps == 1e-6);
    assert_int_equal(config->scheduler.warmup_num_steps, 1000);
    assert_int_equal(config->scheduler.warmup_max_lr.n_items, 0);
    config_free(config);
    config_problems_deinit(&problems);
}

/*
 * Return: the problem with this key, or NULL. Asserts that there is at most one. Problems of its section do not count.
 */
static const struct config_problem *about_key(const struct config_problems *problems, const char *path)
{
    const struct config_problem *found = NULL;

    for (size_t i = 0; i < problems->n_items; i++) {
        if (strcmp(problems->items[i].key, path) != 0)
            continue;
        assert_null(found);
        found = &problems->items[i];
    }
    return found;
}

/* Every key without effect is accepted in its section. A note names the key if its value asks for something. */
static void test_inert_keys(void **state)
{
    static const char *const values[] = {"{a: 1}", "false", "auto", "null", "{}", "[]", "{enabled: false, a: 1}"};
    size_t n_keys, n_inert = 0;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys; i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        const struct config_problem *about;
        struct config *config;
        char text[1024], path[128], *part, *rest = path;
        size_t n = (size_t)snprintf(text, sizeof(text), "listen: {socket: /a}\nworld: {size: 1}\n"), depth = 0;

        if (keys[i].kind != CONFIG_INERT)
            continue;
        snprintf(path, sizeof(path), "%s", keys[i].path);
        for (; (part = strsep(&rest, ".")); depth++) {
            n +=
                (size_t)snprintf(text + n, sizeof(text) - n, "%*s%s: %s", (int)(2 * depth), "", part, rest ? "\n" : "");
            if (rest && depth == 0 && strcmp(part, "scheduler") == 0)
                n += (size_t)snprintf(text + n, sizeof(text) - n, "  type: WarmupLR\n");
            if (rest && depth == 0 && keys[i].only == CONFIG_ONLY_OPTIMIZER(OPTIMIZER_MUON))
                n += (size_t)snprintf(text + n, sizeof(text) - n, "  type: Muon\n");
        }
        for (size_t j = 0; j < ARRAY_SIZE(values); j++) {
            const char *value = keys[i].accepted ? keys[i].accepted : values[j];

            snprintf(text + n, sizeof(text) - n, "%.*s\n",
                     (int)(keys[i].accepted ? strcspn(value, ",") : strlen(value)), value);
            if (load(&config, text, NULL, &problems) != 0) {
                config_problems_print(stderr, &problems);
                fail_msg("%s was refused", keys[i].path);
            }
            about = about_key(&problems, keys[i].path);
            if (j > 0 || keys[i].accepted || keys[i].usual) {
                assert_int_equal(about != NULL, keys[i].usual && j == 0);
            } else {
                assert_non_null(about);
                assert_non_null(strstr(about->text, keys[i].sentence));
            }
            config_free(config);
            config_problems_deinit(&problems);
        }

        if (keys[i].accepted) {
            snprintf(text + n, sizeof(text) - n, "7\n");
            assert_int_equal(load(&config, text, NULL, &problems), CONFIG_E_INVALID);
            assert_non_null(strstr(problems.items[problems.n_items - 1].text, "is refused: "));
            config_problems_deinit(&problems);
        }
        n_inert++;
    }
    assert_true(n_inert > 60);
}

static char *print(const struct config *config)
{
    char *text = NULL;
    size_t n_bytes;
    FILE *file = open_memstream(&text, &n_bytes);

    assert_int_equal(config_print(file, config), 0);
    fclose(file);
    return text;
}

/* A value of the command line is used where the file has none. */
static void test_given(void **state)
{
    static const char deepspeed[] =
        "{\"zero_optimization\": {\"stage\": 1}, \"train_batch_size\": \"auto\", \"gradient_clipping\": 1}";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config_source source = {.text = {"ds.json", deepspeed, sizeof(deepspeed) - 1}, .given = {"/run/a.sock", 3}};
    struct config *config;
    char *text;

    assert_int_equal(config_load_string(&config, &source, &problems), 0);
    assert_int_equal(problems.n_items, 0);
    assert_string_equal(config->listen.socket, "/run/a.sock");
    assert_int_equal(config->world.size, 3);
    assert_false(config_file_has(config, "listen.socket") || config_file_has(config, "world.size"));
    assert_true(config_file_has(config, "zero_optimization.stage"));
    text = print(config);
    assert_non_null(strstr(text, "# command line"));
    free(text);
    config_free(config);

    source.text = (struct config_text){"a.yaml", MINIMAL, strlen(MINIMAL)};
    assert_int_equal(config_load_string(&config, &source, &problems), 0);
    assert_string_equal(config->listen.socket, "/run/zerod/a.sock");
    assert_int_equal(config->world.size, 4);
    config_free(config);

    source.text = (struct config_text){"ds.json", deepspeed, sizeof(deepspeed) - 1};
    source.given = (struct config_given){"run/a.sock", 0};
    assert_int_equal(config_load_string(&config, &source, &problems), CONFIG_E_INVALID);
    assert_int_equal(problems.n_items, 2);
    assert_non_null(strstr(problems.items[0].text, "of the command line is not an absolute path: run/a.sock"));
    assert_non_null(strstr(problems.items[1].text, "is missing; needed: a whole number from 1 to 1024 (ranks)"));
    config_problems_deinit(&problems);
}

static void assert_same_values(const struct config *a, const struct config *b)
{
    size_t n_keys;
    const struct config_key *keys = config_table(&n_keys);

    for (size_t i = 0; i < n_keys; i++) {
        char text_a[4096] = "", text_b[4096] = "";
        FILE *file_a, *file_b;

        if (keys[i].kind != CONFIG_OURS || keys[i].type == CONFIG_SECTION || strstr(keys[i].path, "[]"))
            continue;
        file_a = fmemopen(text_a, sizeof(text_a), "w");
        file_b = fmemopen(text_b, sizeof(text_b), "w");
        config_value_print(file_a, &keys[i], a);
        config_value_print(file_b, &keys[i], b);
        fclose(file_a);
        fclose(file_b);
        if (strcmp(text_a, text_b) != 0)
            fail_msg("%s: %s became %s", keys[i].path, text_a, text_b);
    }
}

static void test_print_round_trip(void **state)
{
    static const char *const texts[] = {
        MINIMAL,
        MINIMAL "optimizer: {type: Adam, params: {lr: 0.1234567890123456, betas: [0.3333333333333333, 0], "
                "eps: 1e-30}}\n",
        MINIMAL "optimizer: {type: SGD, params: {momentum: 0.1, nesterov: true}}\nfp16: {min_loss_scale: 1e-7}\n",
        MINIMAL "optimizer: {type: Lion}\nscheduler: {type: WarmupLR, params: {warmup_min_lr: [0, 1, 1e-300]}}\n",
        MINIMAL "optimizer: {type: Adagrad, params: {lr_decay: 3e-5}}\nlimits: {memory: 12345, "
                "reattach_timeout: 61s}\n",
        MINIMAL "scheduler: {type: WarmupDecayLR, params: {total_num_steps: 1e12, warmup_max_lr: 0.5}}\n",
        MINIMAL "scheduler: {type: WarmupCosineLR, params: {total_num_steps: 7, cos_min_ratio: 0.1}}\nthreads: 5\n",
        "listen: {socket: \"/r\\\"u\\\\n/\xc3\xa4: #x\", allow_groups: [a, 5]}\nworld: {size: 3, key_file: "
        "/k,\n"
        " nodes: [{address: \"a:1\", ranks: 1}, {address: \"[::2]:2\", ranks: 2}], node: 1}\ncollective: "
        "gloo\n"
        "gradient_accumulation_steps: 4\ndiagnostics: {stall_warning: 0, stall_timeout: 0}\n",
    };

    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        struct config *first = load_valid_with(texts[i], &both_engines), *second;
        char *printed = print(first);

        second = load_valid_with(printed, &both_engines);
        assert_same_values(first, second);
        free(printed);
        config_free(first);
        config_free(second);
    }
}

static void test_print_origins(void **state)
{
    struct config *config = load_valid("world:\n  size: 2\nlisten: {socket: /a}\noptimizer:\n  type: Adam\n"
                                       "  params: {lr: auto, weight_decay: 0.1}\nlimits:\n");
    char *printed = print(config);

    assert_non_null(strstr(printed, "job: \"train\"                                            # default\n"));
    assert_non_null(strstr(printed, "  size: 2                                               # f.yaml:2:9\n"));
    assert_non_null(strstr(printed, "  socket: \"/a\"                                          # f.yaml:3:18\n"));
    assert_non_null(strstr(printed, "# f.yaml:5:9; decoupled weight decay, the same as AdamW\n"));
    assert_non_null(strstr(printed, "    lr: 0.001                                           # default\n"));
    assert_non_null(strstr(printed, "    weight_decay: 0.1                                   # f.yaml:6:36\n"));
    assert_non_null(strstr(printed, "    adam_w_mode: true                                   # default\n"));
    assert_non_null(strstr(printed, "scheduler: null"));
    assert_null(strstr(printed, "momentum"));
    free(printed);
    config_free(config);

    config = load_valid(MINIMAL "optimizer: {type: Adam, params: {adam_w_mode: false}}\n");
    printed = print(config);
    assert_non_null(strstr(printed, "; weight decay through the gradient (L2)\n"));
    free(printed);
    config_free(config);
}

/* Printing to a full stream must fail. */
static void test_print_to_full_stream(void **state)
{
    struct config *config = load_valid(MINIMAL);
    FILE *file = fopen("/dev/full", "w");

    assert_int_equal(config_print(file, config), -ENOSPC);
    fclose(file);
    config_free(config);
}

static void test_files(void **state)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    char folder[] = "/tmp/zerod-test-config-XXXXXX", path[64];
    FILE *file;

    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/c.yaml", folder);

    assert_int_equal(config_load(&config, path, NULL, &problems), CONFIG_E_INVALID);
    assert_string_equal(problems.items[0].text, "cannot be read: No such file or directory");
    assert_string_equal(problems.items[0].place, path);
    config_problems_deinit(&problems);

    assert_int_equal(config_load(&config, folder, NULL, &problems), CONFIG_E_INVALID);
    assert_string_equal(problems.items[0].text, "cannot be read: Is a directory");
    config_problems_deinit(&problems);

    file = fopen(path, "w");
    fclose(file);
    assert_int_equal(config_load(&config, path, NULL, &problems), CONFIG_E_INVALID);
    assert_non_null(strstr(problems.items[0].text, "is empty"));
    config_problems_deinit(&problems);

    if (geteuid() != 0) {
        assert_int_equal(chmod(path, 0), 0);
        assert_int_equal(config_load(&config, path, NULL, &problems), CONFIG_E_INVALID);
        assert_string_equal(problems.items[0].text, "cannot be read: Permission denied");
        config_problems_deinit(&problems);
        assert_int_equal(chmod(path, 0600), 0);
    }

    file = fopen(path, "w");
    fputs(MINIMAL, file);
    fclose(file);
    assert_int_equal(config_load(&config, path, NULL, &problems), 0);
    assert_string_equal(config->file, path);
    config_free(config);

    file = fopen(path, "a");
    for (int i = 0; i < CONFIG_MAX_BYTES / 64; i++)
        fprintf(file, "#%063d\n", i);
    fclose(file);
    assert_int_equal(config_load(&config, path, NULL, &problems), CONFIG_E_INVALID);
    assert_non_null(strstr(problems.items[0].text, "allowed: at most 1048576"));
    config_problems_deinit(&problems);

    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

TEST_GROUP(config)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bucket_for_gpus),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_chosen),
        cmocka_unit_test(test_every_section),
        cmocka_unit_test(test_optimizer_defaults),
        cmocka_unit_test(test_chosen_optimizers),
        cmocka_unit_test(test_configured_optimizers_stay),
        cmocka_unit_test(test_schedulers),
        cmocka_unit_test(test_whole_numbers),
        cmocka_unit_test(test_sizes_and_times),
        cmocka_unit_test(test_deepspeed_file),
        cmocka_unit_test(test_inert_keys),
        cmocka_unit_test(test_given),
        cmocka_unit_test(test_print_round_trip),
        cmocka_unit_test(test_print_origins),
        cmocka_unit_test(test_print_to_full_stream),
        cmocka_unit_test(test_files),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
