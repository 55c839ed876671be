/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A gradient that arrived twice: E1001, or E1006 if static_graph learnt another count. The classes, in the order in
 * which they are checked:
 *
 *     D4  DDP complains, but the parameter arrived only once: it was not computed twice
 *     D3  both pushes are in one graph task, or the client's hook ran twice: the optimizer is attached twice
 *     D1  one outer backward, different graph tasks, one of them nested: reentrant checkpointing
 *     D2  different outer backwards, or more micro-batches than configured: an extra backward
 *     U   the records do not show the class, and are printed in full
 *
 * D5, a push after the end of the micro-batch, is checked first: the ledger finds it by its position (cause_push).
 */

#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"

#define ACCUMULATE "diagnostics.on_duplicate: accumulate"
#define NOT_REENTRANCE "batch size, LoRA rank, number of GPUs; ZeRO-3 of other systems, which only hides this"

#define NO_HELP_C "batch size, number of ranks, bucket size"

enum duplicate_class { CLASS_U, CLASS_D1, CLASS_D2, CLASS_D3 };

static bool is_nested(const struct diagnostic_push *push)
{
    return push->record.depth > 0 || (push->record.flags & PUSH_NESTED);
}

static enum duplicate_class classify_duplicate(const struct evidence_duplicate *e)
{
    const struct push_record *first = &e->first.record, *second = &e->second.record;
    bool tasks_known = first->task && second->task, ordinals_known = first->ordinal && second->ordinal;

    if (e->second.present && (second->flags & PUSH_HOOK_TWICE))
        return CLASS_D3;
    if (!e->first.present || !e->second.present)
        return CLASS_U;
    /* A task's number is unique only within its outer backward. */
    if (tasks_known && first->task == second->task && (!ordinals_known || first->ordinal == second->ordinal))
        return CLASS_D3;
    if (!ordinals_known)
        return CLASS_U;
    if (first->ordinal != second->ordinal)
        return CLASS_D2;
    if (tasks_known && (is_nested(&e->first) || is_nested(&e->second)))
        return CLASS_D1;
    return CLASS_U;
}

static const char *reentrant_fix(enum caller caller)
{
    return caller == CALLER_C ? "sum the gradients of all runs of the segment, then zerod_push once"
                              : caller_not_reentrant(caller);
}

/* Return: the remedy that permits more than one gradient of a parameter. */
static struct remedy later_pass(const struct evidence_duplicate *e)
{
    if (e->at.observed)
        return (struct remedy){"or", "DistributedDataParallel(model, static_graph=True)", "if the graph never changes"};
    return (struct remedy){"or", e->accumulated ? NULL : ACCUMULATE, "the sum is exact"};
}

/* Do the pushes have no segment? Then the nested backward belongs to an autograd function of the program, not to a
 * checkpoint. */
static bool is_function(const struct evidence_duplicate *e)
{
    return !(e->first.segment && *e->first.segment) && !(e->second.segment && *e->second.segment);
}

/* ---- D1 ------------------------------------------------------------------------------------------------ */

static void explain_reentrance(struct diagnostic *d, const struct evidence_duplicate *e)
{
    const char *a = e->first.segment ? e->first.segment : "", *b = e->second.segment ? e->second.segment : "";
    uint32_t n_runs = MAX(e->first.record.call, e->second.record.call);
    struct strbuf buf = {0};

    if (is_function(e)) {
        strbuf_add(
            &buf,
            "a function of the program runs a backward inside the backward, and each of them reaches the parameter");
    } else if (is_nested(&e->first) != is_nested(&e->second)) {
        strbuf_add(&buf, "the parameter is used inside a reentrant checkpoint and outside of it; each has its own "
                         "backward pass");
    } else if (*a && *b && strcmp(a, b) != 0) {
        strbuf_add(&buf, "the parameter is used in two reentrant checkpoints, ");
        strbuf_add_foreign(&buf, a);
        strbuf_add(&buf, " and ");
        strbuf_add_foreign(&buf, b);
        strbuf_add(&buf, "; each makes its own backward pass");
    } else {
        strbuf_add(&buf, "the module ran ");
        if (n_runs == 2)
            strbuf_add(&buf, "twice");
        else if (n_runs > 2)
            strbuf_add(&buf, "%" PRIu32 " times", n_runs);
        else
            strbuf_add(&buf, "more than once");
        strbuf_add(&buf, " in one forward under reentrant checkpointing; each run makes its own backward pass");
    }
    diagnostic_field_take(d, "cause", &buf);
}

static void advise_reentrance(struct diagnostic *d, const struct evidence_duplicate *e, enum caller caller)
{
    bool function = is_function(e) && caller != CALLER_C;
    const struct remedy remedies[] = {
        {"fix",
         function ? "return the gradients from the function's backward; it must not call backward() itself"
                  : reentrant_fix(caller),
         function ? NULL : "one gradient per parameter, same numbers"},
        later_pass(e),
    };

    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", "%s", caller == CALLER_C ? NO_HELP_C : NOT_REENTRANCE);
}

/* ---- D2 ------------------------------------------------------------------------------------------------ */

/* Explains a missing mark. A C program marks micro-batches itself and reports no forwards, so only the missing mark is
 * certain. */
static void explain_no_mark(struct diagnostic *d, const struct evidence_duplicate *e)
{
    const struct remedy remedies[] = {
        {"fix", "zerod_end_backward after each backward", "if each has its own forward: a micro-batch each"},
        {"or", "one backward over the sum of the losses", "if both belong to one forward: same numbers"},
        later_pass(e),
    };

    diagnostic_field(d, "cause",
                     "backward %" PRIu32 " was begun without ending backward %" PRIu32
                     ", so both belong to one micro-batch, and both made this gradient",
                     e->second.record.ordinal, e->first.record.ordinal);
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", NO_HELP_C);
}

static void explain_extra_backward(struct diagnostic *d, const struct evidence_duplicate *e)
{
    bool new_forward = e->second.record.flags & PUSH_NEW_FORWARD;
    const struct remedy one_forward[] = {
        {"fix", "(loss_a + loss_b).backward()", "one gradient per parameter, same numbers"},
        later_pass(e),
    };
    const struct remedy two_forwards[] = {
        {"fix", "model(...)", "call the model, not a part of it: its forward begins a micro-batch"},
        {"or", "opt.step() between the two", "if each has a step of its own"},
        later_pass(e),
    };

    if (new_forward)
        diagnostic_field(d, "cause",
                         "backward %" PRIu32 " followed backward %" PRIu32
                         " after a forward, but not the model's own: only that begins the next micro-batch",
                         e->second.record.ordinal, e->first.record.ordinal);
    else
        diagnostic_field(d, "cause",
                         "backward %" PRIu32 " followed backward %" PRIu32
                         " without a forward in between: one micro-batch, two gradients",
                         e->second.record.ordinal, e->first.record.ordinal);
    if (new_forward)
        cause_remedies(d, two_forwards, ARRAY_SIZE(two_forwards));
    else
        cause_remedies(d, one_forward, ARRAY_SIZE(one_forward));
    diagnostic_field(
        d, "does not help",
        "retain_graph=True, which only permits the second backward; gradient checkpointing; number of GPUs");
}

/* Makes the diagnostic for more micro-batches than configured. The rank has asked for the step, so there may be no
 * push. */
static struct diagnostic *diagnose_count(const struct evidence_duplicate *e)
{
    struct diagnostic *d = cause_new(&e->at, E_DUPLICATE, "more micro-batches than configured, step held");
    enum caller caller = caller_of(&e->at, &e->second);
    char number[64], before[96];
    const struct remedy remedies[] = {
        {"fix", "gradient_accumulation_steps: auto", "the step is the boundary, whatever the count"},
        {"or", number, "if the program is right"},
        {"or", before, "if the configuration is right"},
    };

    snprintf(number, sizeof(number), "gradient_accumulation_steps: %" PRIu32, e->n_micro_batches);
    snprintf(before, sizeof(before), "%s after %" PRIu32 " backward%s",
             caller == CALLER_C ? "zerod_step" : "opt.step()", e->n_configured, e->n_configured == 1 ? "" : "s");
    diagnostic_class(d, "D2");
    diagnostic_pushes(d, &e->first, &e->second);
    diagnostic_params(d, e->at.layout, e->params, e->n_params);
    diagnostic_field(d, "expected", "%" PRIu32 " micro-batch%s in a step (gradient_accumulation_steps: %" PRIu32 ")",
                     e->n_configured, e->n_configured == 1 ? "" : "es", e->n_configured);
    diagnostic_field(d, "got", "%" PRIu32, e->n_micro_batches);
    diagnostic_field(d, "cause",
                     "the program accumulates over %" PRIu32 " micro-batches where %" PRIu32 " %s configured",
                     e->n_micro_batches, e->n_configured, e->n_configured == 1 ? "is" : "are");
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", "gradient checkpointing, batch size, number of GPUs");
    diagnostic_field(d, "state",
                     "step held, nothing was applied: %s, or %s to train on gradients %" PRIu32 " / %" PRIu32
                     " times as large",
                     caller_abort(caller), caller_clear(caller), e->n_micro_batches, e->n_configured);
    return diagnostic_finish(d);
}

/* ---- D3 ------------------------------------------------------------------------------------------------ */

static void advise_double_hook(struct diagnostic *d, const struct evidence_duplicate *e, enum caller caller)
{
    if (e->second.record.flags & PUSH_HOOK_TWICE)
        diagnostic_field(d, "cause",
                         "the gradient hook fired twice in one graph task: it is attached to the parameter twice");
    else
        diagnostic_field(
            d, "cause",
            "both pushes come from one graph task, where a parameter's gradient is ready once: it was pushed twice");
    if (caller == CALLER_C)
        diagnostic_field(d, "fix", "call zerod_push once for each parameter of a backward");
    else
        diagnostic_field(d, "fix", "one zerod.Optimizer(model) in the process; opt.close() before the next one");
    diagnostic_field(
        d, "does not help",
        "gradient checkpointing, number of GPUs; on_duplicate: accumulate, which would count the same gradient twice");
}

/* ---- D4 ------------------------------------------------------------------------------------------------ */

static void explain_phantom(struct diagnostic *d, enum caller caller)
{
    const struct remedy remedies[] = {
        {"fix", caller_not_reentrant(caller), "always"},
        {"or", caller_not_finding(caller), "only if every parameter gets a gradient in every step"},
    };

    diagnostic_field(d, "cause",
                     "DDP was built with find_unused_parameters=True, which cannot see into reentrant "
                     "checkpoints:\nit counted their parameters as unused, marked them ready, and failed on the first "
                     "real gradient");
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
}

/* Explains a parameter that is in no checkpointed segment, and that DDP did not find in the graph of the forward's
 * result. */
static void explain_hidden(struct diagnostic *d, enum caller caller)
{
    const struct remedy remedies[] = {
        {"fix", "use it inside forward, and return tensors, lists, tuples, dicts or dataclasses of them", NULL},
        {"or", caller_not_finding(caller), "if every parameter gets a gradient in every step"},
    };

    diagnostic_field(d, "cause",
                     "DDP was built with find_unused_parameters=True, and did not find the parameter in the graph of "
                     "what forward returned:\nDDP marked it ready as unused, and failed on its real gradient");
    diagnostic_field(
        d, "to find out",
        "if the loss calls a part of the model after forward, as model.module.head(x): it is used outside of forward\n"
        "if forward returns an object of the program's own class: DDP does not look into it");
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
}

static struct diagnostic *diagnose_phantom(const struct evidence_duplicate *e)
{
    struct diagnostic *d = cause_new(&e->at, E_DUPLICATE, "DDP complains, but no gradient was computed twice");
    enum caller caller = caller_of(&e->at, &e->first);

    diagnostic_class(d, "D4");
    diagnostic_pushes(d, &e->first, NULL);
    diagnostic_params(d, e->at.layout, e->params, e->n_params);
    cause_push_field(d, "1st push", &e->first, false);
    diagnostic_field(d, "2nd push", "none: exactly 1 gradient arrived");
    if (e->first.present && !is_nested(&e->first))
        explain_hidden(d, caller);
    else
        explain_phantom(d, caller);
    diagnostic_field(d, "does not help",
                     "the parameter that DDP names: it is the first of the backward, never the cause;\n"
                     "LoRA rank, batch size, number of GPUs: it fails with one process too");
    diagnostic_field(d, "state", "DDP stopped the backward; zerod refused nothing");
    return diagnostic_finish(d);
}

/* ---- U ------------------------------------------------------------------------------------------------- */

static void admit_ignorance(struct diagnostic *d, const struct evidence_duplicate *e, enum caller caller)
{
    bool same = e->sums_known && e->sums_equal;

    if (same)
        diagnostic_field(d, "cause",
                         "not known: the same gradient came twice, and the records do not say what pushed it again");
    else
        diagnostic_field(d, "cause", "not known: the records do not say what ran twice");
    diagnostic_field(d, "to find out",
                     "if both are in one graph task: the push, or the hook that makes it, ran twice (D3)\n"
                     "if in one backward but two graph tasks, one nested: recomputed in reentrant checkpoints (D1)\n"
                     "if in two backwards: one of them is extra, or a boundary between them is not marked (D2)%s",
                     caller == CALLER_C ? "\nzerod_push has .ordinal, .task, .depth, .segment, .call and .site for this"
                                        : "");
    if (caller == CALLER_C)
        diagnostic_field(d, "fix",
                         "push each parameter once in a micro-batch: sum what belongs to it, then zerod_push");
    else
        diagnostic_field(d, "fix", "one backward for each forward, and one gradient for each parameter in it");
    if (!e->accumulated && !same && !e->at.observed)
        diagnostic_field(d, "or", ACCUMULATE "   (if both are meant: the sum is exact)");
    diagnostic_field(d, "does not help", "batch size, number of ranks%s",
                     same ? "; on_duplicate: accumulate, which would count the same gradient twice" : "");
}

/* ---- all of them --------------------------------------------------------------------------------------- */

static const char *title_of(const struct evidence_duplicate *e)
{
    if (e->accumulated)
        return "duplicate gradient added as a later pass";
    if (e->at.observed)
        return "duplicate gradient refused by DDP";
    if (e->code == E_GRAPH_CHANGED)
        return e->abort_step ? "a gradient that static_graph had not learnt is refused, step aborted"
                             : "a gradient that static_graph had not learnt is refused";
    return e->abort_step ? "duplicate gradient refused, step aborted" : NULL;
}

static void add_state(struct diagnostic *d, const struct evidence_duplicate *e, enum caller caller)
{
    if (e->at.observed)
        diagnostic_field(d, "state", "DDP stopped the backward half way, and cannot go on; zerod only observes here");
    else if (e->accumulated)
        diagnostic_field(d, "state",
                         "every push was added as a pass of its own, in the order of passes; training goes on");
    else if (e->abort_step)
        diagnostic_field(d, "state", "step aborted on all ranks, nothing was applied: begin it again at micro-batch 0");
    else
        diagnostic_field(d, "state",
                         "the first gradient was added, the second was not: %s, or %s to train on the first alone",
                         caller_abort(caller), caller_clear(caller));
}

static void add_bytes(struct diagnostic *d, const struct evidence_duplicate *e)
{
    if (e->sums_known)
        diagnostic_field(d, "bytes",
                         e->sums_equal ? "the second push holds the same bytes as the first"
                                       : "the second push holds other bytes than the first");
}

struct diagnostic *cause_duplicate(const struct evidence_duplicate *e)
{
    enum caller caller = caller_of(&e->at, e->second.present ? &e->second : &e->first);
    enum duplicate_class class = classify_duplicate(e);
    static const char *const names[] = {[CLASS_U] = "U", [CLASS_D1] = "D1", [CLASS_D2] = "D2", [CLASS_D3] = "D3"};
    struct diagnostic *d;

    if (e->ddp_complained)
        return diagnose_phantom(e);
    if (e->n_configured && e->n_micro_batches > e->n_configured)
        return diagnose_count(e);

    d = cause_new(&e->at, e->code ? e->code : E_DUPLICATE, title_of(e));
    if (e->accumulated)
        diagnostic_warn(d);
    diagnostic_class(d, names[class]);
    diagnostic_pushes(d, &e->first, &e->second);
    diagnostic_params(d, e->at.layout, e->params, e->n_params);
    cause_push_field(d, "1st push", &e->first, class == CLASS_U);
    cause_push_field(d, "2nd push", &e->second, class == CLASS_U);
    add_bytes(d, e);
    if (e->n_params)
        cause_partition(d, e->at.layout, e->params[0]);
    if (e->code == E_GRAPH_CHANGED)
        diagnostic_field(d, "expected",
                         "one gradient of each in a micro-batch, as static_graph: true learnt in the first step");
    switch (class) {
    case CLASS_D1:
        explain_reentrance(d, e);
        advise_reentrance(d, e, caller);
        break;
    case CLASS_D2:
        if (caller == CALLER_C)
            explain_no_mark(d, e);
        else
            explain_extra_backward(d, e);
        break;
    case CLASS_D3:
        advise_double_hook(d, e, caller);
        break;
    case CLASS_U:
        admit_ignorance(d, e, caller);
        break;
    }
    add_state(d, e, caller);
    return diagnostic_finish(d);
}
