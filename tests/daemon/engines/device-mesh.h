/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Engines of several nodes with several GPUs each, in one loop. They are real processes of the real program, with
 * simulated GPUs (tests/sim) or real ones (device-machine.h). The test takes the daemons' part. A core on the CPU
 * (state, step) owns everything and does the same work; the GPUs' results must have the same bits.
 *
 * Each rank has an arena in host memory, in the layout's places. Its ring on the GPU is a copy of the arena. Each node
 * has a segment of host memory with a mirror of all pieces of its GPUs.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <uv.h>

#include "core/base/worker.h"
#include "core/layout/layout.h"
#include "daemon/engines/device-keep.h"
#include "daemon/engines/gpu-engine.h"
#include "daemon/memory/state.h"
#include "daemon/step/step.h"

enum {
    GPUS_MAX_NODES = 6,
    GPUS_MAX_WORLD = 12,
    GPUS_N_TRAINABLE = 6,
    GPUS_N_PARAMS = GPUS_N_TRAINABLE + 3,
    GPUS_PATIENCE_MS = 60 * 1000, /* enough on a busy machine with sanitizers */
    GPUS_MAX_DONE = 4096,
    GPUS_ALL_PARAMS = (1 << GPUS_N_PARAMS) - 1,
};

struct gpus_node {
    struct gpus *gpus;
    unsigned node;
    struct device_keep keep;
    struct device *device;
    struct segment host; /* mirrors of all pieces, of one local rank after the other */
    uint64_t mirror_at[DEVICE_MAX_LOCAL][DEVICE_N_PIECES];
    bool ready, failed, ended;
    char versions[DEVICE_MAX_WHAT_BYTES + 1];
    char what[DEVICE_MAX_WHAT_BYTES + 1];
    bool said, has_tag;
    uint64_t tag;
    uint8_t *done; /* [tag]: whether the order is done */
    unsigned n_late;
    struct device_done last;
};

struct gpus_options {
    unsigned n_nodes, n_local; /* n_local: GPUs of each node */
    unsigned stage;            /* 0 means 2 */
    bool adds_with_nccl;       /* the option deterministic: false */
    bool offload;              /* the test has masters and moments */
    enum optimizer optimizer;
    struct moments_type moments; /* unset: fp32 */
    bool master24;               /* for bf16 weights */
    uint64_t bucket_elems;       /* elements of a bucket; 0 means 300 */
};

struct gpus {
    struct gpus_options options;
    uv_loop_t loop;
    uv_timer_t tick;
    unsigned world;
    struct layout *layout;
    struct worker_pool *pool;
    struct state *state; /* the state of the core on the CPU */
    struct step *step;
    struct hyper hyper;
    uint8_t *arenas[GPUS_MAX_WORLD];
    bool pushed[GPUS_MAX_WORLD][GPUS_N_TRAINABLE];
    uint64_t pool_offset[GPUS_N_PARAMS]; /* stage 3: each parameter's offset in every rank's pool */
    struct gpus_node nodes[GPUS_MAX_NODES];
    uint32_t generation;
    uint64_t last_tag, n_collectives, epoch;
    uint32_t timeout_ms, connect_timeout_ms;
    unsigned n_reduced; /* parcels that the CPU has reduced */
    uint64_t point;     /* the point of local rank 0's slots; 0: none */
    bool whole_numbers; /* in gradients, so that every order of a sum gives the same bits */
    const char *fault;  /* ZEROD_SIM of fault_node's next engine; NULL: no fault */
    unsigned fault_node;
};

/* Skip the test with a message, if this machine has fewer GPUs, or cannot inject faults. */
void need_gpus(unsigned n);
void need_faults(void);

/*
 * Makes the state on the CPU and the keeps, but no engines. Weights get values, moments are 0. If this machine has
 * fewer GPUs than a node needs, its ranks are spread over more nodes, which share the machine's GPUs.
 */
void gpus_init(struct gpus *gpus, const struct gpus_options *options);
/* Sets the same weights in another state. */
void gpus_set_weights(const struct gpus *gpus, const struct state *state);
/* Closes running engines and frees everything. */
void gpus_deinit(struct gpus *gpus);

/* Starts the next generation of engines. */
void gpus_start(struct gpus *gpus);
void gpus_wait_ready(struct gpus *gpus);
/* Closes all engines and waits until they have ended. */
void gpus_stop(struct gpus *gpus);
/* Copies the state of the CPU to the GPUs. */
void gpus_write_state(struct gpus *gpus);

/* Makes new gradients for all ranks. Each rank pushes two of three parameters, or all of them if `all` is set. */
void gpus_make_gradients(struct gpus *gpus, uint64_t seed, bool all);
void gpus_set_gradient(struct gpus *gpus, unsigned rank, unsigned param, uint64_t elem, float value);
/* Copies the arenas to the rings. */
void gpus_push(struct gpus *gpus);
/* Copy to the mirrors what gpus_push() and gpus_write_state() copy to the GPUs. */
void gpus_fill_rings(struct gpus *gpus);
void gpus_fill_state(struct gpus *gpus);

/*
 * Give an order to all nodes. again is the order's tag before an engine failed, or 0. A node that has done that order
 * only sends, or does nothing. Return: the new tag.
 */
uint64_t gpus_order_reduce(struct gpus *gpus, uint32_t parcel, uint32_t micro, uint64_t again);
uint64_t gpus_order_update(struct gpus *gpus, uint64_t again);
uint64_t gpus_order_gather(struct gpus *gpus, uint64_t again);
/*
 * Stage 3: fetches parameters into one rank's pool. params has a bit for each. Only nodes that take part get the order;
 * for other nodes it counts as done.
 */
uint64_t gpus_order_fetch(struct gpus *gpus, unsigned rank, uint32_t params);
/* Copies pieces of all GPUs to their mirrors, or back if `write` is set. kinds has a bit for each kind of piece. */
uint64_t gpus_order_copy(struct gpus *gpus, bool write, uint32_t kinds, uint64_t again);
void gpus_copy(struct gpus *gpus, bool write, uint32_t kinds);

/* Turns the loop once, for at most 10 ms. */
void gpus_turn(struct gpus *gpus);
/* Wait. They fail the test after GPUS_PATIENCE_MS, and gpus_wait_done() also when an engine fails. */
void gpus_wait_done(struct gpus *gpus, uint64_t tag);
void gpus_wait_failed(struct gpus *gpus, unsigned node);
/* Wait. Return: false if an engine failed before all had done the order, or were ready. */
bool gpus_try_done(struct gpus *gpus, uint64_t tag);
bool gpus_try_ready(struct gpus *gpus);
bool gpus_is_done(const struct gpus *gpus, uint64_t tag);

/* Notes that all nodes have reduced the parcel, and reduces it on the CPU. */
void gpus_reduced(struct gpus *gpus, uint32_t parcel, uint32_t micro);
/* Orders the reduction of all parcels, with consecutive tags. Return: the first tag. */
uint64_t gpus_order_reduce_all(struct gpus *gpus, uint32_t micro);
/* Waits until all parcels are reduced, and compares the sums. */
void gpus_finish_reduce_all(struct gpus *gpus, uint32_t micro, uint64_t first_tag);
void gpus_reduce_all(struct gpus *gpus, uint32_t micro);
/* Computes the step's norm and scalars on the CPU, sends them to the engines, and does the CPU's update. */
void gpus_decide(struct gpus *gpus);
void gpus_open_step(struct gpus *gpus);
void gpus_commit(struct gpus *gpus);

/* Compare GPUs with the CPU. They fail the test at the first difference. */
void gpus_check_sums(struct gpus *gpus, uint32_t parcel);
void gpus_check_squares(struct gpus *gpus);
void gpus_check_gradients(struct gpus *gpus);
void gpus_check_state(struct gpus *gpus);
/* Stage 3: asserts that these parameters in a rank's pool are the CPU's published weights. */
void gpus_check_pool(struct gpus *gpus, unsigned rank, uint32_t params);

uint8_t *gpus_mirror(const struct gpus *gpus, unsigned rank, enum device_piece_kind kind);
