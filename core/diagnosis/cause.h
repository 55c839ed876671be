/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * From evidence to diagnostics: the cause classes of docs/diagnostics.md and the texts
 * of every refusal. Pure; each function returns a finished diagnostic of which the caller owns one reference.
 *
 * Strings in evidence are borrowed for the call; NULL counts as unknown.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/process-limit.h"
#include "core/diagnosis/diagnosis.h"
#include "kernels/dtype.h"

struct layout;
struct manifest;

/* Where and whom it concerns; negative: not known or not meant. */
struct evidence_at {
    const struct layout *layout; /* may be NULL */
    int64_t rank, step, micro_batch;
    const char *client; /* program and version as its Hello says: whose syntax fixes are given in */
    bool observed;      /* of a model in DDP, where zerod only looks on: DDP refused, and DDP's switches are fixes */
};

/* E1001, and E1006 for sets and counts of a static graph. */
struct evidence_duplicate {
    struct evidence_at at;
    const uint32_t *params; /* all that were pushed again, in order of arrival */
    size_t n_params;
    struct diagnostic_push first, second;   /* of params[0]; strings borrowed */
    bool sums_known, sums_equal;            /* do the bytes of first and second agree? */
    bool abort_step;                        /* policy: the step was aborted for all */
    bool accumulated;                       /* policy accumulate: a warning, the pushes were added as later passes */
    uint32_t n_micro_batches, n_configured; /* > 0 and different: more micro-batches than configured (D2) */
    enum diagnostic_code code;              /* 0: E_DUPLICATE; E_GRAPH_CHANGED: more pushes than static_graph learnt */
    bool ddp_complained; /* observer of DDP: it says "ready twice", params arrived exactly once (D4) */
};
struct diagnostic *cause_duplicate(const struct evidence_duplicate *evidence);

/* A push that is refused for its place or form: E_STALE, E_EARLY, E_AFTER_BOUNDARY, E_PARAMETER, E_GRADIENT. */
struct evidence_push {
    struct evidence_at at; /* where the rank stands */
    enum diagnostic_code code;
    const uint32_t *params;
    size_t n_params;
    struct diagnostic_push push; /* the first that was refused; strings borrowed */
    bool other_incarnation;
    bool asked;              /* the rank has asked for the step */
    const char *detail;      /* E_GRADIENT: "expected 4096 bytes of fp32, got 2048 of bf16" */
    const char *cause;       /* E_EARLY, of a request that is no push: why it cannot be made now; else NULL */
    const char *const *fix;  /* then: what to do first, [0] with the C API and [1] with the Python package */
};
struct diagnostic *cause_push(const struct evidence_push *evidence);

/* E1005, or the warning about missing parameters under on_missing: zero and skip. */
enum { EVIDENCE_MAX_LACKING = 5 }; /* ranks that a text names; of more it has the number */

/* One rank's part of what is missing. */
struct evidence_lacking {
    unsigned rank;
    const uint32_t *params;
    size_t n_params;
};

struct evidence_missing {
    struct evidence_at at;
    bool warning;
    bool skipped;           /* on_missing: skip */
    const uint32_t *params; /* missing on this rank (E1005), or on any rank (warning) */
    size_t n_params;
    uint32_t n_trainable;
    unsigned world_size;
    const struct evidence_lacking
        *lacking;           /* warning: the first EVIDENCE_MAX_LACKING ranks of this node that miss some */
    unsigned n_lacking;     /* how many ranks of this node miss some */
    bool lacking_elsewhere; /* ranks of other nodes may miss some, too */
    bool same_on_all_ranks; /* every rank misses the same set */
    bool same_every_step;   /* the same set as in every step so far */
    bool kin_used;          /* warning: others of the same list of modules had gradients */
    uint64_t n_steps_seen;
    uint32_t n_micro_batches, n_configured; /* > 0 and fewer than configured */
    uint64_t n_forwards, n_backwards;       /* of this rank in this step, as its client counts; 0: not counted */
    bool prefix;                            /* what arrived is a prefix of the usual backward order */
    bool abandoned;
    uint32_t n_given_up; /* pushes of the backward that was abandoned */
    const char *why;     /* the reason for abandoning it, in the client's words */
    /* The client's evidence. */
    bool absent;                /* the rank never opened the step (M7) */
    const char *exception;      /* the exception that left the backward or the forward, as the client says */
    const char *raised_at;      /* call site */
    const char *swallowed_by;   /* the frame that caught the exception and continued */
    bool in_forward;            /* it left the forward (M3), not the backward (M4) */
    bool requires_grad_changed; /* requires_grad is not what was declared (M6) */
    const char *dead_segment;   /* exactly whole checkpointed segments are missing; one of them (M5) */
    uint32_t n_dead_segments;
    const char *site;      /* call site of that segment's forward */
    const uint8_t *called; /* per entry of params: EVIDENCE_* (core/diagnosis/evidence.h) of its module, 0 unknown */
    bool ddp_silent;       /* an observer of DDP: DDP did not notice; seen when the optimizer's step was asked for */
    /* An observer of DDP: all gradients arrived, but not through the wrapper (X1, E1105; params are none). */
    bool wrapper_bypassed;
};
struct diagnostic *cause_missing(const struct evidence_missing *evidence);

/* E1111, a warning: all ranks push the same bytes. */
struct evidence_alike {
    struct evidence_at at;
    unsigned first_rank, n_ranks; /* those that were compared */
    uint32_t n_params, n_steps;
};
struct diagnostic *cause_alike(const struct evidence_alike *evidence);

/* E1006: static_graph and another set than the learnt one. */
struct evidence_graph {
    struct evidence_at at;
    const uint32_t *params; /* pushed but not learnt, or learnt but not pushed */
    size_t n_params;
    bool extra; /* pushed but not learnt */
};
struct diagnostic *cause_graph_changed(const struct evidence_graph *evidence);

/* E1007 */
struct evidence_abandoned {
    struct evidence_at at;
    const char *why;    /* the client's words; NULL: the rank left */
    uint32_t n_dropped; /* pushes taken back */
    bool aborted;       /* some were reduced already: the step was aborted for all */
};
struct diagnostic *cause_abandoned(const struct evidence_abandoned *evidence);

/* Another node has refused to form the job: with that code and text. */
struct diagnostic *cause_refused_elsewhere(const struct evidence_at *at, unsigned code, const char *text);

/* E1101; ranks' manifests, NULL entries for ranks that have not declared. */
struct diagnostic *cause_manifest(const struct manifest *const *manifests, unsigned world_size);

/* E1101 on attach to a formed job, or E1103 etc. of declaring: one sentence says what. */
struct diagnostic *cause_declare(const struct evidence_at *at, const char *what, const char *fix);

/* E1108 */
struct evidence_args {
    struct evidence_at at;
    unsigned other_rank;       /* who asked first */
    const char *name;          /* "lr of group 0" */
    double value, other_value; /* NAN: not given, so as configured */
};
struct diagnostic *cause_step_args(const struct evidence_args *evidence);

/* E1109 */
struct diagnostic *cause_other_run(const struct evidence_at *at, const char *held_run, const char *asked_run,
                                   uint64_t epoch);
/* E1109 between nodes, before there is state. who: a sentence says which node has which run. */
struct diagnostic *cause_runs_differ(const struct evidence_at *at, const char *who);

/* E1201 */
struct evidence_nonfinite {
    struct evidence_at at; /* rank of the finding */
    uint32_t param;
    uint64_t elem;
    float value;
    uint64_t n_nan, n_inf;
    bool overflowed; /* finite inputs whose sum is not */
    bool held;       /* policy error: the step waits; else it was skipped */
    double loss_scale;
};
struct diagnostic *cause_nonfinite(const struct evidence_nonfinite *evidence);

/* E1202 */
struct diagnostic *cause_loss_scale(const struct evidence_nonfinite *evidence, double min_loss_scale);

/* E1203, a warning: the gradients of some ranks are smaller than the others' by about the loss scale. */
struct evidence_unscaled {
    struct evidence_at at; /* rank: the only such rank, or -1 */
    const bool *set;       /* world_size: these ranks */
    unsigned world_size;
    double ratio; /* of the others' norms to theirs */
    double loss_scale;
};
struct diagnostic *cause_unscaled(const struct evidence_unscaled *evidence);

/* E1301 */
struct diagnostic *cause_rank_taken(const struct evidence_at *at, int64_t pid, uint64_t since_ns, uint64_t now_ns);
/* By another connection of the process that asks: a second optimizer, mostly. */
struct diagnostic *cause_rank_taken_by_itself(const struct evidence_at *at, int64_t pid);

/* E1302 */
struct evidence_lost {
    struct evidence_at at;
    int64_t pid;
    bool left;    /* it said that it leaves (on_leave: stop) */
    bool aborted; /* no successor came, or its gradients differ: aborted for all ranks */
    bool differs; /* the successor's gradient of param differs from its predecessor's */
    bool on_gpu;  /* which a GPU wrote, maybe not to its end when the process died */
    bool crossed; /* its successor waits for gradients of other nodes, whose ranks may wait for it */
    uint32_t param;
    const char *last_message; /* "Push", "EndBackward", ... */
    const char *outstanding;  /* "34 of 52 parameters of micro-batch 2" */
    uint64_t waited_ms;
};
struct diagnostic *cause_rank_lost(const struct evidence_lost *evidence);
/* A rank that had left is there again, and the open step was added up without it: aborted for all. */
struct diagnostic *cause_rank_back(const struct evidence_at *at);

/*
 * The step is aborted for all ranks, because a dead process left a part of it that is refused, and no other process can
 * change that part.
 */
struct evidence_inherited {
    struct evidence_at at;            /* rank: whose process is gone */
    uint32_t n_ended;                 /* micro-batches that it ended; 0: only a part of one stands */
    bool asked;                       /* it had asked for the step, with other arguments than the refused one */
    const struct diagnostic *refusal; /* of the step; NULL: none but that a part of a micro-batch stands */
};
struct diagnostic *cause_inherited(const struct evidence_inherited *evidence);

/* The abort of a step as the innocent see it: names whose request or fault it was. */
struct evidence_abort {
    struct evidence_at at; /* rank: who caused it */
    const char *why;
    uint32_t new_attempt;
    const struct diagnostic *reason;        /* may be NULL */
    const char *reason_text, *reason_class; /* of one that another node made, instead; may be NULL */
};
struct diagnostic *cause_aborted(const struct evidence_abort *evidence);

/* E1501, E1502, E1503 */
struct evidence_node {
    struct evidence_at at;
    /* E1501: the node. Of the others the sentence says which it is: they are told to all nodes. */
    unsigned node, first_rank, n_ranks;
    const char *address, *waits; /* waits: who waits for it to do what; may be NULL */
    const char *why;             /* a sentence; E1501: what follows the colon behind one */
    uint32_t generation;         /* E1502: the next one */
    unsigned here;               /* cause_nodes_differ(): who says so */
};
struct diagnostic *cause_node_silent(const struct evidence_node *evidence); /* it may come back */
/* why: names the keys, with the values "there" and "here". */
struct diagnostic *cause_nodes_differ(const struct evidence_node *evidence);
struct diagnostic *cause_engine(const struct evidence_node *evidence);
/* E1502 of an engine of GPUs: generation is of the next one. */
struct diagnostic *cause_device(const struct evidence_node *evidence);
/* E1502: no engine of GPUs was ever ready, and the job is not formed. */
struct evidence_device_unformed {
    struct evidence_at at;
    const char *why;
    uint64_t gpu_bytes;           /* what zerod needs of each GPU */
    uint64_t offloaded_gpu_bytes; /* with offload_optimizer; 0: the state is offloaded, or cannot be */
    uint64_t offloaded_host_bytes;
};
struct diagnostic *cause_device_unformed(const struct evidence_device_unformed *evidence);

struct diagnostic *cause_node_reborn(const struct evidence_node *evidence); /* its state is gone, too */

/* E1303 */
struct evidence_stall {
    struct evidence_at at;
    const char *waiting;    /* "ranks 0, 2 wait in step 4711" */
    const char *blocking;   /* "rank 1 (pid 1234, last message Push 12.3 s ago)" */
    const char *where;      /* lines: the stacks of these ranks, as far as known; clean; NULL: nothing is known */
    const uint32_t *params; /* that are being waited for, may be none */
    size_t n_params;
    uint64_t since_ms;
    bool aborted; /* stall_timeout */
    bool forming;
    bool absent;     /* the awaited rank never opened the step (M7) */
    bool decided;    /* the step or window: nothing aborts it */
    bool deadlocked; /* ranks wait in different calls, so for each other */
    bool behind_window; /* deadlocked: these calls come after the end of the window that is open */
    bool gone;       /* the processes of all awaited ranks have ended */
    bool elsewhere;  /* the awaited rank is on another node */
    bool cut_off;    /* elsewhere: node 0 is not reached */
    bool again;      /* processes that have left the run wait to attach again */
};
struct diagnostic *cause_stalled(const struct evidence_stall *evidence);

/* E1401 */
struct evidence_quota {
    struct evidence_at at;
    const char *what; /* "gradient slots", "live parameters", "memory of the job" */
    const char *unit; /* "bytes", "elements" */
    uint64_t asked, held, allowed;
    const char *sum; /* several lines: the classes of memory; may be NULL */
    const char *fix;
    bool of_job;         /* the limit is the job's, not the rank's */
    struct process_limit limit; /* the daemon's, when that is what is short */
};
struct diagnostic *cause_quota(const struct evidence_quota *evidence);

/* The texts for a client's report, one row per code. [0]: for callers of the C API, [1]: of the Python package. */
struct report_text {
    enum diagnostic_code code;
    const char *cause;
    const char *fix[2];
    const char *alternative[2]; /* or NULL */
    const char *does_not_help;
    const char *state;
    const char *title_later, *state_later; /* for a rank that is attached already; NULL: as otherwise */
    const char *state_at_end;              /* for a process that ends because of it; NULL: as otherwise */
    bool leaves_gap;                       /* the step lacks the refused gradient: the text says how to continue */
};

/* NULL: clients do not report that code. Constant, so that a signal handler may print it. */
const struct report_text *cause_report_text(enum diagnostic_code code);

/*
 * E1402, E1403, and client reports E1102 to E1107, E1110: a sentence and a fix. attached: the job was formed
 * with this client before it reported.
 */
/* A rank that another user has formed. */
/* E1304. why: a sentence on what keeps this daemon from taking over what an earlier one left. */
struct diagnostic *cause_held(const struct evidence_at *at, const char *why);
/* E1305 */
struct evidence_stopped {
    struct evidence_at at; /* step: the open one; -1: the job was not formed */
    const char *signal;
    bool is_kept;       /* by a service manager, which then has said that it starts no other daemon */
    const char *dir;    /* of checkpoints; NULL: none is configured */
    bool saves_on_stop; /* checkpoint.save_on_stop */
    bool is_saved;      /* a checkpoint has all that was committed */
};
struct diagnostic *cause_stopped(const struct evidence_stopped *evidence);
/* E1701, a warning, and E1702. dir: NULL, none is configured. why: a sentence that names the file. */
struct diagnostic *cause_not_saved(const struct evidence_at *at, const char *dir, const char *why);
/* dir: of all checkpoints; it cannot be opened or listed. */
struct diagnostic *cause_no_folder(const struct evidence_at *at, const char *dir, const char *why);
struct diagnostic *cause_not_loaded(const struct evidence_at *at, const char *path, const char *why);
struct diagnostic *cause_rank_owned(const struct evidence_at *at, uint32_t uid, uint32_t gid, uint32_t owner);
struct diagnostic *cause_not_allowed(const struct evidence_at *at, uint32_t uid, uint32_t gid, const char *what);
struct diagnostic *cause_bad_message(const struct evidence_at *at, const char *what);
struct diagnostic *cause_report(const struct evidence_at *at, enum diagnostic_code code, const uint32_t *params,
                                size_t n_params, const char *detail, bool attached);
