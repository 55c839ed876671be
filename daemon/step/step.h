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
 * It works on the owned partitions of a state and knows no sockets, clients or
 * policies. Its numbers are those of docs/numerics.md. All functions are for the
 * owner's thread (the loop); kernels run on the workers, and completion comes back through
 * worker_pool_reap() as a callback.
 *
 * Ranks of this node may be all ranks (n_local == world size): reductions then add to
 * the accumulators at once. Else a reduction writes one partial sum per *piece* (a maximal
 * subtree of the rank tree whose ranks are all local) into staging, pieces of all
 * nodes travel to the owners, and step_combine() adds them there. The bits are the same.
 *
 * On GPUs slices travel between ranks, wherever those are: of several nodes each reduction is a step_combine() of what
 * the ranks of the world have pushed, with a mask bit for each of them.
 *
 * Where there is one local rank, and its gradients are of the type that travels, its slot is
 * the piece, and staging has no place for it: a reduction then only takes the 64-bit sums of what
 * others own. Those of what is owned here come of step_combine(), and so does what is not finite.
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

enum {
    STEP_MAX_WORLD = 1024,
    STEP_MAX_RANKS = 64, /* of one node: a parameter's pushers fit in one mask */
};

struct devices;
struct offload;
struct ring;
struct step;

/* One reduction; at most one per parcel is under way. */
struct reduction {
    struct work work;
    struct step *step;
    uint64_t staging_elems; /* where the parcel's pieces begin in staging */
    uint32_t parcel, micro_batch, pass;
    bool combining;
    bool busy;
    uint64_t *masks;         /* per part of the parcel: bit i = local rank i (or piece i) takes part */
    const uint8_t **sources; /* per local rank: its slot; combining: per piece, as in staging */
    unsigned n_sources;
    uint64_t slots;                        /* combining: bit i when source i is the slot of one rank */
    bool give_only;                        /* on GPUs: it has been added here already, and is sent to others again */
    bool cancelled;                        /* on GPUs: of done(): it was not done */
    struct ring *held[STEP_MAX_RANKS];     /* for the caller: what keeps the sources readable */
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

/* Where a step's kernels run, and its gradients lie: workers and the memory of this process, or elsewhere. */
struct step_ops {
    /* Slots to accumulators; masks[], sources[] and held[] are set. step_reduced() follows. */
    void (*reduce)(struct reduction *reduction);
    /* Scalars and what has contributed are set. update_done() follows, when weights are written, or with -ECANCELED. */
    void (*update)(struct step *step);
    bool elsewhere; /* slots and accumulators are not here: nothing is staged, and no slot is sent */
};

struct step {
    const struct step_ops *ops;
    const struct layout *layout;
    struct state *state;
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local; /* ranks whose slots are here */
    enum optimizer optimizer;
    struct devices *devices;         /* step-device.c's; likewise the next ones */
    unsigned n_updating, n_to_order; /* orders of the update: not done yet, and of these not given yet */
    struct offload *offload;         /* step-offload.c's; not owned */

    struct reduction *reductions;   /* per parcel */
    struct reduction *combinations; /* per parcel; NULL when all ranks are local */
    struct reduce_result *results;  /* per chunk: squares of the accumulator; sums unused */
    struct position_sum *sums;      /* per chunk and local rank */
    uint8_t *begun;                 /* per part: its accumulator holds something of this step */
    uint8_t *contributed;           /* per parameter: the same of any part */
    struct exact_sum *measured;     /* per parameter: squares of what is owned here, as step_norm() found them */
    struct exact_sum *squares;      /* likewise: those of the last decided step */
    double norm_scale;              /* of that step */
    struct update_scalars *scalars; /* per parameter */
    enum dtype wire;                /* of staging, and of the pieces of other nodes */
    struct segment staging_segment; /* pieces x padded elements of what is not sent from slots; may be empty */
    uint8_t *staging;               /* its start */
    struct subtree pieces[SUBTREE_MAX];
    unsigned n_pieces;
    pthread_mutex_t finding_lock;
    struct step_finding finding;

    struct work update_work;
    void (*update_done)(void *userdata, int result);
    void *update_userdata;
    uint64_t n_reduced_bytes; /* read from slots since step_open */
};

struct step_options {
    struct state *state; /* not consumed, must outlive the step; likewise the others */
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local;
    enum optimizer optimizer;
    const struct step_ops *ops; /* NULL: workers, in the memory of this process */
    struct devices *devices;    /* of ops */
    enum dtype
        wire; /* partial sums are rounded to it, once: DTYPE_F32 or DTYPE_BF16; unused when all ranks are local */
};

/* The pages of staging_segment are the caller's to reserve. Return: 0 or -errno. */
int step_new(struct step **out, const struct step_options *options);
void step_free(struct step *step);

/* Are the parcel's slots themselves what travels? From a node of n_ranks? */
bool step_sends_slots(const struct step *step, uint32_t parcel);
bool step_gets_slots(const struct step *step, unsigned n_ranks, uint32_t parcel);

/* Forgets what was accumulated: for a new step, and after an abort. Nothing may be under way. */
void step_open(struct step *step);

/*
 * Prepares a parcel's reduction: the caller fills masks[] and sources[] of the result, then posts it.
 * Sources must stay readable until done(). Until it is posted it stays as it is, whatever is combined meanwhile.
 */
struct reduction *step_prepare(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);
void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata);

/*
 * As step_prepare(), but for the sum over the pieces of all nodes into the accumulators of the owned partitions. The
 * caller fills sources[], source_ranks[] and n_sources (at most STEP_MAX_RANKS) in rank order,
 * and masks[]: bit i when source i holds something of the part; and slots. Of a source only what is added here is read.
 */
struct reduction *step_combine(struct step *step, uint32_t parcel, uint32_t micro_batch, uint32_t pass);

/* After done(), and where slots are sent also after that of step_combine() if anything of the parcel is owned here: the
 * 64-bit sum of what local rank pushed as that part in that reduction. */
uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t part);

/* Partial sums of piece i of a parcel, from the parcel's start, of type wire; several nodes only. Of what is sent from
 * slots it is the slot, from step_prepare()'s sources[] on. */
const uint8_t *step_piece(const struct step *step, uint32_t parcel, unsigned piece);

/* Where they are written, if they are not in a slot. */
void *step_staging(const struct step *step, uint32_t parcel, unsigned piece);

/* The part has contributed to the step, whoever owns it: its parameter's count will advance here, too. */
void step_contribute(struct step *step, uint32_t part);

/* Adds the squares of all owned contributions to *total. */
void step_norm(struct step *step, struct exact_sum *total);

/* What was measured is that of the decided step. norm_scale: 1 / (D x L), the factor of the norms of parameters. */
void step_decide(struct step *step, double norm_scale);

/* In the last decided step, of what is owned here. Carried: no limb holds more than 32 bits. */
const struct exact_sum *step_squares(const struct step *step, uint32_t param);

/* The norm of a parameter's gradient in the last decided step; squares: of all of it. */
double step_param_norm(const struct step *step, const struct exact_sum *squares);

struct step_update {
    const struct hyper *groups; /* per group */
    double s;                   /* numerics.md section 3 */
};

/* The step is decided: from here it only rolls forward. done() when masters, moments and weights are written; result:
 * 0, or -ECANCELED on GPUs whose job is given up. */
void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata, int result),
                 void *userdata);

/* For ops. A reduction has ended; its findings, one by one, come before. */
void step_reduced(struct reduction *reduction);
void step_keep_finding(struct step *step, const struct step_finding *finding);

/* step-offload.c's: one chunk, from its accumulator. On a worker. */
void step_update_chunk(const struct step *step, uint32_t chunk, const float *acc);

/* Advances the counts of what contributed. */
void step_commit(struct step *step);
