/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Engines of several nodes with several GPUs each, driven from one loop: the real program over the stand-ins
 * (tests/sim) or on GPUs (device-machine.h), real processes. The test stands in for the daemons. Beside them a core
 * (state, step) that owns everything does the same on the CPU; what the GPUs have is compared with it bit for bit.
 *
 * Each rank has an arena in host memory, in the layout's places; its ring on the GPU is a copy of that. Each node has a
 * segment of host memory with a mirror of all pieces of its GPUs.
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
    GPUS_PATIENCE_MS = 60 * 1000, /* a machine with sanitizers and others at work */
    GPUS_MAX_DONE = 4096,
    GPUS_ALL_PARAMS = (1 << GPUS_N_PARAMS) - 1,
};

struct gpus_node {
    struct gpus *gpus;
    unsigned node;
    struct device_keep keep;
    struct device *device;
    struct segment host; /* mirrors of the pieces, local rank after local rank */
    uint64_t mirror_at[DEVICE_MAX_LOCAL][DEVICE_N_PIECES];
    bool ready, failed, ended;
    char versions[DEVICE_MAX_WHAT_BYTES + 1];
    char what[DEVICE_MAX_WHAT_BYTES + 1];
    bool said, has_tag;
    uint64_t tag;
    uint8_t *done; /* by tag */
    unsigned n_late;
    struct device_done last;
};

struct gpus_options {
    unsigned n_nodes, n_local; /* GPUs of each node */
    unsigned stage;            /* 0: 2 */
    bool adds_with_nccl;       /* deterministic: false */
    bool offload;              /* masters and moments are the test's affair */
    enum optimizer optimizer;
    struct moments_type moments; /* nothing: fp32 */
    bool master24;               /* of bf16 weights */
    uint64_t bucket_elems;       /* 0: 300 */
};

struct gpus {
    struct gpus_options options;
    uv_loop_t loop;
    uv_timer_t tick;
    unsigned world;
    struct layout *layout;
    struct worker_pool *pool;
    struct state *state; /* the core on the CPU */
    struct step *step;
    struct hyper hyper;
    uint8_t *arenas[GPUS_MAX_WORLD];
    bool pushed[GPUS_MAX_WORLD][GPUS_N_TRAINABLE];
    uint64_t pool_offset[GPUS_N_PARAMS]; /* stage 3: of each parameter's place, in any rank's pool */
    struct gpus_node nodes[GPUS_MAX_NODES];
    uint32_t generation;
    uint64_t last_tag, n_collectives, epoch;
    uint32_t timeout_ms, connect_timeout_ms;
    unsigned n_reduced; /* on the CPU */
    uint64_t point;     /* of slots of local rank 0; 0: none */
    bool whole_numbers; /* gradients, whose sum is the same in any order */
    const char *fault;  /* ZEROD_SIM of one node's engine, when it is started; NULL: none */
    unsigned fault_node;
};

/* Skip the test and print why, if this machine has fewer GPUs, or no faults to order. */
void need_gpus(unsigned n);
void need_faults(void);

/* State on the CPU and keeps; no engines. Weights have values, moments none. Where there are fewer GPUs than a node is
 * to have, its ranks are on nodes of fewer GPUs, which share those of this machine. */
void gpus_init(struct gpus *gpus, const struct gpus_options *options);
/* Sets those weights in another state, too. */
void gpus_set_weights(const struct gpus *gpus, const struct state *state);
/* Closes the engines that are running. */
void gpus_deinit(struct gpus *gpus);

/* Starts the next generation of engines. */
void gpus_start(struct gpus *gpus);
void gpus_wait_ready(struct gpus *gpus);
/* Closes all and waits until they have ended. */
void gpus_stop(struct gpus *gpus);
/* Copies the state of the CPU to the GPUs. */
void gpus_write_state(struct gpus *gpus);

/* New gradients of all ranks: one of three parameters of each rank is not pushed; if all: each is. */
void gpus_make_gradients(struct gpus *gpus, uint64_t seed, bool all);
void gpus_set_gradient(struct gpus *gpus, unsigned rank, unsigned param, uint64_t elem, float value);
/* Arenas to rings. */
void gpus_push(struct gpus *gpus);
/* Copy the data of gpus_push() and gpus_write_state() to the mirrors alone. */
void gpus_fill_rings(struct gpus *gpus);
void gpus_fill_state(struct gpus *gpus);

/*
 * Gives an order to all nodes. again: its tag before an engine failed, or 0; a node that had carried it out only sends,
 * or does nothing. Return: its tag.
 */
uint64_t gpus_order_reduce(struct gpus *gpus, uint32_t parcel, uint32_t micro, uint64_t again);
uint64_t gpus_order_update(struct gpus *gpus, uint64_t again);
uint64_t gpus_order_gather(struct gpus *gpus, uint64_t again);
/* Stage 3: parameters to one rank's pool; params: a bit for each. Only the nodes that take part get the order; for the
 * others it counts as done. */
uint64_t gpus_order_fetch(struct gpus *gpus, unsigned rank, uint32_t params);
/* Pieces of all GPUs to their mirrors, or back; kinds: a bit for each. */
uint64_t gpus_order_copy(struct gpus *gpus, bool write, uint32_t kinds, uint64_t again);
void gpus_copy(struct gpus *gpus, bool write, uint32_t kinds);

/* One round of the loop, of 10 ms at most. */
void gpus_turn(struct gpus *gpus);
/* Fails the test when an engine fails or it takes too long. */
void gpus_wait_done(struct gpus *gpus, uint64_t tag);
void gpus_wait_failed(struct gpus *gpus, unsigned node);
/* Return: false when an engine has failed before all were done, or ready. */
bool gpus_try_done(struct gpus *gpus, uint64_t tag);
bool gpus_try_ready(struct gpus *gpus);
bool gpus_is_done(const struct gpus *gpus, uint64_t tag);

/* A parcel has been reduced: notes it on both sides, after the same on the CPU. */
void gpus_reduced(struct gpus *gpus, uint32_t parcel, uint32_t micro);
/* Orders all parcels, with tags one after the other. Return: the first one's. */
uint64_t gpus_order_reduce_all(struct gpus *gpus, uint32_t micro);
/* Waits until they are reduced, and compares. */
void gpus_finish_reduce_all(struct gpus *gpus, uint32_t micro, uint64_t first_tag);
void gpus_reduce_all(struct gpus *gpus, uint32_t micro);
/* Norm and scalars of the CPU's step, and they go to the engines; then the update on the CPU. */
void gpus_decide(struct gpus *gpus);
void gpus_open_step(struct gpus *gpus);
void gpus_commit(struct gpus *gpus);

/* Compares, and fails the test with the first difference. */
void gpus_check_sums(struct gpus *gpus, uint32_t parcel);
void gpus_check_squares(struct gpus *gpus);
void gpus_check_gradients(struct gpus *gpus);
void gpus_check_state(struct gpus *gpus);
/* Stage 3: what the pool of a rank has of parameters is what the CPU publishes. */
void gpus_check_pool(struct gpus *gpus, unsigned rank, uint32_t params);

uint8_t *gpus_mirror(const struct gpus *gpus, unsigned rank, enum device_piece_kind kind);
