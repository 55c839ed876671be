/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The layout in the form for the NCCL engine, and the places of all data in the memory that the engine and the daemon
 * share. Pure; both sides use the same functions.
 *
 * Plan: a header and arrays. device_plan_write() writes it once. device_plan_open() reads it in place, after it has
 * checked every number from which places are computed.
 *
 * Pieces of device memory of each local rank (bytes from the piece's start; a *slice* is the rank's partition of a
 * bucket; all arrays begin at multiples of 256 bytes):
 *   state      for each bucket: a slice of masters, of exp_avg and of exp_avg_sq, as far as the optimizer has them.
 *              Masters are fp32, moments have their own type. If there is a weights piece, fp32 weights are their own
 *              masters, and have no slice here. 24-bit masters are two slices: bf16 weights (not if there is a weights
 *              piece), and a byte for each master. Stage 3: after these, for each frozen parameter a slice of it in its
 *              own type. Empty if the state is in host memory (offload)
 *   gradient   for each bucket: a slice of accumulators, fp32
 *   weights    stages 1 and 2: the same as the layout's weight segment
 *   ring       slots, placed by the daemon
 *   undo       for each lane: a slice of accumulators, or of weights. Then, unless the state is in host memory, the
 *              data of unfinished updates: for each launch the marks of its blocks, and slots of these blocks, which
 *              all launches share (kernels/device.h)
 *   pool       stage 3: whole parameters, placed by the daemon at multiples of DEVICE_POOL_ALIGN
 *
 * A *lane* has the resources of one order while it runs. The number of lanes limits how many orders run on the devices
 * at the same time.
 *
 * Inputs: for each part of the layout a mask of the world's ranks that have pushed the part, with
 * device_plan.mask_words words, where rank r is bit r % 64 of word r / 64; for each part whether its accumulator holds
 * data of this step; for each parameter whether a gradient of it is in the step, and its scalars; for each parameter
 * group its settings.
 *
 * Results: for each chunk the exact squares of its accumulator; for each chunk and local rank the position sum of that
 * rank's pushes; for each parcel the first value that was not finite, and the number of the last completed reduction;
 * for each local rank the marks of its lanes, and whether the marks of its updates have been cleared.
 */

#include <assert.h>
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
    DEVICE_LANES = 3,         /* picked: one communicates, one computes, one is reported */
    DEVICE_ALIGN_BYTES = 256, /* alignment of arrays: at least a cache line of any GPU */
};

#define DEVICE_NONE UINT64_MAX /* the array does not exist */

/* A parameter for the engine: layout_param without name and shape. Only matrices that Muon updates have rows and
 * columns. */
struct device_plan_param {
    uint64_t n_elems;
    uint64_t offset_elems; /* from the bucket's start */
    uint64_t weight_offset_bytes;
    uint32_t bucket; /* LAYOUT_NO_BUCKET if frozen */
    uint32_t first_part, n_parts;
    uint32_t first_chunk, n_chunks;
    uint32_t dtype; /* type of the weights */
    uint32_t group;
    uint32_t rows, cols; /* 0: Muon does not update the parameter */
    uint32_t matrix;     /* number among the matrices that Muon updates */
};

struct device_plan_header {
    uint32_t magic, version;
    uint32_t world_size, first_local, n_local;
    uint32_t stage;
    uint32_t optimizer;
    uint32_t moments_dtype;      /* moments_type.dtype: the type of exp_avg */
    uint8_t stochastic;          /* 1: moments are rounded at random */
    uint8_t exp_avg, exp_avg_sq; /* 1: the optimizer has this moment */
    uint8_t master24;            /* 1: masters of bf16 weights have 24 bits */
    uint8_t deterministic;
    uint8_t offload;
    uint8_t reserved[2]; /* 0 */
    uint32_t n_params, n_buckets, n_chunks, n_parts, n_parcels, n_groups;
    uint32_t n_matrices; /* matrices that Muon updates */
    uint32_t mask_words;
    uint64_t weight_bytes, ring_bytes, pool_bytes;
    uint64_t params_at, buckets_at, chunks_at, parts_at, parcels_at; /* offsets in bytes from the header */
    uint64_t n_bytes;                                                /* size of the whole plan */
};

/* A plan in memory. The memory is constant and borrowed. */
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
    bool offload;        /* masters and moments are in host memory: the GPUs only reduce, gather and copy */
    uint64_t ring_bytes; /* size of each local rank's ring */
    uint64_t pool_bytes; /* stage 3: size of each local rank's pool */
};

uint64_t device_plan_bytes(const struct device_plan_options *options);
/* Writes the plan. memory has device_plan_bytes() bytes, zeroed and aligned to 8. */
void device_plan_write(const struct device_plan_options *options, void *memory);
/* Checks a plan and opens it. Return: 0, or -EINVAL with a sentence in why. */
int device_plan_open(struct device_plan *out, const void *memory, uint64_t n_bytes, char *why, size_t why_size);

/* Return: the type that moments have in memory. */
static inline struct moments_type device_plan_moments(const struct device_plan *plan)
{
    return (struct moments_type){.dtype = plan->head->moments_dtype, .stochastic = plan->head->stochastic};
}

/* Do the bucket's masters have 24 bits (kernels/master24.h)? */
static inline bool device_is_master24(const struct device_plan *plan, uint32_t bucket)
{
    assert(bucket < plan->head->n_buckets);
    return plan->head->master24 && plan->buckets[bucket].dtype == DTYPE_BF16;
}

/* ---- device memory --------------------------------------------------------------------------------------- */

/* The places of one bucket's arrays in the pieces of a local rank, in bytes, or DEVICE_NONE. */
struct device_places {
    uint64_t start_elem; /* start of the rank's slice, from the bucket's start */
    uint64_t slice_elems;
    uint64_t master; /* in the state piece; DEVICE_NONE: in weights (see device_master()) or in host memory */
    uint64_t lower;  /* 24-bit masters: the lower bytes, while `master` has the weights; else DEVICE_NONE */
    uint64_t exp_avg, exp_avg_sq;
    uint64_t acc; /* in the gradient piece */
};

/* The places of all arrays in the pieces of a local rank. */
struct device_rank_places {
    struct device_places *buckets;         /* owned */
    uint64_t *frozen;                      /* owned; slices of frozen parameters in state (stage 3) or DEVICE_NONE */
    uint64_t piece_bytes[DEVICE_N_PIECES]; /* the size of each piece */
};

/* Return: 0 or -ENOMEM. */
int device_rank_places_init(struct device_rank_places *places, const struct device_plan *plan, unsigned local_rank);
void device_rank_places_deinit(struct device_rank_places *places);

/*
 * Places in the undo piece, in bytes from its start. The places for updates depend only on the plan. So a later engine
 * finds the marks and slots of an update where an earlier engine wrote them.
 */
struct device_undo_places {
    uint64_t lane_bytes; /* size of each lane; a multiple of DEVICE_ALIGN_BYTES */
    uint64_t marks;      /* offset of uint64_t [device_mark_sets()] [n_blocks] */
    uint64_t slots;      /* offset of the slots; device_undo_bytes() long */
    uint64_t n_bytes;    /* size of the piece */
    uint32_t n_blocks;   /* the most blocks of an update; 0 with offload */
    uint32_t slot_bytes; /* device_undo_slot_bytes() */
};

struct device_undo_places device_undo_places(const struct device_plan *plan);

/*
 * The launches of an update, each with its own marks: parameters that Muon does not update as matrices, Muon's
 * momentum, and each matrix.
 */
enum {
    DEVICE_MARKS_UPDATE = 0,
    DEVICE_MARKS_UPDATE24, /* parameters with 24-bit masters */
    DEVICE_MARKS_MOMENTUM,
    DEVICE_MARKS_MATRIX, /* the first matrix */
};

static inline uint32_t device_mark_sets(bool master24, uint32_t n_matrices)
{
    return n_matrices > 0 ? DEVICE_MARKS_MATRIX + n_matrices : master24 ? DEVICE_MARKS_UPDATE24 + 1 : 1;
}

/*
 * Return: the place of the masters of a rank's slice; of the weights if the masters have 24 bits. *kind: the piece.
 * places: the bucket's. Not for offload.
 */
uint64_t device_master(const struct device_plan *plan, const struct device_places *places, uint32_t bucket,
                       uint32_t *kind);

/* Finds the elements of a parcel that a rank owns, counted from the bucket's start. *end == *begin if it owns none. */
void device_parcel_slice(const struct device_plan *plan, uint32_t parcel, unsigned rank, uint64_t *begin,
                         uint64_t *end);

/*
 * Finds the elements of a parameter that a rank owns, counted from the parameter's start. *end == *begin if it owns
 * none. Only stage 3 has owners of frozen parameters.
 */
void device_param_slice(const struct device_plan *plan, uint32_t param, unsigned rank, uint64_t *begin, uint64_t *end);
/* Finds the ranks that own elements of the parameter: *first to *end - 1. *end == *first if no rank does. */
void device_param_owners(const struct device_plan *plan, uint32_t param, unsigned *first, unsigned *end);

/* ---- inputs ---------------------------------------------------------------------------------------------- */

/* Pointers into a mapping of inputs. */
struct device_inputs {
    uint64_t *masks;                /* per part: mask_words words */
    struct update_scalars *scalars; /* per parameter */
    uint8_t *begun;                 /* per part: its accumulator holds data of this step */
    uint8_t *contributed;           /* per parameter: 1 if it contributed to the step */
    struct hyper *groups;           /* per parameter group; only Muon's settings are read */
};

uint64_t device_inputs_bytes(const struct device_plan *plan);
void device_inputs_open(const struct device_plan *plan, void *map, struct device_inputs *out);

static inline bool device_pushed(const struct device_plan *plan, const struct device_inputs *inputs, uint32_t part,
                                 unsigned rank)
{
    assert(part < plan->head->n_parts);
    assert(rank < plan->head->world_size);
    return inputs->masks[(size_t)part * plan->head->mask_words + rank / 64] >> (rank % 64) & 1;
}

/* ---- results --------------------------------------------------------------------------------------------- */

/* The first non-finite value of a reduction, in the order (parameter, element), like struct step_finding. */
struct device_result_finding {
    uint8_t found;
    uint8_t overflowed; /* all inputs were finite, their sum was not */
    uint16_t zero;
    uint32_t param;
    uint32_t rank; /* undefined if overflowed */
    float value;
    uint64_t elem;
    uint64_t n_nan, n_inf; /* counts in that rank's values of that parameter's chunk */
};

enum device_mark_kind { DEVICE_MARK_REDUCE = 1, DEVICE_MARK_GATHER };

/*
 * Describes a lane's undo copy. The device writes `copied` after the copy and before any change. A killed engine may
 * leave a half-written mark, so a mark is valid only if `copied` and `tag` agree.
 */
struct device_mark {
    uint64_t copied; /* tag + 1; with any other value there is nothing to restore */
    uint32_t kind;   /* enum device_mark_kind */
    uint32_t index;  /* number of the parcel, or of the bucket */
    uint64_t op;     /* number of the reduction */
    uint64_t tag;    /* the order's tag */
};

struct device_results {
    struct exact_sum *squares;              /* per chunk; only the chunks of local ranks are written */
    struct position_sum *sums;              /* per chunk and local rank */
    struct device_result_finding *findings; /* per parcel */
    uint64_t *reduced;                      /* per parcel: DeviceReduce.op, written after all its results */
    struct device_mark *marks;              /* per local rank and lane */
    uint64_t *cleared; /* per local rank: 1 if the undo piece's marks belong to updates; else they are arbitrary */
};

/* Return: the size of the results. The marks begin at *marks_at and have whole pages, because a device writes them. */
uint64_t device_results_bytes(const struct device_plan *plan, uint64_t *marks_at);
void device_results_open(const struct device_plan *plan, void *map, struct device_results *out);
