/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The state of the owned partitions: master weights, moments, accumulated gradient, published weights, step counts. The
 * whole state is in memfds, so it can outlive this process.
 *
 * The owned partitions are those of ranks [first_rank, first_rank + n_ranks). They are contiguous in every bucket.
 * Elements are always counted from the bucket's start. The accessors below subtract the owned partitions' start.
 *
 *              stages 1, 2                          stage 3
 *  master      fp32 weights: the weight segment     state segment
 *              16-bit weights: state segment
 *  its parts   weights: the weight segment          state segment
 *  in 24 bits  lower: state segment                 state segment
 *  moments     state segment                        state segment
 *  gradient    owned partitions                     owned partitions
 *  weights     weight segment, all buckets          not stored: gathered from masters into the pool
 *  frozen      weight segment                       state segment, in their own dtype
 *  spare       second places of masters and         none
 *  places      moments (spare.h): spare segment
 *
 * Workers reserve the pages by state_reserve(). The loop thread never does.
 *
 * If a job on GPUs offloads its optimizer, this process has the whole state except the gradient.
 *
 * If the state is on GPUs, this process has a staging copy: the same segments, where only the counts have pages. Code
 * that needs other values in host memory reserves pages, copies the values (daemon/step/device-io.c), and frees the
 * pages.
 */

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/layout/layout.h"
#include "kernels/master24.h"
#include "kernels/update.h"

/* Counts of committed steps. Only the loop thread writes them. */
struct state_progress {
    uint64_t epoch; /* committed steps, including skipped ones */
    uint64_t n_applied;
    uint64_t n_windows; /* write windows that ended since the last step */
    /*
     * Per parameter: the number of applied steps with a push of this parameter. There are two copies, so that the next
     * daemon reads the counts either before a commit or after the commit (state_begin_counts()).
     */
    uint64_t *counts;
    unsigned copy;
};

struct state_bucket {
    uint64_t owned_start, owned_elems; /* elements from the bucket's start */
    float *master;                     /* at owned_start; NULL: the masters have 24 bits (kernels/master24.h) */
    uint16_t *weights;                 /* at owned_start; the upper 16 bits of 24-bit masters, else NULL */
    int8_t *lower;                     /* at owned_start; the low byte of 24-bit masters, else NULL */
    void *exp_avg;                     /* at owned_start, of state_dtype(); NULL: the optimizer has no exp_avg */
    void *exp_avg_sq;
    float *acc; /* accumulated gradient at owned_start; NULL: on GPUs */
};

/* The arrays of one chunk, from its first element. */
struct state_place {
    float *master;              /* NULL: masters of 24 bits, which are in weights and lower */
    int8_t *lower;              /* NULL: fp32 masters */
    void *exp_avg, *exp_avg_sq; /* of state_dtype(); NULL: the optimizer has no such moment */
    void *weights;              /* weights of 16 bits; NULL: fp32, or in stage 3 not a part of the masters */
};

struct snapshot;

struct state {
    const struct layout *layout;
    struct snapshot *snapshot; /* the snapshot that is being read, or NULL; not owned */
    unsigned stage, first_rank, n_ranks;
    bool staging_copy;
    struct moments_type moments;
    struct segment state, gradient, weights, counts;
    struct state_progress progress;
    struct state_bucket *buckets;
    struct segment spare;          /* the second places of chunks (spare.h); may be empty */
    struct state_bucket *spares;   /* n_spares buckets: arrays in spare; acc is NULL, weights are not published yet */
    uint32_t n_spares;
    _Atomic(uint64_t) *turns;      /* per chunk, for spare.h; the step's; NULL: chunks have one place */
    uint64_t *frozen_offset_bytes; /* stage 3, per frozen parameter: offset in the state segment */
};

/* The arrays of a bucket. */
enum state_kind {
    STATE_MASTER = 0,
    STATE_EXP_AVG = 1,
    STATE_EXP_AVG_SQ = 2,
    STATE_N_KINDS,
};

struct state_options {
    const struct layout *layout; /* not consumed, must outlive the state */
    unsigned stage;
    unsigned first_rank, n_ranks; /* the ranks whose partitions are owned */
    struct optimizer_moments moments;
    bool staging_copy; /* the state is on GPUs: only the counts get pages */
    bool no_gradient;  /* the accumulators are on GPUs, and the state is in host memory */
    bool alone;        /* no engine writes weights, so their segment is sealed */
    uint32_t n_spares; /* chunks of so many first buckets have a second place, for speculative updates */
};

/* Creates the segments without pages, or opens the segments that an earlier daemon kept. Return: 0 or -errno. */
int state_new(struct state **out, const struct state_options *options);
void state_free(struct state *state);

/* state_reserve() reserves one of state_n_reserve_pieces() pieces, in any order. Return: 0 or -errno. */
uint32_t state_n_reserve_pieces(const struct state *state);
int state_reserve(const struct state *state, uint32_t piece);

/*
 * Changes the number of ranks of a job whose ranks are all on this node. The data stay in place (layout.h). layout: a
 * layout of the same parameters, which must outlive the state.
 */
void state_repartition(struct state *state, const struct layout *layout);

/* Return: whether an earlier daemon made the segments. Then their pages need not be reserved. */
bool state_was_found(const struct state *state);

/*
 * Copies the counts to their second copy, to change them there. state_use_counts() makes that copy valid. Return: the
 * second copy.
 */
uint64_t *state_begin_counts(struct state *state);
void state_use_counts(struct state *state, unsigned copy);

static inline unsigned state_other_copy(const struct state *state)
{
    return 1 - state->progress.copy;
}

/* Return: whether the bucket's masters have 24 bits. Then use state_master24() instead of state_master(). */
static inline bool state_is_master24(const struct state *state, uint32_t bucket)
{
    return state->buckets[bucket].lower != NULL;
}

static inline float *state_master(const struct state *state, uint32_t bucket, uint64_t elem)
{
    const struct state_bucket *b = &state->buckets[bucket];

    assert(b->master);
    return b->master + (elem - b->owned_start);
}

static inline struct master24 state_master24(const struct state *state, uint32_t bucket, uint64_t elem)
{
    const struct state_bucket *b = &state->buckets[bucket];

    assert(b->lower);
    return (struct master24){.weights = b->weights + (elem - b->owned_start),
                             .lower = b->lower + (elem - b->owned_start)};
}

/* Return: the type of an array's elements in memory. Not for masters of 24 bits. */
static inline enum dtype state_dtype(const struct state *state, enum state_kind kind)
{
    if (kind == STATE_MASTER)
        return DTYPE_F32;
    return kind == STATE_EXP_AVG ? state->moments.dtype : moments_dtype_of_square(state->moments);
}

static inline void *state_moment(void *moment, enum dtype dtype, uint64_t own_elem)
{
    return moment ? (uint8_t *)moment + dtype_bytes(dtype, own_elem) : NULL;
}

/*
 * Return: elements of state_dtype(), from elem. In a grouped type a group must begin at elem. A group begins at the
 * start of each parameter, partition and chunk.
 */
static inline void *state_exp_avg(const struct state *state, uint32_t bucket, uint64_t elem)
{
    const struct state_bucket *b = &state->buckets[bucket];

    return state_moment(b->exp_avg, state_dtype(state, STATE_EXP_AVG), elem - b->owned_start);
}

static inline void *state_exp_avg_sq(const struct state *state, uint32_t bucket, uint64_t elem)
{
    const struct state_bucket *b = &state->buckets[bucket];

    return state_moment(b->exp_avg_sq, state_dtype(state, STATE_EXP_AVG_SQ), elem - b->owned_start);
}

/* Not for masters of 24 bits. Return: elements of state_dtype(), or NULL if the optimizer has no such moment. */
static inline void *state_values(const struct state *state, enum state_kind kind, uint32_t bucket, uint64_t elem)
{
    switch (kind) {
    case STATE_EXP_AVG:
        return state_exp_avg(state, bucket, elem);
    case STATE_EXP_AVG_SQ:
        return state_exp_avg_sq(state, bucket, elem);
    default:
        return state_master(state, bucket, elem);
    }
}

/* Return: whether the bucket has the array. */
static inline bool state_has(const struct state *state, enum state_kind kind, uint32_t bucket)
{
    const struct state_bucket *b = &state->buckets[bucket];

    return kind == STATE_MASTER || (kind == STATE_EXP_AVG ? b->exp_avg : b->exp_avg_sq) != NULL;
}

/* Return: whether the array is fp32. */
static inline bool state_is_f32(const struct state *state, enum state_kind kind, uint32_t bucket)
{
    return kind == STATE_MASTER ? !state_is_master24(state, bucket) : state_dtype(state, kind) == DTYPE_F32;
}

static inline float *state_acc(const struct state *state, uint32_t bucket, uint64_t elem)
{
    const struct state_bucket *b = &state->buckets[bucket];

    return b->acc + (elem - b->owned_start);
}

/*
 * Return: where the values of an owned chunk are now, and its first place. They are the same if the job has no spare
 * places (spare.h). The other accessors of masters and moments return the first place.
 */
struct state_place state_place(const struct state *state, uint32_t chunk);
struct state_place state_first_place(const struct state *state, uint32_t chunk);
/* Return: the chunk's arrays in the segment `spare`. For spare.h. */
struct state_place state_spare_arrays(const struct state *state, uint32_t chunk);
/* Return: the master or moment of a place; NULL if the place does not have it. */
static inline void *state_place_values(const struct state_place *place, enum state_kind kind)
{
    return kind == STATE_MASTER ? place->master : kind == STATE_EXP_AVG ? place->exp_avg : place->exp_avg_sq;
}

/*
 * Finds the owned elements [*first, *end) of a trainable parameter, counted from the parameter's start. Both are 0 if
 * no element is owned.
 */
void state_owned_elems(const struct state *state, uint32_t param, uint64_t *first, uint64_t *end);

static inline bool state_owns(const struct state *state, unsigned rank)
{
    return rank - state->first_rank < state->n_ranks;
}

/* In stages 1 and 2. Return: the published weights of a parameter, from element `start`. */
static inline uint8_t *state_weights(const struct state *state, uint32_t param, uint64_t start)
{
    const struct layout_param *p = &state->layout->params[param];

    return state->weights.map + p->weight_offset_bytes + start * dtype_size(p->dtype);
}

/* In any stage. Return: the weights of a frozen parameter. */
static inline uint8_t *state_frozen(const struct state *state, uint32_t param)
{
    return state->frozen_offset_bytes ? state->state.map + state->frozen_offset_bytes[param]
                                      : state_weights(state, param, 0);
}
