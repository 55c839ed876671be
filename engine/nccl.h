/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * zerod-engine-nccl drives all GPUs of a node's local ranks from one thread that never waits (proto/device.proto).
 *
 * Streams. Each GPU has two: `main` computes and copies, `comm` communicates. After every collective an event makes
 * main wait for comm. comm waits for main only if it needs results of main, so that slices of one parcel are sent while
 * another parcel is added.
 *
 * Orders. They wait in a queue and are issued one at a time, in the daemon's order. An order begins when the trainers'
 * GPUs have written its inputs, so no stream ever waits for another process. Issuing may need several rounds: after a
 * group of NCCL calls, the next work may be put on the stream only when the communicators have accepted the group. An
 * issued order keeps its lane. The lane's last event on each GPU marks the order's end.
 *
 * Errors. Every error leads to engine_fail(), which reports it and ends the process. The end of the process aborts the
 * communicators, and the daemons end the engines of all nodes. The engine frees nothing at its end, because devices may
 * still work.
 *
 * Files, the lowest layer first; each calls only those above it in this list:
 *
 *   nccl-engine.c    reports, errors, streams
 *   nccl-sizes.c     the sizes of a lane
 *   nccl-memory.c    pieces, lanes, undo
 *   nccl-muon.c      matrices of Muon; orthogonalize.c and cublas.c are below it and independent of the engine
 *   nccl-collect.c   communicators
 *   nccl-fetch.c     fetches of parameters (stage 3)
 *   nccl-reduce.c    reductions
 *   nccl-update.c    updates
 *   nccl-orders.c    the queue and the table of orders; gather, copy
 *   nccl.c           loop, socket, setup
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "core/wire/device-plan.h"
#include "core/wire/device-wire.h"
#include "core/wire/frame.h"
#include "core/wire/progress.h"
#include "core/wire/wire-arena.h"
#include "engine/orthogonalize.h"
#include "kernels/device.h"

/* A piece of device memory, mapped on its GPU. */
struct nccl_piece {
    uint8_t *at; /* device address; the CPU never reads it */
    uint64_t n_bytes;
};

/* A bump allocator over two places of equal size: after the upload, `device` has the bytes of `host`. */
struct nccl_lists {
    uint8_t *host, *device;
    size_t n_used, n_uploaded, n_bytes;
};

/* What a reduction notes about a range until its results are read: the chunk, and the place of its leaves in
 * leaf_ranks. */
struct nccl_range_note {
    uint32_t chunk;
    uint32_t first_leaf, n_leaves;
};

/* The results of one list of ranges: offsets in the lane's results. */
struct nccl_outcome {
    size_t squares, sums, findings, overflows;
    uint32_t n_ranges, n_leaves;
};

/* The memory and events of a lane on one GPU. */
struct nccl_lane {
    struct nccl_lists lists;
    uint8_t *staging;                /* device: slices of other ranks, or the sum of all */
    uint8_t *results, *results_host; /* in device memory, and their copy in host memory */
    size_t n_results_used;
    cudaEvent_t received, done;
    /* Used only during a reduction. */
    struct nccl_range_note *notes; /* notes of the owned ranges, then of the rank's own slot */
    uint16_t *leaf_ranks;
    struct nccl_outcome owned, own;
};

struct nccl_gpu {
    int device;
    unsigned rank; /* in the world */
    cudaStream_t main, comm, aside; /* aside: for a copy beside the queue */
    cudaEvent_t main_event, comm_event, aside_event;
    ncclComm_t communicator;
    struct orthogonalizer orthogonalizer; /* for the main stream; only with Muon */
    bool has_memory;
    uint8_t *marks;            /* device address of the marks in engine->results; the CPU never reads it */
    struct device_words words; /* for the next words_write() */
    uint32_t pool_writers;     /* bits of the local GPUs that may write into this GPU's pool */
    struct device_rank_places places;
    float *scratch; /* for Muon; NULL if the rank owns no matrix */
    struct nccl_piece pieces[DEVICE_N_PIECES];
    struct nccl_lane lanes[DEVICE_LANES];
    const struct progress_page *progress; /* the progress of the trainer's work on this GPU */
    uint64_t released;                    /* no order waits for points up to this one */
};

/* Sizes of a lane's memory on each GPU. */
struct nccl_sizes {
    uint64_t lists, results, staging, stride;
    uint64_t fetch; /* the most bytes of staging in one round of a fetch: equal on all nodes */
    uint64_t n_notes, n_leaves;
};

struct nccl_order {
    struct nccl_order *next;
    struct device_command command; /* owns its arrays */
    void *array;
    uint64_t tag;
    uint32_t timeout_ms;
    uint64_t clock_ns; /* start of its deadline; restarted while it waits for a trainer */
    int lane;          /* -1: no lane yet */
    unsigned step;
    uint32_t bucket; /* the next bucket of a gather */
    size_t n_issued; /* issued parameters of a fetch */
    uint64_t n_sent, n_received;
};

enum nccl_phase {
    NCCL_AWAITS_SETUP,
    NCCL_AWAITS_MEMORY,
    NCCL_RESTORES,
    NCCL_WARMS,
    NCCL_AWAITS_ID,
    NCCL_CONNECTS,
    NCCL_IS_READY,
};

struct nccl_segment {
    uint8_t *map;
    uint64_t n_bytes;
};

struct nccl_engine {
    enum nccl_phase phase;
    struct device_setup setup;
    uint64_t begun_ns;
    struct device_plan plan;
    struct device_inputs inputs;
    struct device_results results;
    struct device_undo_places undo;
    struct nccl_sizes sizes;
    struct nccl_gpu *gpus;
    unsigned n_gpus, n_with_memory;
    bool groups; /* the world has more than one rank */
    bool has_id;
    ncclUniqueId id;
    uint64_t n_collectives;
    struct nccl_segment segments[DEVICE_MAX_SEGMENTS];

    struct nccl_order *first, *last;            /* not issued yet */
    struct nccl_order *in_flight[DEVICE_LANES]; /* by lane; includes the order that is being issued */
    unsigned n_in_flight;
    struct nccl_order *aside; /* the unfinished copy beside the queue, or NULL */
    const uint64_t *tag; /* tag of the present order, for error reports */
    char versions[DEVICE_MAX_WHAT_BYTES];

    struct frame_buffer buffer;
    struct wire_arena arena;
    uint8_t *packet;
};

enum { NCCL_AGAIN = 1 /* the caller must call again in the next round */ };

enum { ENGINE_SOCKET_FD = 3, NCCL_LIST_ALIGN = 16, NCCL_HOST_PAGE = 4096 };

/* nccl-engine.c */

/* Ends the process at once; nothing is destroyed, because threads of CUDA and NCCL may still run. */
void engine_leave(int status) __attribute__((noreturn));
void engine_fail(struct nccl_engine *engine, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
/* Fails unless r is cudaSuccess; what: the entry point. */
void engine_check_cuda(struct nccl_engine *engine, const struct nccl_gpu *gpu, cudaError_t r, const char *what);
/* Fails if a GPU has an error. A lost GPU also makes the calls of NCCL fail, with less information. */
void engine_check_gpus(struct nccl_engine *engine, const char *what);
/* Fails unless r is success or in progress; reports a lost GPU rather than NCCL's error. */
void engine_check_nccl(struct nccl_engine *engine, ncclResult_t r, const char *what);
void engine_report(struct nccl_engine *engine, const struct device_report *report, const int *fds, size_t n_fds);
/* Makes the following calls apply to this GPU. */
void engine_use(struct nccl_engine *engine, const struct nccl_gpu *gpu);
uint64_t engine_now_ns(void);
/* Fails unless the launch of a kernel returned cudaSuccess. */
void engine_launch(struct nccl_engine *engine, const struct nccl_gpu *gpu, int r, const char *what);
/* Return: 0 if all GPUs have passed their main_event, or NCCL_AGAIN. */
int engine_poll(struct nccl_engine *engine);
/* Checks and counts the number of a collective when it is issued. */
void engine_count_collective(struct nccl_engine *engine, uint64_t collective);
/* Makes the comm stream wait for the main stream (comm_later), or the main stream for the comm stream. */
void engine_join(struct nccl_engine *engine, struct nccl_gpu *gpu, bool comm_later);
void engine_join_all(struct nccl_engine *engine, bool comm_later);
/* Makes the main stream wait for the copy beside the queue, if that reads any of these bytes of the GPU. */
void engine_join_aside(struct nccl_engine *engine, struct nccl_gpu *gpu, const void *bytes, uint64_t n_bytes);

/* nccl-sizes.c */

/* Fills engine->sizes from the plan. */
void sizes_find(struct nccl_engine *engine);
/* Return: the most bytes of staging that any owner needs for a parameter. */
uint64_t sizes_staged_bytes(const struct nccl_engine *engine, uint32_t param);

/* nccl-memory.c */

void memory_prepare(struct nccl_engine *engine);
/* Maps one local rank's memory from the descriptors, allocates missing pieces, and reports the new ones. */
void memory_take(struct nccl_engine *engine, const struct device_memory *memory, const int *fds, size_t n_fds);
/* Return: 0 if all arrays are restored, or NCCL_AGAIN. */
int memory_poll_restore(struct nccl_engine *engine);
void memory_share(struct nccl_engine *engine, const struct device_share *share, int fd);
void memory_release(struct nccl_engine *engine, const struct device_release *release);
/* Maps host memory that a device reads and writes. Fails the engine on an error. */
uint8_t *memory_map(struct nccl_engine *engine, int fd, uint64_t n_bytes);

/* Allocates memory of a GPU that is private to this engine. Fails the engine on an error. */
uint8_t *memory_scratch(struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t n_bytes);

/* Reserves n_bytes of a lane's lists, aligned to 16. Return: the host address; *device is the device address. */
void *lists_take(struct nccl_engine *engine, struct nccl_lists *lists, size_t n_bytes, void **device);
void lists_upload(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane);
/* Reserves n_bytes of a lane's results. Return: their offset. */
size_t results_take(struct nccl_engine *engine, struct nccl_lane *lane, size_t n_bytes);

/*
 * Keeps a copy of an array of one GPU until undo_forget() or the lane's next copy; each lane has one copy. Puts all
 * steps on the main stream: records that there is no copy, records the copy's subject, copies, records that there is a
 * copy. mark: all fields except `copied`.
 */
void undo_keep(struct nccl_engine *engine, struct nccl_gpu *gpu, unsigned lane, const struct device_mark *mark,
               const void *array, uint64_t n_bytes);
/* Forgets the lane's copies on all GPUs. Call it when the lane's order has ended. */
void undo_forget(struct nccl_engine *engine, unsigned lane);
/* Return: the undo memory of one launch of an update, for any lane. The step identifies the update: a repeated order
 * has the same step but a new tag, and a new daemon's tags start again. marks: DEVICE_MARKS_UPDATE and so on. */
struct device_update_undo undo_of_update(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t step,
                                         uint32_t marks);

/* nccl-muon.c */

/* Loads cuBLAS and opens it on all GPUs. Call it during setup, because the driver may wait until a GPU is idle. */
void muon_prepare(struct nccl_engine *engine);
/* Makes cuBLAS load its code for a shape, with a matrix of zeroes on the main stream. Call it during setup, too.
 * scratch: as for muon_orthogonalize_on(). */
void muon_warm(struct nccl_engine *engine, struct nccl_gpu *gpu, struct muon_shape shape, float *scratch);
/*
 * Puts the orthogonalisation of a matrix on the main stream. The caller must have called engine_use(). hyper: only
 * ns_steps, ns_coefficients and eps are read. scratch: muon_scratch_elems(shape) elements at a multiple of 64 bytes,
 * which no other work may use until the stream has passed this work. Return: the address of the future result in the
 * scratch memory.
 */
const float *muon_orthogonalize_on(struct nccl_engine *engine, struct nccl_gpu *gpu, struct muon_shape shape,
                                   const float *matrix, const struct hyper *hyper, float *scratch);

/* nccl-collect.c */

/* Makes the id on node 0; other nodes wait for it. */
void collect_begin(struct nccl_engine *engine);
void collect_connect(struct nccl_engine *engine);
/* Return: 0 if all communicators have finished their calls, or NCCL_AGAIN. Fails on an asynchronous error. */
int collect_poll(struct nccl_engine *engine);
void collect_value(struct nccl_engine *engine, const struct device_pair *value);
ncclDataType_t collect_dtype(enum dtype dtype);

/* nccl-orders.c */

void orders_add(struct nccl_engine *engine, const struct device_command *command);
/* Return: true if there was progress. */
bool orders_progress(struct nccl_engine *engine);
void orders_check_deadlines(struct nccl_engine *engine);

/* nccl-fetch.c */

/* Fails the engine if the order may not ask for this fetch. */
void fetch_check(struct nccl_engine *engine, const struct device_order_fetch *fetch);
int fetch_issue(struct nccl_engine *engine, struct nccl_order *order);

/* nccl-reduce.c */

/* Return: whether an earlier engine finished the reduction with this number, but died before it could report that. */
bool reduce_is_done(const struct nccl_engine *engine, uint32_t parcel, uint64_t op);
int reduce_issue(struct nccl_engine *engine, struct nccl_order *order);
void reduce_finish(struct nccl_engine *engine, struct nccl_order *order);

/* nccl-update.c */

/* Allocates Muon's scratch memory. */
void update_prepare(struct nccl_engine *engine);
/* Puts a product of each matrix on the streams, and records the GPUs' main_event, for which engine_poll() waits. */
void update_warm(struct nccl_engine *engine);
int update_issue(struct nccl_engine *engine, struct nccl_order *order);

/* Return: whether slices of the parcel are sent unchanged, and added by the owner. Otherwise NCCL adds them, which
 * needs a whole bucket that is divided evenly. */
static inline bool nccl_exchanges(const struct device_plan *plan, uint32_t parcel)
{
    const struct layout_parcel *p = &plan->parcels[parcel];

    return plan->head->deterministic || plan->head->world_size == 1 || p->n_elems != plan->buckets[p->bucket].n_elems ||
           plan->buckets[p->bucket].owner != LAYOUT_NO_OWNER;
}

static inline float *nccl_acc(const struct nccl_gpu *gpu, uint32_t bucket, uint64_t elem)
{
    const struct device_places *places = &gpu->places.buckets[bucket];

    return (float *)(gpu->pieces[DEVICE_GRADIENT].at + places->acc) + (elem - places->start_elem);
}

/* The master of an element that the rank owns; for a master of 24 bits, its weight. elem: counted from the bucket's
 * start. */
static inline void *nccl_master(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t bucket,
                                uint64_t elem)
{
    const struct device_places *places = &gpu->places.buckets[bucket];
    enum dtype dtype = device_is_master24(&engine->plan, bucket) ? DTYPE_BF16 : DTYPE_F32;
    uint32_t kind;
    uint64_t offset = device_master(&engine->plan, places, bucket, &kind);

    return gpu->pieces[kind].at + offset + (elem - places->start_elem) * dtype_size(dtype);
}

/* A moment at a chunk's start; NULL if the optimizer has none. offset: the offset of the rank's slice in its state.
 * own_elem: the chunk's start, counted from the slice's start. */
static inline void *nccl_moment(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint64_t offset,
                                uint64_t own_elem)
{
    uint64_t before = dtype_bytes(engine->plan.head->moments_dtype, own_elem);

    return offset == DEVICE_NONE ? NULL : gpu->pieces[DEVICE_STATE].at + offset + before;
}

/* The rank's slice in its own copy of the weights. */
static inline uint8_t *nccl_weights(const struct nccl_engine *engine, const struct nccl_gpu *gpu, uint32_t bucket,
                                    uint64_t *n_bytes)
{
    const struct layout_bucket *b = &engine->plan.buckets[bucket];
    const struct device_places *places = &gpu->places.buckets[bucket];

    *n_bytes = places->slice_elems * dtype_size(b->dtype);
    return gpu->pieces[DEVICE_WEIGHTS].at + b->weight_offset_bytes + places->start_elem * dtype_size(b->dtype);
}
