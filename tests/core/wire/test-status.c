/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON in which the daemon describes itself. With --print NAME, the program prints an example instead. Another test
 * compares the examples with the schemas in docs/schema/ and shows them through zerodctl.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <json-c/json.h>

#include "core/base/base.h"
#include "core/base/json.h"
#include "core/diagnosis/diagnosis.h"
#include "core/layout/layout.h"
#include "core/wire/status.h"
#include "daemon/ledger/ledger.h"

enum {
    N_RANKS = 4,
    N_PARAMS = 4,
    S = 1000000000, /* nanoseconds */
    PLAIN = JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE,
};

/* ---- an example ---------------------------------------------------------------------------------------- */

struct example {
    struct layout *layout;
    struct ledger ledger;
    struct diagnostic *diagnostics[2];
    struct status status;
    struct traffic traffic[N_TRAFFIC];
    struct status_refused refused[3];
    struct status_rank ranks[N_RANKS];
    struct status_stack stacks[N_RANKS];
    struct status_param params[N_PARAMS];
};

static void example_layout(struct example *e)
{
    static const uint64_t shapes[N_PARAMS][2] = {{300, 7}, {64, 0}, {1, 0}, {9, 9}};
    static const char odd[] = "odd \"name\" \xff\x01\n";
    const struct layout_decl decls[N_PARAMS] = {
        {.name = "layers.0.w",
         .name_len = 10,
         .dtype = DTYPE_BF16,
         .grad_dtype = DTYPE_F32,
         .trainable = true,
         .n_dims = 2,
         .shape = shapes[0]},
        {.name = "layers.0.b", .name_len = 10, .trainable = true, .n_dims = 1, .shape = shapes[1], .group = 1},
        {.name = odd, .name_len = sizeof(odd) - 1, .trainable = true, .n_dims = 0},
        {.name = "frozen", .name_len = 6, .dtype = DTYPE_F16, .n_dims = 2, .shape = shapes[3]},
    };
    uint32_t bad;

    assert_int_equal(layout_new(&e->layout, decls, N_PARAMS, N_RANKS, 4096, &bad), 0);
}

static void example_ledger(struct example *e)
{
    const uint8_t trainable[N_PARAMS] = {1, 1, 1};
    uint32_t part = e->layout->params[1].first_part;
    uint16_t pass;
    unsigned rank;

    assert_int_equal(ledger_init(&e->ledger, (struct ledger_ranks){.end = N_RANKS, .n = N_RANKS}, e->layout->n_parts,
                                 trainable, false),
                     0);
    for (rank = 1; rank <= 3; rank += 2) {
        ledger_attach(&e->ledger, rank, rank);
        ledger_begin(&e->ledger, rank, 0, 0);
        assert_int_equal(
            ledger_push(&e->ledger, rank,
                        &(struct push_record){.incarnation = rank, .sequence = 1, .param = 1, .part = part}, &pass),
            LEDGER_ADMITTED);
    }
}

static void example_diagnostics(struct example *e)
{
    static const uint32_t ids[] = {0, 2};
    struct diagnostic *d = diagnostic_new(E_DUPLICATE, NULL);

    diagnostic_at(d, 1, 41, 0);
    diagnostic_params(d, e->layout, ids, ARRAY_SIZE(ids));
    diagnostic_field(d, "cause", "the module ran \"twice\"\nin one forward");
    diagnostic_field(d, "fix", "%s", "use_reentrant=False");
    memcpy(d->cause_class, "D1", 3);
    d->first = (struct diagnostic_push){
        .present = true,
        .record = {.incarnation = 0xabc,
                   .sequence = 7,
                   .step = 41,
                   .ordinal = 1,
                   .task = 29,
                   .depth = 1,
                   .call = 2,
                   .time_ns = 90ull * S,
                   .flags = PUSH_NESTED},
        .segment = strdup("layers.0"),
        .site = strdup("modeling.py:98"),
    };
    d->second = d->first;
    d->second.record.flags = PUSH_HOOK_TWICE | PUSH_NEW_FORWARD;
    d->second.segment = strdup("");
    d->second.site = strdup("f\xc3\xbcr \xff.py:1");
    d->id = 5;
    d->time_ns = 95ull * S;
    e->diagnostics[0] = diagnostic_finish(d);

    d = diagnostic_new(E_MISSING, NULL);
    d->warning = true;
    d->id = 6;
    d->time_ns = 101ull * S; /* by a clock that was read later than now_ns */
    e->diagnostics[1] = diagnostic_finish(d);
}

static void example_status(struct example *e)
{
    static const struct hyper groups[8] = {{.lr = 1e-3, .weight_decay = 0.01, .nesterov = true}};
    static const struct status_finding findings[] = {
        {.kind = "slow-rank", .rank = 3, .param = -1, .text = "slow"},
        {.kind = "zero-gradient", .rank = -1, .param = 0, .text = "zero"},
    };
    size_t i;

    assert_true(e->layout->n_groups <= ARRAY_SIZE(groups));

    e->refused[0] = (struct status_refused){1001, 2};
    e->refused[1] = (struct status_refused){1002, 0};
    e->refused[2] = (struct status_refused){1302, 1};
    e->status = (struct status){
        .now_ns = 100ull * S,
        .started_ns = 40ull * S,
        .job = "pretrain",
        .run_id = "run\xff-7",
        .state = "training",
        .version = "0.1.0",
        .isa = "avx2",
        .config_path = "/etc/zerod/pretrain.yaml",
        .socket_path = "/run/zerod/pretrain.sock",
        .pid = 4242,
        .stage = 2,
        .bucket_elems = 1000000,
        .world_size = N_RANKS,
        .n_attached = 3,
        .layout = e->layout,
        .step = 42,
        .attempt = 1,
        .n_applied = 41,
        .n_skipped = 1,
        .loss_scale = 65536,
        .has_grad_norm = true,
        .grad_norm = 0.1,
        .lr = 1e-3,
        .groups = groups,
        .steps_per_s = 3.5,
        .last_step_ns = 300000000,
        .overlap_reduced_bytes = 3,
        .overlap_bytes = 4,
        .early = {.n_elems = 1500,
                  .n_elems_last = 2000,
                  .prevented_by = "memory",
                  .why = "memory is short: 2 of 3 buckets have spare places"},
        .limit_bytes = 64ull << 30,
        .refused = e->refused,
        .n_refused = ARRAY_SIZE(e->refused),
        .slowest_rank = 3,
        .slowest_behind_ns = 1500000,
        .last_diagnostic = e->diagnostics[0],
        .findings = findings,
        .n_findings = ARRAY_SIZE(findings),
        .counters = {.n_pushes_admitted = 1000,
                     .n_pushes_accumulated = 3,
                     .n_aborts = 1,
                     .n_warnings = 1,
                     .n_early_updates = 12,
                     .n_early_updates_dropped = 5},
    };
    for (i = 0; i < N_STATUS_PHASES; i++)
        e->status.phases[i] = (struct status_time){.total_ns = (i + 1) * 1000, .last_ns = (i + 1) * 10};
    for (i = 0; i < N_STATUS_MEMORY; i++)
        e->status.memory[i] = (struct status_bytes){.held_bytes = i << 20, .planned_bytes = 2 * (i << 20)};
    e->status.memory[STATUS_MEMORY_RING].on_device = true;
    e->traffic[TRAFFIC_REDUCE_SCATTER] =
        (struct traffic){.n_orders = 40, .n_bytes_sent = 2 << 20, .n_bytes_received = 1 << 20, .busy_ns = 375000000};
    e->traffic[TRAFFIC_ALL_GATHER] = (struct traffic){.n_orders = 80, .n_bytes_sent = 1 << 20, .n_under_way = 1};
    e->status.has_device = true;
    e->status.device = (struct status_device){.ready = true,
                                              .pid = 4711,
                                              .generation = 3,
                                              .n_failures = 2,
                                              .traffic = e->traffic,
                                              .versions = "CUDA 13.0, driver 13.0, NCCL 2.28.9"};
    e->status.checkpoint = (struct status_checkpoint){
        .dir = "/var/lib/pretrain",
        .wanted = true,
        .is_saving = true,
        .saving =
            {.step = 42, .n_bytes_done = 1 << 20, .n_bytes = 4 << 20, .began_ns = 98ull * S, .waited_ns = 5000000},
        .has_last = true,
        .last = {.step = 20, .n_bytes = 4 << 20, .ended_ns = 40ull * S, .took_ns = 3ull * S, .waited_ns = 7000000},
        .n_saved = 2,
        .n_failed = 1,
        .why = "model.safetensors: No space left on device",
    };
}

static void example_ranks(struct example *e)
{
    static const uint32_t awaited[STATUS_MAX_AWAITED] = {0, 2, 3};
    unsigned i;

    for (i = 0; i < N_RANKS; i++)
        e->ranks[i] = (struct status_rank){
            .rank = i,
            .attached = true,
            .pid = 500 + i,
            .uid = 1000,
            .state = "backward",
            .client = "train 1.0",
            .incarnation = 0xfeedfacecafebeefull,
            .connected_since_ns = 50ull * S,
            .last_message_ns = 99ull * S,
            .step = 42,
            .n_pushes = 7,
            .behind_total_ns = 2500000000ull * i,
            .phases_ns = {1, 2, 3, 4},
            .waits = {{"boundary", "ranks", 1500000000}, {"step", "daemon", 20}},
            .n_waits = 2,
        };
    e->ranks[1].fault = e->diagnostics[0];
    e->ranks[2].waiting_for = "ranks 1, 3 to ask for the step";
    e->ranks[2].waiting_since_ns = 98ull * S;
    e->ranks[3] = (struct status_rank){.rank = 3, .state = "absent"};
    for (i = 0; i < N_RANKS; i++)
        e->stacks[i] = (struct status_stack){.rank = &e->ranks[i]};
    e->stacks[1].awaited = awaited;
    e->stacks[1].n_awaited = 4;
    e->stacks[1].seen_ns = 97ull * S;
    e->stacks[1].text = "main thread:\n  loader.py:21 in __next__";
    e->stacks[2].process = "its process is stopped by a signal";
    e->stacks[2].is_pending = true;
    e->params[0] = (struct status_param){.n_steps = 41, .has_grad_norm = true, .grad_norm = 0.25};
    e->params[1] = (struct status_param){.n_steps = 41, .has_grad_norm = true, .grad_norm = (double)INFINITY};
}

static void example_init(struct example *e)
{
    *e = (struct example){};
    example_layout(e);
    example_ledger(e);
    example_diagnostics(e);
    example_status(e);
    example_ranks(e);
}

static void example_deinit(struct example *e)
{
    diagnostic_unref(e->diagnostics[0]);
    diagnostic_unref(e->diagnostics[1]);
    ledger_deinit(&e->ledger);
    layout_free(e->layout);
}

static const struct diagnostic *const *example_list(const struct example *e)
{
    return (const struct diagnostic *const *)e->diagnostics;
}

/* Return: whether the rank has pushed the part in this step, for struct status. */
static bool has_pushed(const void *userdata, unsigned rank, uint32_t part)
{
    const struct ledger *ledger = userdata;

    return ledger->ranks[rank].pushed_in_step[part];
}

static char *minimal_status(void)
{
    return status_json(&(struct status){.now_ns = 1,
                                        .started_ns = 1,
                                        .job = "train",
                                        .state = "waiting",
                                        .version = "0.1.0",
                                        .stage = 2,
                                        .world_size = 1,
                                        .slowest_rank = -1,
                                        .loss_scale = 1});
}

/* The status of node 0 of three, or of node 1, which knows fewer facts. */
static char *nodes_status_of(const struct example *e, unsigned node)
{
    const struct status_node list[] = {
        {.address = "10.0.0.1:7700", .n_ranks = 2, .known = true, .reached = true},
        {.address = "10.0.0.2:7700",
         .first_rank = 2,
         .n_ranks = 1,
         .known = true,
         .reached = node == 1,
         .why = "has not been heard for 3.1 s",
         .silent_ns = node == 1 ? 0 : 3100000000},
        {.address = "[fd00::3]:7700",
         .first_rank = 3,
         .n_ranks = 1,
         .known = node == 0,
         .why = "not heard of yet",
         .silent_ns = UINT64_MAX},
    };
    const struct status_nodes nodes = {
        .node = node,
        .list = list,
        .n = ARRAY_SIZE(list),
        .engine = "gloo",
        .generation = 3,
        .connected = node == 0,
        .traffic = e->traffic,
        .waits_for = node == 0 ? 6 : 0,
        .waits_to = node == 0 ? "to ask for the step" : NULL,
    };
    struct status status = e->status;

    status.nodes = &nodes;
    status.early = (struct status_early){.prevented_by = "several-nodes", .why = "the job has several nodes"};
    status.counters.n_early_updates = status.counters.n_early_updates_dropped = 0;
    status.has_device = false;
    status.n_attached = 1;
    return status_json(&status);
}

static char *example_report(const struct example *e)
{
    return report_json(&(struct report){.status = &e->status,
                                        .ranks = e->ranks,
                                        .n_ranks = N_RANKS,
                                        .pushes = &(struct status_pushes){.first_rank = e->ledger.first_rank,
                                                                          .end_rank = e->ledger.end_rank,
                                                                          .has_pushed = has_pushed,
                                                                          .userdata = &e->ledger},
                                        .params = e->params,
                                        .stacks = e->stacks,
                                        .diagnostics = example_list(e),
                                        .n_diagnostics = ARRAY_SIZE(e->diagnostics),
                                        .config = "job: pretrain\n"});
}

static char *example_print(const struct example *e, const char *name)
{
    if (strcmp(name, "status") == 0)
        return status_json(&e->status);
    if (strcmp(name, "status-minimal") == 0)
        return minimal_status();
    if (strcmp(name, "status-nodes") == 0)
        return nodes_status_of(e, 0);
    if (strcmp(name, "status-node-1") == 0)
        return nodes_status_of(e, 1);
    if (strcmp(name, "ranks") == 0)
        return ranks_json(e->ranks, N_RANKS, e->status.now_ns);
    if (strcmp(name, "stacks") == 0)
        return stacks_json(e->stacks, N_RANKS, e->layout, e->status.now_ns);
    if (strcmp(name, "params") == 0)
        return params_json(
            e->layout,
            &(struct status_pushes){.end_rank = e->ledger.end_rank, .has_pushed = has_pushed, .userdata = &e->ledger},
            e->params);
    if (strcmp(name, "params-minimal") == 0)
        return params_json(NULL, NULL, NULL);
    if (strcmp(name, "diagnostics") == 0)
        return diagnostics_json(example_list(e), 2, e->layout, e->status.now_ns);
    if (strcmp(name, "diagnostics-unformed") == 0)
        return diagnostics_json(example_list(e), 2, NULL, e->status.now_ns);
    if (strcmp(name, "report") == 0)
        return example_report(e);
    return NULL;
}

/* ---- reading ------------------------------------------------------------------------------------------- */

/* Parses and frees the text. */
static struct json_object *parse(char *text)
{
    struct json_object *root;

    assert_non_null(text);
    assert_null(strchr(text, '\n'));
    root = json_tokener_parse(text);
    assert_non_null(root);
    free(text);
    return root;
}

/* Return: the value at a path like "time.wait.last_ns" or "2.pushed_by". */
static struct json_object *at(struct json_object *o, const char *path)
{
    char copy[128], *save = NULL, *part;

    snprintf(copy, sizeof(copy), "%s", path);
    for (part = strtok_r(copy, ".", &save); part; part = strtok_r(NULL, ".", &save)) {
        if (json_object_is_type(o, json_type_array))
            o = json_object_array_get_idx(o, strtoul(part, NULL, 10));
        else
            assert_true(json_object_object_get_ex(o, part, &o));
    }
    return o;
}

static void assert_text(struct json_object *root, const char *path, const char *expected)
{
    struct json_object *o = at(root, path);

    assert_string_equal(o ? json_object_to_json_string_ext(o, PLAIN) : "null", expected);
}

/* ---- tests --------------------------------------------------------------------------------------------- */

static void test_status(void **state)
{
    static const char *const expected[][2] = {
        {"job", "\"pretrain\""},
        {"run_id", "\"run\\\\xff-7\""},
        {"pid", "4242"},
        {"uptime_ns", "60000000000"},
        {"formed", "true"},
        {"n_params", "4"},
        {"trainable_elems", "2165"},
        {"bucket_elems", "1000000"},
        {"frozen_elems", "81"},
        {"step", "42"},
        {"loss_scale", "65536"},
        {"grad_norm", "0.1"},
        {"lr", "0.001"},
        {"groups.0.weight_decay", "0.01"},
        {"groups.0.nesterov", "true"},
        {"time.wait.total_ns", "1000"},
        {"time.reduce.last_ns", "20"},
        {"time.update.last_ns", "30"},
        {"overlap.ratio", "0.75"},
        {"early_updates", "{\"early_elems\":1500,\"elems\":2000,\"ratio\":0.75,\"prevented_by\":\"memory\","
                          "\"why\":\"memory is short: 2 of 3 buckets have spare places\"}"},
        {"memory.state.held_bytes", "0"},
        {"memory.fixed.held_bytes", "7340032"},
        {"memory.fixed.planned_bytes", "14680064"},
        {"memory.total.held_bytes", "27262976"},
        {"memory.total.on_device", "false"},
        {"memory.ring.on_device", "true"},
        {"memory.device_total.held_bytes", "2097152"},
        {"device.generation", "3"},
        {"device.sent_bytes", "3145728"},
        {"device.received_bytes", "1048576"},
        {"device.collectives.0.name", "\"reduce-scatter\""},
        {"device.collectives.3.n_orders", "0"},
        {"device.versions", "\"CUDA 13.0, driver 13.0, NCCL 2.28.9\""},
        {"checkpoint.dir", "\"/var/lib/pretrain\""},
        {"checkpoint.wanted", "true"},
        {"checkpoint.saving",
         "{\"step\":42,\"bytes_done\":1048576,\"bytes\":4194304,\"since_ns\":2000000000,\"waited_ns\":5000000}"},
        {"checkpoint.last",
         "{\"step\":20,\"bytes\":4194304,\"ns\":3000000000,\"waited_ns\":7000000,\"ago_ns\":60000000000}"},
        {"checkpoint.n_saved", "2"},
        {"checkpoint.n_failed", "1"},
        {"checkpoint.why", "\"model.safetensors: No space left on device\""},
        {"limit_bytes", "68719476736"},
        {"counters.n_pushes_accumulated", "3"},
        {"refused", "[{\"code\":\"E1001\",\"n\":2},{\"code\":\"E1302\",\"n\":1}]"},
        {"slowest_rank", "{\"rank\":3,\"behind_ns\":1500000}"},
        {"findings", "[{\"kind\":\"slow-rank\",\"rank\":3,\"param\":null,\"text\":\"slow\"},"
                     "{\"kind\":\"zero-gradient\",\"rank\":null,\"param\":\"layers.0.w\",\"text\":\"zero\"}]"},
        {"last_diagnostic.code", "\"E1001\""},
        {"last_diagnostic.age_ns", "5000000000"},
        {"last_diagnostic.rank", "1"},
    };
    struct example e;
    struct json_object *root;
    size_t i;

    example_init(&e);
    root = parse(status_json(&e.status));
    for (i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    assert_null(strchr(json_object_get_string(at(root, "last_diagnostic.first_line")), '\n'));
    json_object_put(root);
    example_deinit(&e);
}

static void test_status_of_a_new_daemon(void **state)
{
    static const char *const expected[][2] = {
        {"run_id", "null"}, {"isa", "null"},           {"formed", "false"},      {"grad_norm", "null"},
        {"refused", "[]"},  {"overlap.ratio", "null"}, {"slowest_rank", "null"}, {"last_diagnostic", "null"},
        {"uptime_ns", "0"}, {"steps_per_s", "0"},      {"checkpoint", "null"},   {"findings", "[]"},
        {"early_updates", "{\"early_elems\":0,\"elems\":0,\"ratio\":null,\"prevented_by\":null,\"why\":null}"},
    };
    struct json_object *root = parse(minimal_status());
    size_t i;

    for (i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    json_object_put(root);
}

static void test_status_without_a_checkpoint_yet(void **state)
{
    struct status status = {.job = "j", .state = "waiting", .version = "v", .checkpoint.dir = "/c"};
    struct json_object *root = parse(status_json(&status));

    assert_text(root, "checkpoint",
                "{\"dir\":\"/c\",\"wanted\":false,\"saving\":null,\"last\":null,\"n_saved\":0,\"n_failed\":0,"
                "\"why\":null}");
    json_object_put(root);
}

static void test_save(void **state)
{
    struct json_object *root = parse(save_json(&(struct status_save){
        .message = "step 42 is saved already", .dir = "/c", .is_saved = true, .step = 42, .n_ended = 3}));

    assert_string_equal(json_object_to_json_string_ext(root, PLAIN),
                        "{\"message\":\"step 42 is saved already\",\"dir\":\"/c\",\"saved\":true,\"step\":42,"
                        "\"n_ended\":3}");
    json_object_put(root);
}

static void test_status_of_several_nodes(void **state)
{
    static const char *const expected[][2] = {
        {"nodes.node", "0"},
        {"nodes.engine", "\"gloo\""},
        {"nodes.generation", "3"},
        {"nodes.connected", "true"},
        {"nodes.sent_bytes", "3145728"},
        {"nodes.received_bytes", "1048576"},
        {"nodes.collectives.0", "{\"name\":\"reduce-scatter\",\"n_orders\":40,\"sent_bytes\":2097152,"
                                "\"received_bytes\":1048576,\"busy_ns\":375000000,\"bytes_per_s\":8388608}"},
        {"nodes.collectives.1", "{\"name\":\"all-gather\",\"n_orders\":80,\"sent_bytes\":1048576,"
                                "\"received_bytes\":0,\"busy_ns\":0,\"bytes_per_s\":null}"},
        {"nodes.waits_for", "[1,2]"},
        {"nodes.waits_to", "\"to ask for the step\""},
        {"nodes.list.0",
         "{\"node\":0,\"address\":\"10.0.0.1:7700\",\"first_rank\":0,\"n_ranks\":2,\"reached\":true,\"silent_ns\":0,"
         "\"why\":null}"},
        {"nodes.list.1", "{\"node\":1,\"address\":\"10.0.0.2:7700\",\"first_rank\":2,\"n_ranks\":1,\"reached\":false,"
                         "\"silent_ns\":3100000000,\"why\":\"has not been heard for 3.1 s\"}"},
        {"nodes.list.2", "{\"node\":2,\"address\":\"[fd00::3]:7700\",\"first_rank\":3,\"n_ranks\":1,\"reached\":false,"
                         "\"silent_ns\":null,"
                         "\"why\":\"not heard of yet\"}"},
    };
    static const char *const of_node_1[][2] = {
        {"nodes.connected", "false"}, {"nodes.waits_for", "[]"},        {"nodes.waits_to", "null"},
        {"nodes.list.1.why", "null"}, {"nodes.list.2.reached", "null"}, {"nodes.list.2.silent_ns", "null"},
        {"nodes.list.2.why", "null"},
    };
    struct example e;
    struct json_object *root;
    size_t i;

    example_init(&e);
    root = parse(nodes_status_of(&e, 0));
    for (i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    json_object_put(root);
    root = parse(nodes_status_of(&e, 1));
    for (i = 0; i < ARRAY_SIZE(of_node_1); i++)
        assert_text(root, of_node_1[i][0], of_node_1[i][1]);
    json_object_put(root);
    root = parse(status_json(&e.status));
    assert_text(root, "nodes", "null");
    json_object_put(root);
    example_deinit(&e);
}

static void test_values_that_json_lacks(void **state)
{
    const double values[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    struct status status = {.job = "j", .state = "training", .version = "v", .has_grad_norm = true};
    struct json_object *root;
    size_t i;

    for (i = 0; i < ARRAY_SIZE(values); i++) {
        status.grad_norm = values[i];
        root = parse(status_json(&status));
        assert_text(root, "grad_norm", "null");
        json_object_put(root);
    }
}

static void test_doubles_read_back(void **state)
{
    const double values[] = {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, 123456789.125, -0.0, 6.02214076e23};
    struct json j = {};
    struct json_object *o = json_new_object(&j), *root;
    size_t i;
    char key[ARRAY_SIZE(values)][4];

    for (i = 0; i < ARRAY_SIZE(values); i++) {
        snprintf(key[i], sizeof(key[i]), "%zu", i);
        json_put_double(&j, o, key[i], values[i]);
    }
    root = parse(json_text(&j, o));
    for (i = 0; i < ARRAY_SIZE(values); i++)
        assert_true(json_object_get_double(at(root, key[i])) == values[i]);
    json_object_put(root);
}

static void test_ranks(void **state)
{
    static const char *const expected[][2] = {
        {"0.incarnation", "\"feedfacecafebeef\""},
        {"0.connected_ns", "50000000000"},
        {"0.last_message_ns", "1000000000"},
        {"0.waiting_for", "null"},
        {"0.waiting_ns", "null"},
        {"0.fault", "null"},
        {"1.fault.id", "5"},
        {"2.waiting_for", "\"ranks 1, 3 to ask for the step\""},
        {"2.waiting_ns", "2000000000"},
        {"3.attached", "false"},
        {"3.pid", "null"},
        {"3.uid", "null"},
        {"3.incarnation", "null"},
        {"1.behind_total_ns", "2500000000"},
        {"1.phases", "{\"forward_ns\":1,\"backward_ns\":2,\"room_ns\":3,\"rest_ns\":4}"},
        {"1.waits", "[{\"state\":\"boundary\",\"for\":\"ranks\",\"total_ns\":1500000000},"
                    "{\"state\":\"step\",\"for\":\"daemon\",\"total_ns\":20}]"},
        {"3.waits", "[]"},
        {"3.connected_ns", "null"},
    };
    struct example e;
    struct json_object *root;
    size_t i;

    example_init(&e);
    root = parse(ranks_json(e.ranks, N_RANKS, e.status.now_ns));
    assert_int_equal(json_object_array_length(root), N_RANKS);
    for (i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    json_object_put(root);
    example_deinit(&e);
}

static void test_stacks(void **state)
{
    static const char *const expected[][2] = {
        {"0.stack", "null"},
        {"0.age_ns", "null"},
        {"0.awaited", "[]"},
        {"1.rank", "1"},
        {"1.state", "\"backward\""},
        {"1.n_awaited", "4"},
        {"1.awaited.0", "\"layers.0.w\""},
        {"1.age_ns", "3000000000"},
        {"1.stack", "\"main thread:\\n  loader.py:21 in __next__\""},
        {"2.process", "\"its process is stopped by a signal\""},
        {"2.pending", "true"},
        {"3.attached", "false"},
    };
    struct example e;
    struct json_object *root;

    example_init(&e);
    root = parse(stacks_json(e.stacks, N_RANKS, e.layout, e.status.now_ns));
    for (size_t i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    json_object_put(root);
    example_deinit(&e);
}

/* Asserts that `owners` has the ranks that a walk over the parameter's chunks finds. */
static void assert_owners(const struct layout *layout, uint32_t id, struct json_object *owners)
{
    const struct layout_param *param = &layout->params[id];
    bool expected[N_RANKS] = {}, got[N_RANKS] = {};
    uint32_t i;

    for (i = 0; i < param->n_chunks; i++)
        expected[layout->chunks[param->first_chunk + i].rank] = true;
    for (i = 0; i < json_object_array_length(owners); i++)
        got[json_object_get_int(json_object_array_get_idx(owners, i))] = true;
    assert_memory_equal(expected, got, sizeof(got));
}

static void test_params(void **state)
{
    static const char *const expected[][2] = {
        {"0.name", "\"layers.0.w\""},
        {"0.dtype", "\"bf16\""},
        {"0.grad_dtype", "\"fp32\""},
        {"0.shape", "[300,7]"},
        {"0.n_elems", "2100"},
        {"0.pushed_by", "[]"},
        {"0.n_steps", "41"},
        {"0.grad_norm", "0.25"},
        {"1.pushed_by", "[1,3]"},
        {"1.grad_norm", "null"},
        {"1.group", "1"},
        {"2.shape", "[]"},
        {"2.n_elems", "1"},
        {"2.name", "\"odd \\\"name\\\" \\\\xff\\\\x01\\\\x0a\""},
        {"3.trainable", "false"},
        {"3.bucket", "null"},
        {"3.owners", "[]"},
        {"3.dtype", "\"fp16\""},
        {"3.n_steps", "0"},
    };
    struct example e;
    struct json_object *root;
    char path[32];
    uint32_t i;

    example_init(&e);
    root = parse(params_json(
        e.layout,
        &(struct status_pushes){.end_rank = e.ledger.end_rank, .has_pushed = has_pushed, .userdata = &e.ledger},
        e.params));
    assert_int_equal(json_object_array_length(root), N_PARAMS);
    for (i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    for (i = 0; i < N_PARAMS; i++) {
        snprintf(path, sizeof(path), "%u.owners", i);
        assert_owners(e.layout, i, at(root, path));
    }
    json_object_put(root);

    root = parse(params_json(e.layout, NULL, NULL));
    assert_text(root, "1.pushed_by", "[]");
    assert_text(root, "0.n_steps", "0");
    json_object_put(root);
    root = parse(params_json(NULL, NULL, NULL));
    assert_int_equal(json_object_array_length(root), 0);
    json_object_put(root);
    example_deinit(&e);
}

static void test_diagnostics(void **state)
{
    static const char *const expected[][2] = {
        {"0.code", "\"E1001\""},
        {"0.cause_class", "\"D1\""},
        {"0.warning", "false"},
        {"0.step", "41"},
        {"0.n_params", "2"},
        {"0.params", "[\"layers.0.w\",\"odd \\\"name\\\" \\\\xff\\\\x01\\\\x0a\"]"},
        {"0.first.incarnation", "\"0000000000000abc\""},
        {"0.first.segment", "\"layers.0\""},
        {"0.first.nested", "true"},
        {"0.first.hook_twice", "false"},
        {"0.first.age_ns", "10000000000"},
        {"0.second.segment", "null"},
        {"0.second.site", "\"f\xc3\xbcr \\\\xff.py:1\""},
        {"0.second.hook_twice", "true"},
        {"0.second.new_forward", "true"},
        {"0.fields.1.label", "\"cause\""},
        {"0.fields.1.text", "\"the module ran \\\"twice\\\"\\nin one forward\""},
        {"0.fields.2.text", "\"use_reentrant=False\""},
        {"1.warning", "true"},
        {"1.age_ns", "0"},
        {"1.cause_class", "null"},
        {"1.rank", "null"},
        {"1.step", "null"},
        {"1.micro_batch", "null"},
        {"1.first", "null"},
        {"1.params", "[]"},
    };
    struct example e;
    struct json_object *root;
    size_t i;

    example_init(&e);
    root = parse(diagnostics_json(example_list(&e), 2, e.layout, e.status.now_ns));
    for (i = 0; i < ARRAY_SIZE(expected); i++)
        assert_text(root, expected[i][0], expected[i][1]);
    assert_string_equal(json_object_get_string(at(root, "0.text")), e.diagnostics[0]->text);
    json_object_put(root);
    example_deinit(&e);
}

static void test_report_has_all(void **state)
{
    static const char *const names[] = {"status", "ranks", "params", "diagnostics"};
    struct example e;
    struct json_object *root, *part;
    size_t i;

    example_init(&e);
    root = parse(example_report(&e));
    assert_text(root, "config", "\"job: pretrain\\n\"");
    for (i = 0; i < ARRAY_SIZE(names); i++) {
        part = parse(example_print(&e, names[i]));
        assert_string_equal(json_object_to_json_string(at(root, names[i])), json_object_to_json_string(part));
        json_object_put(part);
    }
    json_object_put(root);
    example_deinit(&e);
}

static void test_messages(void **state)
{
    struct json_object *root = parse(message_json("drained"));

    assert_text(root, "message", "\"drained\"");
    json_object_put(root);
    root = parse(error_json("no \x1b[31mrun\xff"));
    assert_text(root, "error", "\"no \\\\x1b[31mrun\\\\xff\"");
    json_object_put(root);
}

static void test_clean(void **state)
{
    static const char *const cases[][2] = {
        {"", ""},
        {"plain\n\ttext", "plain\n\ttext"},
        {"\xc3\xa4 \xe2\x82\xac \xf0\x9f\x99\x82", "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x99\x82"},
        {"\x7f\x1b\r", "\\x7f\\x1b\\x0d"},
        {"\xc2\x9b", "\\xc2\\x9b"}, /* CSI, a terminal's control character */
        {"\xc0\xaf", "\\xc0\\xaf"}, /* overlong */
        {"\xe0\x80\xaf", "\\xe0\\x80\\xaf"},
        {"\xed\xa0\x80", "\\xed\\xa0\\x80"},          /* surrogate */
        {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"}, /* beyond U+10FFFF */
        {"\xe2\x82", "\\xe2\\x82"},                   /* cut off */
        {"\xf0\x9f\x99", "\\xf0\\x9f\\x99"},
        {"\xe2\x82z", "\\xe2\\x82z"},
    };
    char *clean;
    size_t i;

    for (i = 0; i < ARRAY_SIZE(cases); i++) {
        clean = json_clean(cases[i][0]);
        assert_string_equal(clean, cases[i][1]);
        free(clean);
    }
}

static void test_builder_remembers_failure(void **state)
{
    struct json j = {};
    struct json_object *o = json_new_object(&j);

    json_put(&j, o, "missing", NULL);
    json_put_u64(&j, o, "n", 1);
    assert_true(j.failed);
    assert_null(json_text(&j, o));
}

static int print_example(const char *name)
{
    struct example e;
    _cleanup_free_ char *text = NULL;

    example_init(&e);
    text = example_print(&e, name);
    if (text)
        puts(text);
    example_deinit(&e);
    return text ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status),
        cmocka_unit_test(test_status_of_a_new_daemon),
        cmocka_unit_test(test_status_without_a_checkpoint_yet),
        cmocka_unit_test(test_save),
        cmocka_unit_test(test_status_of_several_nodes),
        cmocka_unit_test(test_values_that_json_lacks),
        cmocka_unit_test(test_doubles_read_back),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_stacks),
        cmocka_unit_test(test_params),
        cmocka_unit_test(test_diagnostics),
        cmocka_unit_test(test_report_has_all),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_clean),
        cmocka_unit_test(test_builder_remembers_failure),
    };

    if (argc == 3 && strcmp(argv[1], "--print") == 0)
        return print_example(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
