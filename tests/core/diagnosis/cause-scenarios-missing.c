/* SPDX-License-Identifier: Apache-2.0 */

/* Scenarios of gradients that did not arrive. */

#include "core/diagnosis/evidence.h"
#include "tests/core/diagnosis/cause-scenarios.h"

/* ---- E1005 to E1007 ------------------------------------------------------------------------------------ */

static struct evidence_missing missing(const struct fixture *f, const char *client)
{
    return (struct evidence_missing){
        .at = at(f->net, client, 1, 0, -1),
        .params = f->unused,
        .n_params = ARRAY_SIZE(f->unused),
        .n_trainable = 17,
        .world_size = 4,
        .same_on_all_ranks = true,
        .same_every_step = true,
        .n_steps_seen = 1,
        .n_forwards = 1,
        .n_backwards = 1,
    };
}

static struct diagnostic *e1005_m1(const struct fixture *f)
{
    static const uint8_t called[] = {EVIDENCE_CALLED, EVIDENCE_CALLED, EVIDENCE_NOT_CALLED, EVIDENCE_NOT_CALLED};
    struct evidence_missing e = missing(f, TORCH);

    e.called = called;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m1_warning(const struct fixture *f)
{
    struct evidence_missing e = missing(f, TORCH);

    e.at.rank = -1;
    e.warning = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m1_c(const struct fixture *f)
{
    struct evidence_missing e = missing(f, "zerod-example");

    e.n_steps_seen = 9;
    e.at.step = 8;
    e.warning = e.skipped = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m1_scattered(const struct fixture *f)
{
    static uint32_t ids[6];
    struct evidence_missing e = missing(f, TRAINER);

    for (unsigned i = 0; i < 6; i++)
        ids[i] = f->encoder[2 * i]; /* only the weights, no biases */
    e.params = ids;
    e.n_params = ARRAY_SIZE(ids);
    return cause_missing(&e);
}

static struct diagnostic *e1005_m1_single(const struct fixture *f)
{
    static uint32_t ids[2];
    struct evidence_missing e = missing(f, TRAINER);

    ids[0] = f->encoder[1]; /* biases of two modules whose weights got gradients */
    ids[1] = f->encoder[3];
    e.params = ids;
    e.n_params = ARRAY_SIZE(ids);
    return cause_missing(&e);
}

static struct diagnostic *e1005_m2(const struct fixture *f)
{
    static const uint8_t called[] = {0, 0, EVIDENCE_NOT_CALLED, EVIDENCE_NOT_CALLED};
    struct evidence_missing e = missing(f, TORCH);

    e.same_on_all_ranks = e.same_every_step = false;
    e.n_steps_seen = 31;
    e.at.step = 30;
    e.called = called;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m2_warning(const struct fixture *f)
{
    struct evidence_missing e = missing(f, "zerod-example");

    e.at = at(f->net, "zerod-example", -1, 30, -1);
    e.warning = true;
    e.same_every_step = false;
    e.same_on_all_ranks = false;
    e.lacking.first = &(struct evidence_lacking){.rank = 3, .params = e.params, .n_params = e.n_params};
    e.lacking.n = 1;
    e.n_steps_seen = 31;
    return cause_missing(&e);
}

static struct evidence_missing nothing_arrived(const struct fixture *f, const char *client)
{
    struct evidence_missing e = missing(f, client);

    e.params = NULL;
    e.n_params = 0;
    e.n_trainable = 17;
    e.same_on_all_ranks = e.same_every_step = false;
    e.n_steps_seen = 0;
    e.n_backwards = 0;
    return e;
}

/* Every trainable parameter of the net. */
static size_t everything(const struct fixture *f, uint32_t ids[32])
{
    size_t n = 0;

    for (uint32_t p = 0; p < f->net->n_params; p++)
        if (f->net->params[p].trainable)
            ids[n++] = p;
    return n;
}

static struct diagnostic *e1005_m3(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TRAINER);
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m3_exception(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TRAINER);
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    e.exception.text = "RuntimeError: shape '[8, 17, 12, 512]' is invalid for input of size 417792";
    e.exception.swallowed_by = "gliner/training/trainer.py:216 training_step";
    e.exception.in_forward = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m3_c(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, "zerod-example");
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    e.n_forwards = 0;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m4(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TRAINER);

    e.params = f->encoder;
    e.n_params = ARRAY_SIZE(f->encoder);
    e.n_backwards = 1;
    e.prefix = e.given_up.abandoned = true;
    e.given_up.n_pushes = 5;
    e.given_up.why = "RuntimeError: CUDA out of memory (injected)";
    e.exception.text = "RuntimeError: CUDA out of memory (injected)";
    e.exception.raised_at = "trainer.py:12";
    e.exception.swallowed_by = "gliner/training/trainer.py:216 training_step";
    return cause_missing(&e);
}

/* The only evidence is the client's reason for giving up the backward. */
static struct diagnostic *e1005_m4_reason(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TORCH);

    e.params = f->encoder;
    e.n_params = ARRAY_SIZE(f->encoder);
    e.given_up.abandoned = true;
    e.given_up.n_pushes = 5;
    e.given_up.why = "zero_grad() came before opt.step()";
    return cause_missing(&e);
}

/* An exception ended the backward before its first gradient. */
static struct diagnostic *e1005_m4_at_once(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TORCH);
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    e.exception.text = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn";
    e.exception.raised_at = "train.py:40";
    return cause_missing(&e);
}

static struct diagnostic *e1005_m4_c(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, "zerod-example");

    e.params = f->encoder;
    e.n_params = ARRAY_SIZE(f->encoder);
    e.given_up.abandoned = true;
    e.given_up.n_pushes = 5;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m5(const struct fixture *f)
{
    struct evidence_missing e = missing(f, TRAINER);

    e.params = f->encoder;
    e.n_params = ARRAY_SIZE(f->encoder);
    e.dead_segments.first = "bert.layer.0";
    e.dead_segments.n = 2;
    e.dead_segments.site = "modeling_bert.py:412";
    return cause_missing(&e);
}

static struct diagnostic *e1005_m5_c(const struct fixture *f)
{
    struct evidence_missing e = missing(f, "zerod-example");

    e.params = f->encoder;
    e.n_params = 6;
    e.dead_segments.first = "block 0";
    e.dead_segments.n = 1;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m6(const struct fixture *f)
{
    struct evidence_missing e = missing(f, TORCH);

    e.requires_grad_changed = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m6_c(const struct fixture *f)
{
    struct evidence_missing e = missing(f, "zerod-example");

    e.requires_grad_changed = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m7(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TORCH);
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    e.absent = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_u(const struct fixture *f)
{
    struct evidence_missing e = missing(f, TORCH);

    static const uint8_t called[] = {0, 0, EVIDENCE_NOT_CALLED, EVIDENCE_NOT_CALLED};

    e.world_size = 1;
    e.at.rank = 0;
    e.called = called;
    return cause_missing(&e);
}

static struct diagnostic *e1005_u_nothing_reached(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TORCH);
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    e.n_forwards = 0;
    e.n_backwards = 1;
    return cause_missing(&e);
}

/* As after loss = torch.tensor(loss.item(), requires_grad=True). */
static struct diagnostic *e1005_m3_cut_off(const struct fixture *f)
{
    struct evidence_missing e = nothing_arrived(f, TORCH);
    uint32_t ids[32];

    e.n_params = everything(f, ids);
    e.params = ids;
    e.n_forwards = e.n_backwards = 1;
    return cause_missing(&e);
}

static struct diagnostic *e1005_count(const struct fixture *f)
{
    struct evidence_missing e = missing(f, "zerod-example");

    e.params = NULL;
    e.n_params = 0;
    e.n_micro_batches = 3;
    e.n_configured = 4;
    return cause_missing(&e);
}

/* The forward of the last micro-batch failed, and the trainer continued without it. */
static struct diagnostic *e1005_count_exception(const struct fixture *f)
{
    struct evidence_missing e = missing(f, TORCH);

    e.params = NULL;
    e.n_params = 0;
    e.n_micro_batches = 3;
    e.n_configured = 4;
    e.exception.text = "IndexError: index out of range in self";
    e.exception.swallowed_by = "train.py:55 main";
    e.exception.in_forward = true;
    return cause_missing(&e);
}

static struct diagnostic *e1006_extra(const struct fixture *f)
{
    return cause_graph_changed(
        &(struct evidence_graph){.at = at(f->net, TORCH, 1, 40, 0), .params = f->unused, .n_params = 2, .extra = true});
}

static struct diagnostic *e1006_missing(const struct fixture *f)
{
    return cause_graph_changed(
        &(struct evidence_graph){.at = at(f->net, "zerod-example", 1, 40, -1), .params = f->encoder, .n_params = 12});
}

static struct diagnostic *e1006_twice(const struct fixture *f)
{
    struct evidence_duplicate e = two_backwards(f, TORCH, 0);

    e.code = E_GRAPH_CHANGED;
    return cause_duplicate(&e);
}

static struct diagnostic *e1007_dropped(const struct fixture *f)
{
    return cause_abandoned(&(struct evidence_abandoned){
        .at = at(f->net, TRAINER, 1, 3, 0),
        .why = "RuntimeError: CUDA out of memory (injected)\nswallowed by gliner/training/trainer.py:216 "
               "training_step",
        .n_dropped = 5,
    });
}

static struct diagnostic *e1007_left(const struct fixture *f)
{
    return cause_abandoned(
        &(struct evidence_abandoned){.at = at(f->net, TORCH, 1, 3, 0), .n_dropped = 17, .aborted = true});
}

static struct diagnostic *e1007_left_c(const struct fixture *f)
{
    return cause_abandoned(
        &(struct evidence_abandoned){.at = at(f->net, "zerod-example", 1, 3, 0), .n_dropped = 1, .aborted = true});
}

static struct diagnostic *e1007_aborted(const struct fixture *f)
{
    return cause_abandoned(&(struct evidence_abandoned){.at = at(f->net, "zerod-example", 1, 3, 2),
                                                        .why = "the batch was not usable",
                                                        .n_dropped = 1,
                                                        .aborted = true});
}

static struct diagnostic *e1105_x1(const struct fixture *f)
{
    struct evidence_missing e = missing(f, TRAINER);

    e.wrapper_bypassed = true;
    e.params = NULL;
    e.n_params = 0;
    return cause_missing(&e);
}

/* Evidence from an observer of DDP (zerod.observe()). */
static struct evidence_missing observed(const struct fixture *f, bool silent)
{
    struct evidence_missing e = missing(f, TORCH);

    e.at.observed = true;
    e.ddp_silent = silent;
    return e;
}

static struct diagnostic *e1005_m1_observed(const struct fixture *f)
{
    struct evidence_missing e = observed(f, false);

    return cause_missing(&e);
}

static struct diagnostic *e1005_m2_observed(const struct fixture *f)
{
    struct evidence_missing e = observed(f, false);

    e.same_on_all_ranks = false;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m4_observed(const struct fixture *f)
{
    struct evidence_missing e = observed(f, false);

    e.exception.text = "RuntimeError: CUDA out of memory (injected)";
    e.exception.swallowed_by = "gliner/training/trainer.py:216 training_step";
    return cause_missing(&e);
}

static struct diagnostic *e1005_m3_observed(const struct fixture *f)
{
    static uint32_t all[17];
    struct evidence_missing e = observed(f, true);

    for (uint32_t i = 0; i < ARRAY_SIZE(all); i++)
        all[i] = i;
    e.params = all;
    e.n_params = ARRAY_SIZE(all);
    e.n_backwards = 0;
    return cause_missing(&e);
}

static struct diagnostic *e1005_m6_observed(const struct fixture *f)
{
    struct evidence_missing e = observed(f, false);

    e.requires_grad_changed = true;
    return cause_missing(&e);
}

static struct diagnostic *e1005_u_observed(const struct fixture *f)
{
    struct evidence_missing e = observed(f, false);

    e.world_size = 1;
    return cause_missing(&e);
}

static const struct scenario scenarios[] = {
    {"e1005-m1", e1005_m1, "M1", false},
    {"e1005-m1-warning", e1005_m1_warning, "M1", true},
    {"e1005-m1-c", e1005_m1_c, "M1", true},
    {"e1005-m1-scattered", e1005_m1_scattered, "M1", false},
    {"e1005-m1-single", e1005_m1_single, "M1", false},
    {"e1005-m2", e1005_m2, "M2", false},
    {"e1005-m2-warning", e1005_m2_warning, "M2", true},
    {"e1005-m3", e1005_m3, "M3", false},
    {"e1005-m3-exception", e1005_m3_exception, "M3", false},
    {"e1005-m3-c", e1005_m3_c, "M3", false},
    {"e1005-m4", e1005_m4, "M4", false},
    {"e1005-m4-reason", e1005_m4_reason, "M4", false},
    {"e1005-m4-at-once", e1005_m4_at_once, "M4", false},
    {"e1005-m4-c", e1005_m4_c, "M4", false},
    {"e1005-m5", e1005_m5, "M5", false},
    {"e1005-m5-c", e1005_m5_c, "M5", false},
    {"e1005-m6", e1005_m6, "M6", false},
    {"e1005-m6-c", e1005_m6_c, "M6", false},
    {"e1005-m7", e1005_m7, "M7", false},
    {"e1005-u", e1005_u, "U", false},
    {"e1005-u-nothing-reached", e1005_u_nothing_reached, "U", false},
    {"e1005-m3-cut-off", e1005_m3_cut_off, "M3", false},
    {"e1005-count", e1005_count, "", false},
    {"e1005-count-exception", e1005_count_exception, "", false},
    {"e1006-extra", e1006_extra, "", false},
    {"e1006-missing", e1006_missing, "", false},
    {"e1006-twice", e1006_twice, "D2", false},
    {"e1007-dropped", e1007_dropped, "M4", true},
    {"e1007-aborted", e1007_aborted, "M4", false},
    {"e1007-left", e1007_left, "M4", false},
    {"e1007-left-c", e1007_left_c, "M4", false},
    {"e1005-m1-observed", e1005_m1_observed, "M1", false},
    {"e1005-m2-observed", e1005_m2_observed, "M2", false},
    {"e1005-m3-observed", e1005_m3_observed, "M3", false},
    {"e1005-m4-observed", e1005_m4_observed, "M4", false},
    {"e1005-m6-observed", e1005_m6_observed, "M6", false},
    {"e1005-u-observed", e1005_u_observed, "U", false},
    {"e1105-x1", e1105_x1, "X1", false},
};

struct scenario_list scenarios_missing(void)
{
    return (struct scenario_list){.items = scenarios, .n = ARRAY_SIZE(scenarios)};
}
