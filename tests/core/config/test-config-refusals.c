/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Errors of the configuration: the refused settings, their places in the file, and the texts.
 */

#include "core/base/base.h"
#include "core/config/config-table.h"
#include "core/config/config.h"
#include "tests/core/config/config-text.h"
#include "tests/group.h"

struct refusal {
    const char *yaml;  /* appended to MINIMAL */
    const char *place; /* place of the first problem: "line:column", or "" for the file as a whole */
    const char *key;
    const char *text; /* a part of the problem's text */
};

static void expect_refusal(const struct refusal *refusal, const char *text, size_t n_problems)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    const struct config_problem *problem;
    char place[64];
    /* fixed, so that the engines of this build do not matter */
    int r = load(&config, text, &(const struct config_build){.have_gloo = false}, &problems);

    if (r != CONFIG_E_INVALID || problems.n_errors != n_problems) {
        config_problems_print(stderr, &problems);
        fail_msg("%s: returned %d with %zu errors instead of %zu", refusal->yaml, r, problems.n_errors, n_problems);
    }
    assert_null(config);
    problem = &problems.items[0];
    for (size_t i = 1; i < problems.n_items && problem->note; i++)
        problem = &problems.items[i];
    snprintf(place, sizeof(place), "f.yaml%s%s", *refusal->place ? ":" : "", refusal->place);
    if (strcmp(problem->place, place) != 0)
        fail_msg("%s: refused at %s instead of %s: %s", refusal->yaml, problem->place, place, problem->text);
    assert_string_equal(problem->key ? problem->key : "", refusal->key);
    if (!strstr(problem->text, refusal->text))
        fail_msg("\"%s\" does not say \"%s\"", problem->text, refusal->text);
    config_problems_deinit(&problems);
}

static void test_refusals(void **state)
{
    static const struct refusal cases[] = {
        /* unknown keys, and the suggested nearest keys */
        {"jbo: x\n", "3:1", "jbo", "unknown key; allowed here: job, log_level, "},
        {"jbo: x\n", "3:1", "jbo", "nearest valid key: job"},
        {"stage: 2\n", "3:1", "stage", "nearest valid key: zero_optimization.stage"},
        {"zero_optimization: {stag: 2}\n", "3:21", "zero_optimization.stag",
         "allowed here: stage, reduce_bucket_size, overlap_comm, stage3_max_live_parameters, stage3_on_one_node, "
         "speculative_update, offload_optimizer; "
         "nearest valid key: zero_optimization.stage"},
        {"zero_optimization: {contiguous_gradient: true}\n", "3:21", "zero_optimization.contiguous_gradient",
         "nearest valid key: zero_optimization.contiguous_gradients"},
        {"Diagnostics: {}\n", "3:1", "Diagnostics", "nearest valid key: diagnostics"},
        {"diagnostics: {on-missing: zero}\n", "3:15", "diagnostics.on-missing", "diagnostics.on_missing"},
        {"gradient_cliping: 1\n", "3:1", "gradient_cliping", "nearest valid key: gradient_clipping"},
        {"\"a\\e[31mb\": 1\n", "3:1", "a?[31mb", "unknown key"},
        /* keys of another type of optimizer or scheduler */
        {"optimizer: {params: {momentum: 0.9}}\n", "3:22", "optimizer.params.momentum",
         "is not a key of AdamW; allowed here: lr, betas, eps, weight_decay, optim_bits, master_weight_bits"},
        {"optimizer: {type: SGD, params: {beta: [0, 0]}}\n", "3:33", "optimizer.params.beta", "unknown key"},
        {"optimizer: {type: Lion, params: {eps: 1}}\n", "3:34", "optimizer.params.eps",
         "is not a key of Lion; allowed here: lr, betas, weight_decay, optim_bits, master_weight_bits"},
        {"scheduler: {type: WarmupLR, params: {cos_min_ratio: 1}}\n", "3:38", "scheduler.params.cos_min_ratio",
         "is not a key of WarmupLR"},
        {"optimizer: {params: {max_grad_norm: 1}}\n", "3:37", "optimizer.params.max_grad_norm", "gradient_clipping"},
        {"optimizer: {params: {bias_correction: false}}\n", "3:39", "optimizer.params.bias_correction", "is refused: "},
        {"amp: {enabled: true}\n", "3:1", "amp", "is refused"},
        /* given twice */
        {"job: a\njob: b\n", "4:1", "job", "is given twice, first in line 3; allowed: once"},
        {"limits: {clients: 5}\nlimits: {}\n", "4:1", "limits", "is given twice, first in line 3"},
        {"steps_per_print: 1\nsteps_per_print: 2\n", "4:1", "steps_per_print", "is given twice"},
        /* wrong types */
        {"job: [a]\n", "3:1", "job", "is not a single value; allowed: a name"},
        {"job: {a: b}\n", "3:1", "job", "is not a single value"},
        {"job: \"a\\0b\"\n", "3:6", "job", "holds a NUL"},
        {"job: a b\n", "3:6", "job", "has a character that a name may not have"},
        {"job: ''\n", "3:6", "job", "is empty"},
        {"threads:\n", "3:1", "threads", "is empty; allowed: auto, or a whole number from 1 to 1024 (threads)"},
        {"limits: 5\n", "3:9", "limits", "is not a section; allowed: a mapping"},
        {"limits: [a]\n", "3:1", "limits", "is not a section"},
        {"optimizer: {params: {betas: 0.9}}\n", "3:29", "optimizer.params.betas", "is not a list"},
        {"optimizer: {params: {betas: [0.9]}}\n", "3:22", "optimizer.params.betas", "must have two items"},
        {"optimizer: {params: {betas: [0.9, [1]]}}\n", "3:22", "optimizer.params.betas", "is not a single value"},
        {"device: gpu\n", "3:9", "device", "\"gpu\" is called cuda; allowed: one of cpu, cuda"},
        {"deterministic: yes\n", "3:16", "deterministic", "\"yes\" is not a truth value; allowed: true or false"},
        {"deterministic: \"true\"\n", "3:16", "deterministic", "is a string"},
        {"threads: \"4\"\n", "3:10", "threads", "is a string: leave the quotes out"},
        {"gradient_clipping: high\n", "3:20", "gradient_clipping", "is not a number"},
        {"gradient_clipping: .inf\n", "3:20", "gradient_clipping", "is not a number"},
        {"gradient_clipping: 1e999\n", "3:20", "gradient_clipping", "is too large"},
        {"gradient_clipping: 1_0\n", "3:20", "gradient_clipping", "no underscores"},
        {"gradient_clipping: 1-2\n", "3:20", "gradient_clipping", "is not a number"},
        /* out of range */
        {"zero_optimization: {stage: 4}\n", "3:28", "zero_optimization.stage",
         "\"4\" is out of range; allowed: a whole number from 0 to 3"},
        {"gradient_clipping: -1\n", "3:20", "gradient_clipping", "is out of range"},
        {"optimizer: {params: {betas: [0.9, 1.0]}}\n", "3:35", "optimizer.params.betas", "to below 1"},
        {"optimizer: {params: {eps: 0}}\n", "3:27", "optimizer.params.eps", "is out of range"},
        {"fp16: {min_loss_scale: -1}\n", "3:24", "fp16.min_loss_scale", "from 0"},
        {"limits: {handshake_timeout: 1ms}\n", "3:29", "limits.handshake_timeout", "from 100ms to 30d"},
        {"limits: {memory: 2000TiB}\n", "3:18", "limits.memory", "is out of range"},
        /* aliases, tags, keys that are not plain words */
        {"job: &a x\nlog_level: *a\n", "4:12", "log_level", "an alias (*name) is not supported"},
        {"threads: !!int 4\n", "3:16", "threads", "a tag (!name) is not supported"},
        {"limits: !x {clients: 4}\n", "3:12", "limits", "a tag (!name) is not supported"},
        {"? [a]\n: b\n", "3:3", "", "a key is a plain word"},
        {"<<: {job: a}\n", "3:1", "<<", "unknown key"},
        /* keys and values that conflict */
        {"bf16: {stochastic_rounding: true}\n", "3:29", "bf16.stochastic_rounding",
         "there is nothing to round: needs bf16_optimizer_states: true"},
        {"optimizer: {params: {master_weight_bits: 16}}\n", "3:42", "optimizer.params.master_weight_bits",
         "allowed: one of 32, 24"},
        {"optimizer: {params: {optim_bits: 16}}\n", "3:34", "optimizer.params.optim_bits", "allowed: one of 32, 8"},
        {"bf16: {bf16_optimizer_states: true}\noptimizer: {params: {optim_bits: 8}}\n", "3:31",
         "bf16.bf16_optimizer_states", "moments are bf16 or of 8 bits, not both"},
        {"bf16: {stochastic_rounding: true}\noptimizer: {params: {optim_bits: 8}}\n", "3:29",
         "bf16.stochastic_rounding", "moments of 8 bits are always rounded at random; leave it out"},
        {"device: cuda\n", "3:9", "device", "cuda needs the engine zerod-engine-nccl, which this build does not have"},
        {"collective: gloo\n", "3:13", "collective",
         "gloo needs the engine zerod-engine-gloo, which this build does not have"},
        {"collective: nccl\n", "3:13", "collective", "nccl needs the engine zerod-engine-nccl"},
        {"limits: {clients: 3}\n", "3:19", "limits.clients", "3 connections are fewer than the 4 ranks"},
        {"weights: private\nzero_optimization: {stage: 3}\n", "3:10", "weights", "stages 1 and 2"},
        {"optimizer: {type: SGD, params: {nesterov: true}}\n", "3:43", "optimizer.params.nesterov",
         "needs momentum above 0"},
        {"optimizer: {type: SGD, params: {momentum: 0.5, nesterov: true, dampening: 0.1}}\n", "3:58",
         "optimizer.params.nesterov", "needs dampening 0"},
        {"fp16: {initial_scale_power: 1, min_loss_scale: 4}\n", "3:48", "fp16.min_loss_scale",
         "above the scale at the start"},
        {"diagnostics: {stall_timeout: 1s}\n", "3:30", "diagnostics.stall_timeout", "before the first warning"},
        {"scheduler: {type: WarmupLR, params: {warmup_min_lr: [0, 0], warmup_max_lr: [1, 1, 1]}}\n", "3:61",
         "scheduler.params.warmup_max_lr", "has 3 numbers, warmup_min_lr has 2"},
        /* missing */
        {"scheduler: {type: WarmupCosineLR}\n", "3:1", "scheduler.params.total_num_steps", "is missing"},
        {"scheduler: {params: {warmup_num_steps: 1}}\n", "3:1", "scheduler.type", "is missing; needed: one of"},
        {"scheduler: {type: OneCycle, params: {cycle_min_lr: 0}}\n", "3:19", "scheduler.type",
         "is another schedule, which zerod does not have"},
        {"scheduler: {type: Cosine, params: {cycle_min_lr: 0}}\n", "3:19", "scheduler.type", "is not known"},
        /* not valid YAML */
        {"a: [1,\n", "4:1", "", "not valid YAML"},
        {"job: \"x\n", "3:7", "", "not valid YAML: "},
        {"job: a: b\n", "3:7", "", "not valid YAML"},
        {"\tjob: a\n", "3:1", "", "not valid YAML"},
        {"---\njob: b\n", "4:1", "", "a second document begins here"},
        {"job: \xff\n", "3:6", "", "byte 0xff is no text"},
        {"job: \x1b[31m\n", "3:6", "", "byte 0x1b is no text"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[1024];

        snprintf(text, sizeof(text), MINIMAL "%s", cases[i].yaml);
        expect_refusal(&cases[i], text, 1);
    }
}

static void test_refusals_of_worlds(void **state)
{
    static const struct refusal cases[] = {
        {"job: a\n", "", "listen.socket", "is missing; needed: an absolute path of at most 107 bytes"},
        {"listen: {socket: a.sock}\nworld: {size: 1}\n", "1:18", "listen.socket", "is not an absolute path"},
        {"listen: {socket: /a/}\nworld: {size: 1}\n", "1:18", "listen.socket", "names a folder"},
        {"listen:\nworld: {size: 1}\n", "1:1", "listen.socket", "is missing"},
        {"listen: {socket: null}\nworld: {size: 1}\n", "1:10", "listen.socket", "is empty"},
        {"listen: {socket: /a, mode: 1777}\nworld: {size: 1}\n", "1:28", "listen.mode", "is out of range"},
        {"listen: {socket: /a, mode: rw}\nworld: {size: 1}\n", "1:28", "listen.mode", "octal"},
        {"listen: {socket: /a, allow_groups: zerod}\nworld: {size: 1}\n", "1:36", "listen.allow_groups",
         "is not a list"},
        {"listen: {socket: /a, admin_users: [a, '']}\nworld: {size: 1}\n", "1:39", "listen.admin_users", "is empty"},
        {"listen: {socket: /a}\nworld: {size: 0}\n", "2:15", "world.size", "is out of range"},
        {"listen: {socket: /a}\nworld: {size: 2.5}\n", "2:15", "world.size",
         "\"2.5\" is not a whole number; allowed: a whole number from 1 to 1024 (ranks)"},
        {"listen: {socket: /a}\nworld: {size: 65}\n", "2:15", "world.size", "65 ranks on one node; allowed: at most"},
        {"listen: {socket: /a}\nworld: {size: 2, node: 1}\n", "2:24", "world.node", "is not one of the nodes"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: []}\n", "2:18", "world.nodes", "is empty"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [5]}\n", "2:26", "world.nodes", "is not a node"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [{ranks: 2}]}\n", "2:26", "world.nodes[].address",
         "is missing; needed: host:port"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [{address: a, ranks: 2}]}\n", "2:36", "world.nodes[].address",
         "is not host:port"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [{address: \"a:0\", ranks: 2}]}\n", "2:36",
         "world.nodes[].address", "has no port"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [{address: \"::1:5\", ranks: 2}]}\n", "2:36",
         "world.nodes[].address", "in brackets"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [{address: \"a:1\", rank: 2, ranks: 2}]}\n", "2:43",
         "world.nodes[].rank", "nearest valid key: world.nodes[].ranks"},
        {"listen: {socket: /a}\nworld: {size: 2, nodes: [{address: \"a:1\", ranks: 3}]}\n", "2:15", "world.size",
         "2 ranks in all, but the ranks of world.nodes add up to 3"},
        {"listen: {socket: /a}\nworld: {size: 2, key_file: /k, nodes: [{address: \"a:1\", ranks: 1}, "
         "{address: \"b:1\", ranks: 1}]}\n",
         "2:32", "world.nodes", "2 nodes need an engine"},
        {"listen: {socket: /a}\nworld: {size: 2, node: 64}\n", "2:24", "world.node",
         "is out of range; allowed: a whole number from 0 to 63"},
        {"- a\n", "1:1", "", "is no configuration"},
        {"", "", "", "is empty; needed at least: listen.socket, world.size"},
        {"# nothing\n", "", "", "is empty"},
        {"---\n", "", "", "is empty"},
        {"null\n", "", "", "is empty"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        expect_refusal(&cases[i], cases[i].yaml, i == 0 ? 2 : 1);
}

/* Rules that are reached only in a build with engines. */
static void test_several_nodes(void **state)
{
    static const struct {
        const char *rest, *key, *text;
    } cases[] = {
        {"collective: local\n", "collective", "local does not reach other nodes"},
        {"collective: nccl\n", "collective", "nccl needs device: cuda"},
        {"collective: gloo\ndevice: cuda\n", "device", "cuda needs collective: nccl"},
        {"collective: nccl\ndevice: cuda\ncommunication_data_type: bf16\n", "communication_data_type",
         "gradients travel between nodes in their own type; allowed: fp32"},
    };
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[512];

        snprintf(text, sizeof(text),
                 "listen: {socket: /a}\nworld: {size: 3, key_file: /k, nodes: [{address: \"a:1\", ranks: 1}, "
                 "{address: \"b:1\", ranks: 2}]}\n%s",
                 cases[i].rest);
        assert_int_equal(load(&config, text, &both_engines, &problems), CONFIG_E_INVALID);
        assert_int_equal(problems.n_errors, 1);
        assert_string_equal(problems.items[0].key, cases[i].key);
        assert_non_null(strstr(problems.items[0].text, cases[i].text));
        config_problems_deinit(&problems);
    }

    assert_int_equal(load(&config,
                          "listen: {socket: /a}\ncollective: gloo\nworld: {size: 3, nodes: "
                          "[{address: \"a:1\", ranks: 1}, {address: \"a:1\", ranks: 2}]}\n",
                          &both_engines, &problems),
                     CONFIG_E_INVALID);
    assert_int_equal(problems.n_errors, 2);
    assert_non_null(strstr(problems.items[0].text, "more than one node needs world.key_file"));
    assert_non_null(strstr(problems.items[1].text, "nodes 0 and 1 have one address, a:1"));
    config_problems_deinit(&problems);

    config_free(load_valid_with(MINIMAL "device: cuda\ncollective: nccl\n", &both_engines));
}

/* The limits on GPUs of several nodes. They need the engine gloo as well as nccl. */
static void test_devices_of_several_nodes(void **state)
{
    static const struct config_build only_nccl = {.have_nccl = true};
    static const struct {
        unsigned n_nodes, n_ranks; /* on each node */
        const struct config_build *build;
        const char *key, *text;
    } cases[] = {
        {2, 8, &only_nccl, "device", "needs the engine zerod-engine-gloo, too"},
        {2, 17, &both_engines, "world.nodes", "17 ranks with a GPU each on node 0; allowed: at most 16"},
        {13, 5, &both_engines, "world.size",
         "65 ranks, and with device: cuda each rank's gradients travel by "
         "themselves between nodes; allowed: at most 64"},
        {4, 16, &both_engines, NULL, NULL},
        {2, 3, &both_engines, NULL, NULL},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config *config = NULL;
        char text[2048];
        int n = snprintf(text, sizeof(text),
                         "listen: {socket: /a}\ncollective: nccl\ndevice: cuda\n"
                         "world: {size: %u, key_file: /k, nodes: [",
                         cases[i].n_nodes * cases[i].n_ranks);

        for (unsigned k = 0; k < cases[i].n_nodes; k++)
            n += snprintf(text + n, sizeof(text) - (size_t)n, "%s{address: \"a:%u\", ranks: %u}", k > 0 ? ", " : "",
                          k + 1, cases[i].n_ranks);
        snprintf(text + n, sizeof(text) - (size_t)n, "]}\n");
        assert_int_equal(load(&config, text, cases[i].build, &problems), cases[i].text ? CONFIG_E_INVALID : 0);
        assert_int_equal(problems.n_errors, cases[i].text ? 1 : 0);
        if (cases[i].text) {
            assert_string_equal(problems.items[0].key, cases[i].key);
            assert_non_null(strstr(problems.items[0].text, cases[i].text));
        } else {
            config_free(config);
        }
        config_problems_deinit(&problems);
    }
}

/* Some settings are refused with device: cuda. */
static void test_device(void **state)
{
    static const struct {
        const char *rest, *key, *text;
    } cases[] = {
        {"weights: private\nworld: {size: 2}\n", "weights", "each rank has a copy of the weights on its GPU anyway"},
        {"world: {size: 17}\n", "world.size", "17 ranks with a GPU each on one node; allowed: at most 16"},
    };
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[256];

        snprintf(text, sizeof(text), "listen: {socket: /a}\ndevice: cuda\ncollective: nccl\n%s", cases[i].rest);
        assert_int_equal(load(&config, text, &both_engines, &problems), CONFIG_E_INVALID);
        assert_int_equal(problems.n_errors, 1);
        assert_string_equal(problems.items[0].key, cases[i].key);
        assert_non_null(strstr(problems.items[0].text, cases[i].text));
        config_problems_deinit(&problems);
    }
    config_free(load_valid_with(MINIMAL "device: cuda\ncollective: nccl\nbf16: {bf16_optimizer_states: true}\n",
                                &both_engines));
    config_free(load_valid_with(
        MINIMAL "device: cuda\ncollective: nccl\noptimizer: {params: {optim_bits: 8, master_weight_bits: 24}}\n",
        &both_engines));
}

/* At most 64 nodes, which send at most 64 partial sums for each gradient. Both limits are tested from both sides. */
static void test_too_many_nodes(void **state)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    static const struct {
        unsigned n_nodes, n_ranks; /* on each node */
        const char *text;
    } cases[] = {
        {65, 1, "has too many items; allowed: a list of at most 64 nodes, each {address, ranks}"},
        {64, 3,
         "the nodes would send 128 partial sums for each gradient; allowed: at most 64. A node sends one if its ranks "
         "are a whole subtree of the sum over all ranks, as with one power of two of ranks on every node, else one for "
         "each subtree that they hold"},
        {32, 3, NULL},
        {64, 16, NULL},
        {64, 1, NULL},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[8192];
        struct config *config;
        int n = snprintf(text, sizeof(text),
                         "listen: {socket: /a}\ncollective: gloo\nworld: {size: %u, key_file: /k, nodes: [",
                         cases[i].n_nodes * cases[i].n_ranks);

        for (unsigned k = 0; k < cases[i].n_nodes; k++)
            n += snprintf(text + n, sizeof(text) - (size_t)n, "%s{address: \"n%u:1\", ranks: %u}", k ? ", " : "", k,
                          cases[i].n_ranks);
        snprintf(text + n, sizeof(text) - (size_t)n, "]}\n");
        assert_int_equal(load(&config, text, &both_engines, &problems), cases[i].text ? CONFIG_E_INVALID : 0);
        if (cases[i].text) {
            assert_int_equal(problems.n_errors, 1);
            assert_string_equal(problems.items[0].key, "world.nodes");
            assert_non_null(strstr(problems.items[0].text, cases[i].text));
        }
        config_problems_deinit(&problems);
        config_free(config);
    }
}

/*
 * A note is printed for bf16 moments that are rounded to the nearest if beta2 is so high that small changes are lost.
 */
static void test_beta2_of_bf16_moments(void **state)
{
    static const struct {
        const char *rest;
        bool noted;
    } cases[] = {
        {"bf16: {bf16_optimizer_states: true}\n", true},
        {"bf16: {bf16_optimizer_states: true, stochastic_rounding: true}\n", false},
        {"bf16: {bf16_optimizer_states: true}\noptimizer: {type: AdamW, params: {betas: [0.9, 0.95]}}\n", false},
        {"bf16: {bf16_optimizer_states: true}\noptimizer: {type: Lion, params: {betas: [0.9, 0.999]}}\n", false},
        {"optimizer: {type: AdamW}\n", false},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config *config;
        char text[256];

        snprintf(text, sizeof(text), MINIMAL "%s", cases[i].rest);
        assert_int_equal(load(&config, text, &both_engines, &problems), 0);
        assert_int_equal(problems.n_items, cases[i].noted);
        if (cases[i].noted) {
            assert_true(problems.items[0].note);
            assert_string_equal(problems.items[0].key, "bf16.bf16_optimizer_states");
            assert_string_equal(problems.items[0].text,
                                "with the second of betas above 0.998, exp_avg_sq never becomes smaller when it is "
                                "rounded to the nearest; bf16: {stochastic_rounding: true} keeps small changes");
        }
        config_problems_deinit(&problems);
        config_free(config);
    }
}

/* Between nodes, communication_data_type is fp32 or bf16. Where the setting has no effect, a note says so. */
static void test_wire_between_nodes(void **state)
{
    static const char nodes[] = "listen: {socket: /a}\ncollective: gloo\nworld: {size: 3, key_file: /k, nodes: "
                                "[{address: \"a:1\", ranks: 1}, {address: \"b:1\", ranks: 2}]}\n";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    char text[512];

    snprintf(text, sizeof(text), "%scommunication_data_type: bf16\n", nodes);
    assert_int_equal(load(&config, text, &both_engines, &problems), 0);
    assert_int_equal(problems.n_errors, 0);
    assert_int_equal(config->communication_data_type, DTYPE_BF16);
    config_free(config);
    config_problems_deinit(&problems);

    for (unsigned stage = 1; stage <= 3; stage++) {
        snprintf(text, sizeof(text), "%sdeterministic: false\nzero_optimization: {stage: %u}\n", nodes, stage);
        assert_int_equal(load(&config, text, &both_engines, &problems), 0);
        assert_int_equal(problems.n_items, 1);
        assert_true(problems.items[0].note);
        assert_string_equal(problems.items[0].place, "f.yaml:4:16");
        assert_string_equal(problems.items[0].text,
                            "false changes nothing with gloo: in stage 1, too, slices travel with every micro-batch "
                            "and are added in the order of numerics.md");
        config_problems_deinit(&problems);
        config_free(config);
    }
    assert_int_equal(load(&config, nodes, &both_engines, &problems), 0);
    assert_int_equal(problems.n_items, 0);
    config_free(config);
}

static void test_socket_length(void **state)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    char text[256], path[128];

    memset(path, 'a', sizeof(path));
    path[0] = '/';
    path[CONFIG_MAX_SOCKET_BYTES] = '\0';
    snprintf(text, sizeof(text), "listen: {socket: %s}\nworld: {size: 1}\n", path);
    assert_int_equal(load(&config, text, NULL, &problems), 0);
    assert_string_equal(config->listen.socket, path);
    config_free(config);

    snprintf(text, sizeof(text), "listen: {socket: %sa}\nworld: {size: 1}\n", path);
    assert_int_equal(load(&config, text, NULL, &problems), CONFIG_E_INVALID);
    assert_non_null(strstr(problems.items[0].text, "longer than a socket's path can be"));
    assert_non_null(strstr(problems.items[0].text, "at most 107 bytes"));
    config_problems_deinit(&problems);
}

/* One load reports all problems of a file, in the order of their places, each with its line and a caret. */
static void test_all_problems_at_once(void **state)
{
    static const char text[] = "listen:\n"
                               "\tsocket: /a\n";
    static const char many[] = "job: pretrain\n"
                               "limits: {clients: many, memory: 5q}\n"
                               "job: again\n"
                               "listen: {socket: run/a}\n"
                               "w\xc3\xa4ights: {b: 1}\n"
                               "steps_per_print: 10\n"
                               "diagnostics:\n"
                               "  on_duplicate:\taccumulat\n";
    static const char expected[] =
        "E1601 config: f.yaml: world.size: is missing; needed: a whole number from 1 to 1024 (ranks)\n"
        "E1601 config: f.yaml:2:19: limits.clients: \"many\" is not a number from 0 up; allowed: a whole "
        "number from 1 "
        "to 65536 (connections)\n"
        "    limits: {clients: many, memory: 5q}\n"
        "                      ^~~~\n"
        "E1601 config: f.yaml:2:33: limits.memory: \"5q\" has an unknown unit; allowed: a size such as 512MB "
        "or 64GiB, "
        "up to 1024TiB, or 0\n"
        "    limits: {clients: many, memory: 5q}\n"
        "                                    ^~\n"
        "E1601 config: f.yaml:3:1: job: is given twice, first in line 1; allowed: once\n"
        "    job: again\n"
        "    ^~~\n"
        "E1601 config: f.yaml:4:18: listen.socket: \"run/a\" is not an absolute path; allowed: an absolute "
        "path of at "
        "most 107 bytes\n"
        "    listen: {socket: run/a}\n"
        "                     ^~~~~\n"
        "E1601 config: f.yaml:5:1: w\xc3\xa4ights: unknown key; allowed here: job, log_level, listen, world, "
        "zero_optimization, device, collective, deterministic, optimizer, scheduler, "
        "gradient_accumulation_steps, "
        "gradient_clipping, gradient_allreduce_op, communication_data_type, fp16, bf16, weights, persist, threads, "
        "diagnostics, "
        "checkpoint, limits; nearest valid key: weights\n"
        "    w\xc3\xa4ights: {b: 1}\n"
        "    ^~~~~~~~\n"
        "note config: f.yaml:6:18: steps_per_print: has no effect here: zerodctl status shows progress at "
        "any time.\n"
        "E1601 config: f.yaml:8:17: diagnostics.on_duplicate: \"accumulat\" is not known; allowed: one of "
        "reject, "
        "accumulate, abort_step; nearest: accumulate\n"
        "      on_duplicate:\taccumulat\n"
        "                   \t^~~~~~~~~\n";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    char buffer[8192];

    assert_int_equal(load(&config, many, NULL, &problems), CONFIG_E_INVALID);
    print_problems(buffer, sizeof(buffer), &problems);
    assert_string_equal(buffer, expected);
    config_problems_deinit(&problems);

    assert_int_equal(load(&config, text, NULL, &problems), CONFIG_E_INVALID);
    assert_int_equal(problems.n_items, 1);
    assert_string_equal(problems.items[0].place, "f.yaml:2:1");
    assert_true(strncmp(problems.items[0].text, "not valid YAML: ", 16) == 0); /* the library writes the rest */
    assert_string_equal(problems.items[0].source, "    \tsocket: /a\n    ^\n");
    config_problems_deinit(&problems);
}

static char *repeated(const char *before, const char *what, size_t n, const char *after)
{
    size_t n_what = strlen(what);
    char *text = malloc(strlen(before) + n * n_what + strlen(after) + 1), *at = stpcpy(text, before);

    for (size_t i = 0; i < n; i++, at += n_what)
        memcpy(at, what, n_what);
    strcpy(at, after);
    return text;
}

/* Malicious input is refused with a bounded list of problems. */
static void test_hostile_texts(void **state)
{
    char *texts[] = {
        repeated("a: ", "[", 100000, ""),
        repeated("a: ", "{a: ", 100000, ""),
        repeated("", "- ", 100000, "a"),
        repeated("", "a: 1\n", 200000, ""),
        repeated("", "job: 1\n", 140000, ""),
        repeated("world: {nodes: [", "{address: \"a:1\", ranks: 1}, ", 1000, "]}\n"),
        repeated("world: {nodes: [", "{q: 1}, ", 1000, "]}\n"),
        repeated("listen: {allow_groups: [", "a, ", 300000, "]}\n"),
        repeated("optimizer: {params: {betas: [", "a, ", 300000, "]}}\n"),
        repeated("", "x", 1000000, ": 1\n"),
        repeated("job: ", "x", 1000000, "\n"),
        repeated("job: ", "\xc3\xa4", 500000, "\n"),
        repeated("a: &a [b]\nb: [", "*a, ", 200000, "]\n"),
        repeated("job: \"", "\\e", 400000, "\"\n"),
        repeated("", "---\na: 1\n", 100000, ""),
        repeated("", "{", 100, ""),
        repeated("", "? ", 60, "a"),
    };

    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config *config;

        assert_int_equal(load(&config, texts[i], NULL, &problems), CONFIG_E_INVALID);
        assert_null(config);
        assert_in_range(problems.n_items, 1, CONFIG_MAX_PROBLEMS);
        for (size_t j = 0; j < problems.n_items; j++) {
            assert_true(strlen(problems.items[j].text) < 1000);
            assert_true(!problems.items[j].source || strlen(problems.items[j].source) < 1000);
        }
        config_problems_deinit(&problems);
        free(texts[i]);
    }
}

static void test_distance(void **state)
{
    assert_int_equal(config_distance("", ""), 0);
    assert_int_equal(config_distance("", "abc"), 3);
    assert_int_equal(config_distance("stage", "stage"), 0);
    assert_int_equal(config_distance("Stage", "sTAGE"), 0);
    assert_int_equal(config_distance("stage", "stgae"), 1);
    assert_int_equal(config_distance("stage", "stag"), 1);
    assert_int_equal(config_distance("kitten", "sitting"), 3);
    assert_int_equal(config_distance("ca", "abc"), 3);
}

/*
 * Without a limit of depth the library reads a megabyte of brackets for seconds. Brackets in texts and comments do not
 * count.
 */
static void test_nested_too_deeply(void **userdata)
{
    static const struct config_given given = {"/run/x.sock", 1};
    static char deep[1000 * 1000];
    const char *const flat[] = {"job: a # [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\n",
                                "# {{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{\njob: a\n",
                                "checkpoint: {dir: '/[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[['}\n",
                                "checkpoint: {dir: \"/\\\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"}\n"};
    struct config *config;

    (void)userdata;
    memset(deep, '[', sizeof(deep));
    for (size_t i = 0; i <= ARRAY_SIZE(flat); i++) {
        bool is_deep = i == ARRAY_SIZE(flat);
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        struct config_source source = {.given = given, .text = {.name = "deep", .text = is_deep ? deep : flat[i]}};

        source.text.n_bytes = is_deep ? sizeof(deep) : strlen(flat[i]);
        assert_int_equal(config_load_string(&config, &source, &problems), is_deep ? CONFIG_E_INVALID : 0);
        if (is_deep) {
            assert_int_equal(problems.n_errors, 1);
            assert_int_equal(problems.items[0].column, 33);
            assert_non_null(strstr(problems.items[0].text, "is nested too deeply; allowed: 32 levels of [ and {"));
        }
        config_problems_deinit(&problems);
        config_free(config);
    }
}

/* Return: a string of n copies of item, with the copy's number for each '#'. The caller frees the string. */
static char *repeat(const char *item, size_t n)
{
    char *text = malloc(n * (strlen(item) + 16) + 1), *end = text;

    for (size_t i = 0; i < n; i++)
        for (const char *c = item; *c; c++)
            end += *c == '#' ? sprintf(end, "%zu", i) : sprintf(end, "%c", *c);
    *end = '\0';
    return text;
}

/* Without limits the library reads each of these files for a second, and the anchors for minutes. */
static void test_too_wide(void **userdata)
{
    static const struct {
        const char *begin, *item, *end, *expected;
        size_t n;
    } cases[] = {
        {"{", "? a,", "? a}\n", "has too many keys and members of lists; allowed: 20000", 200000},
        {"? {", "a: b,", "}\n: c\n", "has too many keys and members of lists; allowed: 20000", 150000},
        {"", "a#: x\n", "", "has too many keys and members of lists; allowed: 20000", 20001},
        {"a: [", "b,", "b]\n", "has too many keys and members of lists; allowed: 20000", 20001},
        {"", "a#: &a# x\n", "", "has too many anchors; allowed: 1000", 1001},
        {"# ", ":::::,,,,,?????&&&&&", "\njob: a\n", NULL, 10000},
    };
    static const struct config_given given = {"/run/x.sock", 1};
    struct config *config;

    (void)userdata;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config_problems problems = CONFIG_PROBLEMS_NULL;
        _cleanup_free_ char *items = repeat(cases[i].item, cases[i].n), *text = NULL;
        struct config_source source = {.given = given, .text = {.name = "wide"}};

        assert_true(asprintf(&text, "%s%s%s", cases[i].begin, items, cases[i].end) > 0);
        source.text.text = text;
        source.text.n_bytes = strlen(text);
        assert_int_equal(config_load_string(&config, &source, &problems), cases[i].expected ? CONFIG_E_INVALID : 0);
        if (cases[i].expected)
            assert_non_null(strstr(problems.items[0].text, cases[i].expected));
        config_problems_deinit(&problems);
        config_free(config);
    }
}

TEST_GROUP(config_refusals)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_nested_too_deeply),
        cmocka_unit_test(test_too_wide),
        cmocka_unit_test(test_refusals_of_worlds),
        cmocka_unit_test(test_several_nodes),
        cmocka_unit_test(test_devices_of_several_nodes),
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_too_many_nodes),
        cmocka_unit_test(test_beta2_of_bf16_moments),
        cmocka_unit_test(test_wire_between_nodes),
        cmocka_unit_test(test_socket_length),
        cmocka_unit_test(test_all_problems_at_once),
        cmocka_unit_test(test_hostile_texts),
        cmocka_unit_test(test_distance),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
