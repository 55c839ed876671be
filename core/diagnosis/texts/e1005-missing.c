/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Missing gradients: E1005, the warning under on_missing: zero and skip, E1007 for an abandoned backward, E1006 for a
 * static graph. The classes, in the order in which they are checked:
 *
 *     X1  (DDP observed) all gradients arrived, but not through the wrapper: E1105
 *     M7  the rank never opened the step
 *     M3  no gradient arrived, because no backward ran
 *     M4  an exception left the backward
 *     M6  requires_grad differs from the declaration
 *     M5  only complete checkpointed segments are missing
 *     M1  the same set is missing on all ranks in every step
 *     M2  another set is missing on other ranks or in other steps
 *     U   one rank and one step cannot show whether it is M1 or M2
 */

#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"
#include "core/diagnosis/evidence.h"
#include "core/layout/layout.h"

#define ON_MISSING_ZERO "diagnostics.on_missing: zero"

enum missing_class { CLASS_U, CLASS_M1, CLASS_M2, CLASS_M3, CLASS_M4, CLASS_M5, CLASS_M6, CLASS_M7 };

static bool is_none(const struct evidence_missing *e)
{
    return e->n_trainable > 0 && e->n_params == e->n_trainable;
}

/* Did the model's forward and a backward run, but no gradient reach the model? */
static bool is_cut_off(const struct evidence_missing *e)
{
    return is_none(e) && !e->warning && !e->given_up.abandoned && !e->exception.text && e->n_forwards > 0 &&
           e->n_backwards > 0 && !e->requires_grad_changed && !e->dead_segments.first;
}

static enum missing_class classify_missing(const struct evidence_missing *e)
{
    bool same = e->same_on_all_ranks && e->same_every_step;
    /* One rank in one step is not enough: it cannot distinguish "never" from "not this time". */
    bool enough = e->n_steps_seen > 1 || (e->n_steps_seen == 1 && e->world_size > 1);

    if (e->absent)
        return CLASS_M7;
    if (is_none(e) && !e->warning &&
        (e->exception.in_forward || (!e->given_up.abandoned && !e->exception.text && e->n_backwards == 0)))
        return CLASS_M3;
    if (is_cut_off(e))
        return CLASS_M3;
    if (e->given_up.abandoned || (e->exception.text && !e->exception.in_forward))
        return CLASS_M4;
    if (e->requires_grad_changed)
        return CLASS_M6;
    if (e->dead_segments.first)
        return CLASS_M5;
    if (!enough || (same && e->kin_used))
        return CLASS_U;
    return same ? CLASS_M1 : CLASS_M2;
}

/* Return: the call that attaches zerod, or DDP, to the model. Parameters must be frozen before it. */
static const char *attaching(const struct evidence_missing *e)
{
    return e->at.observed ? "DistributedDataParallel(model)" : "zerod.Optimizer(model)";
}

/* Adds the setting that permits missing gradients. */
static void add_permission(struct diagnostic *d, const char *label, const struct evidence_missing *e,
                           enum caller caller, const char *note)
{
    if (!e->warning)
        diagnostic_field(d, label, "%s   (%s)", e->at.observed ? caller_finding(caller) : ON_MISSING_ZERO, note);
}

/* Return: causes and remedies that do not apply. find_unused_parameters is named because searches find it first. */
static const char *not_unused(enum caller caller)
{
    return caller == CALLER_C ? "unused parameters; batch size; the other ranks"
                              : "unused parameters; find_unused_parameters=True, which would only hide this; "
                                "gradient checkpointing";
}

/* ---- M3, M4: the backward ------------------------------------------------------------------------------ */

static void add_exception(struct diagnostic *d, const struct evidence_missing *e)
{
    const struct {
        const char *what, *where;
    } lines[] = {{"raised at", e->exception.raised_at}, {"swallowed by", e->exception.swallowed_by}};
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, e->exception.text);
    for (size_t i = 0; i < ARRAY_SIZE(lines); i++) {
        if (!lines[i].where || !*lines[i].where)
            continue;
        strbuf_add(&buf, "%s%s ", buf.n_bytes ? "\n" : "", lines[i].what);
        strbuf_add_foreign(&buf, lines[i].where);
    }
    diagnostic_field_take(d, "exception", &buf);
}

/* Adds the client's reason for abandoning a backward: an exception, or another action of the program. */
static void add_reason(struct diagnostic *d, const char *why)
{
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, why);
    diagnostic_field_take(d, "reason", &buf);
}

static void explain_no_backward(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    if (e->exception.text)
        diagnostic_field(d, "cause",
                         "an exception left the forward and was swallowed; no backward ran, and the program still "
                         "asked for the step");
    else if (is_cut_off(e))
        diagnostic_field(d, "cause",
                         "the model's forward ran, a backward ran, and no gradient came: the loss is cut off from "
                         "the model's output");
    else if (e->n_forwards)
        diagnostic_field(d, "cause",
                         "%" PRIu64 " forward%s ran in this step and no backward: the loss was not "
                         "differentiated",
                         e->n_forwards, e->n_forwards == 1 ? "" : "s");
    else
        diagnostic_field(d, "cause", "no gradient %s in this step, and the program still asked for it",
                         e->at.observed ? "came" : "reached zerod");
    if (caller != CALLER_C && !e->exception.text && !is_cut_off(e))
        diagnostic_field(d, "to find out",
                         "if loss.requires_grad is False: the forward ran under no_grad, or the loss was detached\n"
                         "if loss.requires_grad is True: backward() was not reached");
    if (caller == CALLER_C)
        diagnostic_field(d, "fix", "zerod_begin_backward, zerod_push and zerod_end_backward before zerod_step");
    else if (e->exception.text)
        diagnostic_field(d, "fix", "let the exception through, or skip opt.step() in the handler that caught it");
    else if (is_cut_off(e))
        diagnostic_field(d, "fix",
                         "compute the loss from the model's output itself, without detach(), item() or no_grad");
    else
        diagnostic_field(d, "fix", "loss.backward() before opt.step(), on a loss with loss.requires_grad == True");
    diagnostic_field(d, "does not help", "%s", not_unused(caller));
}

static void explain_half_way(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    uint32_t n_arrived = e->n_trainable > e->n_params ? e->n_trainable - (uint32_t)e->n_params : 0;

    if (!e->exception.text)
        add_reason(d, e->given_up.why);
    diagnostic_field(d, "cause",
                     e->exception.text && e->at.observed ? "an exception left a backward after %" PRIu32 " of %" PRIu32
                                                           " gradients and was swallowed: the program went on"
                     : e->exception.text ? "an exception left a backward after %" PRIu32 " of %" PRIu32
                                           " gradients and was swallowed: the program still asked for the step"
                                         : "a backward was given up after %" PRIu32 " of %" PRIu32
                                           " gradients, and the program still asked for the step",
                     e->given_up.abandoned ? e->given_up.n_pushes : n_arrived, e->n_trainable);
    if (caller == CALLER_C)
        diagnostic_field(d, "fix", "zerod_begin_backward again and redo the micro-batch, or zerod_abort_step");
    else if (e->exception.text)
        diagnostic_field(d, "fix", "let the exception through, or %s",
                         e->at.observed ? "leave that batch out on all ranks before its forward"
                                        : "call opt.abort_step() in the handler that caught it");
    else
        diagnostic_field(d, "fix", "redo the micro-batch before opt.step(): forward and backward; or opt.abort_step()");
    diagnostic_field(d, "does not help", "%s", not_unused(caller));
}

/* ---- M1, M2, M5, M6: the set --------------------------------------------------------------------------- */

/* Prints the modules of the parameters for which the client reported `said`. */
static void print_called(struct strbuf *buf, const struct evidence_missing *e, uint8_t said, const char *sentence)
{
    _cleanup_free_ uint32_t *ids = calloc(e->n_params, sizeof(*ids));
    struct name_group groups[NAME_GROUPS_MAX];
    size_t n = 0, n_groups = 0, n_left;

    for (size_t i = 0; ids && i < e->n_params; i++)
        if (e->called[i] == said)
            ids[n++] = e->params[i];
    if (n == 0)
        return;
    strbuf_add(buf, "%s%s: ", buf->n_bytes ? "\n" : "", sentence);
    n_left = name_groups(groups, &n_groups, e->at.layout, ids, n);
    for (size_t g = 0; g < n_groups; g++) {
        const struct layout_param *first = &e->at.layout->params[groups[g].first];

        strbuf_add(buf, "%s", g ? ", " : "");
        name_print(buf, first->name, groups[g].prefix_len);
        if (groups[g].n > 1)
            strbuf_add(buf, groups[g].prefix_len ? ".*" : "the model itself");
    }
    if (n_left)
        strbuf_add(buf, " and %zu more", n_left);
}

static void add_modules(struct diagnostic *d, const struct evidence_missing *e, bool always)
{
    struct strbuf buf = {0};

    if (!e->called || !e->at.layout || e->n_params == 0)
        return;
    print_called(&buf, e, EVIDENCE_NOT_CALLED, always ? "never called" : "not called in this step");
    print_called(&buf, e, EVIDENCE_CALLED, "called, but the output does not reach the loss");
    diagnostic_field_take(d, "module", &buf);
}

static void print_freeze(struct strbuf *buf, const struct layout_param *param, size_t prefix_len)
{
    strbuf_add(buf, "model.get_%s(\"", prefix_len == param->name_len ? "parameter" : "submodule");
    name_print(buf, param->name, prefix_len);
    strbuf_add(buf, "\").requires_grad_(False)\n");
}

/* Prints Python that freezes exactly the missing parameters: modules without any gradient, or else parameters one by
 * one. */
static void print_freezing(struct strbuf *buf, const struct evidence_missing *e)
{
    const struct layout *layout = e->at.layout;
    struct name_group groups[NAME_GROUPS_MAX];
    size_t n_groups = 0, n_left = name_groups(groups, &n_groups, layout, e->params, e->n_params);
    bool exact = n_left == 0;

    for (size_t g = 0; g < n_groups; g++)
        exact &= groups[g].whole && groups[g].prefix_len > 0;
    if (exact)
        for (size_t g = 0; g < n_groups; g++)
            print_freeze(buf, &layout->params[groups[g].first], groups[g].prefix_len);
    else if (e->n_params <= DIAGNOSTIC_MAX_PARAMS)
        for (size_t i = 0; i < e->n_params; i++)
            print_freeze(buf, &layout->params[e->params[i]], layout->params[e->params[i]].name_len);
    else
        strbuf_add(buf, "for name in NAMES: model.get_parameter(name).requires_grad_(False)   (NAMES: those above)\n");
}

static void add_freezing(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    struct strbuf buf = {0};

    if (caller == CALLER_C || !e->at.layout || e->n_params == 0) {
        if (caller == CALLER_C)
            diagnostic_field(d, "fix", ".trainable = false for them in zerod_declare");
        else
            diagnostic_field(d, "fix", "requires_grad_(False) on them before %s", attaching(e));
        return;
    }
    print_freezing(&buf, e);
    strbuf_add(&buf, "before %s", attaching(e));
    diagnostic_field_take(d, "fix", &buf);
}

static void explain_never_used(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    diagnostic_field(d, "cause",
                     "the loss does not use them: the same set is missing on %s%u rank%s in every step so far "
                     "(%" PRIu64 ")",
                     e->world_size > 1 ? "all " : "", e->world_size, e->world_size == 1 ? "" : "s", e->n_steps_seen);
    add_freezing(d, e, caller);
    diagnostic_field(d, "or", "make the loss use them, if they are meant to be trained");
    add_permission(d, "or", e, caller, "they stay as they are");
    diagnostic_field(
        d, "does not help", "%s",
        e->at.observed ? "TORCH_DISTRIBUTED_DEBUG, which adds names only; number of GPUs"
        : caller == CALLER_C
            ? "batch size, number of ranks, order of pushes"
            : "find_unused_parameters=True: that is a DDP option, and would not train them either; number of GPUs");
}

static void explain_data_dependent(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    diagnostic_field(
        d, "cause",
        "the data decides which parameters the forward uses: the set of missing gradients differs between %s",
        !e->same_on_all_ranks && e->world_size > 1 ? "ranks" : "steps");
    add_permission(d, "fix", e, caller, "a missing gradient contributes nothing");
    if (e->warning)
        diagnostic_field(d, "fix",
                         "none, if that is meant: a rank that did not use a parameter contributes nothing to it");
    if (caller == CALLER_C)
        diagnostic_field(d, "or", "push zeros for what the rank did not use");
    else
        diagnostic_field(
            d, "or",
            e->at.observed
                ? "loss = loss + 0 * sum(p.sum() for p in branch.parameters())   (if each rank is to use them)"
                : "loss = loss + 0 * branch(x).sum()   (if each rank is to use them)");
    diagnostic_field(d, "does not help", "batch size, gradient checkpointing, number of GPUs");
}

static void explain_dead_segment(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, e->dead_segments.first);
    if (e->dead_segments.n > 1)
        strbuf_add(&buf, " and %" PRIu32 " more", e->dead_segments.n - 1);
    if (e->dead_segments.site && *e->dead_segments.site) {
        strbuf_add(&buf, ", forward at ");
        strbuf_add_foreign(&buf, e->dead_segments.site);
    }
    diagnostic_field_take(d, "segment", &buf);
    diagnostic_field(d, "cause",
                     "no input of the checkpointed segment%s requires grad, so reentrant checkpointing cut %s out of "
                     "the backward",
                     e->dead_segments.n > 1 ? "s" : "", e->dead_segments.n > 1 ? "them" : "it");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C ? "recompute the segment with its parameters as inputs of the backward"
                                        : caller_not_reentrant(caller));
    if (caller != CALLER_C)
        diagnostic_field(d, "or", "model.enable_input_require_grads()");
    diagnostic_field(d, "does not help", "the learning rate; freezing more; find_unused_parameters=True");
}

static void explain_membership(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    diagnostic_field(d, "cause",
                     "they were declared trainable and have been frozen since: %s changed after the model was attached",
                     caller == CALLER_C ? "what is trainable" : "requires_grad");
    if (caller == CALLER_C)
        diagnostic_field(d, "fix", "declare .trainable with its final value; it cannot change while the job runs");
    else
        add_freezing(d, e, caller);
    if (caller != CALLER_C)
        diagnostic_field(d, "or", "requires_grad_(True) on them again");
    add_permission(d, "or", e, caller, "they stay as they are");
    diagnostic_field(d, "does not help", "unused modules, gradient checkpointing");
}

static void explain_absent(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    diagnostic_field(d, "cause", "the rank never began this step, in which the others wait");
    diagnostic_field(d, "to find out",
                     "if zerodctl ranks shows no process: it died\nif its last message is old: it hangs\n"
                     "if it has left: its data ended before the others'");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C ? "give every rank the same number of batches"
                                        : "DistributedSampler(dataset, drop_last=True)");
    diagnostic_field(d, "does not help", "%s", not_unused(caller));
}

/* Explains that a backward ran, but that no declared parameter got a gradient. The cause is not known. */
static void admit_nothing_reached(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    diagnostic_field(d, "cause",
                     "not known: %" PRIu64 " backward%s ran, and none of the declared parameters got a gradient",
                     e->n_backwards, e->n_backwards == 1 ? "" : "s");
    diagnostic_field(d, "to find out",
                     "if another copy of the model (wrapped, cast, moved) computed the loss: declare that copy (M1)\n"
                     "if the declared one did: its output was detached, or its gradients were not pushed (M3)");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C ? "declare and push the parameters of the model that computes the loss"
                     : e->at.observed   ? "DistributedDataParallel(model) on the very model that is called"
                                        : "zerod.Optimizer(model) on the very model that is called");
    diagnostic_field(d, "does not help", "unused modules; batch size; number of GPUs");
}

/* Explains parameters that may be experts, layers that are left out by turns, or a last layer that the loss uses in
 * part. */
static void admit_kin(struct diagnostic *d, const struct evidence_missing *e)
{
    diagnostic_field(d, "cause",
                     "not known: others of the same list of modules had gradients, these had none in %" PRIu64 " steps",
                     e->n_steps_seen);
    diagnostic_field(d, "to find out",
                     "if the data chooses among them, as among experts: they come later (M2)\n"
                     "if the loss uses all of the others and never these: they do not come (M1)");
    diagnostic_field(d, "fix", "none if the data chooses; diagnostics.unused: [PATTERN] says that it is meant");
    diagnostic_field(d, "or", "if they are never used: freeze them before they are declared");
    diagnostic_field(d, "does not help", "batch size, gradient checkpointing, number of GPUs");
}

static void admit_one_sample(struct diagnostic *d, const struct evidence_missing *e, enum caller caller)
{
    diagnostic_field(d, "cause",
                     "not known: one rank in one step cannot show whether they are never used, or only not this time");
    diagnostic_field(d, "to find out",
                     "if all ranks and later steps miss the same set: the loss never uses them (M1)\n"
                     "if other ranks or later steps miss another set: the data decides which are used (M2)");
    add_permission(d, "fix", e, caller, "a missing gradient contributes nothing");
    if (e->warning)
        diagnostic_field(d, "fix",
                         "none until that is known; if they are never used: freeze them before they are declared");
    diagnostic_field(d, "does not help", "batch size, gradient checkpointing, number of GPUs");
}

/* ---- all of them --------------------------------------------------------------------------------------- */

static void explain_class(struct diagnostic *d, const struct evidence_missing *e, enum missing_class class)
{
    enum caller caller = caller_of(&e->at, &(struct diagnostic_push){.site = (char *)e->dead_segments.site});

    switch (class) {
    case CLASS_M1:
        explain_never_used(d, e, caller);
        break;
    case CLASS_M2:
        explain_data_dependent(d, e, caller);
        break;
    case CLASS_M3:
        explain_no_backward(d, e, caller);
        break;
    case CLASS_M4:
        explain_half_way(d, e, caller);
        break;
    case CLASS_M5:
        explain_dead_segment(d, e, caller);
        break;
    case CLASS_M6:
        explain_membership(d, e, caller);
        break;
    case CLASS_M7:
        explain_absent(d, e, caller);
        break;
    case CLASS_U:
        if (is_none(e))
            admit_nothing_reached(d, e, caller);
        else if (e->kin_used)
            admit_kin(d, e);
        else
            admit_one_sample(d, e, caller);
        break;
    }
    if (e->at.observed)
        diagnostic_field(d, "state",
                         e->ddp_silent
                             ? "zerod only observes here, and stopped before the optimizer's step; DDP does not "
                               "notice, and other ranks may wait"
                             : "DDP reports this one forward late, and cannot go on; zerod only observes here");
    else if (e->warning && e->skipped)
        diagnostic_field(d, "state",
                         "step skipped on all ranks (on_missing: skip): weights and optimizer state are unchanged; not "
                         "reported again for these");
    else if (e->warning)
        diagnostic_field(d, "state",
                         "what no rank pushed stays as it is; what some ranks pushed is the sum of theirs; not "
                         "reported again for these");
    else
        diagnostic_field(d, "state", "step held, nothing was applied: %s, or %s to train without these gradients",
                         caller_abort(caller), caller_clear(caller));
}

/* Makes the diagnostic for fewer micro-batches than configured. All gradients may have arrived. */
static struct diagnostic *diagnose_count(const struct evidence_missing *e)
{
    struct diagnostic *d = cause_new(&e->at, E_MISSING, "fewer micro-batches than configured, step held");
    enum caller caller = caller_of(&e->at, NULL);
    char number[64];
    const struct remedy remedies[] = {
        {"fix", "gradient_accumulation_steps: auto", "the step is the boundary, whatever the count"},
        {"or", e->n_micro_batches ? number : NULL, "if the program is right"},
        {"or",
         caller == CALLER_C ? "zerod_step after the last micro-batch only"
                            : "opt.step() after the last micro-batch only",
         "if the configuration is right"},
    };

    snprintf(number, sizeof(number), "gradient_accumulation_steps: %" PRIu32, e->n_micro_batches);
    add_exception(d, e);
    diagnostic_field(d, "expected", "%" PRIu32 " micro-batch%s in a step (gradient_accumulation_steps: %" PRIu32 ")",
                     e->n_configured, e->n_configured == 1 ? "" : "es", e->n_configured);
    diagnostic_field(d, "got", "%" PRIu32, e->n_micro_batches);
    diagnostic_field(d, "cause",
                     "the rank asked for the step after %" PRIu32 " of %" PRIu32 " configured micro-batches",
                     e->n_micro_batches, e->n_configured);
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", "unused parameters; a smaller last batch of the epoch");
    diagnostic_field(d, "state", "step held, nothing was applied: %s and run the other micro-batches, or %s",
                     caller_clear(caller), caller_abort(caller));
    return diagnostic_finish(d);
}

static struct diagnostic *diagnose_bypass(const struct evidence_missing *e)
{
    struct diagnostic *d = cause_new(&e->at, E_DRIFTED, "ranks drift apart, the wrapper was bypassed");

    diagnostic_class(d, "X1");
    diagnostic_field(d, "got", "%" PRIu32 " of %" PRIu32 " gradients, and no forward of the DDP wrapper",
                     e->n_trainable, e->n_trainable);
    diagnostic_field(d, "cause",
                     "the loss was computed on the model inside the wrapper, so DDP never averaged the gradients: "
                     "each rank trains alone");
    diagnostic_field(d, "fix", "call the model that the trainer hands in: model(**inputs), not self.model(**inputs)");
    diagnostic_field(d, "does not help", "the learning rate, the seed, the sampler");
    diagnostic_field(d, "state",
                     "zerod only observes here and refused nothing; going on trains one model for each rank");
    return diagnostic_finish(d);
}

/* Prints "missing on rank 1 of 4", or "missing on ranks 0, 2 and 9 more of 16". */
static void print_lacking_ranks(struct strbuf *buf, const struct evidence_missing *e)
{
    unsigned n = MIN(e->lacking.n, (unsigned)EVIDENCE_MAX_LACKING);

    strbuf_add(buf, "missing on rank%s ", e->lacking.n == 1 ? "" : "s");
    for (unsigned i = 0; i < n; i++)
        strbuf_add(buf, "%s%u", i ? ", " : "", e->lacking.first[i].rank);
    if (e->lacking.n > n)
        strbuf_add(buf, " and %u more", e->lacking.n - n);
    strbuf_add(buf, " of %u", e->world_size);
}

/* Prints a line for each rank, with the names if they are few. */
static void print_lacking_params(struct strbuf *buf, const struct evidence_missing *e)
{
    unsigned n = MIN(e->lacking.n, (unsigned)EVIDENCE_MAX_LACKING);

    for (unsigned i = 0; i < n; i++) {
        const struct evidence_lacking *lacking = &e->lacking.first[i];

        strbuf_add(buf, "%srank %u misses ", i ? "\n" : "", lacking->rank);
        if (lacking->n_params == e->n_params)
            strbuf_add(buf, "all of them");
        else if (lacking->n_params > DIAGNOSTIC_MAX_PARAMS)
            strbuf_add(buf, "%zu of them", lacking->n_params);
        else
            name_list_print(buf, e->at.layout, lacking->params, lacking->n_params);
    }
    if (e->lacking.n > n)
        strbuf_add(buf, "\nand %u ranks more miss some", e->lacking.n - n);
}

/* Adds the ranks that miss parameters, and their parameters. */
static void add_lacking(struct diagnostic *d, const struct evidence_missing *e)
{
    struct strbuf buf = {0};
    bool alike = true;

    if (e->same_on_all_ranks) {
        diagnostic_field(d, "ranks", "missing on all %u", e->world_size);
        return;
    }
    for (unsigned i = 0; i < MIN(e->lacking.n, (unsigned)EVIDENCE_MAX_LACKING); i++)
        alike &= e->lacking.first[i].n_params == e->n_params;
    if (e->lacking.n == 0)
        strbuf_add(&buf, "missing on ranks of other nodes");
    else if (alike)
        print_lacking_ranks(&buf, e);
    else
        print_lacking_params(&buf, e);
    if (e->lacking.n > 0 && e->lacking.elsewhere)
        strbuf_add(&buf, "\n(of the ranks of this node)");
    diagnostic_field_take(d, "ranks", &buf);
}

struct diagnostic *cause_missing(const struct evidence_missing *e)
{
    static const char *const names[] = {
        [CLASS_U] = "U",   [CLASS_M1] = "M1", [CLASS_M2] = "M2", [CLASS_M3] = "M3",
        [CLASS_M4] = "M4", [CLASS_M5] = "M5", [CLASS_M6] = "M6", [CLASS_M7] = "M7",
    };
    enum missing_class class = classify_missing(e);
    struct strbuf title = {0};
    struct diagnostic *d;

    if (e->wrapper_bypassed)
        return diagnose_bypass(e);
    /* If no gradient arrived, or a backward was abandoned, the count is less important. */
    if (e->n_configured && e->n_micro_batches < e->n_configured && !is_none(e) && !e->given_up.abandoned)
        return diagnose_count(e);

    strbuf_add(&title, "%zu of %" PRIu32 " gradients missing, %s", e->n_params, e->n_trainable,
               e->ddp_silent    ? "and DDP says nothing"
               : e->at.observed ? "DDP cannot go on"
               : !e->warning    ? "step held"
               : e->skipped     ? "step skipped"
                                : "step taken without them");
    d = cause_new(&e->at, E_MISSING, strbuf_text(&title));
    strbuf_deinit(&title);
    if (e->warning)
        diagnostic_warn(d);
    diagnostic_class(d, names[class]);
    diagnostic_params(d, e->at.layout, e->params, e->n_params);
    if (e->warning)
        add_lacking(d, e);
    add_modules(d, e, class == CLASS_M1);
    add_exception(d, e);
    explain_class(d, e, class);
    return diagnostic_finish(d);
}

/* ---- E1006, E1007 -------------------------------------------------------------------------------------- */

struct diagnostic *cause_graph_changed(const struct evidence_graph *e)
{
    struct diagnostic *d = cause_new(&e->at, E_GRAPH_CHANGED,
                                     e->extra ? "a gradient that static_graph had not learnt is refused"
                                              : "gradients that static_graph learnt are missing, step held");
    enum caller caller = caller_of(&e->at, NULL);

    diagnostic_params(d, e->at.layout, e->params, e->n_params);
    diagnostic_field(d, "expected", "%s",
                     e->extra ? "no gradient of these: the first step had none"
                              : "a gradient of each of these: the first step had one");
    diagnostic_field(d, "got", "%s", e->extra ? "one" : "none");
    diagnostic_field(d, "cause",
                     "diagnostics.static_graph is true, and the set of parameters that the backward reaches has "
                     "changed since the first step");
    diagnostic_field(d, "fix", "diagnostics.static_graph: false");
    diagnostic_field(d, "or", "%s",
                     caller == CALLER_C
                         ? "use the same parameters in every step"
                         : "use every module in every step, and freeze or unfreeze before the first one");
    diagnostic_field(d, "does not help", "batch size, number of GPUs");
    if (e->extra)
        diagnostic_field(d, "state", "the gradient was not added; %s, or %s to go on without it", caller_abort(caller),
                         caller_clear(caller));
    else
        diagnostic_field(d, "state", "step held, nothing was applied: %s, or %s to train without these gradients",
                         caller_abort(caller), caller_clear(caller));
    return diagnostic_finish(d);
}

/* Explains that the program left with an open micro-batch. Its backward may have ended normally. */
static void explain_left(struct diagnostic *d, enum caller caller)
{
    if (caller == CALLER_C) {
        diagnostic_field(d, "cause", "zerod_leave came before zerod_step");
        diagnostic_field(d, "fix", "zerod_leave after the last step, or zerod_abort_step first");
        return;
    }
    diagnostic_field(d, "cause",
                     "its program ended, or called opt.close(), after gradients were computed and before opt.step()");
    diagnostic_field(d, "fix", "if the program's own output has an exception, begin with that one");
}

static void explain_given_up(struct diagnostic *d, const struct evidence_abandoned *e, enum caller caller)
{
    add_reason(d, e->why);
    diagnostic_field(d, "cause", "%s",
                     caller == CALLER_C ? "the program called zerod_abandon_backward"
                                        : "an exception left the backward, or zero_grad() came before opt.step()");
    if (e->aborted)
        diagnostic_field(d, "fix", "%s",
                         caller == CALLER_C ? "go back to zerod_epoch() and begin the step again at micro-batch 0"
                                            : "begin the step again with its first micro-batch");
    else
        diagnostic_field(d, "fix", "%s",
                         caller == CALLER_C ? "zerod_begin_backward and redo this micro-batch, or zerod_abort_step"
                                            : "redo this micro-batch, or opt.abort_step()");
}

struct diagnostic *cause_abandoned(const struct evidence_abandoned *e)
{
    struct diagnostic *d = cause_new(&e->at, E_ABANDONED,
                                     !e->why      ? "left before the step, step aborted"
                                     : e->aborted ? "backward abandoned, step aborted"
                                                  : "backward abandoned, its gradients dropped");
    enum caller caller = caller_of(&e->at, NULL);

    if (!e->aborted)
        diagnostic_warn(d);
    diagnostic_class(d, "M4");
    diagnostic_field(d, "got", "%" PRIu32 " gradient%s of this micro-batch before it was given up", e->n_dropped,
                     e->n_dropped == 1 ? "" : "s");
    if (e->why)
        explain_given_up(d, e, caller);
    else
        explain_left(d, caller);
    diagnostic_field(d, "does not help", "%s", not_unused(caller));
    if (e->aborted)
        diagnostic_field(
            d, "state",
            "some were in the sums already: step aborted on all ranks, weights and optimizer state are unchanged");
    else
        diagnostic_field(
            d, "state",
            "none of them was in a sum yet: they are dropped, earlier micro-batches stay, no other rank notices");
    return diagnostic_finish(d);
}
