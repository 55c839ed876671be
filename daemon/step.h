/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The data path of a step, in the order in which it happens:
 *
 *     step_open               a new step: nothing has contributed yet
 *     step_prepare, step_post per bucket, micro-batch, pass: slots -> accumulators   (workers)
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
 */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/layout.h"
#include "daemon/state.h"
#include "daemon/worker.h"
#include "kernels/kernels.h"

enum {
    STEP_MAX_WORLD = 1024,
    STEP_MAX_RANKS = 64, /* of one node: a parameter's pushers fit in one mask */
    STEP_MAX_PIECES = 12,
};

struct ring;
struct step;

/* One reduction under way; there is at most one per bucket. */
struct reduction {
    struct work work;
    struct step *step;
    uint64_t staging_elems; /* where the bucket's pieces begin in staging */
    uint32_t bucket, micro_batch, pass;
    bool combining;
    bool busy;
    uint64_t *masks;         /* per parameter of the bucket: bit i = local rank i (or piece i) takes part */
    const uint8_t **sources; /* per local rank: its slot; combining: per piece, fp32 from the bucket's start */
    unsigned n_sources;
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

struct step_piece {
    unsigned first, n; /* ranks */
};

struct step {
    const struct layout *layout;
    struct state *state;
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local; /* ranks whose slots are here */
    enum optimizer optimizer;

    struct reduction *reductions;   /* per bucket */
    struct reduce_result *results;  /* per chunk: squares of the accumulator; sums unused */
    struct position_sum *sums;      /* per chunk and local rank */
    uint8_t *contributed;           /* per parameter: its accumulator holds something of this step */
    double *norms;                  /* per parameter: of the last decided step, scaled */
    struct update_scalars *scalars; /* per parameter */
    float *staging;                 /* pieces x padded elements; NULL when all ranks are local */
    struct step_piece pieces[STEP_MAX_PIECES];
    unsigned n_pieces;
    pthread_mutex_t finding_lock;
    struct step_finding finding;

    struct work update_work;
    void (*update_done)(void *userdata);
    void *update_userdata;
    uint64_t n_reduced_bytes; /* read from slots since step_open */
};

struct step_options {
    struct state *state; /* not consumed, must outlive the step; likewise the others */
    const struct kernels *kernels;
    struct worker_pool *pool;
    unsigned first_local, n_local;
    enum optimizer optimizer;
};

/* Return: 0 or -ENOMEM. */
int step_new(struct step **out, const struct step_options *options);
void step_free(struct step *step);

/* Bytes that step_new() would take, for the class "fixed". */
uint64_t step_fixed_bytes(const struct layout *layout, unsigned n_local);

/* Forgets what was accumulated: for a new step, and after an abort. Nothing may be under way. */
void step_open(struct step *step);

/*
 * Prepares bucket's reduction: the caller fills masks[] and sources[] of the result, then posts it.
 * Sources must stay readable until done(). Only one per bucket at a time.
 */
struct reduction *step_prepare(struct step *step, uint32_t bucket, uint32_t micro_batch, uint32_t pass);
void step_post(struct reduction *reduction, void (*done)(void *userdata, struct reduction *reduction), void *userdata);

/*
 * As step_prepare(), but for the sum over the pieces of all nodes into the accumulators of the owned partitions, in
 * stage 1 of all. The caller fills sources[], source_ranks[] and n_sources (at most STEP_MAX_RANKS) in rank order,
 * and masks[]: bit i when source i holds something of the parameter. Of a source only what is added here is read.
 */
struct reduction *step_combine(struct step *step, uint32_t bucket, uint32_t micro_batch, uint32_t pass);

/* After done(): the 64-bit sum of what local rank pushed of a parameter in that reduction. */
uint64_t step_sum(const struct step *step, const struct reduction *reduction, unsigned local_rank, uint32_t param);

/* Partial sums of piece i of a bucket, fp32 from the bucket's start; several nodes only. */
float *step_staging(const struct step *step, uint32_t bucket, unsigned piece);

/* Adds the squares of all owned contributions to *total and sets norms[] unscaled. */
void step_norm(struct step *step, struct exact_sum *total);

struct step_update {
    const struct hyper *groups; /* per group */
    double s;                   /* numerics.md section 3 */
    double norm_scale;          /* 1 / (D x L): scales norms[] */
};

/* The step is decided: from here it only rolls forward. done() when masters, moments and weights are written. */
void step_update(struct step *step, const struct step_update *update, void (*done)(void *userdata), void *userdata);

/* Advances the counts of what contributed. */
void step_commit(struct step *step);

/* Maximal subtrees of the tree over world ranks inside [first, first + n). Return: how many, in rank order. */
unsigned step_find_pieces(unsigned world, unsigned first, unsigned n, struct step_piece *pieces);
