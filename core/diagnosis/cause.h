/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Turns evidence into diagnostics: the cause classes of docs/diagnostics.md and the texts of every refusal. Pure. Each
 * function returns a finished diagnostic, and the caller owns one reference to it.
 *
 * Strings in evidence are borrowed for the call; NULL means unknown.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/process-limit.h"
#include "core/diagnosis/diagnosis.h"
#include "kernels/dtype.h"

struct layout;
struct manifest;

/* The position and the rank that a diagnostic is about. A negative number is unknown, or does not apply. */
struct evidence_at {
    const struct layout *layout; /* may be NULL */
    int64_t rank, step, micro_batch;
    const char *client; /* program and version, from the rank's Hello; they select the syntax of fixes */
    bool observed;      /* zerod only observes a DDP model: DDP made the refusal, and fixes are DDP's settings */
};

/* Evidence for E1001, or for E1006 if static_graph learnt another count. */
struct evidence_duplicate {
    struct evidence_at at;
    const uint32_t *params; /* all parameters that were pushed again, in order of arrival */
    size_t n_params;
    struct diagnostic_push first, second;   /* the pushes of params[0]; strings borrowed */
    bool sums_known, sums_equal;            /* are the bytes of both pushes known, and are they equal? */
    bool abort_step;                        /* on_duplicate: abort_step: the step was aborted for all ranks */
    bool accumulated;                       /* on_duplicate: accumulate: a warning; pushes were added as later passes */
    uint32_t n_micro_batches, n_configured; /* 0 < n_configured < n_micro_batches: too many micro-batches (D2) */
    enum diagnostic_code code;              /* 0: E_DUPLICATE; E_GRAPH_CHANGED: static_graph learnt fewer pushes */
    bool ddp_complained;                    /* DDP reports "ready twice", but each of params arrived only once (D4) */
};
struct diagnostic *cause_duplicate(const struct evidence_duplicate *evidence);

/*
 * Evidence for a push or request at a wrong position or of a wrong form: E_STALE, E_EARLY, E_AFTER_BOUNDARY,
 * E_PARAMETER, E_GRADIENT.
 */
struct evidence_push {
    struct evidence_at at; /* the rank's position */
    enum diagnostic_code code;
    const uint32_t *params;
    size_t n_params;
    struct diagnostic_push push; /* the first refused push; strings borrowed */
    bool other_incarnation;
    bool asked;              /* the rank has already asked for the step */
    const char *detail;      /* E_GRADIENT: "expected 4096 bytes of fp32, got 2048 of bf16" */
    const char *cause;       /* E_EARLY of a request other than a push: why it is too early; else NULL */
    const char *const *fix;  /* if cause is set: the action that must come first, [0] with the C API, [1] with Python */
};
struct diagnostic *cause_push(const struct evidence_push *evidence);

/* Evidence for E1005, or for the warning about missing parameters under on_missing: zero and skip. */
enum { EVIDENCE_MAX_LACKING = 5 }; /* ranks that a text names; it counts the other ranks */

/* The parameters whose gradients one rank did not push. */
struct evidence_lacking {
    unsigned rank;
    const uint32_t *params;
    size_t n_params;
};

/* Which ranks of this node miss parameters; for the warning. */
struct evidence_lacking_ranks {
    const struct evidence_lacking *first; /* the first EVIDENCE_MAX_LACKING of them */
    unsigned n;                           /* number of all of them */
    bool elsewhere;                       /* ranks of other nodes may miss parameters, too */
};

/* A backward that the rank abandoned in this step. */
struct evidence_given_up {
    bool abandoned;
    uint32_t n_pushes;
    const char *why; /* the client's reason */
};

/* The exception that left the backward or the forward, from the client. */
struct evidence_exception {
    const char *text;
    const char *raised_at;    /* call site of the exception */
    const char *swallowed_by; /* the frame that caught the exception and continued */
    bool in_forward;          /* the exception left the forward (M3), not the backward (M4) */
};

/* Only complete checkpointed segments are missing (M5), from the client. */
struct evidence_dead_segments {
    const char *first; /* the name of one */
    uint32_t n;
    const char *site; /* call site of the forward of that one */
};

struct evidence_missing {
    struct evidence_at at;
    bool warning;
    bool skipped;           /* on_missing: skip */
    const uint32_t *params; /* missing on this rank (E1005), or on any rank (warning) */
    size_t n_params;
    uint32_t n_trainable;
    unsigned world_size;
    struct evidence_lacking_ranks lacking;
    bool same_on_all_ranks; /* every rank misses the same parameters */
    bool same_every_step;   /* the same parameters were missing in every step so far */
    bool kin_used;          /* warning: other parameters of the same list of modules had gradients */
    uint64_t n_steps_seen;
    uint32_t n_micro_batches, n_configured; /* n_micro_batches < n_configured: too few micro-batches */
    uint64_t n_forwards, n_backwards;       /* this rank's counts in this step, from its client; 0: not counted */
    bool prefix;                            /* the gradients that arrived are the first of the usual backward order */
    struct evidence_given_up given_up;
    /* Evidence from the client: */
    bool absent; /* the rank never opened the step (M7) */
    struct evidence_exception exception;
    bool requires_grad_changed; /* requires_grad differs from the declaration (M6) */
    struct evidence_dead_segments dead_segments;
    const uint8_t *called; /* for each of params: EVIDENCE_* of its module (core/diagnosis/evidence.h); 0: unknown */
    bool ddp_silent;       /* observer: DDP did not report it; found when the optimizer's step was requested */
    /* Observer: all gradients arrived, but through calls that bypass DDP's wrapper (X1, E1105). params is empty. */
    bool wrapper_bypassed;
};
struct diagnostic *cause_missing(const struct evidence_missing *evidence);

/* Evidence for E1111, a warning: all ranks push the same bytes. */
struct evidence_alike {
    struct evidence_at at;
    unsigned first_rank, n_ranks; /* the ranks that were compared */
    uint32_t n_params, n_steps;
};
struct diagnostic *cause_alike(const struct evidence_alike *evidence);

/* Evidence for E1006: a step pushed other parameters than static_graph learnt. */
struct evidence_graph {
    struct evidence_at at;
    const uint32_t *params; /* pushed but not learnt, or learnt but not pushed */
    size_t n_params;
    bool extra; /* true: pushed but not learnt; false: learnt but not pushed */
};
struct diagnostic *cause_graph_changed(const struct evidence_graph *evidence);

/* Evidence for E1007: a backward was abandoned. */
struct evidence_abandoned {
    struct evidence_at at;
    const char *why;    /* the client's reason; NULL: the rank left the run */
    uint32_t n_dropped; /* number of pushes that were dropped */
    bool aborted;       /* some of the pushes were already reduced: the step was aborted for all ranks */
};
struct diagnostic *cause_abandoned(const struct evidence_abandoned *evidence);

/* Makes the diagnostic for another node's refusal to form the job, with that node's code and text. */
struct diagnostic *cause_refused_elsewhere(const struct evidence_at *at, unsigned code, const char *text);

/* Makes E1101. manifests: one per rank; NULL for ranks that have not declared. */
struct diagnostic *cause_manifest(const struct manifest *const *manifests, unsigned world_size);

/* Makes E1101 for a refused declaration, for instance on attach to a formed job. what: a sentence with the reason. */
struct diagnostic *cause_declare(const struct evidence_at *at, const char *what, const char *fix);

/* Evidence for E1108: ranks asked for the step with different arguments. */
struct evidence_args {
    struct evidence_at at;
    unsigned other_rank;       /* the rank that asked for the step first */
    const char *name;          /* such as "lr of group 0" */
    double value, other_value; /* NAN: not given, so the configured value is used */
};
struct diagnostic *cause_step_args(const struct evidence_args *evidence);

/* Makes E1109: the daemon holds the state of another run. */
struct diagnostic *cause_other_run(const struct evidence_at *at, const char *held_run, const char *asked_run,
                                   uint64_t epoch);
/* Makes E1109 between nodes, before a job has state. who: a sentence that says which node has which run. */
struct diagnostic *cause_runs_differ(const struct evidence_at *at, const char *who);

/* Evidence for E1201: a gradient, or a sum of gradients, is not finite. */
struct evidence_nonfinite {
    struct evidence_at at; /* rank: the rank whose gradient has the value */
    uint32_t param;
    uint64_t elem;
    float value;
    uint64_t n_nan, n_inf;
    bool overflowed; /* the inputs are finite, but their sum is not */
    bool held;       /* on_nonfinite is error: the step is held; false: it was skipped */
    double loss_scale;
};
struct diagnostic *cause_nonfinite(const struct evidence_nonfinite *evidence);

/* Makes E1202: gradients overflow, and the loss scale is at its minimum. */
struct diagnostic *cause_loss_scale(const struct evidence_nonfinite *evidence, double min_loss_scale);

/* Evidence for E1203, a warning: the gradients of some ranks are smaller than those of other ranks by about the loss
 * scale. */
struct evidence_unscaled {
    struct evidence_at at; /* rank: the rank with small gradients if there is only one, else -1 */
    const bool *set;       /* world_size entries; true for ranks with small gradients */
    unsigned world_size;
    double ratio; /* norms of the other ranks, divided by the norms of these ranks */
    double loss_scale;
};
struct diagnostic *cause_unscaled(const struct evidence_unscaled *evidence);

/* Makes E1301: a living process holds the rank. */
struct diagnostic *cause_rank_taken(const struct evidence_at *at, int64_t pid, uint64_t since_ns, uint64_t now_ns);
/* Makes E1301 if another connection of the same process holds the rank, mostly for a second optimizer. */
struct diagnostic *cause_rank_taken_by_itself(const struct evidence_at *at, int64_t pid);

/* Evidence for E1302: a trainer is gone. */
struct evidence_lost {
    struct evidence_at at;
    int64_t pid;
    bool left;    /* the rank announced its leave (on_leave: stop) */
    bool aborted; /* no successor came, or its gradients differ: the step was aborted for all ranks */
    bool differs; /* the successor's gradient of param differs from its predecessor's */
    bool on_gpu;  /* a GPU wrote the gradient of param; the write may be incomplete if the process died meanwhile */
    bool crossed; /* the successor waits for gradients of other nodes, whose ranks may wait for the successor */
    uint32_t param;
    const char *last_message; /* such as "Push" or "EndBackward" */
    const char *outstanding;  /* such as "34 of 52 parameters of micro-batch 2" */
    uint64_t waited_ms;
};
struct diagnostic *cause_rank_lost(const struct evidence_lost *evidence);
/* Makes the diagnostic for a step that is aborted because a rank that left is back after sums were made without it. */
struct diagnostic *cause_rank_back(const struct evidence_at *at);

/*
 * Evidence for a refused step to which a dead process contributed. No other process can change that part, so the step
 * is aborted for all ranks.
 */
struct evidence_inherited {
    struct evidence_at at;            /* rank: the rank of the dead process */
    uint32_t n_ended;                 /* micro-batches that the process ended; 0: the sums have only a part of one */
    bool asked;                       /* the process asked for the step, with other arguments than another rank */
    const struct diagnostic *refusal; /* the refusal of the step; NULL: only a part of a micro-batch remains */
};
struct diagnostic *cause_inherited(const struct evidence_inherited *evidence);

/* Evidence for the diagnostic of an aborted step that goes to ranks that did not cause the abort. Its text names the
 * rank that requested or caused it. */
struct evidence_abort {
    struct evidence_at at; /* rank: the rank that caused the abort */
    const char *why;
    uint32_t new_attempt;
    const struct diagnostic *reason;        /* may be NULL */
    const char *reason_text, *reason_class; /* from another node, in place of reason; may be NULL */
};
struct diagnostic *cause_aborted(const struct evidence_abort *evidence);

/* Evidence for E1501 (a node is lost), E1502 (an engine failed), E1503 (a node came back without its state). */
struct evidence_node {
    struct evidence_at at;
    /* E1501: the lost node. With other codes all nodes get the text, so `why` names the node. */
    unsigned node, first_rank, n_ranks;
    const char *address, *waits; /* waits: which node or rank waits for the lost node, and for what; may be NULL */
    const char *why;             /* a sentence; with E1501 only its part after a colon */
    uint32_t generation;         /* E1502: the next generation */
    unsigned here;               /* cause_nodes_differ(): the node that compared the configurations */
};
struct diagnostic *cause_node_silent(const struct evidence_node *evidence); /* makes E1501: the node may come back */
/* Makes the diagnostic for nodes whose configurations differ. why: names the keys, with the values "there" and
 * "here". */
struct diagnostic *cause_nodes_differ(const struct evidence_node *evidence);
struct diagnostic *cause_engine(const struct evidence_node *evidence);
/* Makes E1502 for an engine of GPUs. generation: the next engine's. */
struct diagnostic *cause_device(const struct evidence_node *evidence);
/* Evidence for E1502 if no engine of GPUs became ready, so that the job is not formed. */
struct evidence_device_unformed {
    struct evidence_at at;
    const char *why;
    uint64_t gpu_bytes;           /* memory that zerod needs on each GPU */
    uint64_t offloaded_gpu_bytes; /* the same with offload_optimizer; 0: it is already set, or not possible */
    uint64_t offloaded_host_bytes;
};
struct diagnostic *cause_device_unformed(const struct evidence_device_unformed *evidence);

struct diagnostic *cause_node_reborn(const struct evidence_node *evidence); /* makes E1503: the node lost its state */

/* Evidence for E1303: ranks have waited for a long time. */
struct evidence_stall {
    struct evidence_at at;
    const char *waiting;    /* such as "ranks 0, 2 wait in step 4711" */
    const char *blocking;   /* such as "rank 1 (pid 1234, last message Push 12.3 s ago)" */
    const char *where;      /* lines with the known stacks of the awaited ranks, cleaned for printing; NULL: none */
    const uint32_t *params; /* the awaited parameters; may be empty */
    size_t n_params;
    uint64_t since_ms;
    bool aborted; /* the step was aborted (stall_timeout) */
    bool forming;
    bool absent;     /* the awaited rank never opened the step (M7) */
    bool decided;    /* the step or window is decided, so it cannot be aborted */
    bool deadlocked; /* ranks wait for each other, in different calls */
    bool behind_window; /* deadlocked: the calls must wait for the end of the open write window */
    bool gone;       /* the processes of all awaited ranks have ended */
    bool elsewhere;  /* the awaited rank is on another node */
    bool cut_off;    /* elsewhere is set: node 0 cannot be reached */
    bool again;      /* processes that have left the run wait to attach again */
};
struct diagnostic *cause_stalled(const struct evidence_stall *evidence);

/* Evidence for E1401: the client or the job would exceed a quota. */
struct evidence_quota {
    struct evidence_at at;
    const char *what; /* such as "gradient slots", "live parameters", "memory of the job" */
    const char *unit; /* such as "bytes", "elements" */
    uint64_t asked, held, allowed;
    const char *sum; /* several lines with the classes of memory; may be NULL */
    const char *fix;
    bool of_job;         /* the limit is the job's, not the rank's */
    struct process_limit limit; /* the limit of the daemon's process, if that is the cause */
};
struct diagnostic *cause_quota(const struct evidence_quota *evidence);

/*
 * The texts for faults that a client reports, one row per code. [0] is for callers of the C API, [1] for callers of the
 * Python package.
 */
struct report_text {
    enum diagnostic_code code;
    const char *cause;
    const char *fix[2];
    const char *alternative[2]; /* may be NULL */
    const char *does_not_help;
    const char *state;
    const char *title_later, *state_later; /* title and state if the rank is already attached; NULL: no difference */
    const char *state_at_end;              /* state if the process ends because of the fault; NULL: no difference */
    bool leaves_gap;                       /* the step lacks the refused gradient, and the text says how to continue */
};

/*
 * Return: the texts, or NULL if clients do not report that code. The texts are constant, so that a signal handler may
 * print them.
 */
const struct report_text *cause_report_text(enum diagnostic_code code);

/* Makes E1304. why: a sentence that says why this daemon cannot adopt an earlier daemon's state. */
struct diagnostic *cause_held(const struct evidence_at *at, const char *why);
/* Evidence for E1305: the daemon stopped while ranks were attached, and no other daemon continues the run. */
struct evidence_stopped {
    struct evidence_at at; /* step: the open step; -1: the job was not yet formed */
    const char *signal;
    bool is_kept;       /* a service manager keeps the state, but starts no other daemon */
    const char *dir;    /* folder of checkpoints; NULL: none is configured */
    bool saves_on_stop; /* checkpoint.save_on_stop */
    bool is_saved;      /* a checkpoint has all committed steps */
};
struct diagnostic *cause_stopped(const struct evidence_stopped *evidence);
/* Makes E1701, a warning. dir: the folder of checkpoints; NULL if none is configured. why: a sentence that names the
 * file. */
struct diagnostic *cause_not_saved(const struct evidence_at *at, const char *dir, const char *why);
/* Makes E1702 if dir, the folder of all checkpoints, cannot be opened or listed. */
struct diagnostic *cause_no_folder(const struct evidence_at *at, const char *dir, const char *why);
/* Makes E1702. path: the checkpoint. why: a sentence. */
struct diagnostic *cause_not_loaded(const struct evidence_at *at, const char *path, const char *why);
/* Makes E1402: another user formed the rank. */
struct diagnostic *cause_rank_owned(const struct evidence_at *at, uint32_t uid, uint32_t gid, uint32_t owner);
/*
 * Make E1402, E1403, and the client reports E1102 to E1107 and E1110. what, detail: a sentence. attached: the client
 * reported after the job was formed with it.
 */
struct diagnostic *cause_not_allowed(const struct evidence_at *at, uint32_t uid, uint32_t gid, const char *what);
struct diagnostic *cause_bad_message(const struct evidence_at *at, const char *what);
struct diagnostic *cause_report(const struct evidence_at *at, enum diagnostic_code code, const uint32_t *params,
                                size_t n_params, const char *detail, bool attached);
