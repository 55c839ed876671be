/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Diagnostics of faults that only the client can detect, E1102 to E1107 and E1110. The client reports the code, the
 * parameters and a sentence. The daemon makes the text, so that its log, the exception and the manual agree.
 */

#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"

static const struct report_text texts[] = {
    {
        .code = E_GRADIENT,
        .cause = "a partition has one place for each element of a parameter; a sparse gradient says only at run time "
                 "which elements it has",
        .fix = {"push every element of the parameter, zeros where it has no gradient",
                "sparse=False of nn.Embedding and F.embedding, sparse_grad=False of torch.gather   (the same numbers, "
                "dense)"},
        .does_not_help = "the learning rate, batch size; torch.optim.SparseAdam, whose step zerod does not have",
        .state = "it was refused, nothing has changed",
        .leaves_gap = true,
    },
    {
        .code = E_PARAMETER,
        .cause = "the parameter requires a gradient and is in no parameter group, so it was declared frozen",
        .fix = {"declare it trainable, on every rank, or push no gradient of it",
                "put it into a group of zerod.Optimizer(groups, model=model), on every rank"},
        .alternative = {NULL, "param.requires_grad_(False) before zerod.Optimizer   (it keeps its value)"},
        .does_not_help = "gradient checkpointing, batch size",
        .state = "it was refused, nothing has changed",
        .leaves_gap = true,
    },
    {
        .code = E_REPOINTED,
        .cause = "the parameter has left the memory where zerod publishes weights: the step would train weights that "
                 "nobody reads",
        .fix = {"read weights where zerod_weight() says, after every zerod_form()",
                "model.to(...), model.half() and load_state_dict(..., assign=True) before "
                "zerod.Optimizer(model)"},
        .alternative = {NULL, "with zerod.writable(model): model.load_state_dict(...)   (changes values, not storage)"},
        .does_not_help = "the learning rate; frozen parameters",
        .state = "the step was refused before anything was applied; state and weights are unchanged",
    },
    {
        .code = E_DRIFTED,
        .cause = "ranks that should hold equal parameters do not: something changes them outside zerod, or a "
                 "wrapper was bypassed",
        .fix = {"change weights between zerod_write_begin() and zerod_write_end() only",
                "call the wrapped model, and change weights inside zerod.writable(model) only"},
        .alternative = {NULL, NULL},
        .does_not_help = "the order of sums: zerod's sums have the same bits on every rank",
        .state = "nothing was refused in the daemon; going on trains one model for each rank",
    },
    {
        .code = E_WEIGHT_WRITTEN,
        .cause = "published weights are one read-only mapping for all ranks, and the program wrote to them "
                 "in place",
        .fix = {"zerod_write_begin() before and zerod_write_end() after, on every rank",
                "with zerod.writable(model): ...   (around the write, on every rank)"},
        .alternative = {"write to a copy   (values that are not trained need not be in zerod's memory)",
                        "opt.close()   (before the write, when training is over: the process then owns the weights)"},
        .does_not_help = "another build or driver; weights: private, because those copies are read-only too",
        .state = "what was written is in this process only",
        .state_at_end = "the process is stopped (SIGSEGV) before the write: weights are unchanged, and the run can go "
                        "on with a successor",
        .leaves_gap = true,
    },
    {
        .code = E_REDUCED_TWICE,
        .cause = "the model is wrapped in DDP or FSDP: its gradients are averaged over the ranks before "
                 "zerod sums them again",
        .fix = {"push each rank's own gradients, not reduced ones",
                "zerod.Optimizer(model) on the bare model, without the wrapper"},
        .alternative = {NULL, "zerod.observe(ddp_model)   (watch and explain only)"},
        .does_not_help = "gradient_allreduce_op: no setting undoes a second reduction",
        .state = "attach refused; nothing has changed",
        .title_later = "gradients would be reduced twice, wrapper refused",
        .state_later = "the model stays attached; without the wrapper it trains on",
    },
    {
        .code = E_RELEASED_READ,
        .cause = "stage 3 publishes a weight only while it is gathered, and the program read it at another time",
        .fix = {"zerod_gather() before the read, zerod_release() after it",
                "call the module, or with zerod.gathered(model): ...   (around the read)"},
        .alternative = {NULL, "zero_optimization.stage: 2   (weights are always there)"},
        .does_not_help = "another build or driver; looking for freed memory",
        .state = "no stale value was read: the process is stopped (SIGSEGV), and the run can go on with a successor",
    },
};

const struct report_text *cause_report_text(enum diagnostic_code code)
{
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        if (texts[i].code == code)
            return &texts[i];
    return NULL;
}

static void add_state(struct diagnostic *d, const struct report_text *text, enum caller caller, bool attached)
{
    if (text->leaves_gap)
        diagnostic_field(d, "state", "%s: %s, or %s to train without it", text->state, caller_abort(caller),
                         caller_clear(caller));
    else
        diagnostic_field(d, "state", "%s", attached && text->state_later ? text->state_later : text->state);
}

/* detail: the client's sentence. Its first line says what happened; the others may name a call site. */
struct diagnostic *cause_report(const struct evidence_at *at, enum diagnostic_code code, const uint32_t *params,
                                size_t n_params, const char *detail, bool attached)
{
    const struct report_text *text = cause_report_text(code);
    struct diagnostic *d = cause_new(at, code, text && attached ? text->title_later : NULL);
    enum caller caller = caller_of(at, &(struct diagnostic_push){.site = (char *)detail});
    size_t language = caller == CALLER_C ? 0 : 1;
    struct strbuf buf = {0};

    diagnostic_params(d, at->layout, params, n_params);
    strbuf_add_foreign(&buf, detail);
    diagnostic_field_take(d, "got", &buf);
    if (text) {
        diagnostic_field(d, "cause", "%s", text->cause);
        diagnostic_field(d, "fix", "%s", text->fix[language]);
        if (text->alternative[language])
            diagnostic_field(d, "or", "%s", text->alternative[language]);
        diagnostic_field(d, "does not help", "%s", text->does_not_help);
        add_state(d, text, caller, attached);
    } else {
        diagnostic_field(d, "cause", "reported by the client, which alone can see it");
        diagnostic_field(d, "fix", "see the entry of this code in the manual");
        diagnostic_field(d, "does not help", "the daemon: it has not seen it");
        diagnostic_field(d, "state", "the daemon's state is unchanged");
    }
    return diagnostic_finish(d);
}
