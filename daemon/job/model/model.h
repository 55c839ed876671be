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
    JOB_RESERVING,    /* layout fixed, pages of the state being reserved */
    JOB_INITIALISING, /* waits for rank 0's initial weights */
    JOB_TRAINING,
    JOB_UPDATING, /* the step is decided and rolls forward */
    JOB_ABORTING, /* reductions of the aborted attempt are still under way */
    JOB_WINDOW,   /* a write window is open */
    JOB_COMMITTING_WINDOW,
};

struct job_ops {
    /* Sends a reply to a rank's peer; consumes the descriptors, also on failure. */
    void (*answer)(void *userdata, void *peer, const struct reply *reply, int *fds, size_t n_fds);
    /*
     * Drops a peer that broke the protocol: sends it the diagnostic (borrowed; NULL: none), and closes its connection
     * when the verb has returned.
     */
    void (*drop)(void *userdata, void *peer, const struct diagnostic *diagnostic);
    /* Logs a new diagnostic. Borrowed. */
    void (*log)(void *userdata, const struct diagnostic *diagnostic);
    uint64_t (*now_ns)(void *userdata);
    /* Requests a call of job_tick() within delay_ms. */
    void (*soon)(void *userdata, unsigned delay_ms);
    /* Called after an event from a GPU engine, as opposed to a peer or a worker. May be NULL. */
    void (*after)(void *userdata);
    void *userdata;
    struct uv_loop_s *loop; /* for GPU engines; NULL: jobs on GPUs are not served */
};

/* The run's journal for the next daemon, and what this daemon adopted from an earlier one. */
struct job_survival {
    struct journal *journal; /* NULL: the memory is not kept */
    struct replay *replay;   /* of an earlier daemon's log: nothing is recorded; NULL: no replay; owned */
    uint64_t found_ns;       /* when this daemon adopted the state; 0: it began the state itself */
    uint64_t away_ns;        /* how long no daemon served the run, the last time; up to 50 ms too long */
    char *holds;             /* why the kept state could not be adopted; owned; NULL: nothing is held */
    char **held;             /* names of the kept descriptors that are held; owned */
    size_t n_held;
};

/* Data of the run that the job serves. struct job_kept has the data that survives the daemon. */
struct job_run {
    struct job_survival survival;
    const struct config *configured; /* the daemon's configuration */
    struct config chosen;            /* `configured` with a program's optimizer and the run's number of ranks */
    bool was_loaded;                 /* the initial weights are those of a checkpoint */
    uint64_t loaded_digest;          /* of that checkpoint's description; 0: an earlier daemon loaded it */
    bool was_spread;                 /* several nodes: this node has the weights; node 0 reports when all nodes do */
    bool is_next;       /* the processes had an earlier run on this daemon: this run begins without a checkpoint */
    bool is_over;       /* a rank failed that had process.is_last: no rank gets a successor */
    bool ends;          /* the daemon stops for good: no next daemon follows */
    bool stopping;      /* the daemon ends: a rank whose connection closes is not reported as lost */
    char *drop_why;     /* why the job is dropped when no work is under way; owned; NULL: it is not dropped */
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
    struct diagnostic *refusal; /* why a stage failed; owned; NULL: for lack of memory */
    struct work reserve_work;
    int reserve_result;            /* written by workers, atomically */
    bool has_memory;               /* all memory is reserved, also on GPUs; only loading a checkpoint remains */
    enum config_gpu_room gpu_room; /* as this node requested it: gpu-room.h */
};

/* The memory that the job may hold, and the memory that it has charged. */
struct job_memory {
    struct plan_bytes planned;
    struct quota quota;
    struct charge charge;
};

/* Work under way on workers and engines. */
struct job_work {
    struct parcel *parcels;             /* of the open step; owned */
    const struct summing *summing;      /* makes their sums (collect.h) */
    struct verification *verifications; /* pushes that are compared with a predecessor's */
    unsigned n_under_way;               /* reductions and verifications */
    unsigned n_io;                      /* other works: reserving, initial weights, gathering, reading */
    unsigned n_inits;                   /* of these: initial weights */
};

/* Why the step is aborted. */
struct job_abort {
    struct diagnostic *reason;
    int64_t rank;
    char *why;             /* of zerod_abort_step; owned */
    char *text, *class;    /* of the reason, if another node made its diagnostic; owned */
    uint32_t said_attempt; /* several nodes: the last attempt that node 0 announced */
    bool next;             /* node 0 has aborted the step after the one that is being committed */
};

/* The verdict on the step. */
struct job_decision {
    struct hyper *hypers;        /* per group, of the step under way; owned */
    struct step_finding finding; /* of all nodes: the input of the decision */
    struct lossscale lossscale;
    bool has_hypers; /* this daemon has set hypers */
    double s;        /* of the update */
    bool holds_back; /* the update begins when a checkpoint's copy of the GPUs' state is made */
    uint8_t *learnt; /* static_graph: per parameter, pushed in the first step; owned */
    bool has_learnt;
};

struct save_pool;
struct saving;

/* Checkpoints: daemon/job/state/save.c. */
struct job_save {
    struct saving *now; /* the checkpoint that is being written; NULL: none */
    bool wanted;        /* a checkpoint was requested */
    bool is_ordered;    /* several nodes: node 0 ordered one, which begins as soon as it can */
    uint64_t ordered_step, ordered_token;
    uint32_t ordered_windows; /* windows closed before it in that step */
    bool has_step;
    uint64_t step;      /* of the last checkpoint that was begun */
    uint64_t n_windows; /* windows closed before it in that step */
    uint64_t token;     /* several nodes: the number of that checkpoint */
    uint64_t begun_ns;  /* when it was begun; before the first one: since when one is possible; 0: never */
    uint64_t n_saved, n_failed;
    uint64_t last_bytes, last_ns, last_waited_ns; /* of the last whole checkpoint: kept.saved_step */
    uint64_t last_ended_ns;
    char *why;                 /* why the last one failed; owned; NULL: it did not */
    struct save_pool *pool;    /* owned; NULL: none yet */
    struct charge copy_charge; /* GPUs: of the staging copy, while a checkpoint is written */
};

struct job_stall {
    uint64_t reported_ns, interval_ns;
    bool has_asked; /* awaited ranks were asked where they are, for the report that is due */
};

struct job {
    const struct config *config; /* run.chosen */
    const struct kernels *kernels;
    struct worker_pool *pool;
    struct job_ops ops;

    struct job_kept kept; /* outlives a kill; so do the parts of ledger, state and step in the journal's head */
    enum job_phase phase;
    bool todo; /* job_settle() is to be called at the end of this event */
    struct job_run run;
    struct job_world world;
    struct job_rank *ranks; /* by rank, with spare room; other nodes' ranks as far as known: remote-ranks.h */

    struct layout *layout;
    struct ledger ledger;
    struct executor *executor; /* does the work where the memory is */
    struct state *state;       /* the executor's, and so is step */
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
    struct job_save save;
    struct resume *resume; /* while the job is formed: the checkpoint that it begins with; owned */
    struct job_stall stall;
    struct job_diagnostics diagnostics;
    struct job_stats stats;
};

/* Called when something changes that others may wait for. job_settle() then runs at the end of this event. */
static inline void job_todo(struct job *job)
{
    job->todo = true;
}

/* Bytes of a set with a bit per parameter; never 0. */
static inline size_t job_bits_bytes(const struct job *job)
{
    return job->layout->n_params / 8 + 1;
}

static inline unsigned job_n_local(const struct job *job)
{
    return job->world.end - job->world.first;
}

/* Return: the parcel, or NULL if there is none of that number. */
static inline struct parcel *job_parcel(const struct job *job, uint32_t parcel)
{
    return job->layout && parcel < job->layout->n_parcels ? &job->work.parcels[parcel] : NULL;
}

/* Is it a rank of this node? */
static inline bool job_is_own(const struct job *job, unsigned rank)
{
    return rank >= job->world.first && rank < job->world.end;
}
