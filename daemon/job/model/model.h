/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The job: ranks, formation, the step as a transaction. It knows who is
 * attached, what each rank waits for, and decides; it does no socket I/O. Requests come in as
 * verbs, answers go out through job_ops.answer(); bytes are moved by step on the workers.
 *
 *   job.c        life, ranks coming and going, faults, time       (this header, first part)
 *   form.c       manifests -> layout, memory, segments, initial weights
 *   admit.c      the way of a push: slot, ledger, parcel
 *   collect.c    what is complete is reduced, what is reduced is credited
 *   boundary.c   end of micro-batch, asking for the step
 *   commit.c     the step: decision, update, commit
 *   abort.c      its abort
 *   gather.c     stage 3, reading of state
 *   param-norm.c the norm of one parameter, over nodes   (param-norm.h)
 *   window.c     write windows
 *   exchange.c   what this node's engine moves                     (exchange.h)
 *   nodes.c      this node among others (nodes.h); nodes-report.c tells node 0, nodes-obey.c does what node 0 says,
 *                nodes-engine.c has the engines
 *   stall.c      who waits for whom, time-outs
 *   device-job.c memory that lies on GPUs                          (device-job.h)
 *
 * A verb answers at once, or notes in rank->wait what the rank waits for; job_settle() answers
 * whoever can be answered, and is called after everything that may have changed that.
 * All of it runs on the loop's thread. A rank has at most one answered request outstanding.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/blob.h"
#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/config/config.h"
#include "core/config/lossscale.h"
#include "core/diagnosis/cause.h"
#include "core/diagnosis/diagnosis.h"
#include "core/diagnosis/evidence.h"
#include "core/layout/layout.h"
#include "core/layout/manifest.h"
#include "core/layout/plan.h"
#include "core/wire/wire.h"
#include "daemon/job/model/kept.h"
#include "daemon/memory/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/memory/ring.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"

struct devices;
struct exact_sum;
struct exchange_said;
struct job;
struct leader_merged;
struct mirror;
struct node_finding;
struct node_message;
struct node_verdict;
struct nodes;
struct nodes_ops;
struct param_norm;
struct pool;
struct window;

enum job_phase {
    JOB_WAITING,      /* no layout yet: ranks attach and declare */
    JOB_RESERVING,    /* layout fixed, pages of the state being reserved */
    JOB_INITIALISING, /* waits for rank 0's initial weights */
    JOB_TRAINING,
    JOB_UPDATING, /* the step is decided and rolls forward */
    JOB_ABORTING, /* reductions of the aborted attempt are still under way */
    JOB_WINDOW,   /* a write window is open */
    JOB_COMMITTING_WINDOW,
};

enum job_wait {
    WAIT_NONE,
    WAIT_FORM,
    WAIT_INIT,
    WAIT_READY,
    WAIT_SLOT,
    WAIT_END,
    WAIT_OTHERS, /* has asked for the step and misses gradients: what the others push tells why */
    WAIT_STEP,
    WAIT_NORM,
    WAIT_GATHER,
    WAIT_READ,
    WAIT_WINDOW_BEGIN,
    WAIT_WINDOW_END,
    WAIT_WRITE,
    WAIT_ABANDON, /* several nodes: until what is announced of it is taken back */
    WAIT_ABORTED, /* for the abort that it has caused; several nodes: until node 0 has said it */
    WAIT_ABORT,
};

/* A request that cannot be made now: what, why, and what comes first. Static texts. */
struct misplaced {
    const char *what, *cause, *fix;
};

/* Something of a rank was refused; sticky until cleared. Pushes that are refused alike join. */
struct fault {
    enum diagnostic_code code; /* 0: none */
    uint32_t *params;          /* owned */
    uint32_t n_params, capacity;
    struct push_record first, second; /* of params[0] */
    bool other_incarnation;
    bool sums_known, sums_equal;
    char detail[192];
    const struct misplaced *misplaced; /* a request, not a push */
    struct diagnostic *diagnostic;     /* set once the text has been needed; then nothing joins */
    bool told;                         /* by a refusal: from then on gathers are refused, too */
};

/* What a rank asked the step with. */
struct step_args {
    struct hyper *groups; /* owned; n_groups, or NULL: as configured */
    uint32_t n_groups;
    bool has_max_norm;
    double max_norm;
    double loss_scale;
    bool found_inf;
};

/* A gradient of which some parts have been pushed. */
struct partial_push {
    uint32_t param;
    uint32_t next; /* part; 0: nothing is partly pushed */
    bool refused;  /* what was said of the first part goes for the others */
    bool torn;     /* one before it has lacked its last parts, in this micro-batch */
};

struct reading;

struct job_rank {
    unsigned rank;
    void *peer; /* its session; NULL while nobody is attached */
    uint64_t incarnation; /* numbered by this daemon, so that everybody may see it; 0: never attached */
    uint64_t secret;      /* the client's own name of its incarnation: shown to nobody */
    uint32_t owner;       /* uid that formed the rank */
    int64_t pid;
    uint32_t uid, gid;
    char *client;             /* owned */
    const char *last_request; /* static */
    uint64_t attached_ns, last_ns, lost_ns;
    bool declared, formed, ready, left;
    bool resumes; /* the run had weights when it asked to be formed */
    enum config_on_duplicate on_duplicate;

    struct manifest manifest;
    struct ring *rings[2]; /* [0] of this incarnation, [1] of a dead one while its slots are read */
    char **strings; /* interned, by id; owned */
    uint32_t n_strings;
    uint64_t string_bytes;

    enum job_wait wait;
    uint64_t wait_ns;
    struct request_slot_request slot_wanted;
    bool slot_credited;  /* since the client was last told to look */
    bool impatient;      /* has waited in vain for a slot, in this micro-batch */
    bool waited_in_vain; /* and no wait since has brought one */
    bool reserving;      /* an overflow extent */
    struct fault again;  /* on_duplicate: accumulate: what was pushed again, for one warning */
    bool again_reported;

    struct fault fault;
    struct diagnostic *abort_notice; /* to be delivered with the next answer */
    struct blob blob;                /* the last one: of a micro-batch or a step */
    struct blob blob_committed;      /* of the last committed step */
    struct blob blob_step;           /* came with the request for the step */
    struct step_args args;
    bool abandoned;      /* a backward was given up in this step */
    uint32_t n_given_up; /* and so many pushes with it */
    char *given_up_why;  /* in the client's words; owned, NULL: it said nothing */
    struct rank_evidence evidence;
    bool proceed; /* cleared a fault of the step request: ask again without judging it */
    uint64_t n_forwards, n_backwards, n_forwards_at_step, n_backwards_at_step;
    uint64_t asked_ns;
    uint64_t n_pushes;
    struct partial_push partial;

    struct reading *given; /* the last answer with state, whose memory it still has; read-state.c */

    uint32_t *gathered; /* stage 3: per parameter, how often; owned */
    uint64_t live_elems;
    uint32_t *gathering; /* parameters of the request under way; owned */
    uint32_t n_gathering;
    bool prefetching; /* one hint at a time is loaded */
    bool forget;      /* of its WriteEnd */
};

/* A redone push: compared with its predecessor's sum once both are known. */
struct verification {
    struct work work;
    struct job *job;
    struct ring *ring;
    struct ring_slot *slot;
    unsigned rank;
    uint32_t part;
    uint16_t pass;
    uint32_t attempt;
    const uint8_t *data;
    uint8_t *copy; /* owned; of a job on GPUs: what data is */
    uint64_t sum;
    bool summed;
    struct verification *next;
};

/* What the next reduction of a parcel is. */
struct cursor {
    uint32_t micro_batch, pass;
};

struct job_ops {
    /* Sends a reply to a rank's peer; descriptors are taken, also on failure. */
    void (*answer)(void *userdata, void *peer, const struct reply *reply, int *fds, size_t n_fds);
    /* The peer broke the protocol: it is told (NULL: nothing) and its connection closed, after the verb has returned.
     * Borrowed. */
    void (*drop)(void *userdata, void *peer, const struct diagnostic *diagnostic);
    /* A diagnostic was made: to be logged. Borrowed. */
    void (*log)(void *userdata, const struct diagnostic *diagnostic);
    uint64_t (*now_ns)(void *userdata);
    /* Asks for job_tick() in delay_ms at the latest. */
    void (*soon)(void *userdata, unsigned delay_ms);
    /* After something came from an engine of GPUs, not from a peer or a worker. May be NULL. */
    void (*after)(void *userdata);
    void *userdata;
    struct uv_loop_s *loop; /* for that engine; NULL: jobs on GPUs are not served */
};

struct job_times {
    uint64_t first_asked_ns, last_commit_ns, decided_ns;
    uint64_t reduce_busy_since_ns;
    uint64_t wait_total_ns, wait_last_ns;
    uint64_t reduce_total_ns, reduce_last_ns, reduce_shown_ns; /* last: of the step under way; shown: of the last one */
    uint64_t update_total_ns, update_last_ns;
    uint64_t step_last_ns;
    uint64_t recent_ns[32]; /* of the last steps, for the rate and the median */
    unsigned n_recent, slowest_rank;
    uint64_t slowest_behind_ns;
};

struct job_counters {
    uint64_t admitted, retried, dropped, accumulated, redone;
    uint64_t applied, skipped, aborts, reattaches, warnings;
    uint64_t overlap_bytes, overlap_reduced_bytes; /* of the last complete micro-batch */
    uint64_t batch_bytes, batch_reduced_bytes;     /* of the one under way */
    uint32_t batch;
};


/* The run that the job serves: who it is, and what is settled for as long as it lasts. */
struct job_run {
    char *id;                        /* owned; NULL: none yet */
    const struct config *configured; /* the daemon's */
    struct config chosen;            /* the same with a program's optimizer; what it points to is the daemon's */
    uint64_t digest;                 /* of the manifest */
    uint64_t n_incarnations;         /* so far, of all ranks */
    bool given_weights;              /* rank 0 has given all initial weights */
    bool has_weights;                /* and they are on all nodes */
    bool draining;
    bool stopping;      /* the daemon ends: that connections close is no loss */
    char *drop_why;     /* why the job is to be dropped when nothing is under way any more; owned, NULL: it is not */
    unsigned drop_code; /* of the diagnostic with which another node has refused it; 0: none */
};

/* Ranks are numbered over all nodes: 0 to size - 1. Those of this node are first to end - 1. */
struct job_world {
    unsigned size, first, end;
};

/* What the job may hold, and what it does. */
struct job_memory {
    struct plan_bytes planned;
    struct quota quota;
    struct charge charge;
    struct work reserve_work;
    int reserve_result; /* written by workers, atomically */
};

/* What is under way on workers and engines. */
struct job_work {
    struct cursor *cursors;             /* per parcel */
    struct verification *verifications; /* pushes that are compared with a predecessor's */
    unsigned n_under_way;               /* reductions and verifications */
    unsigned n_io;                      /* other works: reserving, initial weights, gathering, reading */
    unsigned n_inits;                   /* of these: initial weights */
    uint64_t late_warned_step;          /* epoch + 1 in which a late parameter was named */
};

/* Why the step is aborted. */
struct job_abort {
    struct diagnostic *reason;
    int64_t rank;
    char *why;             /* of zerod_abort_step; owned */
    char *text, *class;    /* of the diagnostic that is the reason, when another node made it; owned */
    uint32_t said_attempt; /* several nodes: the one that node 0 has said last */
    bool next;             /* node 0 has aborted the step after the one that is being committed */
};

/* Which sets of parameters were missing: a warning comes once per set. */
struct job_missing {
    uint64_t seen[64]; /* digests of the sets that were reported */
    unsigned n_seen;
    uint64_t last;     /* digest of the last step's set, 0: none was missing */
    uint64_t n_last;   /* steps in a row with that set */
    uint32_t n_params; /* that no rank pushed in the step under way */
};

/* The verdict on the step. */
struct job_decision {
    struct hyper *hypers;        /* per group, of the step under way; owned */
    bool applying;               /* the step under way: decided to be applied */
    struct step_finding finding; /* of all nodes: what the decision was told */
    struct lossscale lossscale;
    double norm, lr; /* of the last step */
    bool has_norm;
    uint8_t *learnt; /* static_graph: per parameter, pushed in the first step; owned */
    bool has_learnt;
};

struct job_stall {
    uint64_t reported_ns, interval_ns;
};

/* What was said, and how often each code. */
struct job_journal {
    struct kept_diagnostics kept;
    struct {
        unsigned code;
        uint64_t n;
    } refused[32];
    size_t n_refused;
};

struct job_stats {
    struct job_times times;
    struct job_counters counters;
};

struct job {
    const struct config *config; /* the configured one, or chosen */
    const struct kernels *kernels;
    struct worker_pool *pool;
    struct job_ops ops;

    enum job_phase phase;
    struct job_run run;
    struct job_world world;
    struct job_rank *ranks; /* by rank; other nodes' are mirrored: mirror.h */

    struct layout *layout;
    struct ledger ledger;
    struct state *state;
    struct step *step;
    struct devices *devices;               /* NULL: all is in host memory */
    struct nodes *nodes;                   /* NULL: one node */
    struct mirror *mirror;                 /* likewise */
    struct param_norm *param_norms;        /* several nodes: questions under way, param-norm.h */
    uint64_t n_param_norms;                /* asked so far */
    struct pool *gathered;                 /* stage 3, in host memory; else NULL */
    struct device_gather *device_gathered; /* stage 3, on GPUs, from when they have their memory; else NULL */
    struct window *window;

    struct job_memory memory;
    struct job_work work;
    struct job_abort abort;
    struct job_missing missing;
    struct job_decision decision;
    struct job_stall stall;
    struct job_journal journal;
    struct job_stats stats;
};

/* ---- life (job.c) -------------------------------------------------------------------------------------- */

int job_new(struct job **out, const struct config *config, const struct kernels *kernels, struct worker_pool *pool,
            const struct job_ops *ops);
/* Before anybody attaches, if the configuration has several nodes. Return: 0 or -ENOMEM. */
int job_join(struct job *job, const struct nodes_ops *ops);
/* The pool must be idle. */
void job_free(struct job *job);

/* Verbs of a rank. They answer through ops, now or later. */
struct job_attach {
    void *peer;
    const struct request_hello *hello;
    int64_t pid;
    uint32_t uid, gid;
    bool is_admin;
};

/* Return: 0 and *out; 1: refused, *refusal is the caller's. */
int job_attach(struct job *job, const struct job_attach *attach, struct job_rank **out, struct diagnostic **refusal);
/* The peer is gone: process dead, or connection closed. */
void job_detach(struct job *job, struct job_rank *rank);
void job_leave(struct job *job, struct job_rank *rank);
void job_intern(struct job *job, struct job_rank *rank, const struct request_intern *request);
void job_clear_fault(struct job *job, struct job_rank *rank);
void job_report(struct job *job, struct job_rank *rank, const struct request_report *request);
void job_evidence(struct job *job, struct job_rank *rank, const struct request_evidence *request);
/* The step is committed or aborted: what the rank did and said of it is forgotten. */
void job_forget_step(struct job_rank *rank);

/* Answers whoever can be answered, posts what can be posted. */
void job_settle(struct job *job);

/* For zerodctl. Return: 0, or positive with *why a sentence to be freed by the caller. */
int job_drop(struct job *job, char **why);
/* Everything of the run is forgotten; nobody is attached, nothing under way. */
void job_reset(struct job *job);
bool job_is_idle(const struct job *job); /* nobody is attached */

/* ---- time (stall.c) ------------------------------------------------------------------------------------ */

/* Several times a second: time-outs, stalls. */
void job_tick(struct job *job);

/* ---- formation (form.c) -------------------------------------------------------------------------------- */

void job_declare(struct job *job, struct job_rank *rank, const struct request_declare *request);
void job_form(struct job *job, struct job_rank *rank, const struct request_form *request);
void job_init(struct job *job, struct job_rank *rank, const struct request_init *request);
void job_ready(struct job *job, struct job_rank *rank);
void form_settle(struct job *job);
void form_drop(struct job *job);
/* What the layout needs is there, and the ranks can be told; or it is not, and they are told that. Takes the
 * diagnostic. */
void job_formed(struct job *job);
void job_unformed(struct job *job, struct diagnostic *diagnostic);
/* There is no memory for a piece of the initial weights. */
void job_refuse_init(struct job *job, struct job_rank *rank, const struct request_init *request);
/* Whoever waits to form is told why not, and may declare again; takes the diagnostic. */
void form_refuse_all(struct job *job, struct diagnostic *diagnostic);
/* Several nodes: another one's daemon is configured differently, so that the job cannot be formed. */
void job_node_differs(struct job *job, unsigned node, const char *difference);

/* ---- the way of a push (admit.c) ----------------------------------------------------------------------- */

void job_begin_backward(struct job *job, struct job_rank *rank, const struct request_begin_backward *request);
void job_push(struct job *job, struct job_rank *rank, const struct request_push *request);
void job_event(struct job *job, struct job_rank *rank, const struct request_event *request);
void job_slot_request(struct job *job, struct job_rank *rank, const struct request_slot_request *request);
void admit_settle(struct job *job, struct job_rank *rank);

/* ---- reductions (collect.c) ---------------------------------------------------------------------------- */

void collect_parcel(struct job *job, uint32_t parcel);
void collect_all(struct job *job);
/* Draws conclusions from comparisons that are done; those of an aborted attempt are forgotten. */
void collect_settle(struct job *job);
void collect_verify(struct job *job, struct job_rank *rank, struct ring_slot *slot, uint32_t part, uint16_t pass);
/* Everything that the rank pushed in micro-batches it has ended is reduced or compared. */
bool collect_is_done(const struct job *job, const struct job_rank *rank);
/* Slots of a micro-batch that has ended: what nothing was admitted into is given back. */
void collect_close(struct job *job, struct job_rank *rank);
/* Slots of the open micro-batch that are not posted are given back. */
void collect_drop_open(struct job *job, struct job_rank *rank);
/* Several nodes: is anything that the rank has pushed announced to the others, and in no sum yet? */
bool collect_has_promised(const struct job *job, const struct job_rank *rank);
/* Sums it now, as the rank's slots will go. */
void collect_keep_promises(struct job *job, const struct job_rank *rank);
void collect_release_ring(struct job *job, struct job_rank *rank, bool abort);

/* ---- boundaries (boundary.c) --------------------------------------------------------------------------- */

void job_end_backward(struct job *job, struct job_rank *rank, const struct request_end_backward *request);
void job_abandon_backward(struct job *job, struct job_rank *rank, const struct request_abandon_backward *request);
/* Of a rank that has left inside a backward. */
void job_give_up_open(struct job *job, struct job_rank *rank);
void job_step(struct job *job, struct job_rank *rank, const struct request_step *request);
void job_grad_norm(struct job *job, struct job_rank *rank);
/* Judges requests for the step that waited for what other ranks push. */
void boundary_settle(struct job *job);

/* ---- the step (commit.c) ------------------------------------------------------------------------------- */

void commit_settle(struct job *job);

/* ---- its abort (abort.c) ------------------------------------------------------------------------------- */

/* Aborts the step for all; reason is taken (may be NULL); rank < 0: nobody in particular. */
void job_abort(struct job *job, int64_t rank, struct diagnostic *reason);
/* The same on this node, where it is to be. */
void abort_start(struct job *job, int64_t rank, struct diagnostic *reason);
void abort_settle(struct job *job);
void job_abort_step(struct job *job, struct job_rank *rank, const char *why);
void job_abort_seen(struct job *job, struct job_rank *rank, uint32_t attempt);

/* ---- what node 0 says (form.c, collect.c, commit.c, abort.c); only in a job of several nodes ------------ */

/* All ranks of all nodes have declared the same, under that run id; empty: none has one. */
void job_form_now(struct job *job, const char *run_id);
/* Another node cannot form the job, or has lost what it held of it: the ranks are told, the job is dropped. */
void job_give_up(struct job *job, unsigned code, const char *why); /* code: of another node's diagnostic, 0: of none */
void form_settle_doom(struct job *job);
/* Of a job that is given up: what its ranks are told, and who comes before it is dropped. Return: to be released. */
struct diagnostic *job_describe_doom(const struct job *job);
/* Initial weights are everywhere. */
void job_train(struct job *job);
/* What was lent of a parcel is added here to what this node owns. */
void collect_combined(struct job *job, uint32_t parcel);
/* Where the rank's gradients of the parcel lie, and in which ring; NULL: it has pushed nothing of it there. */
struct ring_slot *collect_find_slot(const struct job_rank *rank, uint32_t parcel, uint32_t micro_batch, uint32_t pass,
                                    struct ring **ring);
/* A parcel's partial sums have arrived everywhere: its next ones may be made. */
void collect_settled(struct job *job, uint32_t parcel);
/* A promised parcel of this node is awaited: it is summed now. */
void collect_take(struct job *job, uint32_t parcel);
/* What was announced and is not awaited is taken back: ranks that wait for that can give up their backward. */
void job_withdrawn(struct job *job);
/* Fills what this node's ranks ask the step with; groups: room for one hyper per group. */
/* This node's exact sum of squares, and where a value came from that is not finite. */
void job_describe_sum(struct job *job, struct exact_sum *squares, struct node_finding *finding);
void job_describe_request(const struct job *job, struct node_message *message, struct wire_hyper *groups);
/*
 * Node 0: the verdict on what all know together; groups: room likewise. Return: false when the step is to be held, and
 * hold says for whom.
 */
bool job_judge(struct job *job, const struct leader_merged *merged, struct node_verdict *verdict,
               struct wire_hyper *groups, struct node_message *hold);
void job_carry_out(struct job *job, const struct node_verdict *verdict);
void job_hold(struct job *job, const struct node_message *message);
/* Of what is accumulated, unscaled. */
void job_norm_is(struct job *job, double norm);
void job_commit(struct job *job);
/* The step is aborted everywhere, under that new attempt. */
void job_aborted(struct job *job, const struct node_message *message);
/* The write window: is open; goes to its owners (NULL, or why not: static); is stored; is done with. */
void job_window_open(struct job *job);
const char *job_window_write(struct job *job, const struct exchange_said *said, const uint64_t *written, size_t n);
void job_window_store(struct job *job);
void job_window_closed(struct job *job);
/* All had left, and all are expected back; own: this node's too, of which it does not know better. */
void job_all_are_back(struct job *job, bool own);
/* A rank that had left is back, and the step was added up without it. */
void job_is_back_late(struct job *job, struct job_rank *rank);
/* The engines begin again, under this generation. */
void job_note_engine(struct job *job, uint32_t generation, const char *why);

/* ---- stage 3 (gather.c), state (read-state.c) ------------------------------------------------------------- */

void job_gather(struct job *job, struct job_rank *rank, const struct request_gather *request);
void job_release(struct job *job, struct job_rank *rank, const struct request_release *request);
void job_prefetch(struct job *job, struct job_rank *rank, const struct request_prefetch *request);
void job_read_state(struct job *job, struct job_rank *rank, const struct request_read_state *request);
/* Frees the memory of the last answer to ReadState, also when the client still has a descriptor of it. */
void job_release_reading(struct job *job, struct job_rank *rank);
void reading_free(struct reading *reading);
int pool_new(struct pool **out, struct job *job);
void pool_free(struct pool *pool);
const struct segment *pool_segment(const struct pool *pool);
uint64_t pool_held_bytes(const struct pool *pool);
/* Is anything being loaded into a pool? */
bool gather_is_busy(const struct job *job);
/* Parameters that are gathered are copied again; done(job) on the loop. Posts nothing and returns false when none is.
 */
bool gather_refresh(struct job *job, void (*done)(struct job *job));
/* Answers ranks that wait for what is there now. */
void gather_settle(struct job *job);
void gather_detach(struct job *job, struct job_rank *rank);

/* ---- write windows (window.c) -------------------------------------------------------------------------- */

void job_write_begin(struct job *job, struct job_rank *rank);
void job_write_state(struct job *job, struct job_rank *rank, const struct request_write_state *request);
void job_write_end(struct job *job, struct job_rank *rank, bool forget);
void window_detach(struct job *job, struct job_rank *rank);
void window_settle(struct job *job);
void window_free(struct window *window);
void window_forget(struct job *job);
bool window_is_busy(const struct window *window); /* NULL is idle */

/* ---- shared by the files above ------------------------------------------------------------------------- */

/* Answers the rank's request and ends its wait; fds are taken. */
void job_answer(struct job *job, struct job_rank *rank, const struct reply *reply, int *fds, size_t n_fds);
void job_answer_done(struct job *job, struct job_rank *rank);
void job_refuse(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic, bool aborted);
struct wire_position job_position(const struct job *job, const struct job_rank *rank);
/* Logs and keeps it; takes the reference. Return: borrowed. */
struct diagnostic *job_keep(struct job *job, struct diagnostic *diagnostic);
/* What somebody was told who has no rank, or did not get one. */
struct diagnostic *job_keep_stranger(struct job *job, struct diagnostic *diagnostic);
/* Before an answered request is served: delivers an abort or a sticky fault instead. Return: true when it did. */
bool job_is_held(struct job *job, struct job_rank *rank);
/* The same before a request that needs the other ranks: also when one has left and on_leave is stop. */
bool job_is_stopped(struct job *job, struct job_rank *rank);
/* Does this wait end with what other ranks do? */
bool job_is_collective(enum job_wait wait);
void job_fault(struct job *job, struct job_rank *rank, struct diagnostic *diagnostic); /* takes it; sticky */
/* The rank's client broke the protocol (E1403): a sentence says how. */
void job_drop_peer(struct job *job, struct job_rank *rank, const char *what);
/* The first rank's program, for texts that are about all ranks; NULL: not known. */
const char *job_client(const struct job *job);
struct evidence_at job_at(const struct job *job, const struct job_rank *rank);
struct diagnostic *job_fault_diagnostic(struct job *job, struct job_rank *rank, struct fault *fault, bool accumulated);
void job_fault_join(struct fault *fault, uint32_t param);
void job_fault_push(struct job *job, struct job_rank *rank, enum diagnostic_code code, const struct push_record *first,
                    const struct push_record *second, const char *detail);
/* Refuses a request (E1003) that came too early; it has been answered then. */
void job_refuse_early(struct job *job, struct job_rank *rank, const struct misplaced *misplaced);
void job_fault_reset(struct fault *fault);
void job_wait(struct job *job, struct job_rank *rank, enum job_wait wait);
double job_loss_scale(const struct job *job);

/* What a step with these arguments uses for a group: the arguments', or as configured and scheduled. */
struct hyper job_hyper(const struct job *job, const struct step_args *args, uint32_t group);
struct hyper job_plain_hyper(const struct config *config, const struct wire_hyper *h);
struct wire_hyper job_wire_hyper(const struct hyper *h);
uint64_t job_now(const struct job *job);
const char *job_waits_for(const struct job *job, const struct job_rank *rank); /* static text */

/* on_leave: stop. Those who wait are told. */
void job_stop_waiting(struct job *job);

/* Aborts the step because of what an earlier process of a rank left in it; takes the refusal of the step, or NULL. */
void job_abort_inherited(struct job *job, const struct job_rank *from, struct diagnostic *refusal);

/* What a rank asks the step with, to another node and from there. groups: room for one per group. */
/* NULL: the rank's arguments agree with those of the ranks that have asked. */
struct diagnostic *job_compare_args(const struct job *job, const struct job_rank *rank);
void job_describe_args(const struct job *job, const struct step_args *args, struct request_step *request,
                       struct wire_hyper *groups);
void job_keep_args(const struct job *job, struct step_args *args, const struct request_step *request);

/* Has the rank pushed all of a trainable parameter's gradient in this step / in the micro-batch of the entries? */
bool job_has_pushed(const struct job *job, unsigned rank, uint32_t param);
/* Is the parameter still to come in the open backward of a rank of this node? */
bool job_awaits(const struct job *job, const struct job_rank *rank, uint32_t param);
bool job_has_pushed_now(const struct job *job, unsigned rank, uint32_t param);
/* How many of them in that micro-batch. */
uint32_t job_n_pushed_open(const struct job *job, const struct job_rank *rank);

/* A bit per parameter: has any rank of this node pushed it in this step, have all? Frozen ones: none has, all have. */
void job_find_pushed(const struct job *job, uint8_t *any, uint8_t *all);

/* Trainable parameters of the model. */
uint32_t job_n_trainable(const struct job *job);

/* Of a set with a bit per parameter; never 0. */
static inline size_t job_bits_bytes(const struct job *job)
{
    return job->layout->n_params / 8 + 1;
}

static inline unsigned job_n_local(const struct job *job)
{
    return job->world.end - job->world.first;
}

static inline bool job_rank_is_here(const struct job_rank *rank)
{
    return rank->peer != NULL;
}
