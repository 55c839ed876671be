/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Turns a message into its diagnostic. A text alone proves little, so each diagnostic says what the message proves. It
 * names a cause only if the clues leave a single one. Otherwise it says how to tell the remaining causes apart.
 */

#include "client/ctl/explain.h"

#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"

#define FOLK "batch size, LoRA rank, number of GPUs"
#define STATE_DDP "DDP cannot go on from here: start again after the fix; zerod had no part in it"

static enum caller caller_of_clues(unsigned clues)
{
    return clues & CLUE_SWIFT ? CALLER_SWIFT : clues & CLUE_TRAINER ? CALLER_TRAINER : CALLER_TORCH;
}

/* ---- the common beginning ------------------------------------------------------------------------------ */

static struct diagnostic *begin_diagnostic(const struct explain_message *m, enum diagnostic_code code,
                                           const char *title)
{
    struct diagnostic *d = diagnostic_new(code, title);
    struct strbuf ranks = {0};

    diagnostic_warn(d); /* `explain` refuses nothing, so this is a warning */
    cause_print_ranks(&ranks, m->ranks, EXPLAIN_MAX_RANKS);
    if (m->n_ranks == 1)
        diagnostic_at(d, strtol(strbuf_text(&ranks), NULL, 10), -1, -1);
    strbuf_deinit(&ranks);
    return d;
}

static void add_parameter(struct diagnostic *d, const struct explain_message *m, const char *whose)
{
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, m->name);
    if (m->index >= 0)
        strbuf_add(&buf, "%sindex %" PRId64 " %s", *m->name ? ", " : "", m->index, whose);
    diagnostic_field_take(d, "parameter", &buf);
}

/* Adds the part of a list that fits on a line. */
static void add_list(struct diagnostic *d, const struct explain_message *m)
{
    enum { MAX_BYTES = 90 };
    char shown[MAX_BYTES + 1];
    size_t n = MIN(strlen(m->list), (size_t)MAX_BYTES);
    struct strbuf buf = {0};

    if (m->n_listed == 0)
        return;
    memcpy(shown, m->list, n);
    shown[n] = '\0';
    if (m->list[n]) {
        char *end = strrchr(shown, ' ');

        if (end)
            *end = '\0';
    }
    strbuf_add(&buf, "%s", m->names ? "" : m->n_listed == 1 ? "index " : "indices ");
    strbuf_add_foreign(&buf, shown);
    strbuf_add(&buf, "%s", m->list[n] || m->list_cut ? " ..." : "");
    diagnostic_field_take(d, "parameter", &buf);
}

static void add_ranks(struct diagnostic *d, const struct explain_message *m)
{
    struct strbuf buf = {0};

    if (m->n_ranks < 2)
        return;
    cause_print_ranks(&buf, m->ranks, EXPLAIN_MAX_RANKS);
    diagnostic_field_take(d, "ranks", &buf);
}

static void add_exception(struct diagnostic *d, const struct explain_message *m)
{
    struct strbuf buf = {0};

    strbuf_add_foreign(&buf, m->exception);
    diagnostic_field_take(d, "exception", &buf);
}

/* ---- DDP: ready only once ------------------------------------------------------------------------------ */

#define NOT_THE_NAMED                                                                                                  \
    "the parameter named: it is the first whose hook came twice, which says nothing about its layer;\n"

/* Return: true if Trainer sets find_unused_parameters=True: for models that are no PreTrainedModel, such as peft's. */
static bool finding_by_default(const struct explain_message *m)
{
    return !(m->clues & CLUE_NOT_FIND) && (m->clues & (CLUE_TRAINER | CLUE_SWIFT)) &&
           (strstr(m->name, "lora_") || strncmp(m->name, "base_model.", 11) == 0);
}

static void say_phantom(struct diagnostic *d, const struct explain_message *m)
{
    enum caller caller = caller_of_clues(m->clues);
    const struct remedy remedies[] = {
        {"fix", caller_not_reentrant(caller), "always"},
        {"or", caller_not_finding(caller), "only if every parameter gets a gradient in every step"},
    };

    diagnostic_class(d, "D4");
    diagnostic_field(d, "proves",
                     "DDP marked the parameter ready twice, the second time inside a reentrant checkpoint");
    diagnostic_field(d, "cause",
                     "%s which cannot see into reentrant checkpoints:\n"
                     "it counted their parameters as unused, marked them ready, and failed on the first real gradient",
                     m->clues & CLUE_FIND ? "DDP was built with find_unused_parameters=True,"
                                          : "most likely DDP was built with find_unused_parameters=True,\n"
                                            "as the Trainer does for a model that is no PreTrainedModel of its own,");
    if (!(m->clues & CLUE_FIND))
        diagnostic_field(d, "to find out",
                         "if one process with one layer, called once, gives the same error: it is this (D4)\n"
                         "if ddp_find_unused_parameters=False was set after all: a module ran twice (D1)");
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", NOT_THE_NAMED FOLK ": it fails with one process too");
}

static void say_reentrant(struct diagnostic *d, const struct explain_message *m)
{
    enum caller caller = caller_of_clues(m->clues);
    bool sure = m->clues & CLUE_NOT_FIND;
    const struct remedy remedies[] = {
        {"fix", caller_not_reentrant(caller), "right in both cases, same numbers"},
        {"or", caller == CALLER_TORCH ? "DistributedDataParallel(model, static_graph=True)" : NULL,
         "the graph never changes"},
        {"or", sure ? NULL : caller_not_finding(caller), "for D4 only, if every parameter gets a gradient"},
    };

    diagnostic_class(d, sure ? "D1" : "U");
    diagnostic_field(d, "proves",
                     "DDP marked the parameter ready twice, the second time inside a reentrant checkpoint");
    if (sure) {
        diagnostic_field(
            d, "cause",
            "find_unused_parameters is off, so two gradients came: the parameter is used by two runs under\n"
            "reentrant checkpointing, or by one and outside of it; each makes its own backward pass");
    } else {
        diagnostic_field(d, "cause",
                         "not known: reentrant checkpointing, and either two gradients (D1) or unused detection (D4)");
        diagnostic_field(
            d, "to find out",
            "if DDP was built with find_unused_parameters=True: one gradient came, nothing ran twice (D4)\n"
            "if it was built without: the module ran twice in one forward, or is shared (D1)");
    }
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", NOT_THE_NAMED FOLK);
}

static void say_twice_elsewhere(struct diagnostic *d, const struct explain_message *m)
{
    diagnostic_class(d, "U");
    diagnostic_field(d, "proves",
                     "DDP marked the parameter ready twice, the second time outside of any reentrant checkpoint");
    diagnostic_field(d, "cause",
                     "not known: a second backward over one forward, or a parameter that DDP counted as unused%s",
                     m->clues & CLUE_NOT_FIND ? ";\nfind_unused_parameters is off, so it is the former" : "");
    diagnostic_field(
        d, "to find out",
        "look for two backward() over one forward, the first of which does not reach every parameter (D2)\n"
        "or find_unused_parameters=True, and the parameter is used after forward: model.module.head(x) (D4)\n"
        "or find_unused_parameters=True, and forward returns a type that DDP does not look into (D4)");
    diagnostic_field(d, "fix", "(loss_a + loss_b).backward()   (D2: one backward for each forward)");
    diagnostic_field(d, "or",
                     "use it inside forward, and return tensors, lists, tuples, dicts or dataclasses of them"
                     "   (D4)");
    diagnostic_field(d, "or", "%s   (D4: if every parameter gets a gradient)",
                     caller_not_finding(caller_of_clues(m->clues)));
    diagnostic_field(d, "does not help", "gradient checkpointing: the traceback goes through no checkpoint; " FOLK);
}

/* The message was copied without its traceback, so each cause above is possible. */
static void say_twice_somewhere(struct diagnostic *d, const struct explain_message *m)
{
    enum caller caller = caller_of_clues(m->clues);
    bool not_finding = m->clues & CLUE_NOT_FIND;
    const struct remedy remedies[] = {
        {"fix", caller_not_reentrant(caller),
         not_finding ? "D1: with gradient checkpointing, same numbers"
                     : "D1, D4: with gradient checkpointing, same numbers"},
        {"or", "(loss_a + loss_b).backward()", "D2: one backward for each forward"},
        {"or", not_finding ? NULL : caller_not_finding(caller), "D4: if every parameter gets a gradient"},
    };

    diagnostic_class(d, "U");
    diagnostic_field(d, "proves", "DDP marked the parameter ready twice; where, only the traceback would say");
    diagnostic_field(d, "cause", "not known: reentrant checkpointing%s a second backward over one forward%s",
                     not_finding ? ", or" : ",",
                     not_finding ? "" : ", or a parameter that\nDDP counted as unused (find_unused_parameters=True)");
    diagnostic_field(
        d, "to find out",
        "give explain the whole log: its traceback goes through a checkpoint (%1$s), or through none (D2)\n"
        "turn gradient checkpointing off: if the error goes, the checkpoints are reentrant (%1$s)",
        not_finding ? "D1" : "D1, D4");
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help", NOT_THE_NAMED FOLK);
}

static struct diagnostic *say_ready_once(const struct explain_message *m)
{
    bool checkpoint = m->clues & CLUE_CHECKPOINT,
         phantom = checkpoint && ((m->clues & CLUE_FIND) || finding_by_default(m));
    struct diagnostic *d = begin_diagnostic(m, E_DUPLICATE,
                                            phantom ? "DDP complains, but no gradient was computed twice"
                                                    : "DDP marked a parameter ready twice");

    add_parameter(d, m, "of DDP's");
    add_ranks(d, m);
    if (phantom)
        say_phantom(d, m);
    else if (checkpoint)
        say_reentrant(d, m);
    else if (!(m->clues & CLUE_TRACEBACK))
        say_twice_somewhere(d, m);
    else
        say_twice_elsewhere(d, m);
    diagnostic_field(d, "state", STATE_DDP);
    return diagnostic_finish(d);
}

/* ---- DDP: reduction of the prior iteration ------------------------------------------------------------- */

#define FREEZE "module.requires_grad_(False) on them before DistributedDataParallel(model)"
#define LET_THROUGH "let the exception through, or leave that batch out on all ranks before its forward"

static void say_half_way(struct diagnostic *d, const struct explain_message *m)
{
    diagnostic_class(d, "M4");
    add_exception(d, m);
    diagnostic_field(d, "proves", "a backward began on this rank and gave some gradients, but not those listed");
    diagnostic_field(d, "cause",
                     "most likely an exception left that backward half way and was swallowed: the log shows one");
    diagnostic_field(d, "to find out",
                     "if only this rank complains, and those listed come first in the model: it is this (M4)\n"
                     "if all ranks complain of the same: the loss never uses them (M1)");
    diagnostic_field(d, "fix", LET_THROUGH);
    diagnostic_field(d, "does not help",
                     "find_unused_parameters=True, which would only hide this; unused layers; the other ranks");
}

static void say_dead_segment(struct diagnostic *d, const struct explain_message *m)
{
    diagnostic_class(d, "M5");
    diagnostic_field(d, "proves",
                     "the loss did not reach those listed, and torch warned that no input of a checkpoint "
                     "requires grad");
    diagnostic_field(d, "cause",
                     "most likely reentrant checkpointing cut them out of the backward: no input of their "
                     "segment requires grad");
    diagnostic_field(d, "to find out",
                     "if those listed are the parameters of whole checkpointed layers: it is this (M5)\n"
                     "if others are among them: the loss never uses those (M1)");
    diagnostic_field(d, "fix", "%s", caller_not_reentrant(caller_of_clues(m->clues)));
    diagnostic_field(d, "or", "model.enable_input_require_grads()");
    diagnostic_field(d, "does not help", "find_unused_parameters=True, which would only hide this; freezing more");
}

static void say_unused(struct diagnostic *d, const struct explain_message *m, bool all)
{
    enum caller caller = caller_of_clues(m->clues);

    diagnostic_class(d, all ? "M1" : "U");
    diagnostic_field(d, "proves", "a backward began on this rank and gave some gradients, but not those listed");
    diagnostic_field(d, "cause", "%s",
                     all ? "most likely the loss does not use them: the same are missing on all ranks that complain"
                         : "not known: one rank's list cannot show whether they are never used, or only not this time");
    if (all)
        diagnostic_field(d, "to find out",
                         "if it was the first step: the loss never uses them (M1)\nif earlier steps went well: the "
                         "data decides which are used (M2)");
    else
        diagnostic_field(d, "to find out",
                         "if all ranks list the same, in the first step: the loss never uses them (M1)\n"
                         "if ranks list others, or earlier steps went well: the data decides which are used (M2)\n"
                         "if no other rank complains, and %s:\n"
                         "an exception left the backward of this rank, and was swallowed (M4)",
                         m->from_start ? "these come first in the model" : "the first of the model are among them");
    diagnostic_field(d, "fix", FREEZE "   (M1)");
    diagnostic_field(d, "or", "%s   (M2)", caller_finding(caller));
    if (!all)
        diagnostic_field(d, "or", LET_THROUGH "   (M4)");
    diagnostic_field(d, "does not help", "TORCH_DISTRIBUTED_DEBUG, which adds names, not a cause; " FOLK);
}

static void say_differs(struct diagnostic *d, const struct explain_message *m)
{
    diagnostic_class(d, "M2");
    diagnostic_field(d, "proves", "a backward began on each of these ranks, and reached other parameters on each");
    diagnostic_field(d, "cause", "the data decides which parameters the forward uses: ranks list different parameters");
    diagnostic_field(d, "fix", "%s", caller_finding(caller_of_clues(m->clues)));
    diagnostic_field(d, "or", "loss = loss + 0 * sum(p.sum() for p in branch.parameters())");
    diagnostic_field(d, "does not help", "freezing them; " FOLK);
}

/* With find_unused_parameters=True, torch 2's DDP does not expect gradients of parameters on which no output of forward
 * depends. An output that the loss does not use counts too. */
static void say_not_reached(struct diagnostic *d)
{
    diagnostic_class(d, "U");
    diagnostic_field(d, "proves",
                     "a backward began and gave some gradients; forward's outputs depend on those listed, "
                     "and none came");
    diagnostic_field(d, "cause", "not known: the backward stopped half way, or was told to leave them out");
    diagnostic_field(
        d, "to find out",
        "if one rank complains, and those listed come first in the model: an exception was swallowed (M4)\n"
        "if backward(inputs=...) or torch.autograd.grad is used: it leaves the others out (M2)");
    diagnostic_field(d, "fix", LET_THROUGH "   (M4)");
    diagnostic_field(d, "does not help", "outputs that the loss does not use: torch 2 counts those as used; " FOLK);
}

/* Return: true if another rank's message of this kind lists different parameters. */
static bool another_list(const struct explain_message *m, const struct explain_messages *all)
{
    for (size_t i = 0; i < all->n; i++)
        if (all->items[i].kind == m->kind && strcmp(all->items[i].list, m->list) != 0 && all->items[i].n_listed)
            return true;
    return false;
}

static struct diagnostic *say_prior(const struct explain_message *m, const struct explain_messages *all)
{
    char title[96];
    struct diagnostic *d;

    snprintf(title, sizeof(title), "DDP missed %s%u gradient%s in the step before", m->list_cut ? "at least " : "",
             m->n_listed, m->n_listed == 1 ? "" : "s");
    d = begin_diagnostic(m, E_MISSING, m->n_listed ? title : "DDP missed gradients in the step before");
    add_list(d, m);
    add_ranks(d, m);
    if (*m->exception)
        say_half_way(d, m);
    else if (m->kind == EXPLAIN_PRIOR_FIND)
        say_not_reached(d);
    else if (m->clues & CLUE_DEAD)
        say_dead_segment(d, m);
    else if (another_list(m, all))
        say_differs(d, m);
    else
        say_unused(d, m, m->n_ranks > 1);
    diagnostic_field(d, "state",
                     "DDP reports this one forward late, and cannot go on from here: start again after the fix;\n"
                     "zerod had no part in it");
    return diagnostic_finish(d);
}

static struct diagnostic *say_static(const struct explain_message *m)
{
    bool fewer = m->kind == EXPLAIN_PRIOR_STATIC;
    struct diagnostic *d = begin_diagnostic(m, E_GRAPH_CHANGED,
                                            fewer ? "gradients that DDP's static graph learnt are missing"
                                                  : "a gradient that DDP's static graph did not learn");

    add_list(d, m);
    add_ranks(d, m);
    if (fewer)
        add_exception(d, m);
    diagnostic_field(d, "proves",
                     fewer
                         ? "DDP was built with static_graph=True; the first step gave gradients of those listed, this "
                           "one none"
                         : "DDP was built with static_graph=True, and a parameter without gradient in the first step "
                           "has one now");
    diagnostic_field(d, "cause", "%s",
                     fewer && *m->exception
                         ? "most likely an exception left that backward half way and was swallowed: the log shows one"
                         : "the set of parameters that the backward reaches has changed since the first step");
    if (!fewer)
        diagnostic_field(d, "to find out",
                         "DDP does not name the parameter: list those whose .grad is None after the first backward");
    diagnostic_field(d, "fix", "DistributedDataParallel(model, static_graph=False, find_unused_parameters=True)");
    diagnostic_field(d, "or",
                     "use every module in every step; freeze and unfreeze before DistributedDataParallel(model)");
    diagnostic_field(d, "does not help", FOLK);
    diagnostic_field(d, "state", STATE_DDP);
    return diagnostic_finish(d);
}

/* ---- DeepSpeed ----------------------------------------------------------------------------------------- */

/* DeepSpeed's stage 3 asserts only if both gradients are in one bucket; otherwise it continues silently. */
static struct diagnostic *say_deepspeed(const struct explain_message *m)
{
    bool bare = m->kind == EXPLAIN_DEEPSPEED_BARE, checkpoint = m->clues & CLUE_CHECKPOINT;
    enum caller caller = caller_of_clues(m->clues);
    const struct remedy remedies[] = {
        {"fix", caller_not_reentrant(caller), "one gradient per parameter, same numbers"},
        {"or", caller == CALLER_TORCH ? "deepspeed.checkpointing.non_reentrant_checkpoint" : NULL,
         "for deepspeed.checkpointing.checkpoint"},
        {"or", "one forward over both inputs, one backward over the sum of the losses", "two forwards, two losses: D2"},
    };
    struct diagnostic *d = begin_diagnostic(m, E_DUPLICATE, "DeepSpeed found a second gradient of one parameter");

    diagnostic_class(d, checkpoint ? "D1" : "U");
    add_parameter(d, m, "in DeepSpeed's own order of trainable parameters");
    add_ranks(d, m);
    diagnostic_field(d, "proves", "%s",
                     bare ? "stage 3: the hook of a parameter fired twice while one bucket was filled"
                          : "stages 1 and 2: the hook of this parameter fired twice between two resets of the buckets");
    diagnostic_field(d, "cause", "%s",
                     checkpoint
                         ? "a module ran twice in one forward under reentrant checkpointing, or is shared; each run "
                           "makes its own backward pass"
                         : "not known: reentrant checkpointing of what runs twice or is shared, or an extra "
                           "backward");
    if (!checkpoint)
        diagnostic_field(
            d, "to find out",
            "turn gradient checkpointing off. If the error goes: recomputed in reentrant checkpoints (D1)\n"
            "if it stays: two backwards over one forward (D2)");
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(
        d, "does not help", "%s" FOLK ";\nZeRO-%s",
        bare ? "" : "the parameter named: it is the first that came twice, which says nothing about its layer;\n",
        bare ? "2, which refuses the same, with a text"
             : "3 hides this where the two fall into different "
               "buckets, it does not cure it");
    diagnostic_field(d, "state", "%s",
                     bare ? "the step is lost; earlier steps may have trained on part of a gradient, silently"
                          : "the step is lost: start again after the fix");
    return diagnostic_finish(d);
}

/* ---- zerod's own --------------------------------------------------------------------------------------- */

static struct diagnostic *say_ours(const struct explain_message *m)
{
    const struct diagnostic_info *info = diagnostic_info((enum diagnostic_code)m->code);
    struct diagnostic *d = begin_diagnostic(m, info->code, NULL);

    add_ranks(d, m);
    diagnostic_field(d, "what",
                     "zerod's own diagnostic: the lines below the code in the log name the parameters and the "
                     "fix");
    diagnostic_field(d, "cause", "%s", info->summary);
    diagnostic_field(d, "fix", "docs/diagnostics.md#e%d", m->code);
    diagnostic_field(d, "or", "zerodctl diagnostics   (the whole text, while the daemon runs)");
    return diagnostic_finish(d);
}

struct diagnostic *explain_say(const struct explain_message *m, const struct explain_messages *all)
{
    switch (m->kind) {
    case EXPLAIN_READY_ONCE:
        return say_ready_once(m);
    case EXPLAIN_PRIOR:
    case EXPLAIN_PRIOR_FIND:
        return say_prior(m, all);
    case EXPLAIN_PRIOR_STATIC:
    case EXPLAIN_GRAPH_CHANGED:
        return say_static(m);
    case EXPLAIN_DEEPSPEED_TWICE:
    case EXPLAIN_DEEPSPEED_BARE:
        return say_deepspeed(m);
    case EXPLAIN_OURS:
        break;
    }
    return say_ours(m);
}
