/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The keep outlives an engine of GPUs. It has the descriptors of the device memory that the engine has allocated, and
 * segments of host memory (the plan, the inputs and results of orders, facts, and the progress of trainers' GPUs). A
 * killed engine's memory stays on the GPUs while any process holds these descriptors. The next engine maps this memory,
 * and restores data that an interrupted reduction or gather left incomplete. It finishes an interrupted update when the
 * update is ordered again.
 *
 * The keep outlives the daemon, too: the keeper of descriptors (core/base/keep.h) has copies of all of them, and
 * device_keep_init() of the next daemon finds them.
 *
 * devices.c, which starts engines, owns the keep; an engine borrows it until ended() of gpu-engine.h.
 */

#include <stdbool.h>
#include <stdint.h>

#include "core/base/segment.h"
#include "core/wire/device-plan.h"
#include "core/wire/device-wire.h"

/* Facts about this node's device memory, for the next daemon. */
struct device_facts {
    uint64_t n_bytes[DEVICE_MAX_LOCAL][DEVICE_N_PIECES]; /* allocated size; 0: not allocated yet */
    uint8_t gpus[DEVICE_MAX_LOCAL][DEVICE_GPU_BYTES];    /* UUIDs of the GPUs that have the memory */
    uint64_t released[DEVICE_MAX_LOCAL];                 /* orders do not wait for points up to this one */
    int64_t pid;         /* of the last engine; until it has ended, no other process may use the memory */
    uint64_t start_time; /* child_start_time() of that process */
};

struct device_keep {
    struct segment plan_segment, inputs_segment, results_segment, facts_segment;
    struct segment progress_segments[DEVICE_MAX_LOCAL]; /* struct progress_page of each local rank */
    struct device_plan plan;
    struct device_inputs inputs;
    struct device_results results;
    struct device_facts *facts;
    struct device_rank_places places[DEVICE_MAX_LOCAL];
    int fds[DEVICE_MAX_LOCAL][DEVICE_N_PIECES]; /* -1: not allocated yet */
    bool in_use;                                /* an engine that has not ended uses it */
};

/* Makes the segments, or finds the segments and descriptors of an earlier daemon. Loop thread. Return: 0 or -errno. */
int device_keep_init(struct device_keep *keep, const struct device_plan_options *options);
/* Reserves the pages of the segments. Any thread. Return: 0 or -errno. */
int device_keep_reserve(const struct device_keep *keep);
/* Return: true if the segments were made by an earlier daemon. */
bool device_keep_was_found(const struct device_keep *keep);
/* Adds a piece that was allocated. Takes ownership of the descriptor. Return: 0, or -errno if the keeper of descriptors
 * does not keep the descriptor. */
int device_keep_add(struct device_keep *keep, unsigned local_rank, enum device_piece_kind kind, int fd,
                    uint64_t n_bytes);
/*
 * Several nodes: forgets which reductions are done, because an earlier daemon may have used the numbers of this
 * daemon's reductions. Results of a step that the earlier daemon did not finish are not used.
 */
void device_keep_forget_ops(struct device_keep *keep);
/*
 * Closes the descriptors and frees the names, so that a new keep can use the same names. The segments stay until
 * device_keep_deinit(), because an engine that is still ending may use them.
 */
void device_keep_let_go(struct device_keep *keep);
void device_keep_deinit(struct device_keep *keep);
