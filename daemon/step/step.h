/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The data path of a step, in the order in which it happens:
 *
 *     step_open               a new step: nothing has contributed yet
 *     step_prepare, step_post per parcel, micro-batch, pass: slots -> accumulators   (workers)
 *     step_combine, step_post between nodes only: partial sums -> accumulators       (workers)
 *     step_norm               the exact norm over all that contributed
 *     step_update             unscale + clip + optimizer + 16-bit weights            (workers)
 *     step_commit             counts
 *
 * A step works on the owned partitions of a state and knows no sockets, clients or policies. docs/numerics.md defines
 * its numbers. All functions are for the owner's thread (the loop); kernels run on the workers, and completion comes
 * back through worker_pool_reap() as a callback.
 *
 * If all ranks are on this node (n_local == world size), reductions add to the accumulators at once. Else a reduction
 * writes one partial sum per *piece* (a maximal subtree of the rank tree whose ranks are all local) into staging, all
 * nodes send their pieces to the owners, and step_combine() adds them there. The bits of both are equal.
 *
 * GPUs send slices between ranks, on one node or on several. On several nodes each reduction is a step_combine() of
 * the gradients that the ranks of the world have pushed, with a mask bit for each rank.
 *
 * If there is one local rank, and its gradients have the type that is sent, its slot is the piece, and staging has no
 * place for it. A reduction then only computes the 64-bit sums of the elements that other nodes own. step_combine()
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
 * The operation that a worker is in the midst of. It lies in memory that is kept, so the next daemon finds it, and
 * finishes the chunk with it before it does anything else of that operation.
 */
struct step_slot {
    _Atomic(uint64_t) op; /* 0: none */
    uint32_t chunk;
    struct undo_slot undo;
};

/* One reduction; at most one per parcel is under way. */
struct reduction {
    struct work work;
    uint64_t op; /* its number, which marks the chunks that are done; 0: nothing is kept */
    struct step *step;
    uint64_t staging_elems; /* where the parcel's pieces begin in staging */
    uint32_t parcel, micro_batch, pass;
    bool combining;
    bool busy;
    bool give_only;          /* on GPUs: added here already; this node only sends its slices again */
    bool cancelled;          /* on GPUs, when done() is called: nothing was added */
    uint64_t posted_ns;      /* for the recorder */
    uint64_t *masks;         /* per part of the parcel: bit i = local rank i (or piece i) takes part */
    const uint8_t **sources; /* per local rank: its slot; combining: per piece, as in staging */
    unsigned n_sources;
    uint64_t slots;                        /* combining: bit i when source i is the slot of one rank */
    struct ring *held[STEP_MAX_RANKS];     /* for the caller: rings that it holds so that sources stay readable */
    unsigned source_ranks[STEP_MAX_RANKS]; /* combining: first rank of each piece, in order */
    void (*done)(void *userdata, struct reduction *reduction);
    void *userdata;
};

/* Where a value that is not finite came from; the least (micro-batch, parameter, element) is kept. */
struct step_finding {
    bool found;
    bool overflowed; /* all inputs were finite, their sum was not */
    uint32_t micro_batch, param;
    unsigned rank; /* meaningless when overflowed */
    uint64_t elem;
    float value;
    uint64_t n_nan, n_inf; /* in that parameter's piece by that rank */
};

/* The verbs of a step that differ by place: in the memory of this process by workers, or on GPUs by an engine. */
struct step_ops {
    /* Adds the slots to the accumulators. The caller has set masks[], sources[] and held[]. step_reduced() follows. */
    void (*reduce)(struct reduction *reduction);
    /* scalars and contributed are set. update_done() follows, when weights are written, or with -ECANCELED. */
    void (*update)(struct step *step);
    bool elsewhere; /* slots and accumulators are not here: nothing is staged, and no slot is sent */
    /*
     * These verbs may need memory of their own, which step_new() makes and step_free() frees. NULL: they need none.
     * Return: 0 or -errno.
     */
    int (*make)(struct step *step);
    void (*unmake)(struct step *step);
    /* Takes that memory over from a step of another number of ranks. NULL: there is none. */
    void (*go_on_from)(struct step *step, struct step *before);
};

struct step {
    const struct step_ops *ops;
    const struct layout *layout;
    struct state *state;
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local; /* ranks whose slots are here */
    enum optimizer optimizer;
    struct devices *devices;         /* step-device.c's */
    unsigned n_updating, n_to_order; /* step-device.c's: orders of the update that are not done, not given yet */
    struct offload *offload;         /* step-offload.c's; not owned */
    struct muon *muon;               /* step-muon.c's; NULL: the optimizer is another one */
    struct published *published;     /* owned; NULL: weights are there when the whole step is */

    struct reduction *reductions;   /* per parcel */
    struct reduction *combinations; /* per parcel; NULL when all ranks are local */
    struct segment kept;            /* all of this: */
    struct kept_findings *findings; /* step-kept.c's */
    _Atomic(uint64_t) *stamps;      /* per chunk: the last operation that is done */
    struct step_slot *slots;        /* per worker; NULL: nobody keeps them */
    struct reduce_result *results;  /* per chunk: squares of the accumulator; sums unused */
    struct position_sum *sums;      /* per chunk and local rank */
    uint8_t *begun;                 /* per part: its accumulator holds gradients of this step */
    uint8_t *contributed;           /* per parameter: any of its parts has contributed to this step */
    struct exact_sum *measured;     /* per parameter: squares of the owned elements, as step_norm() found them */
    struct exact_sum *squares;      /* per parameter: `measured` of the last decided step */
    unsigned squares_copy;          /* of two: in which of them the squares lie */
    double norm_scale;              /* of the last decided step */
    struct update_scalars *scalars; /* per parameter */
    bool past_caches;               /* accumulators are written past the caches: they do not fit */
    enum dtype wire;                /* of staging, and of the pieces of other nodes */
    struct segment staging_segment; /* pieces x padded elements of parcels not sent from slots; may be empty */
    uint8_t *staging;               /* its start */
    struct subtree pieces[SUBTREE_MAX];
    unsigned n_pieces;
    pthread_mutex_t finding_lock;
    struct step_finding finding;

    uint64_t n_ops;     /* operations so far: sums of parcels, and updates */
    uint64_t opened_op; /* those up to this one belong to earlier steps */
    uint64_t update_op; /* as reduction.op */
    const struct hyper *groups; /* of the update under way; not owned */
    struct work update_work;
    void (*update_done)(void *userdata, int result);
    void *update_userdata;
    uint64_t n_reduced_bytes; /* read from slots since step_open */
};

struct step_options {
    struct state *state; /* not consumed, must outlive the step; so must the other pointers' targets */
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local;
    enum optimizer optimizer;
    size_t cache_bytes;         /* of the CPU's largest cache; 0: nothing fits into it */
    const struct step_ops *ops; /* NULL: workers, in the memory of this process */
    bool publishes;             /* what they write are the weights that all ranks map */
    struct devices *devices;    /* of ops */
    enum dtype
        wire; /* partial sums are rounded to it, once: DTYPE_F32 or DTYPE_BF16; unused when all ranks are local */
};

/* The pages of staging_segment are the caller's to reserve. Return: 0 or -errno. */
int step_new(struct step **out, const struct step_options *options);
void step_free(struct step *step);

/* Does this node send the slots of the parcel instead of staging? Does a node of n_ranks? */
bool step_sends_slots(const struct step *step, uint32_t parcel);
bool step_gets_slots(const struct step *step, unsigned n_ranks, uint32_t parcel);

/* Forgets all accumulated gradients: for a new step, and after an abort. No reduction may be under way. */
void step_open(struct step *step);

/*
 * Prepares a parcel's reduction: the caller fills masks[] and sources[] of the result, then posts it. Sources must stay
 * readable until done(). step_combine() does not change a reduction that is prepared but not posted.
 */
struct reduction *step_prepare(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);
/* Numbers the reduction, so that the next daemon does not reduce again those chunks that are done. Before step_post().
 */
void step_number(struct reduction *reduction);
void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata);
/*
 * An earlier daemon was killed in the midst of the reduction, which is prepared: finishes the chunks that its workers
 * were at. For all such reductions, before any is posted: a worker that begins another chunk forgets where it was.
 */
void step_finish_torn(struct reduction *reduction);
/* An earlier daemon has finished the reduction, which is prepared: done() is called at once. */
void step_was_reduced(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction),
                      void *userdata);

/*
 * As step_prepare(), but for the sum over the pieces of all nodes into the accumulators of the owned partitions. The
 * caller fills sources[], source_ranks[] and n_sources (at most STEP_MAX_RANKS) in rank order,
 * and masks[]: bit i when source i holds gradients of the part; and slots. Only the owned elements of a source are
 * read.
 */
struct reduction *step_combine(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);

/*
 * The 64-bit sum of the part that the local rank pushed in that reduction. Call it after done(); if slots are sent and
 * this node owns any of the parcel, also after done() of step_combine().
 */
uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t part);

/*
 * The partial sums of a piece of a parcel, from the parcel's start, of type wire; several nodes only. If slots are
 * sent, that is the slot, once step_prepare()'s sources[] are set.
 */
const uint8_t *step_piece(const struct step *step, uint32_t parcel, unsigned piece);

/* Where workers write the partial sums of a piece, if slots are not sent. */
void *step_staging(const struct step *step, uint32_t parcel, unsigned piece);

/* A part of the parameter is in the step, here or on another node: it is updated, and step_commit() advances its count.
 */
void step_contribute(struct step *step, uint32_t param);

/* Adds the squares of all owned contributions to *total. */
void step_norm(struct step *step, struct exact_sum *total);

/* Keeps the measured squares as the decided step's. norm_scale: 1 / (D x L), the factor of the parameters' norms. */
void step_decide(struct step *step, double norm_scale);

/* Squares of the owned elements of a parameter in the last decided step. Carried: no limb holds more than 32 bits. */
const struct exact_sum *step_squares(const struct step *step, uint32_t param);

/* The norm of a parameter's gradient in the last decided step. squares: over all elements, those of all nodes. */
double step_param_norm(const struct step *step, const struct exact_sum *squares);

/*
 * The step is as an earlier daemon has opened it, after n_ops operations. squares_copy, norm_scale: of the last decided
 * step.
 */
void step_found(struct step *step, uint64_t n_ops, unsigned squares_copy, double norm_scale);

/* Takes over the operations and squares of a step that was made for another number of ranks. */
void step_go_on_from(struct step *step, struct step *before);

struct step_update {
    const struct hyper *groups; /* per group; they stay until done() */
    double s;                   /* numerics.md section 3 */
};

/*
 * The step is decided: from here it only rolls forward. done() is called when masters, moments and weights are written.
 * result: 0, or -ECANCELED on GPUs whose job is being dropped.
 */
void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata, int result),
                 void *userdata);

/* For ops: sums the slots on workers. */
void step_reduce_here(struct reduction *reduction);
/* For ops: a reduction has ended. Each of its findings was kept before. */
void step_reduced(struct reduction *reduction);
void step_keep_finding(struct step *step, const struct step_finding *finding);

/* Return: the arguments of the kernel that updates a chunk. acc: the chunk's accumulator. */
struct update_args step_update_args(const struct step *step, uint32_t chunk, const float *acc);
/* Where the accumulator of a chunk lies in the memory of this process. */
float *step_acc_here(const struct step *step, uint32_t chunk);
/* The optimizer of a parameter. */
static inline enum optimizer step_optimizer(const struct step *step, uint32_t param)
{
    return optimizer_of_param(step->optimizer, step->layout->params[param].muon);
}

/* For step-offload.c and step-muon.c: updates one chunk from its accumulator. On a worker. */
void step_update_chunk(struct step *step, uint32_t chunk, const float *acc);
/* Finishes the chunk at which a worker of an earlier daemon was killed. slot: that worker's. */
void step_finish_chunk(struct step *step, uint32_t chunk, const float *acc, struct step_slot *slot);
/*
 * Finishes the chunks of [first, end) that an earlier daemon was updating when it was killed. Call it before any other
 * chunk of the range is updated. acc(): where the accumulator of a chunk lies.
 */
typedef const float *(*step_acc)(const void *userdata, uint32_t chunk);
void step_finish_torn_update(struct step *step, uint32_t first, uint32_t end, step_acc acc, const void *userdata);

/* Advances the counts of the parameters that contributed. */
void step_commit(struct step *step);
