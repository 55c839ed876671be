/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The data path of a step, in order:
 *
 *     step_open               begins a new step without contributions
 *     step_prepare, step_post for each parcel, micro-batch and pass: slots -> accumulators (workers)
 *     step_combine, step_post only on several nodes: partial sums -> accumulators (workers)
 *     step_norm               the exact norm over all contributions
 *     step_update             unscale + clip + optimizer + 16-bit weights            (workers)
 *     step_commit             increments the parameters' step counts
 *
 * A step works on the owned partitions of a state, and does not use sockets, clients or policies. docs/numerics.md
 * defines the results. All functions are for the loop thread. Kernels run on the workers, and worker_pool_reap() calls
 * done() when they end.
 *
 * If all ranks are on this node (n_local == world size), reductions add to the accumulators at once. Otherwise a
 * reduction writes one partial sum per *piece* into staging. A piece is a maximal subtree of the rank tree whose ranks
 * are all local. Each node sends its pieces to the nodes that own the elements. There a reduction of step_combine()
 * adds the pieces. The result has the same bits as on one node.
 *
 * On GPUs, ranks send slices of gradients directly to each other, on one node or on several. On several nodes each
 * reduction is a step_combine() with a mask bit for each rank of the world.
 *
 * If a node has only one local rank, and the rank's gradients have the wire type, the rank's slot itself is the piece,
 * and is not copied to staging ("slots are sent"). Then a reduction only computes the 64-bit sums of the elements that
 * other nodes own. The reduction of step_combine() computes the 64-bit sums of the owned elements, and finds values
 * that are not finite.
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
    STEP_MAX_RANKS = 64, /* ranks of one node, so that a 64-bit mask has a bit for each */
};

struct devices;
struct muon;
struct offload;
struct published;
struct ring;
struct speculation;
struct step;

/*
 * A worker's current operation and chunk, in kept memory. After a kill, the next daemon reads the slot, and finishes
 * its chunk before the other chunks of the operation.
 */
struct step_slot {
    _Atomic(uint64_t) op; /* 0: no operation */
    uint32_t chunk;
    uint32_t accepts; /* 1: the chunk's speculative update is being accepted */
    struct undo_slot undo;
};

/* One reduction. At most one reduction per parcel runs at a time. */
struct reduction {
    struct work work;
    uint64_t op; /* number of the operation, the stamp of finished chunks; 0: no stamps are kept */
    struct step *step;
    uint64_t staging_elems; /* where the parcel's pieces begin in staging */
    uint32_t parcel, micro_batch, pass;
    bool combining;
    bool busy;
    bool give_only;          /* on GPUs: this node only sends its slices again, because its own sum is done */
    bool cancelled;          /* on GPUs, in done(): the reduction was cancelled and added nothing */
    uint64_t posted_ns;      /* time of step_post(), for the recorder */
    uint64_t *masks;         /* per part of the parcel; bit i: source i contributes */
    const uint8_t **sources; /* per local rank: its slot; when combining, per piece: its partial sums */
    unsigned n_sources;
    uint64_t slots;                        /* when combining; bit i: source i is the slot of one rank */
    struct ring *held[STEP_MAX_RANKS];     /* the rings that the caller holds to keep sources readable */
    unsigned source_ranks[STEP_MAX_RANKS]; /* when combining: the first rank of each piece, in rank order */
    void (*done)(void *userdata, struct reduction *reduction);
    void *userdata;
};

/*
 * The origin of a value that is not finite. Of several origins, the least (micro-batch, parameter, element) is stored.
 */
struct step_finding {
    bool found;
    bool overflowed; /* all inputs were finite, but their sum was not */
    uint32_t micro_batch, param;
    unsigned rank; /* meaningless when overflowed */
    uint64_t elem;
    float value;
    uint64_t n_nan, n_inf; /* counts among the inspected elements of the rank */
};

/* Workers can read the accumulators of the parcel, and their values are those of the open step. */
typedef void (*step_ready)(void *userdata, uint32_t parcel);

/*
 * The functions of a step that differ between host memory, where workers run them, and GPUs, where an engine runs them.
 */
struct step_ops {
    /*
     * Starts to add the slots to the accumulators. The caller has set masks[], sources[] and held[]. step_reduced()
     * follows.
     */
    void (*reduce)(struct reduction *reduction);
    /*
     * Starts the update. The caller has set scalars and contributed. update_done() follows when the weights are
     * written, or with -ECANCELED.
     */
    void (*update)(struct step *step);
    /* For step_complete(). NULL: the accumulators are in host memory. */
    void (*complete)(struct step *step, uint32_t parcel, step_ready ready, void *userdata);
    /* Return: the accumulator of an owned chunk in host memory, after ready(). NULL: step_acc_here(). */
    const float *(*acc)(const struct step *step, uint32_t chunk);
    bool elsewhere; /* slots and accumulators are on GPUs, so nothing is staged, and no slot is sent */
    /*
     * Makes memory for these functions. Called by step_new(). NULL: these functions need no memory. Return: 0 or
     * -errno.
     */
    int (*make)(struct step *step);
    /* Frees the memory of make(). Called by step_free(). May be NULL. */
    void (*unmake)(struct step *step);
    /* Moves the memory of make() from a step for another number of ranks to this step. May be NULL. */
    void (*go_on_from)(struct step *step, struct step *before);
};

struct step {
    const struct step_ops *ops;
    struct step_ops replay_ops;       /* during replay: ops, without reducing */
    const struct step_ops *ops_after; /* during replay: the ops after the replay; else NULL */
    const uint64_t *found_sums;       /* in step_was_reduced(): its sums, per local rank and part; else NULL */
    const struct layout *layout;
    struct state *state;
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local; /* the ranks of this node */
    enum optimizer optimizer;
    struct devices *devices;         /* used by step-device.c */
    unsigned n_updating, n_to_order; /* step-device.c: the update's orders that are unfinished, and not yet made */
    struct offload *offload;         /* used by step-offload.c; not owned */
    struct muon *muon;               /* used by step-muon.c; NULL: another optimizer */
    struct published *published;     /* owned; NULL: weights are not published before the step ends */
    struct speculation *speculation; /* owned; NULL: nothing is updated before the decision */

    struct reduction *reductions;   /* per parcel */
    struct reduction *combinations; /* per parcel; NULL when all ranks are local */
    struct segment kept;            /* the kept segment, which has the arrays from findings to squares */
    struct kept_findings *findings; /* used by step-kept.c */
    _Atomic(uint64_t) *stamps;      /* per chunk: the operation that last finished the chunk */
    _Atomic(uint64_t) *turns;       /* per chunk, of a state with spare places (spare.h); else NULL */
    struct step_slot *slots;        /* per worker; NULL: not kept */
    struct reduce_result *results;  /* per chunk: squares of the accumulator; the field `sums` is unused */
    struct position_sum *sums;      /* per chunk and local rank */
    uint8_t *begun;                 /* per part: its accumulator has gradients of this step */
    uint8_t *contributed;           /* per parameter: a part has contributed to this step */
    struct exact_sum *measured;     /* per parameter: squares of the owned elements, from step_norm() */
    struct exact_sum *squares;      /* per parameter: `measured` of the last decided step */
    unsigned squares_copy;          /* index of the copy that `squares` points to */
    double norm_scale;              /* factor of parameter norms in the last decided step */
    struct update_scalars *scalars; /* per parameter */
    bool past_caches;               /* accumulators exceed the CPU's caches, so they are written past the caches */
    enum dtype wire;                /* type of staging, and of the pieces of other nodes */
    struct segment staging_segment; /* for each piece, all elements of staged parcels; may be empty */
    uint8_t *staging;               /* start of staging_segment */
    struct subtree pieces[SUBTREE_MAX];
    unsigned n_pieces;
    pthread_mutex_t finding_lock;
    struct step_finding finding;

    uint64_t n_ops;     /* number of operations so far: sums of parcels, and updates */
    uint64_t opened_op; /* operations up to this one belong to earlier steps */
    uint64_t update_op; /* the number of the update's operation, like reduction.op */
    const struct hyper *groups; /* groups of the current update; not owned */
    struct work update_work;
    void (*update_done)(void *userdata, int result);
    void *update_userdata;
    uint64_t n_reduced_bytes; /* bytes read from slots since step_open() */
};

struct step_options {
    struct state *state; /* all pointers are borrowed, and must outlive the step */
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local;
    enum optimizer optimizer;
    size_t cache_bytes;         /* size of the CPU's largest cache; 0: no accumulator fits */
    const struct step_ops *ops; /* NULL: the step is in host memory, and workers run it */
    bool publishes;             /* updates write the weights that all ranks map */
    struct devices *devices;    /* used by ops */
    enum dtype wire;            /* type of partial sums, F32 or BF16; unused if all ranks are local */
};

/* Makes a step. The caller reserves the pages of staging_segment. Return: 0 or -errno. */
int step_new(struct step **out, const struct step_options *options);
void step_free(struct step *step);

/* Return: whether all ranks are on this node. */
static inline bool step_is_alone(const struct step *step)
{
    return step->n_local == step->layout->world_size;
}

/* Return: whether this node, or a node of n_ranks ranks, sends its rank's slot of the parcel instead of staging. */
bool step_sends_slots(const struct step *step, uint32_t parcel);
bool step_gets_slots(const struct step *step, unsigned n_ranks, uint32_t parcel);

/* Drops all accumulated gradients, to begin a new step or after an abort. No reduction may be running. */
void step_open(struct step *step);

/*
 * Prepares a parcel's reduction. The caller fills masks[] and sources[] of the result, and then calls step_post().
 * Sources must stay readable until done(). step_combine() of the same parcel does not change a prepared reduction.
 */
struct reduction *step_prepare(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);
/*
 * Gives the reduction the number of an operation, so that the next daemon does not reduce finished chunks again. Call
 * it before step_post().
 */
void step_number(struct reduction *reduction);
void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata);
/*
 * While a new daemon replays the log of a killed daemon, posted reductions do not run. step_was_reduced() ends a
 * reduction whose end is in the log, and calls done() at once. sums: the 64-bit sums in the log, per local rank and
 * part of the parcel. step_end_replay() runs all other posted reductions.
 */
void step_begin_replay(struct step *step);
void step_was_reduced(struct reduction *reduction, const uint64_t *sums);
void step_end_replay(struct step *step);

/*
 * step_prepare() for a reduction that adds all nodes' pieces to the accumulators of the owned partitions. The caller
 * fills sources[], source_ranks[] and n_sources (at most STEP_MAX_RANKS) in rank order, masks[] (bit i: source i has
 * gradients of the part), and slots. Only the owned elements of a source are read.
 */
struct reduction *step_combine(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);

/*
 * Return: the 64-bit sum of the part that the local rank pushed in this reduction. Call it after done(). If slots are
 * sent and this node owns elements of the parcel, call it also after done() of the step_combine() reduction.
 */
uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t part);

/*
 * Only on several nodes. Return: the partial sums of a piece of a parcel, in type wire, from the parcel's start. If
 * slots are sent, returns the rank's slot, which is sources[0] of the parcel's step_prepare().
 */
const uint8_t *step_piece(const struct step *step, uint32_t parcel, unsigned piece);

/*
 * Return: the place in staging to which workers write the partial sums of a piece. Call it only if slots are not sent.
 */
void *step_staging(const struct step *step, uint32_t parcel, unsigned piece);

/*
 * Call it when all expected gradients of the parcel are in the accumulators of this node. More may come nevertheless.
 * ready() is called when the accumulators are in host memory: at once, or later, or never if the step is decided
 * before.
 */
void step_complete(struct step *step, uint32_t parcel, step_ready ready, void *userdata);

/*
 * Records that some node has gradients of a part of the parameter, so that the parameter is updated, and counted by
 * step_commit().
 */
void step_contribute(struct step *step, uint32_t param);

/* Adds the squares of all owned contributions to *total. */
void step_norm(struct step *step, struct exact_sum *total);

/*
 * Makes the result of step_norm() the squares of the decided step. norm_scale: 1 / (D x L), the factor of parameter
 * norms.
 */
void step_decide(struct step *step, double norm_scale);

/* Return: the sum of squares of a parameter's owned elements in the last decided step, carried (32 bits per limb). */
const struct exact_sum *step_squares(const struct step *step, uint32_t param);

/*
 * Return: the norm of a parameter's gradient in the last decided step. squares: the sum of step_squares() of all nodes.
 */
double step_param_norm(const struct step *step, const struct exact_sum *squares);

/*
 * Restores the step that an earlier daemon opened after n_ops operations. squares_copy, norm_scale: the fields of
 * struct step after the last decided step.
 */
void step_found(struct step *step, uint64_t n_ops, unsigned squares_copy, double norm_scale);

/* Takes over the operations and squares of a step that was made for another number of ranks. */
void step_go_on_from(struct step *step, struct step *before);

struct step_update {
    const struct hyper *groups; /* per group; must stay until done() */
    double s;                   /* numerics.md section 3 */
};

/*
 * Computes the scalars of a parameter in the coming update. last, last_param: those of another parameter of the same
 * update, or NULL; they save time if both parameters have the same settings.
 */
void step_scalars(const struct step *step, const struct step_update *update, uint32_t param,
                  const struct update_scalars *last, uint32_t last_param, struct update_scalars *out);

/*
 * Updates masters, moments and weights. Call it when the step is decided, because an update cannot be aborted. done()
 * is called when all values are written. result: 0, or -ECANCELED on GPUs if the job is being dropped.
 */
void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata, int result),
                 void *userdata);

/* For step_ops: the reduction and the update in host memory, on workers. */
void step_reduce_here(struct reduction *reduction);
void step_update_here(struct step *step);
/* For step_ops: step_reduced() ends a reduction. Call step_keep_finding() before, for each finding of the reduction. */
void step_reduced(struct reduction *reduction);
void step_keep_finding(struct step *step, const struct step_finding *finding);

/* Return: the arguments of the kernel that updates a chunk in a place, without acc and k. */
struct update_args step_args_in(const struct step *step, uint32_t chunk, const struct state_place *place);
/* Return: the arguments of the kernel that updates a chunk. acc: the chunk's accumulator. */
struct update_args step_update_args(const struct step *step, uint32_t chunk, const float *acc);
/* Return: the accumulator of a chunk in host memory. step_ready_acc(): after ready() of step_complete(). */
float *step_acc_here(const struct step *step, uint32_t chunk);
const float *step_ready_acc(const struct step *step, uint32_t chunk);
/* Return: the optimizer of a parameter. */
static inline enum optimizer step_optimizer(const struct step *step, uint32_t param)
{
    return optimizer_of_param(step->optimizer, step->layout->params[param].muon);
}

/* For step-offload.c and step-muon.c: updates one chunk from its accumulator. On a worker. */
void step_update_chunk(struct step *step, uint32_t chunk, const float *acc);
/* Finishes a torn chunk of an update (step-kept.h). slot: the slot that describes the chunk. */
void step_finish_chunk(struct step *step, uint32_t chunk, const float *acc, struct step_slot *slot);
/*
 * Finishes the torn chunks of an update in [first, end). Call it before other chunks of the range are updated. acc()
 * returns the accumulator of a chunk.
 */
typedef const float *(*step_acc)(const void *userdata, uint32_t chunk);
void step_finish_torn_update(struct step *step, uint32_t first, uint32_t end, step_acc acc, const void *userdata);

/* Increments the step counts of the parameters that contributed. */
void step_commit(struct step *step);
