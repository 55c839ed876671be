/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The layout as the NCCL engine gets it, and what lies where in the memory that it shares with the daemon. Pure; the
 * same functions on both sides.
 *
 * Plan: a header and arrays, written once (device_plan_write), read in place (device_plan_open), which looks at every
 * number that places are computed from.
 *
 * Pieces of device memory, of each local rank (bytes from the piece's start; a *slice* is the rank's partition of a
 * bucket; all arrays begin at multiples of 256 bytes):
 *   state      for each bucket: slice of masters (not where the weights are masters: those in fp32, if there is a
 *              weights piece), of exp_avg and of exp_avg_sq as the optimizer has them, masters in fp32, moments in
 *              their type. Masters in 24 bits are two slices: bf16 weights (not if there is a weights piece), and a
 *              byte for each. Stage 3: behind them, for each frozen parameter, a slice of it in its own type. Nothing
 *              where the state is in host memory (offload)
 *   gradient   for each bucket: slice of accumulators, fp32
 *   weights    stages 1 and 2: as the layout's weight segment
 *   ring       slots, placed by the daemon
 *   undo       for each lane: a slice of accumulators, or of weights; then, unless the state is in host memory, what
 *              updates leave half done: for each launch the marks of its blocks, and slots of these blocks, which
 *              all launches share (kernels/device.h)
 *   pool       stage 3: whole parameters, placed by the daemon, each from a multiple of DEVICE_POOL_ALIGN
 *
 * A *lane* is what one order needs while it is under way; so many orders are at most under way on the devices.
 *
 * Inputs: for each part of the layout a mask of the world's ranks that have pushed it, device_plan.mask_words words,
 * rank r being bit r % 64 of word r / 64; for each part whether its accumulator holds something of this step; for each
 * parameter whether it has contributed to the step, and its scalars; for each parameter group its settings.
 *
 * Results: for each chunk the exact squares of its accumulator; for each chunk and local rank the position sum of what
 * that rank pushed; for each parcel the first value that was not finite, and the number of the last reduction that is
 * done; for each local rank the marks of its lanes, and whether the marks of its updates have been cleared.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "core/wire/device-wire.h"
#include "kernels/device.h"
#include "kernels/exact.h"
#include "kernels/position_sum.h"
#include "kernels/update.h"

enum {
    DEVICE_PLAN_VERSION = 7,
    DEVICE_LANES = 3,         /* picked: one that communicates, one that computes, one that is being reported */
    DEVICE_ALIGN_BYTES = 256, /* of arrays: whole lines and more of any GPU */
};

#define DEVICE_NONE UINT64_MAX /* an array that is not there */

/* A parameter as the engine needs it: layout_param without name and shape, but for matrices that Muon updates. */
struct device_plan_param {
    uint64_t n_elems;
    uint64_t offset_elems; /* from the bucket's start */
    uint64_t weight_offset_bytes;
    uint32_t bucket; /* LAYOUT_NO_BUCKET when frozen */
    uint32_t first_part, n_parts;
    uint32_t first_chunk, n_chunks;
    uint32_t dtype; /* of the weights */
    uint32_t group;
    uint32_t rows, cols; /* 0: Muon does not update it */
    uint32_t matrix;     /* its number among those that Muon updates */
};

struct device_plan_header {
    uint32_t magic, version;
    uint32_t world_size, first_local, n_local;
    uint32_t stage;
    uint32_t optimizer;
    uint32_t moments_dtype;      /* as moments_type has it, of exp_avg */
    uint8_t stochastic;          /* 1: moments are rounded at random */
    uint8_t exp_avg, exp_avg_sq; /* which moments there are */
    uint8_t master24;            /* masters of bf16 weights have 24 bits */
    uint8_t deterministic;
    uint8_t offload;
    uint8_t reserved[2]; /* 0 */
    uint32_t n_params, n_buckets, n_chunks, n_parts, n_parcels, n_groups;
    uint32_t n_matrices; /* that Muon updates */
    uint32_t mask_words;
    uint64_t weight_bytes, ring_bytes, pool_bytes;
    uint64_t params_at, buckets_at, chunks_at, parts_at, parcels_at; /* bytes from the header */
    uint64_t n_bytes;                                                /* of all */
};

/* A plan in memory; constant, borrowed from where it lies. */
struct device_plan {
    const struct device_plan_header *head;
    const struct device_plan_param *params;
    const struct layout_bucket *buckets;
    const struct layout_chunk *chunks;
    const struct layout_part *parts;
    const struct layout_parcel *parcels;
};

struct device_plan_options {
    const struct layout *layout;
    unsigned stage;
    unsigned first_local, n_local;
    enum optimizer optimizer;
    struct optimizer_moments moments;
    bool deterministic;
    bool offload;        /* masters and moments are in host memory: reductions, gathering and copies are all there is */
    uint64_t ring_bytes; /* of each local rank */
    uint64_t pool_bytes; /* stage 3: likewise */
};

uint64_t device_plan_bytes(const struct device_plan_options *options);
/* memory: device_plan_bytes(), zeroed, aligned to 8. */
void device_plan_write(const struct device_plan_options *options, void *memory);
/* Return: 0, or -EINVAL with a sentence in why. */
int device_plan_open(struct device_plan *out, const void *memory, uint64_t n_bytes, char *why, size_t why_size);

/* How moments lie in memory. */
static inline struct moments_type device_plan_moments(const struct device_plan *plan)
{
    return (struct moments_type){.dtype = plan->head->moments_dtype, .stochastic = plan->head->stochastic};
}

/* Do the bucket's masters have 24 bits (kernels/master24.h)? */
static inline bool device_is_master24(const struct device_plan *plan, uint32_t bucket)
{
    return plan->head->master24 && plan->buckets[bucket].dtype == DTYPE_BF16;
}

/* ---- device memory --------------------------------------------------------------------------------------- */

/* Where arrays of one bucket lie in the pieces of a local rank; bytes, or DEVICE_NONE. */
struct device_places {
    uint64_t start_elem; /* of the rank's slice, from the bucket's start */
    uint64_t slice_elems;
    uint64_t master; /* in state; DEVICE_NONE: in weights, see device_master(), or in host memory */
    uint64_t lower;  /* the bytes of masters in 24 bits, of which `master` has the weights; else DEVICE_NONE */
    uint64_t exp_avg, exp_avg_sq;
    uint64_t acc; /* in gradient */
};

/* Where everything lies in the pieces of a local rank. */
struct device_rank_places {
    struct device_places *buckets;         /* owned */
    uint64_t *frozen;                      /* owned; frozen parameters' slices in state, stage 3; else DEVICE_NONE */
    uint64_t piece_bytes[DEVICE_N_PIECES]; /* what each piece must have */
};

/* Return: 0 or -ENOMEM. */
int device_rank_places_init(struct device_rank_places *places, const struct device_plan *plan, unsigned local_rank);
void device_rank_places_deinit(struct device_rank_places *places);

/* Places in the undo piece; bytes from its start. Those of updates follow from the plan alone: the next engine finds
 * the marks and slots of an update where the last one had them. */
struct device_undo_places {
    uint64_t lane_bytes; /* of each lane; a multiple of DEVICE_ALIGN_BYTES */
    uint64_t marks;      /* uint64_t [device_mark_sets()] [n_blocks] */
    uint64_t slots;      /* device_undo_bytes() */
    uint64_t n_bytes;    /* of the piece */
    uint32_t n_blocks;   /* of an update, at most; 0 with offload */
    uint32_t slot_bytes; /* device_undo_slot_bytes() */
};

struct device_undo_places device_undo_places(const struct device_plan *plan);

/*
 * The launches of an update, each with marks of its own: those of all parameters that are no matrices for Muon, that of
 * Muon's momentum, and one for each matrix.
 */
enum {
    DEVICE_MARKS_UPDATE = 0,
    DEVICE_MARKS_UPDATE24, /* of masters in 24 bits */
    DEVICE_MARKS_MOMENTUM,
    DEVICE_MARKS_MATRIX, /* of the first matrix */
};

static inline uint32_t device_mark_sets(bool master24, uint32_t n_matrices)
{
    return n_matrices > 0 ? DEVICE_MARKS_MATRIX + n_matrices : master24 ? DEVICE_MARKS_UPDATE24 + 1 : 1;
}

/* Where the masters of a rank's slice lie, or the weights of those in 24 bits: *kind is the piece. places: the
 * bucket's. Not with offload. */
uint64_t device_master(const struct device_plan *plan, const struct device_places *places, uint32_t bucket,
                       uint32_t *kind);

/* Elements of a parcel that a rank owns, from the bucket's start; *end == *begin: none. */
void device_parcel_slice(const struct device_plan *plan, uint32_t parcel, unsigned rank, uint64_t *begin,
                         uint64_t *end);

/* Elements of a parameter that a rank owns, from the parameter's start; *end == *begin: none. Those of a frozen one are
 * owned in stage 3 alone. */
void device_param_slice(const struct device_plan *plan, uint32_t param, unsigned rank, uint64_t *begin, uint64_t *end);
/* Ranks *first to *end - 1 own elements of it; *end == *first: no rank does. */
void device_param_owners(const struct device_plan *plan, uint32_t param, unsigned *first, unsigned *end);

/* ---- inputs ---------------------------------------------------------------------------------------------- */

/* Pointers into a mapping of inputs. */
struct device_inputs {
    uint64_t *masks;                /* per part, mask_words each */
    struct update_scalars *scalars; /* per parameter */
    uint8_t *begun;                 /* per part */
    uint8_t *contributed;           /* per parameter */
    struct hyper *groups;           /* per parameter group; Muon's settings alone are read */
};

uint64_t device_inputs_bytes(const struct device_plan *plan);
void device_inputs_open(const struct device_plan *plan, void *map, struct device_inputs *out);

static inline bool device_pushed(const struct device_plan *plan, const struct device_inputs *inputs, uint32_t part,
                                 unsigned rank)
{
    return inputs->masks[(size_t)part * plan->head->mask_words + rank / 64] >> (rank % 64) & 1;
}

/* ---- results --------------------------------------------------------------------------------------------- */

/* The first value of a reduction that was not finite, by (parameter, element); as struct step_finding. */
struct device_result_finding {
    uint8_t found;
    uint8_t overflowed; /* all inputs were finite, their sum was not */
    uint16_t zero;
    uint32_t param;
    uint32_t rank; /* meaningless when overflowed */
    float value;
    uint64_t elem;
    uint64_t n_nan, n_inf; /* in that parameter's chunk by that rank */
};

enum device_mark_kind { DEVICE_MARK_REDUCE = 1, DEVICE_MARK_GATHER };

/*
 * The subject of a lane's undo copy. The device writes `copied` after the copy and before it changes anything. A killed
 * engine may leave half of a write, so only a mark of which `copied` and `tag` agree says something.
 */
struct device_mark {
    uint64_t copied; /* tag + 1; else: there is nothing to put back */
    uint32_t kind;   /* enum device_mark_kind */
    uint32_t index;  /* parcel, or bucket */
    uint64_t op;     /* the number of a reduction */
    uint64_t tag;    /* of the order */
};

struct device_results {
    struct exact_sum *squares;              /* per chunk; those of local ranks are written */
    struct position_sum *sums;              /* per chunk and local rank */
    struct device_result_finding *findings; /* per parcel */
    uint64_t *reduced;                      /* per parcel: DeviceReduce.op; set when all of its results are there */
    struct device_mark *marks;              /* per local rank and lane */
    uint64_t *cleared; /* per local rank: 1, the undo piece's marks are those of updates; else they are anything */
};

/* Marks lie in whole pages, from *marks_at to the end: a device writes them. */
uint64_t device_results_bytes(const struct device_plan *plan, uint64_t *marks_at);
void device_results_open(const struct device_plan *plan, void *map, struct device_results *out);
