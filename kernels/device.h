/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The kernels of zerod on a GPU: twins, bit for bit, of the CPU's kernels in kernels.h (kernels/cuda/). Every function
 * here puts a few launches on a stream and returns at once.
 *
 * A launch works on a list of ranges, because parameters are many and often small: a range is a piece of one
 * parameter, as in reduce.h and update.h, and a chunk is the part of a range that one thread block works on. The arrays
 * of a list lie in memory that the device reads and writes. They belong to the caller, who must not change them until
 * an event that is recorded after the launch says that it is done. The list itself is copied and may be freed when the
 * function returns. Results must lie in device memory, because blocks add to them with atomics. Ranges, leaves, chunks
 * and scalars may be registered host memory; but every block begins by reading its own of them, so lists that are used
 * again, or are long, are better copied to the device.
 *
 * Tensors lie at any address that their element type allows. At multiples of 16 bytes they are read and
 * written sixteen bytes at a time; a range with one array elsewhere is correct, and slow.
 *
 * All functions are for a thread whose current device is the stream's. Return: 0, or the cudaError_t with which
 * a launch was refused. An empty list is no launch. Beyond that nothing is checked: an address that the device
 * cannot reach is a sticky error of the device, as always.
 *
 * The same sources are compiled as C++ for the CPU too (kernels/cuda/host.h), for the stand-ins and the tests.
 */

#include "kernels/dtype.h"
#include "kernels/exact.h"
#include "kernels/position_sum.h"
#include "kernels/reduce.h"
#include "kernels/update.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what cudaStream_t and CUstream point to */

enum {
    DEVICE_CHUNK_ELEMS = 8192, /* picked, not measured */
    /* Sums that wait for their right side, at most: enough for a tree over 2^16 ranks, whoever is absent. */
    DEVICE_TREE_DEPTH = 16,
};

/*
 * Loads the code of all kernels to the current device, so that no launch does, for which the driver may wait until the
 * device is idle. Return: 0, or a cudaError_t: cudaErrorNoKernelImageForDevice where there is no code for its
 * generation.
 */
int device_load_kernels(void);

/* ---- lists --------------------------------------------------------------------------------------------- */

/* Elements [index, index + 1) x DEVICE_CHUNK_ELEMS of a range, as far as the range goes. */
struct device_chunk {
    uint32_t range;
    uint32_t index;
};

static inline uint32_t device_chunks_count(uint64_t n_elems)
{
    return (uint32_t)((n_elems + DEVICE_CHUNK_ELEMS - 1) / DEVICE_CHUNK_ELEMS);
}

/* Writes the chunks of a whole range. Return: how many, device_chunks_count(n_elems). */
uint32_t device_chunks_fill(struct device_chunk *chunks, uint32_t range, uint64_t n_elems);

/* ---- reduce: reduce.h on the device -------------------------------------------------------------------- */

/* A leaf: the gradient that one rank pushed, or a partial sum from another node. */
struct device_leaf {
    const void *data;  /* at the range's first element */
    uint32_t n_joins;  /* additions of the tree that are due once this leaf is there; device_leaves_fill() */
    uint32_t reserved; /* 0 */
};

/*
 * One reduction of a piece of a parameter: reduce_args. Several ranges of a list may not write the same
 * elements. Into an accumulator: `out` is the accumulator. Into a buffer, as a partial sum: `out` is the
 * buffer and `first` is set.
 */
struct device_reduce_range {
    float *out;          /* at the range's first element */
    uint64_t n_elems;    /* may be 0; a multiple of 64 unless the range ends the parameter */
    uint64_t start_elem; /* of the range, from the parameter's start; a multiple of 64 */
    uint32_t first_leaf; /* in the list's leaves */
    uint16_t n_leaves;   /* 1 .. REDUCE_MAX_LEAVES */
    uint8_t dtype;       /* enum dtype, of all leaves */
    uint8_t first;       /* out = 0.0f + sum, and is only written; else out += sum */
};

enum device_value {
    DEVICE_NAN,
    DEVICE_INF,
    DEVICE_MINUS_INF,
};

/* The values of a leaf, or of a sum of finite leaves, that are not finite; device_finding_read() decodes it. */
struct device_finding {
    uint64_t n_nan;
    uint64_t n_inf;
    uint64_t first; /* the complement of (element x 4 + enum device_value): zero is none, the first is the most */
};

/* Whole trees, of which each has kernels of its own where all arrays begin at multiples of 16 bytes, and all others. */
enum device_tree {
    DEVICE_TREE_1, /* leaves */
    DEVICE_TREE_2,
    DEVICE_TREE_4,
    DEVICE_TREE_8,
    DEVICE_TREE_OTHER,
    N_DEVICE_TREES,
};

struct device_reduce_list {
    const struct device_reduce_range *ranges;
    const struct device_leaf *leaves;
    const struct device_chunk *chunks; /* as device_reduce_fill() orders them */
    struct exact_sum *squares; /* out, per range: of its new elements; `nonfinite` when one is not finite. Not yet
                                  carried: exact_sum_merge(), exact_sum_round() take it as it is */
    struct position_sum *sums; /* out, per leaf, of this range; NULL: not wanted (partial sums) */
    /* Out: whose values are not finite, as reduce_find_nonfinite() finds them; per leaf, and per range. */
    struct device_finding *findings, *overflows;
    uint32_t n_ranges;
    uint32_t n_leaves; /* of all ranges */
    uint32_t n_chunks;
    uint32_t n_chunks_of[N_DTYPES][N_DEVICE_TREES]; /* the chunks of each kernel, one kernel's behind the other's */
};

/* Sets the leaves of one range: data, and the joins that reduce_joins() gave for them. */
void device_leaves_fill(struct device_leaf *leaves, const void *const *data, unsigned n_leaves,
                        const struct reduce_join *joins);

/* Writes the chunks of all ranges, and counts them in the list. All but the list are where the CPU reads and writes. */
void device_reduce_fill(struct device_reduce_list *list, const struct device_reduce_range *ranges,
                        const struct device_leaf *leaves, struct device_chunk *chunks);

/* Clears the results and launches a kernel for each type and tree that the list has: for one, mostly. */
int device_reduce(struct CUstream_st *stream, const struct device_reduce_list *list);

void device_finding_read(const struct device_finding *finding, struct reduce_finding *out);

/* ---- the 64-bit sums alone: position_sum.h on the device ------------------------------------------------ */

struct device_position_range {
    const void *data;
    uint64_t n_elems;    /* a multiple of 64 unless the range ends the parameter */
    uint64_t start_elem; /* a multiple of 64 */
    uint32_t dtype;      /* enum dtype */
    uint32_t reserved;   /* 0 */
};

struct device_position_list {
    const struct device_position_range *ranges;
    const struct device_chunk *chunks;
    struct position_sum *sums; /* out, per range; position_sum_add() joins those of one parameter */
    uint32_t n_ranges;
    uint32_t n_chunks;
};

int device_position_sums(struct CUstream_st *stream, const struct device_position_list *list);

/* ---- update: update.h on the device ---------------------------------------------------------------------- */

enum {
    DEVICE_UPDATE_BLOCKS = 2048, /* of an update with undo slots, at most: more than any GPU runs at a time; picked */
    DEVICE_UNDO_GROUP_ELEMS = 512,
    /* A mark is the list's tag above the group that is saved, or DEVICE_UNDO_DONE when none is left: enough for 2^44
     * elements. */
    DEVICE_UNDO_TAG_SHIFT = 24,
    DEVICE_UNDO_DONE = (1 << DEVICE_UNDO_TAG_SHIFT) - 1,
    /* Muon's first pass has the number of an optimizer. Its p and acc are the summed gradient (kernels.h). */
    DEVICE_MUON_MOMENTUM = N_OPTIMIZERS,
    DEVICE_N_UPDATES,
};

#define DEVICE_UNDO_MAX_TAG ((UINT64_C(1) << 40) - 1)

/*
 * An update may be killed with its process at any moment, if its memory outlives the process: before a block changes a
 * group of elements it saves them here, and says so in its mark (undo.h on the device). If the same list is launched
 * again, with the same tag and memory, blocks go on where they were and make the bits of an undisturbed launch. Blocks
 * that were through change nothing.
 */
struct device_update_undo {
    uint64_t *marks;   /* device_update_blocks(), zeroed once; NULL: nothing is saved */
    void *slots;       /* device_undo_bytes(); also of other lists that end before this one begins */
    uint64_t tag;      /* 1 to DEVICE_UNDO_MAX_TAG: of this list, and of no other that has these marks */
    uint32_t slot_bytes; /* device_undo_slot_bytes() */
    uint32_t reserved;   /* 0 */
};

static inline uint64_t device_undo_tag(uint64_t mark)
{
    return mark >> DEVICE_UNDO_TAG_SHIFT;
}

static inline bool device_undo_is_done(uint64_t mark)
{
    return (mark & DEVICE_UNDO_DONE) == DEVICE_UNDO_DONE;
}

/* The blocks of an update with undo slots, given the chunks of its list. */
static inline uint32_t device_update_blocks(uint64_t n_chunks)
{
    const uint64_t most = DEVICE_UPDATE_BLOCKS;

    return (uint32_t)(n_chunks < most ? n_chunks : most);
}

/* A slot has a group's masters, room for fp32, and those of m and v that there are, as they lie in memory. */
static inline uint32_t device_undo_slot_bytes(unsigned n_moments, enum dtype moments)
{
    const size_t n_elems = DEVICE_UNDO_GROUP_ELEMS;

    return (uint32_t)(dtype_bytes(DTYPE_F32, n_elems) + n_moments * dtype_bytes(moments, n_elems));
}

/* Two slots for each block. */
static inline uint64_t device_undo_bytes(uint32_t n_blocks, uint32_t slot_bytes)
{
    return UINT64_C(2) * n_blocks * slot_bytes;
}

/* update_args. Ranges of a list may not overlap. */
struct device_update_range {
    float *p; /* NULL: masters are w16 and lower, in 24 bits */
    void *m;  /* of the list's moments; NULL where the optimizer has none */
    void *v;  /* likewise */
    const float *acc;
    void *w16;     /* NULL when w16_dtype is DTYPE_F32 */
    int8_t *lower; /* of masters in 24 bits (master24.h), else NULL */
    uint64_t n_elems;
    uint64_t start_elem; /* from the parameter's start, a multiple of 64; rounding at random alone reads it */
    uint32_t scalars;    /* which of the list's: one for each parameter */
    uint32_t w16_dtype;
};

struct device_update_list {
    const struct device_update_range *ranges;
    const struct device_chunk *chunks;
    const struct update_scalars *scalars; /* of update_scalars_compute() */
    struct device_update_undo undo;
    uint32_t n_chunks;
    enum optimizer optimizer; /* or DEVICE_MUON_MOMENTUM */
    bool master24;            /* all ranges have masters in 24 bits; else none has. Not DEVICE_MUON_MOMENTUM's */
    struct moments_type moments;
};

int device_update(struct CUstream_st *stream, const struct device_update_list *list);

/* ---- Muon: how muon_orthogonalize() of muon.h begins, on the device ---------------------------------------- */

enum {
    DEVICE_NORM_SUMS = 1024, /* blocks of a launch, at most; picked, not measured */
};

/* x = matrix / max(Frobenius norm, eps). The arrays do not overlap. */
struct device_normalize {
    float *x;
    const float *matrix;
    double *sums; /* DEVICE_NORM_SUMS, in device memory; they are written before they are read */
    uint64_t n_elems;
    double eps;
};

/* Two launches. The bits depend neither on the device nor on the addresses. */
int device_normalize(struct CUstream_st *stream, const struct device_normalize *list);

/* ---- conversion: convert.h on the device ----------------------------------------------------------------- */

struct device_convert_range {
    void *dst;
    const void *src; /* dst and src do not overlap */
    uint64_t n_elems;
    uint32_t dtype;    /* enum dtype of the side that is not fp32; DTYPE_F32 copies */
    uint32_t reserved; /* 0 */
};

struct device_convert_list {
    const struct device_convert_range *ranges;
    const struct device_chunk *chunks;
    uint32_t n_chunks;
};

int device_convert_to_f32(struct CUstream_st *stream, const struct device_convert_list *list);
int device_convert_from_f32(struct CUstream_st *stream, const struct device_convert_list *list);

/* ---- words in host memory ------------------------------------------------------------------------------- */

enum {
    DEVICE_MAX_WORDS = 8,
};

/* What is written where: an address of registered host memory, as the device knows it. */
struct device_words {
    struct {
        uint64_t *at;
        uint64_t value;
    } words[DEVICE_MAX_WORDS];
    uint32_t n;
};

/* One launch, whatever the number. Each word is in the host's memory before the next is written. */
int device_write_words(struct CUstream_st *stream, const struct device_words *words);

#ifdef __cplusplus
}
#endif
