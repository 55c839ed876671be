/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Refusals of one message of one rank: a push with a wrong position or form, arguments, runs, values, quotas,
 * permissions. Duplicates, missing gradients, ranks, manifests and client reports have their own files.
 */

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"
#include "core/layout/layout.h"

/* ---- pushes: E1002, E1003, E1004, E1102, E1103 --------------------------------------------------------- */

/* Is the refusal about a request other than a push? Only codes about a position are also used for requests. */
static bool is_request(const struct evidence_push *e)
{
    return e->detail && *e->detail && (e->code == E_STALE || e->code == E_EARLY || e->code == E_AFTER_BOUNDARY);
}

static const char *push_title(const struct evidence_push *e)
{
    if (!is_request(e))
        return NULL;
    return e->code == E_STALE   ? "stale request refused"
           : e->code == E_EARLY ? "early request refused"
                                : "request after the boundary refused";
}

/* Is the push for the next micro-batch, before that has begun? */
static bool is_unopened(const struct evidence_push *e)
{
    const struct push_record *record = &e->push.record;

    return e->code == E_EARLY && e->push.present && !e->asked && !is_request(e) &&
           (int64_t)record->step == e->at.step && record->micro_batch == e->at.micro_batch;
}

/* Adds the rank's position, and the position that the push or request names. */
static void add_positions(struct diagnostic *d, const struct evidence_push *e)
{
    if (is_unopened(e)) {
        diagnostic_field(d, "expected", "the beginning of micro-batch %" PRId64 " of step %" PRId64, e->at.micro_batch,
                         e->at.step);
        diagnostic_field(d, "got", "a push into it");
        return;
    }
    if (e->at.step >= 0 && e->at.micro_batch >= 0 && !e->cause)
        diagnostic_field(d, "expected", "step %" PRId64 ", micro-batch %" PRId64 "%s", e->at.step, e->at.micro_batch,
                         e->asked ? ", which this rank has ended: it waits in the step" : "");
    if (is_request(e))
        cause_foreign_field(d, "got", e->detail);
    else if (e->push.present)
        diagnostic_field(d, "got", "step %" PRIu64 ", micro-batch %" PRIu32, e->push.record.step,
                         e->push.record.micro_batch);
}

static void explain_stale(struct diagnostic *d, const struct evidence_push *e, enum caller caller)
{
    diagnostic_class(d, "D5");
    if (e->other_incarnation) {
        diagnostic_field(d, "cause",
                         "an earlier process of this rank still pushes, although another process holds the rank now");
        diagnostic_field(d, "fix",
                         "end the earlier process (zerodctl ranks shows the pid of the one that holds the rank)");
        diagnostic_field(d, "does not help", "the gradient, its parameter, the number of ranks");
        return;
    }
    diagnostic_field(d, "cause",
                     "it came after its micro-batch was closed: a backward, or a hook, ran past the boundary");
    diagnostic_field(
        d, "fix", "%s",
        caller == CALLER_C
            ? "push before zerod_end_backward of the same micro-batch; zerod_epoch() returns the rank's position"
            : "call every backward() before opt.step(), in the same thread");
    diagnostic_field(
        d, "does not help",
        "looking for a lost message: one that is sent again is known by its sequence number and never refused");
}

static void explain_after_boundary(struct diagnostic *d, const struct evidence_push *e, enum caller caller)
{
    diagnostic_class(d, "D5");
    diagnostic_field(d, "cause", "this rank has ended its backward and has not begun another");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C
                         ? "zerod_begin_backward before the next backward's pushes"
                         : "every backward() before opt.step(); a second one needs a forward of its own");
    diagnostic_field(d, "does not help", "batch size, gradient checkpointing, number of GPUs");
}

static void explain_early(struct diagnostic *d, const struct evidence_push *e, enum caller caller)
{
    const struct push_record *record = &e->push.record;
    bool next = (int64_t)record->step == e->at.step && record->micro_batch == e->at.micro_batch;

    assert(e->code == E_EARLY);
    if (e->cause) {
        diagnostic_field(d, "cause", "%s", e->cause);
        diagnostic_field(d, "fix", "%s", e->fix[caller != CALLER_C]);
        diagnostic_field(d, "does not help", "the gradients, the other ranks, batch size");
        return;
    }
    if (e->asked)
        diagnostic_field(d, "cause", "this rank has asked for the step: nothing can begin before the answer");
    else if (next)
        diagnostic_field(d, "cause", "its micro-batch is the next one, which has not begun");
    else
        diagnostic_field(d, "cause", "the rank counts ahead of the job: that position is not open");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C
                         ? "zerod_begin_backward first; it opens the position that zerod_epoch() returns"
                         : "let zerod.Optimizer count steps and micro-batches; opt.step() once for each step");
    diagnostic_field(d, "does not help",
                     "the speed of the other ranks: a fast rank may run ahead by whole micro-batches");
}

static void explain_parameter(struct diagnostic *d, const struct evidence_push *e, enum caller caller)
{
    bool frozen = e->n_params && e->at.layout && e->params[0] < e->at.layout->n_params;

    cause_foreign_field(d, "got", e->detail);
    if (frozen) {
        diagnostic_class(d, "M6");
        diagnostic_field(
            d, "cause",
            caller == CALLER_C
                ? "the parameter was declared frozen (.trainable is false unless it is set) and has a gradient"
                : "the parameter was declared frozen and has a gradient now: requires_grad changed after it "
                  "was declared");
        diagnostic_field(d, "fix", "%s",
                         caller == CALLER_C ? ".trainable = true for it in zerod_declare, on every rank"
                                            : "unfreeze before zerod.Optimizer(model); opt.close() and attach again to "
                                              "change it");
    } else {
        diagnostic_field(d, "cause", "the push names an index that the manifest does not have");
        diagnostic_field(d, "fix", "%s",
                         caller == CALLER_C ? "zerod_push.param is the order of zerod_declare, from 0"
                                            : "zerod.Optimizer(model) after the model has its last parameter");
    }
    diagnostic_field(d, "does not help", "gradient checkpointing, batch size");
}

/* Splits "expected 4096 bytes of fp32, got 2048 of bf16" into two fields. */
static void add_expected_and_got(struct diagnostic *d, const char *detail)
{
    static const char expected[] = "expected ", got[] = ", got ";
    const char *at = detail ? strstr(detail, got) : NULL;
    _cleanup_free_ char *first = NULL;

    if (at && strncmp(detail, expected, strlen(expected)) == 0)
        first = strndup(detail + strlen(expected), (size_t)(at - detail) - strlen(expected));
    if (!first) {
        cause_foreign_field(d, "got", detail);
        return;
    }
    cause_foreign_field(d, "expected", first);
    cause_foreign_field(d, "got", at + strlen(got));
}

static void explain_form(struct diagnostic *d, const struct evidence_push *e, enum caller caller)
{
    add_expected_and_got(d, e->detail);
    diagnostic_field(d, "cause", "the gradient does not have the form that was declared for its parameter");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C ? "shape and grad_dtype of zerod_declare must be those of what is pushed"
                                        : "cast and resize the model before zerod.Optimizer(model), not after it");
    diagnostic_field(d, "does not help", "loss scaling, batch size, bucket size");
}

struct diagnostic *cause_push(const struct evidence_push *e)
{
    struct diagnostic *d = cause_new(&e->at, e->code, push_title(e));
    enum caller caller = caller_of(&e->at, &e->push);

    diagnostic_pushes(d, NULL, is_request(e) ? NULL : &e->push);
    if (!is_request(e)) {
        diagnostic_params(d, e->at.layout, e->params, e->n_params);
        cause_push_field(d, "push", &e->push, false);
    }
    switch (e->code) {
    case E_STALE:
        add_positions(d, e);
        explain_stale(d, e, caller);
        break;
    case E_AFTER_BOUNDARY:
        add_positions(d, e);
        explain_after_boundary(d, e, caller);
        break;
    case E_PARAMETER:
        explain_parameter(d, e, caller);
        break;
    case E_GRADIENT:
        explain_form(d, e, caller);
        break;
    default:
        add_positions(d, e);
        explain_early(d, e, caller);
        break;
    }
    if (e->cause)
        diagnostic_field(d, "state", "it was refused, nothing has changed: %s to go on, or %s", caller_clear(caller),
                         caller_abort(caller));
    else
        diagnostic_field(d, "state", "it was refused, nothing has changed: %s, or %s to train without it",
                         caller_abort(caller), caller_clear(caller));
    return diagnostic_finish(d);
}

/* ---- declaring, arguments, runs: E1101, E1108, E1109 --------------------------------------------------- */

struct diagnostic *cause_declare(const struct evidence_at *at, const char *what, const char *fix)
{
    struct diagnostic *d = cause_new(at, E_MANIFEST, "declaration refused, job not formed");

    cause_foreign_field(d, "cause", what);
    cause_foreign_field(d, "fix", fix);
    diagnostic_field(d, "does not help", "socket, permissions, batch size");
    diagnostic_field(d, "state", "the declaration was refused; the state that the daemon holds is unchanged");
    return diagnostic_finish(d);
}

static void add_argument(struct diagnostic *d, const char *label, double value, int64_t rank, const char *note)
{
    struct strbuf buf = {0};

    if (isnan(value))
        strbuf_add(&buf, "not given: as configured");
    else
        cause_print_double(&buf, value);
    if (rank >= 0)
        strbuf_add(&buf, "   (rank %" PRId64 "%s)", rank, note);
    diagnostic_field_take(d, label, &buf);
}

struct diagnostic *cause_step_args(const struct evidence_args *e)
{
    struct diagnostic *d = cause_new(&e->at, E_STEP_ARGS, NULL);
    enum caller caller = caller_of(&e->at, NULL);

    cause_foreign_field(d, "argument", e->name);
    add_argument(d, "expected", e->other_value, e->other_rank, ", which asked first");
    add_argument(d, "got", e->value, e->at.rank, "");
    diagnostic_field(
        d, "cause",
        "all ranks ask for a step with the same arguments, and this rank's value differs from the first one's");
    diagnostic_field(d, "fix", "%s",
                     caller == CALLER_C
                         ? "the same zerod_step_args on every rank, or args = NULL: as configured"
                         : "one schedule for all ranks: step it once for each opt.step(), never by a rank's own loss");
    diagnostic_field(d, "or", "scheduler: in the daemon's configuration   (the daemon computes lr for all ranks)");
    diagnostic_field(d, "does not help", "the order in which ranks ask; rounding: arguments are compared as sent");
    diagnostic_field(d, "state",
                     "this rank's request was refused, the others wait: %s and ask again with their value, or %s",
                     caller_clear(caller), caller_abort(caller));
    return diagnostic_finish(d);
}

struct diagnostic *cause_other_run(const struct evidence_at *at, const char *held_run, const char *asked_run,
                                   uint64_t epoch)
{
    struct diagnostic *d = cause_new(at, E_OTHER_RUN, NULL);
    struct strbuf buf = {0};

    strbuf_add(&buf, "run id ");
    strbuf_add_foreign(&buf, asked_run);
    diagnostic_field_take(d, "asked", &buf);
    strbuf_add(&buf, "run id ");
    strbuf_add_foreign(&buf, held_run);
    strbuf_add(&buf, ", at epoch %" PRIu64, epoch);
    diagnostic_field_take(d, "held", &buf);
    diagnostic_field(d, "cause",
                     "the daemon keeps a run's state until it is told to forget it, and this is another run");
    strbuf_add(&buf, "ZEROD_RUN_ID=");
    strbuf_add_foreign(&buf, held_run);
    cause_remedies(d,
                   (const struct remedy[]){
                       {"fix", strbuf_text(&buf), "go on with the run that is held"},
                       {"or", "zerodctl drop",
                        "discard its state; the next run begins with the newest checkpoint, if there is one"},
                   },
                   2);
    strbuf_deinit(&buf);
    diagnostic_field(d, "does not help", "the model, the number of ranks, permissions");
    diagnostic_field(d, "state", "attach refused; the state that is held is unchanged");
    return diagnostic_finish(d);
}

/* ---- values: E1201, E1202 ------------------------------------------------------------------------------ */

static void add_finding(struct diagnostic *d, const struct evidence_nonfinite *e)
{
    struct strbuf buf = {0};

    if (isfinite(e->value))
        strbuf_add(&buf, "%g", (double)e->value);
    else
        strbuf_add(&buf, "%s", isnan(e->value) ? "NaN" : e->value > 0 ? "+inf" : "-inf");
    strbuf_add(&buf, " at element %" PRIu64, e->elem);
    if (e->at.layout && e->param < e->at.layout->n_params)
        strbuf_add(&buf, " of %" PRIu64, e->at.layout->params[e->param].n_elems);
    strbuf_add(&buf, "; %" PRIu64 " NaN and %" PRIu64 " infinite in all", e->n_nan, e->n_inf);
    diagnostic_field_take(d, "got", &buf);
}

static void add_scale(struct diagnostic *d, double loss_scale)
{
    struct strbuf buf = {0};

    if (!(loss_scale > 0))
        return;
    cause_print_double(&buf, loss_scale);
    diagnostic_field_take(d, "loss scale", &buf);
}

static void add_nonfinite_state(struct diagnostic *d, const struct evidence_nonfinite *e, enum caller caller)
{
    if (e->held)
        diagnostic_field(d, "state", "step held, nothing was applied: %s drops it on all ranks, %s skips it",
                         caller_abort(caller), caller_clear(caller));
    else
        diagnostic_field(
            d, "state", "step skipped on all ranks alike: weights and optimizer state are unchanged, training goes on");
}

static void explain_nonfinite(struct diagnostic *d, const struct evidence_nonfinite *e)
{
    if (e->overflowed)
        diagnostic_field(d, "cause", "each rank's gradient is finite, but their sum is beyond what fp32 can hold");
    else if (e->at.rank >= 0)
        diagnostic_field(d, "cause",
                         "the gradient that rank %" PRId64 " pushed is not finite: its own backward made it so",
                         e->at.rank);
    else
        diagnostic_field(d, "cause", "a gradient that is not finite was pushed");
}

static void advise_nonfinite(struct diagnostic *d, const struct evidence_nonfinite *e, enum caller caller)
{
    bool scaled = e->loss_scale > 1, too_large = e->overflowed || (scaled && e->n_nan == 0);
    struct remedy remedies[] = {
        {"fix", "with torch.autograd.detect_anomaly(): loss.backward()", "on that rank: it names the operation"},
        {"or", e->held ? "diagnostics.on_nonfinite: skip" : "diagnostics.on_nonfinite: error",
         e->held ? "such steps are skipped" : "such steps are held"},
    };

    if (too_large && scaled)
        remedies[0] = (struct remedy){"fix", "fp16: {enabled: true, loss_scale: 0}", "a loss scale that adapts"};
    else if (too_large)
        remedies[0] = (struct remedy){"fix", "a lower learning rate", "gradients of this size: the loss diverges"};
    else if (caller == CALLER_C)
        remedies[0] =
            (struct remedy){"fix", "look for the first value that is not finite", "loss and activations, on that rank"};
    cause_remedies(d, remedies, ARRAY_SIZE(remedies));
    diagnostic_field(d, "does not help",
                     "gradient_clipping: it cannot clip a norm that is not finite; the other ranks");
}

struct diagnostic *cause_nonfinite(const struct evidence_nonfinite *e)
{
    struct diagnostic *d = cause_new(&e->at, E_NONFINITE,
                                     e->held ? "non-finite gradient, step held" : "non-finite gradient, step skipped");
    enum caller caller = caller_of(&e->at, NULL);

    if (!e->held)
        diagnostic_warn(d);
    diagnostic_params(d, e->at.layout, &e->param, 1);
    add_finding(d, e);
    add_scale(d, e->loss_scale);
    explain_nonfinite(d, e);
    advise_nonfinite(d, e, caller);
    add_nonfinite_state(d, e, caller);
    return diagnostic_finish(d);
}

struct diagnostic *cause_loss_scale(const struct evidence_nonfinite *e, double min_loss_scale)
{
    struct diagnostic *d =
        cause_new(&e->at, E_LOSS_SCALE,
                  e->held ? "loss scale at its minimum, step held" : "loss scale at its minimum, step skipped");
    enum caller caller = caller_of(&e->at, NULL);
    struct strbuf buf = {0};

    if (!e->held)
        diagnostic_warn(d);
    if (e->n_nan + e->n_inf > 0 || e->overflowed) {
        diagnostic_params(d, e->at.layout, &e->param, 1);
        add_finding(d, e);
    } else {
        diagnostic_field(d, "got", "found_inf: a rank saw it and asked for the step to be skipped");
    }
    add_scale(d, e->loss_scale);
    cause_print_double(&buf, min_loss_scale);
    strbuf_add(&buf, "   (fp16.min_loss_scale)");
    diagnostic_field_take(d, "minimum", &buf);
    diagnostic_field(d, "cause",
                     "gradients are not finite even at the smallest loss scale: the scale is not the reason");
    diagnostic_field(d, "fix",
                     "bf16 weights and gradients, with fp16: {enabled: false}   (bf16 has the range of fp32)");
    diagnostic_field(d, "or", "a lower learning rate, or a longer warm-up: scheduler.params.warmup_num_steps");
    diagnostic_field(d, "does not help", "a smaller fp16.min_loss_scale; gradient_clipping");
    add_nonfinite_state(d, e, caller);
    return diagnostic_finish(d);
}

struct diagnostic *cause_unscaled(const struct evidence_unscaled *e)
{
    struct diagnostic *d = cause_new(&e->at, E_UNSCALED, NULL);
    bool is_c = caller_of(&e->at, NULL) == CALLER_C;
    struct strbuf buf = {0};

    diagnostic_warn(d);
    strbuf_add(&buf, "the gradients of rank%s ", e->at.rank >= 0 ? "" : "s");
    cause_print_ranks(&buf, e->set, e->world_size);
    strbuf_add(&buf, " are about %.0f times smaller than those of the other ranks of this node", e->ratio);
    diagnostic_field_take(d, "got", &buf);
    add_scale(d, e->loss_scale);
    diagnostic_field(d, "cause",
                     "each rank multiplies its loss by the loss scale, and the step divides the sum by it:\n"
                     "these ranks do not multiply, or the others multiply twice");
    diagnostic_field(d, "fix", "%s",
                     is_c ? "multiply the loss by zerod_loss_scale(c), on every rank"
                          : "(loss * opt.loss_scale).backward()   (on every rank; accelerator.backward() does it)");
    diagnostic_field(d, "or", "fp16: {enabled: false}   (fp32 and bf16 need no loss scale)");
    diagnostic_field(d, "does not help", "gradient_clipping; a smaller fp16.initial_scale_power");
    diagnostic_field(d, "state", "nothing was refused; not reported again in later steps");
    return diagnostic_finish(d);
}

/* ---- limits, permissions, messages: E1401, E1402, E1403 ------------------------------------------------ */

/* Explains why memory or descriptors are short, if no quota is the reason. */
static void explain_shortage(struct diagnostic *d, const struct evidence_quota *e)
{
    switch (e->limit.kind) {
    case PROCESS_LIMIT_OPEN_FILES:
        diagnostic_field(d, "cause",
                         "zerod has no file descriptor left for it: its limit is %" PRIu64 " (RLIMIT_NOFILE)",
                         e->limit.limit);
        diagnostic_field(d, "fix",
                         "raise the limit of zerod (LimitNOFILE= of its unit, or ulimit -n), or close connections");
        return;
    case PROCESS_LIMIT_ADDRESS_SPACE:
        diagnostic_field(d, "cause",
                         "zerod may not map more memory: its limit of address space is %.1f GiB (RLIMIT_AS)",
                         (double)e->limit.limit / (1024 * 1024 * 1024));
        diagnostic_field(d, "fix", "start zerod without it: ulimit -v unlimited, or LimitAS=infinity in its unit");
        return;
    case PROCESS_LIMIT_NONE:
        diagnostic_field(d, "cause", "the machine does not have the memory for it");
        cause_foreign_field(d, "fix", e->fix);
    }
}

static void explain_excess(struct diagnostic *d, const struct evidence_quota *e)
{
    if (e->asked > e->allowed)
        diagnostic_field(d, "cause", "the request alone is over the limit, by %" PRIu64 " %s", e->asked - e->allowed,
                         e->unit);
    else
        diagnostic_field(d, "cause", "the request does not fit beside what is held already");
    cause_foreign_field(d, "fix", e->fix);
}

struct diagnostic *cause_quota(const struct evidence_quota *e)
{
    struct diagnostic *d = cause_new(&e->at, E_QUOTA, NULL);

    cause_foreign_field(d, "what", e->what);
    if (e->asked)
        diagnostic_field(d, "asked", "%" PRIu64 " %s", e->asked, e->unit);
    if (e->allowed) {
        diagnostic_field(d, "held", "%" PRIu64 " %s", e->held, e->unit);
        diagnostic_field(d, "allowed", "%" PRIu64 " %s", e->allowed, e->unit);
    }
    cause_foreign_field(d, "sum", e->sum);
    if (e->allowed)
        explain_excess(d, e);
    else
        explain_shortage(d, e);
    diagnostic_field(d, "does not help", "%s",
                     e->at.rank >= 0 && !e->of_job
                         ? "permissions; the other ranks: what they hold is counted separately"
                         : "permissions; batch size: the daemon holds no activations");
    diagnostic_field(d, "state", "refused before anything was allocated; what is held stays");
    return diagnostic_finish(d);
}

/* Adds the cause. what: for instance "connect (listen.allow_users, listen.allow_groups)". */
static void add_permission(struct diagnostic *d, const char *what)
{
    struct strbuf buf = {0};

    strbuf_add(&buf, "neither the user nor a group of the user may ");
    strbuf_add_foreign(&buf, what);
    diagnostic_field_take(d, "cause", &buf);
}

struct diagnostic *cause_not_allowed(const struct evidence_at *at, uint32_t uid, uint32_t gid, const char *what)
{
    struct diagnostic *d = cause_new(at, E_NOT_ALLOWED, NULL);
    bool draining = what && strstr(what, "drain"), admin = what && strstr(what, "admin");

    diagnostic_field(d, "got", "uid %" PRIu32 ", gid %" PRIu32, uid, gid);
    if (draining)
        cause_foreign_field(d, "cause", what);
    else
        add_permission(d, what);
    if (draining)
        diagnostic_field(d, "fix", "wait until the job has ended; a new daemon takes trainers again");
    else if (admin)
        diagnostic_field(d, "fix", "listen.admin_users or listen.admin_groups: name the user, or a group of the user");
    else
        diagnostic_field(d, "fix", "listen.allow_users or listen.allow_groups: name the user, or a group of the user");
    diagnostic_field(d, "does not help", "%s",
                     draining ? "another uid or gid" : "the mode of the socket: zerod asks the kernel who connects");
    diagnostic_field(d, "state", "nothing has changed; the connection is closed");
    return diagnostic_finish(d);
}

struct diagnostic *cause_rank_owned(const struct evidence_at *at, uint32_t uid, uint32_t gid, uint32_t owner)
{
    struct diagnostic *d = cause_new(at, E_NOT_ALLOWED, NULL);

    diagnostic_field(d, "got", "uid %" PRIu32 ", gid %" PRIu32, uid, gid);
    diagnostic_field(d, "cause", "the rank belongs to uid %" PRIu32 ", who formed it", owner);
    diagnostic_field(d, "fix", "start the rank again as uid %" PRIu32 ", or as an administrator (listen.admin_users)", owner);
    diagnostic_field(d, "does not help", "listen.allow_users: it lets the user connect already");
    diagnostic_field(d, "state", "nothing has changed; the connection is closed");
    return diagnostic_finish(d);
}

struct diagnostic *cause_bad_message(const struct evidence_at *at, const char *what)
{
    struct diagnostic *d = cause_new(at, E_BAD_MESSAGE, NULL);

    cause_foreign_field(d, "got", what);
    diagnostic_field(
        d, "cause",
        "an impossible value, or a message out of order: a mistake of the program, or a client of another version");
    diagnostic_field(d, "fix",
                     "correct the value after \"got\", in the program or its environment (RANK, ZEROD_SOCKET)");
    diagnostic_field(d, "or", "the libzerod that belongs to this daemon: zerod --version, zerodctl --version");
    diagnostic_field(d, "does not help", "the gradients, the load of the machine");
    diagnostic_field(d, "state", "the message changed nothing");
    return diagnostic_finish(d);
}
