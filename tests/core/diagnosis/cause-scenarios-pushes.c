/* SPDX-License-Identifier: Apache-2.0 */

/* Pushes that are refused: duplicates, pushes at a wrong time, pushes of a wrong form. */

#include "tests/core/diagnosis/cause-scenarios.h"

/* ---- E1001 --------------------------------------------------------------------------------------------- */

static struct evidence_duplicate tower_twice(const struct fixture *f, const char *client)
{
    return (struct evidence_duplicate){
        .at = at(f->vision, client, 0, 0, 0),
        .params = f->tower,
        .n_params = ARRAY_SIZE(f->tower),
        .first = push((struct push_record){.sequence = 470, .ordinal = 1, .task = 29, .depth = 1, .call = 2},
                      "vpm.encoder.layers.26", "modeling.py:98"),
        .second = push((struct push_record){.sequence = 902, .ordinal = 1, .task = 56, .depth = 1, .call = 1},
                       "vpm.encoder.layers.26", "modeling.py:98"),
    };
}

static struct diagnostic *e1001_d1(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TRAINER);

    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d1_swift(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, SWIFT);

    e.params = f->tower + 16;
    e.n_params = 16 * 25;
    e.sums_known = true;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d1_inside_and_outside(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TORCH);

    e.at = at(f->net, TORCH, 3, 12, 1);
    e.params = &f->used;
    e.n_params = 1;
    e.first = push((struct push_record){.ordinal = 1, .task = 7, .flags = PUSH_NESTED}, "head", "train.py:20");
    e.second = push((struct push_record){.sequence = 2, .ordinal = 1, .task = 1, .flags = PUSH_SITE_IS_BACKWARD}, NULL,
                    "train.py:31");
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d1_two_segments(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TORCH);

    e.at = at(f->net, TORCH, 0, 12, 1);
    e.params = f->encoder;
    e.n_params = 2;
    e.first.segment = (char *)"encoder_a";
    e.second.segment = (char *)"encoder_b";
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d1_accumulated(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TRAINER);

    e.accumulated = true;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d1_c(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, "zerod-example");

    e.at = at(f->net, "zerod-example", 1, 5, 0);
    e.params = f->encoder;
    e.n_params = 6;
    e.first = push((struct push_record){.ordinal = 1, .task = 3, .depth = 1, .call = 3}, "block 0", "model.c:210");
    e.second = push((struct push_record){.sequence = 9, .ordinal = 1, .task = 5, .depth = 1, .call = 1}, "block 0",
                    "model.c:210");
    e.abort_step = true;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d2(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, TORCH, 0);

    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d2_no_boundary(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, "zerod-example", PUSH_NEW_FORWARD);

    e.first.site = e.second.site = NULL;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d2_forward(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, TORCH, PUSH_NEW_FORWARD);

    e.second.site = (char *)"gan.py:81";
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d2_count(const struct fixture *f)
{
    return cause_duplicate(
        &(struct evidence_duplicate){.at = at(f->net, TORCH, 1, 30, 5), .n_micro_batches = 5, .n_configured = 4});
}

static struct diagnostic *e1001_d3_hook(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, TORCH, PUSH_HOOK_TWICE);

    e.second.record.ordinal = 1;
    e.second.site = (char *)"gan.py:77";
    e.sums_equal = true;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d3_task(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, "zerod-example", 0);

    e.first.record.task = e.second.record.task = 11;
    e.second.record.ordinal = 1;
    e.first.site = e.second.site = (char *)"train.c:88";
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d4(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TRAINER);

    e.params = f->tower;
    e.n_params = 1;
    e.second = (struct diagnostic_push){0};
    e.ddp_complained = true;
    return cause_duplicate(&e);
}

/* The parameter belongs to a forward whose output DDP does not see. */
static struct diagnostic *e1001_d4_hidden(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TORCH);

    e.params = f->tower;
    e.n_params = 1;
    e.first = push((struct push_record){.sequence = 3, .step = 7, .ordinal = 1}, NULL, NULL);
    e.second = (struct diagnostic_push){0};
    e.ddp_complained = true;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_d1_observed(const struct fixture *f)
{
    struct evidence_duplicate e = tower_twice(f, TORCH);

    e.at.observed = true;
    e.n_params = 1;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_u(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, "zerod-example", 0);

    e.first = push((struct push_record){.sequence = 14, .step = 7, .ordinal = 1}, NULL, NULL);
    e.second = push((struct push_record){.sequence = 31, .step = 7, .ordinal = 1}, NULL, NULL);
    e.params = &f->used;
    e.n_params = 1;
    e.sums_equal = true;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_u_no_record(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, TORCH, 0);

    e.first = (struct diagnostic_push){0};
    e.sums_known = false;
    e.second.record.step = 7;
    e.second.segment = (char *)"block 3";
    e.second.record.call = 2;
    return cause_duplicate(&e);
}

static struct diagnostic *e1001_u_torch(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, TORCH, 0);

    e.second.record.task = 2;
    e.second.record.ordinal = 1; /* one backward, two tasks, none nested: the records contradict each other */
    e.first.record.step = e.second.record.step = 7;
    e.sums_known = false;
    return cause_duplicate(&e);
}

/* ---- E1002 to E1004, E1102, E1103 ---------------------------------------------------------------------- */

static struct evidence_push late(const struct fixture *f, enum diagnostic_code code)
{
    return (struct evidence_push){
        .at = at(f->net, "zerod-example", 1, 4, 1),
        .code = code,
        .params = f->encoder,
        .n_params = 3,
        .push = push((struct push_record){.sequence = 88, .step = 4, .ordinal = 1}, NULL, "train.c:91"),
    };
}

static struct diagnostic *e1002_d5(const struct fixture *f)
{
    struct evidence_push e = late(f, E_STALE);

    e.at.client = TORCH;
    e.push.record.step = 3;
    e.push.site = (char *)"train.py:40";
    return cause_push(&e);
}

static struct diagnostic *e1002_zombie(const struct fixture *f)
{
    struct evidence_push e = late(f, E_STALE);

    e.other_incarnation = true;
    return cause_push(&e);
}

static struct diagnostic *e1002_request(const struct fixture *f)
{
    struct evidence_push e = late(f, E_STALE);

    e.detail = "end of a micro-batch";
    e.push = push((struct push_record){.step = 3}, NULL, NULL);
    return cause_push(&e);
}

static struct diagnostic *e1003(const struct fixture *f)
{
    struct evidence_push e = late(f, E_EARLY);

    e.push.record.micro_batch = 2;
    return cause_push(&e);
}

static struct diagnostic *e1003_not_begun(const struct fixture *f)
{
    struct evidence_push e = late(f, E_EARLY);

    e.push = push((struct push_record){.step = 4, .micro_batch = 1, .task = 9}, NULL, NULL);
    return cause_push(&e);
}

static struct diagnostic *e1003_request(const struct fixture *f)
{
    static const char *const fix[2] = {"zerod_end_backward before zerod_step", "opt.step() when no backward runs"};
    struct evidence_push e = late(f, E_EARLY);

    e.detail = "the step";
    e.cause = "a micro-batch is open, and its gradients belong to the step";
    e.fix = fix;
    return cause_push(&e);
}

static struct diagnostic *e1003_asked(const struct fixture *f)
{
    struct evidence_push e = late(f, E_EARLY);

    e.at.client = TORCH;
    e.push.record.micro_batch = 1;
    e.asked = true;
    return cause_push(&e);
}

static struct diagnostic *e1004_d5(const struct fixture *f)
{
    struct evidence_push e = late(f, E_AFTER_BOUNDARY);

    return cause_push(&e);
}

static struct diagnostic *e1004_request(const struct fixture *f)
{
    struct evidence_push e = late(f, E_AFTER_BOUNDARY);

    e.detail = "backward of step 4, micro-batch 0";
    return cause_push(&e);
}

static struct diagnostic *e1102(const struct fixture *f)
{
    struct evidence_push e = late(f, E_GRADIENT);

    e.detail = "expected 256 bytes of fp32, got 128 of bf16";
    e.n_params = 1;
    return cause_push(&e);
}

static struct diagnostic *e1102_device(const struct fixture *f)
{
    struct evidence_push e = late(f, E_GRADIENT);

    e.at.client = TORCH;
    e.push = push((struct push_record){.depth = 1}, "head", NULL);
    e.detail = "a gradient on cuda:1; the ring is host memory";
    return cause_push(&e);
}

static struct diagnostic *e1103_unknown(const struct fixture *f)
{
    struct evidence_push e = late(f, E_PARAMETER);
    uint32_t id = f->net->n_params + 3;

    e.params = &id;
    e.n_params = 1;
    e.detail = "no parameter 21: the manifest has 18";
    return cause_push(&e);
}

static struct diagnostic *e1103_m6(const struct fixture *f)
{
    struct evidence_push e = late(f, E_PARAMETER);

    e.at.client = TRAINER;
    e.params = &f->frozen;
    e.n_params = 1;
    e.detail = "parameter 0 of 18 is frozen";
    return cause_push(&e);
}

static const struct scenario scenarios[] = {
    {"e1001-d1", e1001_d1, "D1", false},
    {"e1001-d1-swift", e1001_d1_swift, "D1", false},
    {"e1001-d1-inside-and-outside", e1001_d1_inside_and_outside, "D1", false},
    {"e1001-d1-two-segments", e1001_d1_two_segments, "D1", false},
    {"e1001-d1-accumulated", e1001_d1_accumulated, "D1", true},
    {"e1001-d1-c", e1001_d1_c, "D1", false},
    {"e1001-d2", e1001_d2, "D2", false},
    {"e1001-d2-no-boundary", e1001_d2_no_boundary, "D2", false},
    {"e1001-d2-forward", e1001_d2_forward, "D2", false},
    {"e1001-d2-count", e1001_d2_count, "D2", false},
    {"e1001-d3-hook", e1001_d3_hook, "D3", false},
    {"e1001-d3-task", e1001_d3_task, "D3", false},
    {"e1001-d4", e1001_d4, "D4", false},
    {"e1001-d4-hidden", e1001_d4_hidden, "D4", false},
    {"e1001-d1-observed", e1001_d1_observed, "D1", false},
    {"e1001-u", e1001_u, "U", false},
    {"e1001-u-no-record", e1001_u_no_record, "U", false},
    {"e1001-u-torch", e1001_u_torch, "U", false},
    {"e1002-d5", e1002_d5, "D5", false},
    {"e1002-zombie", e1002_zombie, "D5", false},
    {"e1002-request", e1002_request, "D5", false},
    {"e1003", e1003, "", false},
    {"e1003-not-begun", e1003_not_begun, "", false},
    {"e1003-asked", e1003_asked, "", false},
    {"e1003-request", e1003_request, "", false},
    {"e1004-d5", e1004_d5, "D5", false},
    {"e1004-request", e1004_request, "D5", false},
    {"e1102", e1102, "", false},
    {"e1102-device", e1102_device, "", false},
    {"e1103-unknown", e1103_unknown, "", false},
    {"e1103-m6", e1103_m6, "M6", false},
};

struct scenario_list scenarios_pushes(void)
{
    return (struct scenario_list){.items = scenarios, .n = ARRAY_SIZE(scenarios)};
}
