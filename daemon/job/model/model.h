/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/sequence.h"
#include "core/base/worker.h"
#include "core/budget/plan.h"
#include "core/config/config.h"
#include "core/config/lossscale.h"
#include "core/wire/journal-wire.h"
#include "daemon/job/model/alike.h"
#include "daemon/job/model/diagnostics.h"
#include "daemon/job/model/missing.h"
#include "daemon/job/model/phases.h"
#include "daemon/job/model/rank-norm.h"
#include "daemon/job/model/stats.h"
#include "daemon/job/model/waits.h"
#include "daemon/job/model/zero-gradient.h"
#include "daemon/job/model/zero-lr.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/quota.h"
#include "daemon/step/parcel.h"
#include "daemon/step/speculation.h"
#include "daemon/step/step.h"

struct coordinator;
struct executor;
struct journal;
struct job_rank;
struct reply;
struct uv_loop_s;
struct resume;
struct verification;
struct window;
struct worker_pool;

enum job_phase {
    JOB_WAITING,      /* no layout yet: ranks attach and declare */
    JOB_RESERVING,    /* the layout is fixed, and workers reserve the pages of the state */
    JOB_INITIALISING, /* waits for rank 0's initial weights */
    JOB_TRAINING,
    JOB_UPDATING, /* the step is decided, and no abort is possible before its commit */
    JOB_ABORTING, /* reductions of the aborted attempt are still under way */
    JOB_WINDOW,   /* a write window is open */
    JOB_COMMITTING_WINDOW,
};

struct job_ops {
    /* Sends a reply to a rank's peer; consumes the descriptors, also on failure. */
    void (*answer)(void *userdata, void *peer, const struct reply *reply, int *fds, size_t n_fds);
    /*
     * Drops a peer that broke the protocol: sends the diagnostic (borrowed; NULL: none), and closes the connection when
     * the job's verb has returned.
     */
    void (*drop)(void *userdata, void *peer, const struct diagnostic *diagnostic);
    /* Logs a new diagnostic, which is borrowed. */
    void (*log)(void *userdata, const struct diagnostic *diagnostic);
    uint64_t (*now_ns)(void *userdata);
    /* Requests a call of job_tick() within delay_ms. */
    void (*soon)(void *userdata, unsigned delay_ms);
    /* Called after each event from a GPU engine. Events from peers and workers do not call it. May be NULL. */
    void (*after)(void *userdata);
    void *userdata;
    struct uv_loop_s *loop; /* for GPU engines; NULL: jobs on GPUs are not served */
};

/* The run's journal for the next daemon, and what this daemon adopted from an earlier one. */
struct job_survival {
    struct journal *journal; /* NULL: the memory is not kept */
    struct replay *replay;   /* runs while an earlier daemon's log is replayed; owned; NULL: no replay */
    uint64_t found_ns;       /* when this daemon adopted the run; 0: the run began with this daemon */
    uint64_t away_ns;        /* how long no daemon served the run before it was adopted; up to 50 ms too long */
    char *holds;             /* why this daemon holds kept state without adopting it; owned; NULL: nothing is held */
    char **held;             /* names of the descriptors of that state; owned */
    size_t n_held;
};

/* Data of the run that the job serves. struct job_kept has the data that survives the daemon. */
struct job_run {
    struct job_survival survival;
    const struct config *configured; /* the daemon's configuration */
    struct config chosen;            /* a copy of `configured` with settings that the program or the run chose */
    bool was_loaded;                 /* the initial weights are those of a checkpoint */
    uint64_t loaded_digest;          /* digest of the checkpoint's description; 0: loaded by an earlier daemon */
    bool was_spread;                 /* several nodes: this node has its initial weights; other nodes may lack them */
    bool is_next;       /* the processes had an earlier run on this daemon, so this run begins without a checkpoint */
    bool is_over;       /* a rank with process.is_last failed, so no rank gets a successor */
    bool ends;          /* the daemon stops, and no next daemon will adopt the run */
    bool stopping;      /* the daemon ends, so a rank whose connection closes is not reported as lost */
    char *drop_why;     /* why the job is dropped as soon as no work is under way; owned; NULL: it is not dropped */
    bool saves_last;    /* the run is over, and a checkpoint of its last step was requested */
    bool drop_for_next; /* the job is dropped because its processes begin another run */
    unsigned drop_code; /* the code with which another node refused the job; 0: none */
};

/* Ranks are numbered over all nodes from 0 to size - 1. This node has ranks first to end - 1. */
struct job_world {
    unsigned size, first, end;
};

/* The stages of forming, from equal manifests to reserved memory. */
struct job_forming {
    struct sequence sequence;
    struct diagnostic *refusal; /* why a stage failed; owned; NULL: memory was lacking */
    struct work reserve_work;
    int reserve_result;            /* 0, or the -errno of a worker; written atomically */
    bool has_memory;               /* all memory is reserved, also on GPUs; only loading a checkpoint remains */
    enum config_gpu_room gpu_room; /* the room that this node requests (gpu-room.h) */
};

/* The memory that the job may hold, and the memory that it has charged. */
struct job_memory {
    struct plan_bytes planned;
    struct quota quota;
    struct charge charge;
};

/* Work under way on workers and engines. */
struct job_work {
    struct parcel *parcels;             /* one for each parcel, for the open step; owned */
    const struct summing *summing;      /* how the parcels are summed (collect.h) */
    struct verification *verifications; /* pushes that are compared with a predecessor's */
    unsigned n_under_way;               /* number of reductions and verifications */
    unsigned n_io;                      /* number of other works: reserving, initial weights, gathering, reading */
    unsigned n_inits;                   /* works in n_io that copy initial weights */
};

/* Why the step is aborted. */
struct job_abort {
    struct diagnostic *reason;
    int64_t rank;
    char *why;             /* the reason given to zerod_abort_step(); owned */
    char *text, *class;    /* text and class of the reason, if another node made its diagnostic; owned */
    uint32_t said_attempt; /* several nodes: the last attempt that node 0 announced */
    bool next;             /* node 0 has aborted the step after the one that is being committed */
};

/* The verdict on the step. */
struct job_decision {
    struct hyper *hypers;        /* hyperparameters of each group in the open step; owned */
    struct step_finding finding; /* the first value on any node that is not finite; an input of the verdict */
    struct lossscale lossscale;
    bool has_hypers; /* this daemon has set hypers */
    double s;        /* factor of the gradients in the update */
    bool holds_back; /* the update waits until a checkpoint has copied the state from the GPUs */
    uint8_t *learnt; /* static_graph: for each parameter, whether the first applied step had its gradient; owned */
    bool has_learnt;
};

/* Speculative updates (daemon/job/transaction/speculate.h): counts of the last steps, and the expected scalars. */
struct job_speculation {
    uint32_t n_micro;                     /* micro-batches of the last committed step; 0: not known */
    uint32_t n_micro_expected;            /* micro-batches that this step was expected to have; 0: not known */
    unsigned n_in_vain;                   /* steps in a row in which no speculative update was accepted */
    uint64_t pauses_until;                /* the first step in which it is tried again */
    struct hyper *hypers;                 /* per group, as expected in the open step; owned */
    bool has_hypers;                      /* hypers and s are set */
    double s;                             /* the expected factor of the gradients */
    struct speculation_counts counts;     /* when the last step was committed */
    uint64_t n_elems_early, n_elems_last; /* the last applied step: updated speculatively, and in all */
};

struct save_pool;
struct saving;

/* Checkpoints: daemon/job/state/save.c. */
struct job_save {
    struct saving *now; /* the checkpoint that is being written; NULL: none */
    bool wanted;        /* a checkpoint was requested */
    bool is_ordered;    /* several nodes: node 0 ordered a checkpoint, which has not begun on this node yet */
    uint64_t ordered_step, ordered_token;
    uint32_t ordered_windows; /* write windows that were closed in ordered_step before the checkpoint */
    bool has_step;
    uint64_t step;      /* the step of the last checkpoint that was begun */
    uint64_t n_windows; /* write windows that were closed in that step before the checkpoint */
    uint64_t token;     /* several nodes: the number of the checkpoint */
    uint64_t begun_ns;  /* when the checkpoint was begun; before the first: when one became possible; 0: not yet */
    uint64_t n_saved, n_failed;
    uint64_t last_bytes, last_ns, last_waited_ns; /* of the last complete checkpoint (kept.saved_step) */
    uint64_t last_ended_ns;
    char *why;                 /* why the last checkpoint failed; owned; NULL: it did not */
    struct save_pool *pool;    /* owned; NULL: none yet */
    struct charge copy_charge; /* GPUs: charges the staging copy while a checkpoint is written */
};

struct job_stall {
    uint64_t reported_ns, interval_ns;
    bool has_asked; /* awaited ranks were asked for their stacks, for the report that is due */
};

struct job {
    const struct config *config; /* run.chosen */
    const struct kernels *kernels;
    struct worker_pool *pool;
    struct job_ops ops;

    struct job_kept kept; /* survives a kill of the daemon, as do the parts of ledger, state and step in survival.c */
    enum job_phase phase;
    bool todo; /* job_settle() is to be called at the end of this event */
    struct job_run run;
    struct job_world world;
    struct job_rank *ranks; /* indexed by rank, with spare room; other nodes' ranks: remote-ranks.h */

    struct layout *layout;
    struct ledger ledger;
    struct executor *executor; /* does the work in host memory or on GPUs */
    struct state *state;       /* the executor owns state and step */
    struct step *step;
    struct coordinator *coordinator;
    struct window *window;

    struct job_forming forming;
    struct job_memory memory;
    struct job_work work;
    struct job_abort abort;
    struct job_missing missing;
    struct job_alike alike;
    struct job_rank_norm rank_norm;
    struct job_zero_gradient zero_gradient;
    struct job_zero_lr zero_lr;
    struct job_slow slow;
    struct job_waits waits;
    struct job_decision decision;
    struct job_speculation speculation;
    struct job_save save;
    struct resume *resume; /* the checkpoint with which the job begins, while the job is formed; owned */
    struct job_stall stall;
    struct job_diagnostics diagnostics;
    struct job_stats stats;
};

/* Call it when a change may end a wait. job_settle() then runs at the end of this event. */
static inline void job_todo(struct job *job)
{
    job->todo = true;
}

/* Return: the size in bytes of a set with one bit per parameter; never 0. */
static inline size_t job_bits_bytes(const struct job *job)
{
    return job->layout->n_params / 8 + 1;
}

static inline unsigned job_n_local(const struct job *job)
{
    return job->world.end - job->world.first;
}

/* Return: the parcel with that number, or NULL if there is none. */
static inline struct parcel *job_parcel(const struct job *job, uint32_t parcel)
{
    return job->layout && parcel < job->layout->n_parcels ? &job->work.parcels[parcel] : NULL;
}

/* Does the rank belong to this node? */
static inline bool job_is_own(const struct job *job, unsigned rank)
{
    return rank >= job->world.first && rank < job->world.end;
}
