/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The kernels of zerod on a GPU (kernels/cuda/). Their results have the same bits as those of the CPU's kernels in
 * kernels.h. Every function of this file puts a few launches on a stream and does not wait.
 *
 * A launch works on a list of ranges, because a model has many parameters and many are small. A range is a piece of one
 * parameter, as in reduce.h and update.h. A chunk is the part of a range that one thread block works on. The device
 * reads and writes the arrays of a list. The caller owns them and must not change them until an event after the launch
 * has completed. The list itself is copied and may be freed when the function returns. Results must be in device
 * memory, because blocks add to them with atomics. Ranges, leaves, chunks and scalars may be registered host memory.
 * But every block first reads its own entries, so long or reused lists are better copied to the device.
 *
 * Tensors may be at any address that their element type allows. At multiples of 16 bytes they are read and written in
 * units of 16 bytes. A range with any other array is correct, but slow.
 *
 * The current device of the calling thread must be the stream's. Return: 0, or the cudaError_t of a refused launch. For
 * an empty list nothing is launched. Addresses are not checked: an address that the device cannot reach causes a sticky
 * error of the device, as always.
 *
 * The same sources are compiled as C++ for the CPU too (kernels/cuda/host.h), for the simulated CUDA of the tests
 * (tests/sim).
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
    /* The most unfinished sums: enough for a tree over 2^16 ranks with any ranks absent. */
    DEVICE_TREE_DEPTH = 16,
};

/*
 * Loads the code of all kernels to the current device. Otherwise the first launch would load it, and the driver might
 * wait until the device is idle. Return: 0, or a cudaError_t: cudaErrorNoKernelImageForDevice if there is no code for
 * the device's generation.
 */
int device_load_kernels(void);

/* ---- lists --------------------------------------------------------------------------------------------- */

/* Elements [index, index + 1) x DEVICE_CHUNK_ELEMS of a range, limited by the range's end. */
struct device_chunk {
    uint32_t range;
    uint32_t index;
};

static inline uint32_t device_chunks_count(uint64_t n_elems)
{
    return (uint32_t)((n_elems + DEVICE_CHUNK_ELEMS - 1) / DEVICE_CHUNK_ELEMS);
}

/* Writes the chunks of a whole range. Return: their number, device_chunks_count(n_elems). */
uint32_t device_chunks_fill(struct device_chunk *chunks, uint32_t range, uint64_t n_elems);

/* ---- reduce: reduce.h on the device -------------------------------------------------------------------- */

/* A leaf: the gradient that one rank pushed, or a partial sum from another node. */
struct device_leaf {
    const void *data;  /* at the range's first element */
    uint32_t n_joins;  /* additions of the tree that are due after this leaf; set by device_leaves_fill() */
    uint32_t reserved; /* 0 */
};

/*
 * One reduction of a piece of a parameter, like reduce_args. Ranges of a list must not write the same elements. To add
 * to an accumulator, `out` is the accumulator. To write a partial sum to a buffer, `out` is the buffer and `first` is
 * set.
 */
struct device_reduce_range {
    float *out;          /* at the range's first element */
    uint64_t n_elems;    /* may be 0; a multiple of 64 unless the range ends the parameter */
    uint64_t start_elem; /* number of the range's first element in the parameter; a multiple of 64 */
    uint32_t first_leaf; /* index in the list's leaves */
    uint16_t n_leaves;   /* 1 .. REDUCE_MAX_LEAVES */
    uint8_t dtype;       /* enum dtype, of all leaves */
    uint8_t first;       /* out = 0.0f + sum, without reading out; else out += sum */
};

enum device_value {
    DEVICE_NAN,
    DEVICE_INF,
    DEVICE_MINUS_INF,
};

/* The non-finite values of a leaf, or of a sum of finite leaves; device_finding_read() decodes it. */
struct device_finding {
    uint64_t n_nan;
    uint64_t n_inf;
    uint64_t first; /* the complement of (element x 4 + enum device_value), so the first one is largest; 0: none */
};

/* Complete trees of 1, 2, 4 and 8 leaves have kernels of their own, for arrays at multiples of 16 bytes. One kernel
 * serves all other trees and arrays. */
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
    const struct device_chunk *chunks; /* in the order of device_reduce_fill() */
    struct exact_sum *squares;         /* out, per range: of its new elements; `nonfinite` if one is not finite. Carries
                                          are not moved yet; exact_sum_merge() and exact_sum_round() allow that */
    struct position_sum *sums;         /* out, per leaf, of this range; NULL: not needed (partial sums) */
    /* Out: non-finite values, as in reduce_find_nonfinite(): per leaf, and per range. */
    struct device_finding *findings, *overflows;
    uint32_t n_ranges;
    uint32_t n_leaves; /* leaves of all ranges */
    uint32_t n_chunks;
    uint32_t n_chunks_of[N_DTYPES][N_DEVICE_TREES]; /* the number of chunks of each kernel; `chunks` is in this order */
};

/* Fills the leaves of one range from their data and the joins of reduce_joins(). */
void device_leaves_fill(struct device_leaf *leaves, const void *const *data, unsigned n_leaves,
                        const struct reduce_join *joins);

/* Writes the chunks of all ranges, and counts them in the list. Call it with ranges, leaves and chunks in the CPU's
 * memory; the list's own arrays are not read. */
void device_reduce_fill(struct device_reduce_list *list, const struct device_reduce_range *ranges,
                        const struct device_leaf *leaves, struct device_chunk *chunks);

/* Clears the results, and launches one kernel for each type and tree in the list. Most lists need one kernel. */
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
    struct position_sum *sums; /* out, per range; position_sum_add() adds the sums of one parameter */
    uint32_t n_ranges;
    uint32_t n_chunks;
};

int device_position_sums(struct CUstream_st *stream, const struct device_position_list *list);

/* ---- update: update.h on the device ---------------------------------------------------------------------- */

enum {
    DEVICE_UPDATE_BLOCKS = 2048, /* picked: the most blocks with undo slots; more than any GPU runs at a time */
    DEVICE_UNDO_GROUP_ELEMS = 512,
    /* The upper bits of a mark are the list's tag. The lower 24 bits are the number of the saved group, or
     * DEVICE_UNDO_DONE if no group is left. They are enough for 2^44 elements. */
    DEVICE_UNDO_TAG_SHIFT = 24,
    DEVICE_UNDO_DONE = (1 << DEVICE_UNDO_TAG_SHIFT) - 1,
    /* Muon's first pass has its own number after the optimizers. In that pass, p and acc are the summed gradient
     * (kernels.h). */
    DEVICE_MUON_MOMENTUM = N_OPTIMIZERS,
    DEVICE_N_UPDATES,
};

#define DEVICE_UNDO_MAX_TAG ((UINT64_C(1) << 40) - 1)

/*
 * An update may be killed with its process at any moment, if its memory outlives the process. Before a block changes a
 * group of elements, it saves the group in a slot and records that in its mark, as undo.h does on the CPU. If the same
 * list is launched again, with equal tag and memory, blocks continue from their marks, and the bits are those of an
 * undisturbed launch. Finished blocks change nothing.
 */
struct device_update_undo {
    uint64_t *marks;     /* device_update_blocks() marks, zeroed before their first use; NULL: no saving */
    void *slots;         /* device_undo_bytes() bytes; may be shared with lists that end before this one begins */
    uint64_t tag;        /* 1 to DEVICE_UNDO_MAX_TAG: unique among the lists that use these marks */
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

/* The number of blocks of an update with undo slots, from the chunks of its list. */
static inline uint32_t device_update_blocks(uint64_t n_chunks)
{
    const uint64_t most = DEVICE_UPDATE_BLOCKS;

    return (uint32_t)(n_chunks < most ? n_chunks : most);
}

/* The bytes of a slot: a group's masters, with room for fp32, and the optimizer's m and v, in the types of memory. */
static inline uint32_t device_undo_slot_bytes(unsigned n_moments, enum dtype moments)
{
    const size_t n_elems = DEVICE_UNDO_GROUP_ELEMS;

    return (uint32_t)(dtype_bytes(DTYPE_F32, n_elems) + n_moments * dtype_bytes(moments, n_elems));
}

/* The bytes of all slots. Each block has two. */
static inline uint64_t device_undo_bytes(uint32_t n_blocks, uint32_t slot_bytes)
{
    return UINT64_C(2) * n_blocks * slot_bytes;
}

/* A range of an update, like update_args. Ranges of a list must not overlap. */
struct device_update_range {
    float *p; /* NULL: masters of 24 bits, in w16 and lower */
    void *m;  /* in the list's type of moments; NULL if the optimizer has none */
    void *v;  /* like m */
    const float *acc;
    void *w16;     /* NULL if w16_dtype is DTYPE_F32 */
    int8_t *lower; /* lower bytes of masters of 24 bits (master24.h), or NULL */
    uint64_t n_elems;
    uint64_t start_elem; /* from the parameter's start, a multiple of 64; only stochastic rounding reads it */
    uint32_t scalars;    /* index in the list's scalars: one entry per parameter */
    uint32_t w16_dtype;
};

struct device_update_list {
    const struct device_update_range *ranges;
    const struct device_chunk *chunks;
    const struct update_scalars *scalars; /* from update_scalars_compute() */
    struct device_update_undo undo;
    uint32_t n_chunks;
    enum optimizer optimizer; /* or DEVICE_MUON_MOMENTUM */
    bool master24;            /* true: all ranges have masters of 24 bits; false: none has, or DEVICE_MUON_MOMENTUM */
    struct moments_type moments;
};

int device_update(struct CUstream_st *stream, const struct device_update_list *list);

/* ---- Muon: the first step of muon_orthogonalize() (muon.h) on the device ----------------------------------- */

enum {
    DEVICE_NORM_SUMS = 1024, /* picked, not measured: the most blocks of a launch */
};

/* x = matrix / max(Frobenius norm, eps). The arrays do not overlap. */
struct device_normalize {
    float *x;
    const float *matrix;
    double *sums; /* DEVICE_NORM_SUMS values in device memory; need not be initialised */
    uint64_t n_elems;
    double eps;
};

/* Two launches. The bits do not depend on the device or the addresses. */
int device_normalize(struct CUstream_st *stream, const struct device_normalize *list);

/* ---- conversion: convert.h on the device ----------------------------------------------------------------- */

struct device_convert_range {
    void *dst;
    const void *src; /* dst and src do not overlap */
    uint64_t n_elems;
    uint32_t dtype;    /* enum dtype of the side that is not fp32; DTYPE_F32: copy */
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

/* Words and their addresses: device addresses of registered host memory. */
struct device_words {
    struct {
        uint64_t *at;
        uint64_t value;
    } words[DEVICE_MAX_WORDS];
    uint32_t n;
};

/* Writes all words in one launch. Each word is in the host's memory before the next word is written. */
int device_write_words(struct CUstream_st *stream, const struct device_words *words);

#ifdef __cplusplus
}
#endif
