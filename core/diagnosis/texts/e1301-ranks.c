/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Diagnostics of ranks as processes: taken, lost, waited for, and an aborted step as reported to other ranks. E1301,
 * E1302, E1303, E1304, E1305.
 */

#include <inttypes.h>
#include <string.h>

#include "core/base/base.h"
#include "core/diagnosis/cause-common.h"

#define STEP_ABORTED                                                                                                   \
    "step aborted on all ranks, weights and optimizer state are unchanged: begin it again at micro-batch 0"

static bool is_c(const struct evidence_at *at)
{
    return caller_of(at, NULL) == CALLER_C;
}

/* Return: the call by which a rank leaves the run. */
static const char *leave(const struct evidence_at *at)
{
    return is_c(at) ? "zerod_leave" : "opt.close()";
}

/* Prints a duration, such as "12.3 s", "2 min 5 s" or "3 h 10 min". */
static void print_duration(struct strbuf *buf, uint64_t ms)
{
    uint64_t s = ms / 1000;

    if (s < 60)
        strbuf_add(buf, "%" PRIu64 ".%" PRIu64 " s", s, ms % 1000 / 100);
    else if (s < 3600)
        strbuf_add(buf, "%" PRIu64 " min %" PRIu64 " s", s / 60, s % 60);
    else
        strbuf_add(buf, "%" PRIu64 " h %" PRIu64 " min", s / 3600, s % 3600 / 60);
}

/* ---- E1301 --------------------------------------------------------------------------------------------- */

struct diagnostic *cause_rank_taken(const struct evidence_at *at, int64_t pid, uint64_t since_ns, uint64_t now_ns)
{
    struct diagnostic *d = cause_new(at, E_RANK_TAKEN, NULL);
    struct strbuf buf = {0};

    if (pid > 0)
        strbuf_add(&buf, "pid %" PRId64 ", ", pid);
    strbuf_add(&buf, "attached ");
    print_duration(&buf, now_ns > since_ns ? (now_ns - since_ns) / 1000000 : 0);
    strbuf_add(&buf, " ago");
    diagnostic_field_take(d, "held by", &buf);
    diagnostic_field(d, "cause", "two processes claim one rank, and the one that holds it is alive");
    diagnostic_field(d, "fix", "give each process its own rank: RANK in its environment, or %s",
                     is_c(at) ? "zerod_options.rank" : "zerod.Optimizer(..., rank=)");
    if (pid > 0)
        diagnostic_field(d, "or", "kill %" PRId64 "   (if it is a leftover: the rank is free as soon as it is gone)",
                         pid);
    diagnostic_field(d, "does not help", "the socket, the run id, a time-out: a dead process frees its rank at once");
    diagnostic_field(d, "state", "attach refused; the rank that is held goes on");
    return diagnostic_finish(d);
}

struct diagnostic *cause_rank_taken_by_itself(const struct evidence_at *at, int64_t pid)
{
    struct diagnostic *d = cause_new(at, E_RANK_TAKEN, NULL);

    diagnostic_field(d, "held by", "pid %" PRId64 ", the process that asks", pid);
    diagnostic_field(d, "cause",
                     "this process has attached to this daemon already: a daemon holds one job, with one optimizer");
    diagnostic_field(d, "fix", "start one daemon for each optimizer: zerodrun --jobs 2, and %s",
                     is_c(at) ? "zerod_options.socket from ZEROD_SOCKET_1 for the second"
                              : "zerod.Optimizer(second_model, job=1)");
    diagnostic_field(d, "or", "%s the first one   (if it is no longer needed)", is_c(at) ? "zerod_close()" : "close()");
    diagnostic_field(d, "does not help", "RANK, the run id; looking for a leftover process: there is none");
    diagnostic_field(d, "state", "attach refused; the rank that is held goes on");
    return diagnostic_finish(d);
}

/* ---- E1302 --------------------------------------------------------------------------------------------- */

static void add_process(struct diagnostic *d, const struct evidence_lost *e)
{
    struct strbuf buf = {0};

    if (e->pid > 0)
        strbuf_add(&buf, "pid %" PRId64, e->pid);
    if (e->last_message && *e->last_message) {
        strbuf_add(&buf, "%slast message ", buf.n_bytes ? ", " : "");
        strbuf_add_foreign(&buf, e->last_message);
    }
    diagnostic_field_take(d, "process", &buf);
    cause_foreign_field(d, "outstanding", e->outstanding);
}

static void explain_left(struct diagnostic *d, const struct evidence_lost *e)
{
    diagnostic_field(d, "cause", "the rank said that it is done (%s), and diagnostics.on_leave is stop",
                     is_c(&e->at) ? "zerod_leave" : "opt.close(), or the end of its program");
    diagnostic_field(d, "fix", "run the same number of steps on every rank");
    diagnostic_field(d, "or", "diagnostics.on_leave: continue   (the others go on without it)");
    diagnostic_field(d, "does not help", "looking for a crash: the rank ended normally");
    diagnostic_field(d, "state", "committed steps stay; no further step begins");
}

static void explain_difference(struct diagnostic *d, const struct evidence_lost *e)
{
    diagnostic_field(
        d, "cause", "%s",
        e->on_gpu
            ? "the successor redid the micro-batch, but its gradient is not the one in the sums:\n"
              "its predecessor's, or as much of that as the GPU had written when it died"
            : "the successor redid the micro-batch, but its gradient is not its predecessor's, which is in the sums");
    diagnostic_field(d, "fix", "%s",
                     is_c(&e->at)
                         ? "store loader position and RNG state with each micro-batch and step (the blob of "
                           "zerod_end_backward),\n"
                           "and restore them from zerod_user_state"
                         : "zerod.user_state(opt, sampler=...): it keeps RNG and loader position and restores them;\n"
                           "draw a batch right before its forward");
    if (e->on_gpu)
        diagnostic_field(d, "or",
                         "nothing   (if the rank was killed inside a backward: the step is redone, and whole)");
    diagnostic_field(d, "does not help", "rounding in zerod: gradients are compared as they were pushed");
    diagnostic_field(d, "state", STEP_ABORTED);
}

static void explain_nobody_came(struct diagnostic *d, const struct evidence_lost *e)
{
    struct strbuf buf = {0};

    strbuf_add(&buf, "its process is gone, and no successor attached");
    if (e->waited_ms) {
        strbuf_add(&buf, " within ");
        print_duration(&buf, e->waited_ms);
        strbuf_add(&buf, " (limits.reattach_timeout)");
    }
    diagnostic_field_take(d, "cause", &buf);
    diagnostic_field(d, "fix", "start the rank again with the same run id; zerodrun --restarts N does it by itself");
    diagnostic_field(d, "does not help", "the ranks that wait; the network");
    diagnostic_field(d, "state", STEP_ABORTED);
}

static void explain_crossed(struct diagnostic *d, const struct evidence_lost *e)
{
    struct strbuf buf = {0};

    strbuf_add(
        &buf,
        "its process died inside a backward. What it had pushed stays on its GPU until all nodes have pushed the\n"
        "same. They have not for ");
    print_duration(&buf, e->waited_ms);
    strbuf_add(&buf, ": their ranks died, too, or wait for this one");
    diagnostic_field_take(d, "cause", &buf);
    diagnostic_field(d, "fix", "none is needed: the step begins again with all ranks");
    diagnostic_field(d, "does not help", "the ranks that wait; the network");
    diagnostic_field(d, "state", STEP_ABORTED);
}

/* Explains a lost process. The text is short, because it follows the process's own message about its end. */
static void explain_gone(struct diagnostic *d, const struct evidence_lost *e)
{
    diagnostic_field(d, "cause", "its process ended, or closed its connection, without %s", leave(&e->at));
    diagnostic_field(d, "fix", "start the rank again with the same run id; zerodrun --restarts N does it by itself");
    diagnostic_field(d, "or", "%s before the process ends   (if the rank was done)", leave(&e->at));
    diagnostic_field(
        d, "state", "the others wait and lose nothing; limits.reattach_timeout or zerodctl abort-step aborts the step");
}

struct diagnostic *cause_rank_lost(const struct evidence_lost *e)
{
    const char *title = e->left      ? "a rank has left, the others stop"
                        : e->differs ? "successor's gradient differs, step aborted"
                        : e->aborted ? "rank lost, step aborted"
                                     : "rank lost, waiting for its successor";
    struct diagnostic *d = cause_new(&e->at, E_RANK_LOST, title);

    if (!e->left && !e->differs && !e->aborted)
        diagnostic_warn(d);
    if (e->differs)
        diagnostic_params(d, e->at.layout, &e->param, 1);
    add_process(d, e);
    if (e->left)
        explain_left(d, e);
    else if (e->differs)
        explain_difference(d, e);
    else if (e->crossed)
        explain_crossed(d, e);
    else if (e->aborted)
        explain_nobody_came(d, e);
    else
        explain_gone(d, e);
    return diagnostic_finish(d);
}

struct diagnostic *cause_rank_back(const struct evidence_at *at)
{
    struct diagnostic *d = cause_new(at, E_RANK_LOST, "a rank that had left is back, step aborted");

    diagnostic_field(d, "cause", "this rank had left (%s), and gradients of this step were added up without it",
                     leave(at));
    diagnostic_field(d, "fix", "none is needed: the step begins again with all ranks");
    diagnostic_field(d, "or", "%s after the last step only   (if the rank should not come back)", leave(at));
    diagnostic_field(d, "does not help", "the ranks that went on: they lose only this step");
    diagnostic_field(d, "state", STEP_ABORTED);
    return diagnostic_finish(d);
}

struct diagnostic *cause_inherited(const struct evidence_inherited *e)
{
    struct diagnostic *d =
        cause_new(&e->at, E_RANK_LOST, "what a dead process left of its step is refused, step aborted");
    struct strbuf buf = {0};

    if (e->refusal)
        strbuf_add_bytes(&buf, e->refusal->text, strcspn(e->refusal->text, "\n"));
    diagnostic_field_take(d, "got", &buf);
    if (e->asked)
        diagnostic_field(d, "cause",
                         "a dead process of this rank had asked for the step, and no successor can change its request");
    else if (!e->refusal)
        diagnostic_field(d, "cause", "the sums hold part of a micro-batch of a dead process, which was not redone");
    else
        diagnostic_field(
            d, "cause",
            "%" PRIu32
            " micro-batch%s of this rank had been ended by a process that died since: its successor cannot change that",
            e->n_ended, e->n_ended == 1 ? "" : "es");
    diagnostic_field(d, "fix", "none is needed: the step begins again, and the successor does all of it");
    diagnostic_field(d, "or", "fix the program   (if the step is refused again, then for the successor's own work)");
    diagnostic_field(d, "does not help", "the ranks that waited: they lose only this step");
    diagnostic_field(d, "state", STEP_ABORTED);
    return diagnostic_finish(d);
}

/* ---- the abort of a step ------------------------------------------------------------------------------- */

/* Prints the complete text, because the reader of an abort must find the reason in one place. */
static void print_reason(struct strbuf *buf, const char *text)
{
    size_t n = strlen(text);

    while (n > 0 && text[n - 1] == '\n')
        n--;
    strbuf_add_bytes(buf, text, n);
}

static void add_fix_of_abort(struct diagnostic *d, const struct evidence_abort *e)
{
    diagnostic_field(d, "fix", "%s",
                     is_c(&e->at) ? "go back to zerod_epoch() and begin the step again at micro-batch 0"
                                  : "begin the step again with its first micro-batch");
}

/* Makes the warning for an abort that the program requested, for instance to resume from a checkpoint. It is no
 * fault. */
static struct diagnostic *begins_again(const struct evidence_abort *e)
{
    struct diagnostic *d = cause_new(&e->at, E_RANK_LOST, "step begins again on all ranks");

    diagnostic_warn(d);
    cause_foreign_field(d, "reason", e->why);
    diagnostic_field(d, "cause", "the program asked for it");
    add_fix_of_abort(d, e);
    diagnostic_field(d, "state",
                     "nothing is wrong: gradients of the step are dropped on all ranks, and attempt %" PRIu32 " begins",
                     e->new_attempt);
    return diagnostic_finish(d);
}

struct diagnostic *cause_aborted(const struct evidence_abort *e)
{
    const char *reason = e->reason ? e->reason->text : e->reason_text;
    const char *class = e->reason ? e->reason->cause_class : e->reason_class;
    struct strbuf buf = {0};
    struct diagnostic *d;

    if (!reason && e->at.rank >= 0)
        return begins_again(e);
    d = cause_new(&e->at, E_RANK_LOST, "step aborted for all ranks");
    if (class && class[0])
        diagnostic_class(d, class);
    if (e->at.rank >= 0)
        diagnostic_field(d, "guilty", "rank %" PRId64, e->at.rank);
    cause_foreign_field(d, "reason", e->why);
    if (reason) {
        print_reason(&buf, reason);
        diagnostic_field_take(d, "cause", &buf);
    } else {
        diagnostic_field(d, "cause", "an administrator asked for it (zerodctl abort-step)");
    }
    add_fix_of_abort(d, e);
    diagnostic_field(d, "does not help", "%s",
                     e->at.rank >= 0 ? "the other ranks: they lose only this step"
                     : reason        ? "the ranks that waited: they lose only this step"
                                     : "the training program: the abort came from outside the job");
    diagnostic_field(d, "state",
                     "gradients of the step are dropped on all ranks, weights and optimizer state are unchanged; "
                     "attempt %" PRIu32 " begins",
                     e->new_attempt);
    return diagnostic_finish(d);
}

/* ---- E1303 --------------------------------------------------------------------------------------------- */

static void explain_other_node(struct diagnostic *d, const struct evidence_stall *e)
{
    if (e->decided) {
        diagnostic_field(d, "cause", "the step, or the write window, is decided, and a node has not ended it");
        diagnostic_field(d, "fix", "see that the daemons of all nodes run, and reach node 0: then it ends by itself");
        diagnostic_field(d, "or", "zerodctl status on node 0   (whether that node is reached, and why not)");
        diagnostic_field(d, "or", "end the run   (if a node's daemon does not come back with what it held)");
        diagnostic_field(d, "does not help", "the ranks of this node; zerodctl abort-step; a longer stall_timeout");
        return;
    }
    if (e->cut_off) {
        diagnostic_field(d, "cause",
                         "nothing goes on without node 0: its run or its machine has ended, or the network is down");
        diagnostic_field(d, "fix", "see that its daemon runs, and is reached from here: then the wait ends by itself");
        diagnostic_field(d, "or", "end the run here, too   (if it has ended there)");
        diagnostic_field(d, "does not help", "the ranks of this node; zerodctl abort-step; a longer stall_timeout");
        return;
    }
    if (e->forming)
        diagnostic_field(d, "cause", "the job forms when all ranks of all nodes have attached and declared");
    else
        diagnostic_field(d, "cause",
                         "a step needs every node: all ranks of this node wait, and a rank of that node is behind");
    diagnostic_field(d, "fix",
                     "run zerodctl ranks on that node: it shows which rank is behind, and which rank it waits for");
    diagnostic_field(d, "or", "zerodctl status on node 0   (whether that node is reached, and why not)");
    diagnostic_field(d, "does not help", "the ranks of this node; bucket size; a longer stall_timeout");
}

static void explain_stall(struct diagnostic *d, const struct evidence_stall *e)
{
    if (e->elsewhere) {
        explain_other_node(d, e);
        return;
    }
    if (e->forming) {
        diagnostic_field(d, "cause", "the job forms when all ranks have attached and declared, and some have not");
        diagnostic_field(d, "fix", "start every rank of world.size; zerodctl ranks shows which are missing");
        diagnostic_field(d, "does not help", "the model; memory");
        return;
    }
    if (e->deadlocked) {
        diagnostic_field(d, "cause",
                         e->behind_window ? "a write window is open, and these calls have to wait for its end"
                                          : "the ranks wait in different calls, and each call needs all ranks");
        diagnostic_field(d, "fix",
                         !e->behind_window ? "the same collective calls in the same order on every rank"
                         : is_c(&e->at)    ? "zerod_write_end on every rank, before the step's first micro-batch"
                                        : "leave zerod.writable(...) on every rank, before the step's first backward");
        diagnostic_field(d, "or", "zerodctl abort-step   (drops the step on all ranks)");
        diagnostic_field(d, "does not help", "the speed of a rank; bucket size; a longer stall_timeout");
        return;
    }
    if (e->gone) {
        diagnostic_field(d, "cause", "the process that the others wait for has ended without %s", leave(&e->at));
        diagnostic_field(d, "fix", "start it again with the same run id; zerodrun --restarts N does it by itself");
        diagnostic_field(d, "or", "%s before the process ends   (if it was done)", leave(&e->at));
        diagnostic_field(d, "does not help", "the ranks that wait; bucket size; a longer stall_timeout");
        return;
    }
    if (e->again) {
        diagnostic_field(d, "cause",
                         "a process that has left (%s) attaches again when every rank has left, and after rank 0",
                         leave(&e->at));
        diagnostic_field(d, "fix", "%s on every rank, and then attach again on every rank", leave(&e->at));
        diagnostic_field(d, "does not help", "RANK, the run id; a longer stall_timeout");
        return;
    }
    if (e->absent)
        diagnostic_field(d, "cause", "the rank that the others wait for never began the step");
    else
        diagnostic_field(d, "cause", "a step needs every rank, and the one that the others wait for is behind");
    if (e->where)
        diagnostic_field(d, "fix", "see why it stays there; zerodctl stacks looks again, at all of its threads");
    else
        diagnostic_field(d, "fix", "see where it is: py-spy dump --pid PID, or gdb -p PID   (its pid: zerodctl ranks)");
    diagnostic_field(d, "or", "zerodctl abort-step   (drops the step on all ranks)");
    diagnostic_field(d, "does not help", "the ranks that wait; bucket size; a longer stall_timeout");
}

/* Does the step stay open because this node may not abort it alone? */
static bool is_kept_open(const struct evidence_stall *e)
{
    return e->decided || (e->cut_off && !e->forming);
}

struct diagnostic *cause_stalled(const struct evidence_stall *e)
{
    struct strbuf title = {0};
    struct diagnostic *d;

    strbuf_add(&title, "stalled for ");
    print_duration(&title, e->since_ms);
    if (e->aborted)
        strbuf_add(&title, is_kept_open(e) ? ", wait given up" : e->forming ? ", forming given up" : ", step aborted");
    d = cause_new(&e->at, E_STALLED, strbuf_text(&title));
    strbuf_deinit(&title);
    if (!e->aborted)
        diagnostic_warn(d);
    if (e->absent)
        diagnostic_class(d, "M7");
    cause_foreign_field(d, "waits", e->waiting);
    cause_foreign_field(d, "on", e->blocking);
    if (e->where)
        diagnostic_field(d, "where", "%s", e->where);
    diagnostic_params(d, e->at.layout, e->params, e->n_params);
    explain_stall(d, e);
    if (e->again && !e->aborted)
        diagnostic_field(d, "state", "nothing is lost, and all keep waiting");
    else if (!e->aborted)
        diagnostic_field(d, "state", "nothing is lost, and all keep waiting; diagnostics.stall_timeout ends the wait");
    else if (is_kept_open(e))
        diagnostic_field(
            d, "state", "the ranks that waited are refused; the daemon holds its part, which ends when the nodes meet");
    else if (e->forming)
        diagnostic_field(d, "state", "the ranks that waited are refused and may try again; no job was formed");
    else
        diagnostic_field(d, "state", STEP_ABORTED);
    return diagnostic_finish(d);
}

/* ---- E1304 --------------------------------------------------------------------------------------------- */

struct diagnostic *cause_held(const struct evidence_at *at, const char *why)
{
    struct diagnostic *d = cause_new(at, E_HELD, NULL);

    diagnostic_field(d, "cause", "%s", why);
    diagnostic_field(d, "fix",
                     "restore the version and the configuration that the run was started with, and restart the "
                     "daemon: it resumes the run");
    diagnostic_field(
        d, "or", "zerodctl drop   (discards the run; the next one begins with the newest checkpoint, if there is one)");
    diagnostic_field(d, "does not help", "the trainers; the gradients");
    diagnostic_field(d, "state", "nothing was changed: the memory of the run is held as the last daemon left it");
    return diagnostic_finish(d);
}

/* ---- E1305 --------------------------------------------------------------------------------------------- */

/* Adds the step with which the next run begins, and the setting that saves the last step. */
static void add_what_was_saved(struct diagnostic *d, const struct evidence_stopped *e)
{
    if (e->at.step < 0)
        diagnostic_field(d, "fix", "start the daemon and the ranks again");
    else if (e->is_saved)
        diagnostic_field(d, "fix",
                         "start the daemon and the ranks again: the run begins with step %" PRId64 ", from %s",
                         e->at.step, e->dir);
    else if (e->dir)
        diagnostic_field(
            d, "fix", "start the daemon and the ranks again: the run begins with the newest checkpoint in %s, if any",
            e->dir);
    else
        diagnostic_field(d, "fix", "start the daemon and the ranks again, from what the program has saved");
    if (e->at.step >= 0 && !e->saves_on_stop)
        diagnostic_field(d, "or", "next time %s: a daemon that stops saves the last step",
                         e->dir ? "checkpoint.save_on_stop: true" : "checkpoint.dir in the configuration");
}

struct diagnostic *cause_stopped(const struct evidence_stopped *e)
{
    struct diagnostic *d = cause_new(&e->at, E_STOPPED, NULL);

    if (e->is_kept)
        diagnostic_field(d, "cause",
                         "zerod was told to stop for good (%s): by systemctl stop, a shutdown, or the end of zerodrun",
                         e->signal);
    else
        diagnostic_field(d, "cause", "zerod was told to stop (%s), and nobody keeps the state of the run", e->signal);
    add_what_was_saved(d, e);
    if (e->is_kept)
        diagnostic_field(d, "or", "next time systemctl restart: the next daemon goes on with the run, ranks only wait");
    else
        diagnostic_field(d, "or", "next time under systemd or zerodrun, which keep the state for the next daemon");
    diagnostic_field(d, "or", "next time zerodctl drain: the daemon stops when all ranks have left");
    diagnostic_field(d, "does not help", "the training program; a longer limits.reattach_timeout");
    if (e->at.step < 0)
        diagnostic_field(d, "state", "nothing is lost: the job was not formed");
    else if (e->is_saved)
        diagnostic_field(d, "state", "saved: the checkpoint has all that was committed");
    else
        diagnostic_field(d, "state", "lost: masters and moments%s", e->dir ? " since that checkpoint" : "");
    return diagnostic_finish(d);
}

/* ---- E1111 --------------------------------------------------------------------------------------------- */

struct diagnostic *cause_alike(const struct evidence_alike *e)
{
    struct diagnostic *d = cause_new(&e->at, E_ALIKE, "ranks push the same gradients");
    bool is_c = caller_of(&e->at, NULL) == CALLER_C;

    diagnostic_warn(d);
    diagnostic_class(d, "X2");
    diagnostic_field(d, "got",
                     "the same bytes from ranks %u to %u, of all %" PRIu32 " parameters, in %" PRIu32 " steps in a row",
                     e->first_rank, e->first_rank + e->n_ranks - 1, e->n_params, e->n_steps);
    diagnostic_field(
        d, "cause",
        "the ranks compute on the same data, so %u of them do the work of one: the sampler does not split it",
        e->n_ranks);
    if (is_c) {
        diagnostic_field(d, "fix", "give every rank batches of its own, by its rank and the number of ranks");
    } else {
        diagnostic_field(d, "fix", "DataLoader(dataset, sampler=DistributedSampler(dataset))");
        diagnostic_field(d, "or", "torch.manual_seed(seed + opt.rank)   (where batches are drawn at random)");
        diagnostic_field(d, "or", "datasets.distributed.split_dataset_by_node(dataset, rank, world_size)");
    }
    diagnostic_field(d, "does not help",
                     "the sum over the ranks: the mean of equal gradients is the gradient; the learning rate");
    diagnostic_field(d, "state", "nothing was refused; not reported again in later steps");
    return diagnostic_finish(d);
}
