/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The data path of a step, in order:
 *
 *     step_open               begins a new step without contributions
 *     step_prepare, step_post per parcel, micro-batch, pass: slots -> accumulators   (workers)
 *     step_combine, step_post between nodes only: partial sums -> accumulators       (workers)
 *     step_norm               the exact norm over all contributions
 *     step_update             unscale + clip + optimizer + 16-bit weights            (workers)
 *     step_commit             counts
 *
 * A step works on the owned partitions of a state, independent of sockets, clients and policies. docs/numerics.md
 * defines its numbers. All functions are for the loop thread. Kernels run on the workers, and worker_pool_reap() calls
 * back when they end.
 *
 * If all ranks are on this node (n_local == world size), reductions add to the accumulators at once. Otherwise a
 * reduction writes one partial sum per *piece* into staging. A piece is a maximal subtree of the rank tree whose ranks
 * are all local. All nodes send their pieces to the owners, and step_combine() adds them there. Both ways give the same
 * bits.
 *
 * GPUs send slices between ranks, on one node or on several. On several nodes each reduction is a step_combine() of
 * the gradients that the ranks of the world have pushed, with a mask bit for each rank.
 *
 * If there is only one local rank, and its gradients have the wire type, its slot is the piece, and staging has no
 * place for it. Then a reduction only computes the 64-bit sums of the elements that other nodes own. step_combine()
 * computes the sums of the owned elements, and finds values that are not finite.
 */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/base/worker.h"
#include "core/layout/layout.h"
#include "core/layout/subtree.h"
#include "daemon/memory/state.h"
#include "kernels/kernels.h"
#include "kernels/undo.h"

enum {
    STEP_MAX_WORLD = 1024,
    STEP_MAX_RANKS = 64, /* of one node: a parameter's pushers fit in one mask */
};

struct devices;
struct muon;
struct offload;
struct published;
struct ring;
struct step;

/*
 * A worker's current operation and chunk. It is in kept memory. The next daemon finds it there, and finishes that chunk
 * before the other chunks of the operation.
 */
struct step_slot {
    _Atomic(uint64_t) op; /* 0: no operation */
    uint32_t chunk;
    struct undo_slot undo;
};

/* One reduction. At most one reduction per parcel runs at a time. */
struct reduction {
    struct work work;
    uint64_t op; /* the number that stamps finished chunks; 0: no stamps are kept */
    struct step *step;
    uint64_t staging_elems; /* where the parcel's pieces begin in staging */
    uint32_t parcel, micro_batch, pass;
    bool combining;
    bool busy;
    bool give_only;          /* on GPUs: this node has already added, and only sends its slices again */
    bool cancelled;          /* on GPUs, in done(): the reduction added nothing */
    uint64_t posted_ns;      /* for the recorder */
    uint64_t *masks;         /* per part of the parcel; bit i: local rank i (or piece i) contributes */
    const uint8_t **sources; /* per local rank: its slot; combining: per piece, as in staging */
    unsigned n_sources;
    uint64_t slots;                        /* combining; bit i: source i is the slot of one rank */
    struct ring *held[STEP_MAX_RANKS];     /* the rings that the caller holds to keep sources readable */
    unsigned source_ranks[STEP_MAX_RANKS]; /* combining: first rank of each piece, in order */
    void (*done)(void *userdata, struct reduction *reduction);
    void *userdata;
};

/* The origin of a value that is not finite. The least (micro-batch, parameter, element) is kept. */
struct step_finding {
    bool found;
    bool overflowed; /* all inputs were finite, but their sum was not */
    uint32_t micro_batch, param;
    unsigned rank; /* meaningless when overflowed */
    uint64_t elem;
    float value;
    uint64_t n_nan, n_inf; /* among the inspected elements of that rank */
};

/* The functions of a step that differ by place. Workers run them in host memory, or an engine runs them on GPUs. */
struct step_ops {
    /* Adds the slots to the accumulators. The caller has set masks[], sources[] and held[]. step_reduced() follows. */
    void (*reduce)(struct reduction *reduction);
    /* scalars and contributed are set. update_done() follows when weights are written, or with -ECANCELED. */
    void (*update)(struct step *step);
    bool elsewhere; /* slots and accumulators are on GPUs: no data are staged, and no slot is sent */
    /* Makes memory for these functions, called by step_new(). NULL: they need no memory. Return: 0 or -errno. */
    int (*make)(struct step *step);
    /* Frees that memory, called by step_free(). May be NULL. */
    void (*unmake)(struct step *step);
    /* Takes that memory over from a step of another number of ranks. May be NULL. */
    void (*go_on_from)(struct step *step, struct step *before);
};

struct step {
    const struct step_ops *ops;
    struct step_ops replay_ops;       /* during replay: ops, without reducing */
    const struct step_ops *ops_after; /* during replay: the ops that follow; else NULL */
    const uint64_t *found_sums;       /* replayed: what step_sum() returns, per local rank and part; else NULL */
    const struct layout *layout;
    struct state *state;
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local; /* ranks whose slots are here */
    enum optimizer optimizer;
    struct devices *devices;         /* of step-device.c */
    unsigned n_updating, n_to_order; /* of step-device.c: the update's orders that are not done, not given */
    struct offload *offload;         /* of step-offload.c; not owned */
    struct muon *muon;               /* of step-muon.c; NULL: another optimizer */
    struct published *published;     /* owned; NULL: weights appear when the whole step ends */

    struct reduction *reductions;   /* per parcel */
    struct reduction *combinations; /* per parcel; NULL when all ranks are local */
    struct segment kept;            /* the segment with these: */
    struct kept_findings *findings; /* of step-kept.c */
    _Atomic(uint64_t) *stamps;      /* per chunk: the last finished operation */
    struct step_slot *slots;        /* per worker; NULL: not kept */
    struct reduce_result *results;  /* per chunk: squares of the accumulator; sums unused */
    struct position_sum *sums;      /* per chunk and local rank */
    uint8_t *begun;                 /* per part: its accumulator has gradients of this step */
    uint8_t *contributed;           /* per parameter: a part has contributed to this step */
    struct exact_sum *measured;     /* per parameter: squares of the owned elements, from step_norm() */
    struct exact_sum *squares;      /* per parameter: `measured` of the last decided step */
    unsigned squares_copy;          /* which of the two copies has the squares */
    double norm_scale;              /* of the last decided step */
    struct update_scalars *scalars; /* per parameter */
    bool past_caches;               /* accumulators exceed the caches, and are written past them */
    enum dtype wire;                /* type of staging, and of the pieces of other nodes */
    struct segment staging_segment; /* pieces x padded elements of staged parcels; may be empty */
    uint8_t *staging;               /* its start */
    struct subtree pieces[SUBTREE_MAX];
    unsigned n_pieces;
    pthread_mutex_t finding_lock;
    struct step_finding finding;

    uint64_t n_ops;     /* operations so far: sums of parcels, and updates */
    uint64_t opened_op; /* operations up to this one belong to earlier steps */
    uint64_t update_op; /* as reduction.op */
    const struct hyper *groups; /* of the current update; not owned */
    struct work update_work;
    void (*update_done)(void *userdata, int result);
    void *update_userdata;
    uint64_t n_reduced_bytes; /* read from slots since step_open() */
};

struct step_options {
    struct state *state; /* not consumed, must outlive the step; so must the other pointers' targets */
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local;
    enum optimizer optimizer;
    size_t cache_bytes;         /* size of the CPU's largest cache; 0: no accumulator fits */
    const struct step_ops *ops; /* NULL: workers run them in host memory */
    bool publishes;             /* updates write the weights that all ranks map */
    struct devices *devices;    /* for ops */
    enum dtype wire;            /* partial sums are rounded to it once (F32 or BF16); unused if all ranks are local */
};

/* Makes a step. The caller reserves the pages of staging_segment. Return: 0 or -errno. */
int step_new(struct step **out, const struct step_options *options);
void step_free(struct step *step);

/* Return: whether all ranks are on this node. */
static inline bool step_is_alone(const struct step *step)
{
    return step->n_local == step->layout->world_size;
}

/* Return: whether this node, or a node of n_ranks ranks, sends the slots of the parcel instead of staging. */
bool step_sends_slots(const struct step *step, uint32_t parcel);
bool step_gets_slots(const struct step *step, unsigned n_ranks, uint32_t parcel);

/* Drops all accumulated gradients, for a new step and after an abort. No reduction may be running. */
void step_open(struct step *step);

/*
 * Prepares a parcel's reduction. The caller fills masks[] and sources[] of the result, and then posts it. Sources must
 * stay readable until done(). step_combine() does not change a reduction that is prepared but not posted.
 */
struct reduction *step_prepare(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);
/* Numbers the reduction before step_post(), so that the next daemon does not reduce the finished chunks again. */
void step_number(struct reduction *reduction);
void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata);
/*
 * While a new daemon replays the log of a killed one, posted reductions do not run. step_was_reduced() ends those that
 * the log has, with their sums: per local rank, and part of the parcel. It calls done() at once. step_end_replay() runs
 * the others, which the killed daemon may have left unfinished.
 */
void step_begin_replay(struct step *step);
void step_was_reduced(struct reduction *reduction, const uint64_t *sums);
void step_end_replay(struct step *step);

/*
 * As step_prepare(), but for the sum of all nodes' pieces into the accumulators of the owned partitions. The caller
 * fills sources[], source_ranks[] and n_sources (at most STEP_MAX_RANKS) in rank order, masks[] (bit i: source i has
 * gradients of the part), and slots. Only the owned elements of a source are read.
 */
struct reduction *step_combine(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);

/*
 * Return: the 64-bit sum of the part that the local rank pushed in that reduction. Must be called after done(); and if
 * slots are sent and this node owns elements of the parcel, after done() of step_combine(), too.
 */
uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t part);

/*
 * Several nodes only. Return: the partial sums of a piece of a parcel, from the parcel's start, of type wire. If slots
 * are sent, this is the slot, and step_prepare()'s sources[] must be set.
 */
const uint8_t *step_piece(const struct step *step, uint32_t parcel, unsigned piece);

/* Return: where workers write the partial sums of a piece. Only if slots are not sent. */
void *step_staging(const struct step *step, uint32_t parcel, unsigned piece);

/* Records that a part of the parameter contributes on some node. Then it is updated, and step_commit() counts it. */
void step_contribute(struct step *step, uint32_t param);

/* Adds the squares of all owned contributions to *total. */
void step_norm(struct step *step, struct exact_sum *total);

/* Keeps the measured squares as the decided step's. norm_scale: 1 / (D x L), the factor of parameter norms. */
void step_decide(struct step *step, double norm_scale);

/* Return: squares of a parameter's owned elements in the last decided step. They are carried (32 bits per limb). */
const struct exact_sum *step_squares(const struct step *step, uint32_t param);

/* Return: the norm of a parameter's gradient in the last decided step. squares: over the elements of all nodes. */
double step_param_norm(const struct step *step, const struct exact_sum *squares);

/*
 * Restores the step that an earlier daemon opened after n_ops operations. squares_copy, norm_scale: of the last decided
 * step.
 */
void step_found(struct step *step, uint64_t n_ops, unsigned squares_copy, double norm_scale);

/* Takes over the operations and squares of a step that was made for another number of ranks. */
void step_go_on_from(struct step *step, struct step *before);

struct step_update {
    const struct hyper *groups; /* per group; must stay until done() */
    double s;                   /* numerics.md section 3 */
};

/*
 * Updates masters, moments and weights. The step is decided, and can no longer be aborted. done() is called when all
 * are written. result: 0, or -ECANCELED on GPUs if the job is being dropped.
 */
void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata, int result),
                 void *userdata);

/* For ops: sum the slots, and update, on workers. */
void step_reduce_here(struct reduction *reduction);
void step_update_here(struct step *step);
/* For ops: ends a reduction, after step_keep_finding() for each of its findings. */
void step_reduced(struct reduction *reduction);
void step_keep_finding(struct step *step, const struct step_finding *finding);

/* Return: the arguments of the kernel that updates a chunk. acc: the chunk's accumulator. */
struct update_args step_update_args(const struct step *step, uint32_t chunk, const float *acc);
/* Return: the accumulator of a chunk in host memory. */
float *step_acc_here(const struct step *step, uint32_t chunk);
/* Return: the optimizer of a parameter. */
static inline enum optimizer step_optimizer(const struct step *step, uint32_t param)
{
    return optimizer_of_param(step->optimizer, step->layout->params[param].muon);
}

/* For step-offload.c and step-muon.c: updates one chunk from its accumulator. On a worker. */
void step_update_chunk(struct step *step, uint32_t chunk, const float *acc);
/* Finishes the chunk that a worker of a killed daemon was updating. slot: that worker's slot. */
void step_finish_chunk(struct step *step, uint32_t chunk, const float *acc, struct step_slot *slot);
/*
 * Finishes the chunks of [first, end) that a killed daemon was updating. Call it before another chunk of the range is
 * updated. acc(): returns the accumulator of a chunk.
 */
typedef const float *(*step_acc)(const void *userdata, uint32_t chunk);
void step_finish_torn_update(struct step *step, uint32_t first, uint32_t end, step_acc acc, const void *userdata);

/* Increments the counts of the parameters that contributed. */
void step_commit(struct step *step);
