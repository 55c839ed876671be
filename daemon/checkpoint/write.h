/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes a checkpoint, or leaves everything as it was:
 *
 *     .step-00001000.writing/   all files, each synced; the description last; then the folder is synced
 *     step-00001000/            renamed; then the folder around it is synced
 *
 * If that last sync fails, the checkpoint is there, but a loss of power may take it away. A checkpoint of the same step
 * is replaced: the two exchange their names.
 *
 * After that the oldest other checkpoints beyond the limit are removed: renamed to a name with a dot, which is synced,
 * first. What an earlier daemon left behind under names with a dot is removed before anything else. docs/checkpoints.md
 * describes the files.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/description.h"
#include "kernels/update.h"

struct disk;
struct kernels;
struct snapshot;
struct state;

/* The bytes that a rank has stored. */
struct checkpoint_blob {
    unsigned rank;
    void *data; /* owned by the order */
    size_t n_bytes;
};

struct checkpoint_order {
    const char *dir; /* of the checkpoints; it is made if only its last part is missing */
    const struct disk *disk;
    const struct state *state;     /* of all ranks; only its layout and frozen parameters are read here */
    const struct kernels *kernels; /* to round masters where there are no weights of 16 bits */
    enum optimizer optimizer;
    struct snapshot *snapshot;
    struct description description; /* but for its files; owned */
    uint64_t *counts;               /* per parameter, of applied steps; owned */
    struct checkpoint_blob *blobs;  /* owned */
    size_t n_blobs;
    unsigned save_total_limit; /* 0: none is removed */
    atomic_bool cancelled;     /* -ECANCELED soon, and no sentence */
    _Atomic(uint64_t) n_bytes_done;
    _Atomic(uint64_t) n_bytes; /* of all files but the description; known soon after it began */
};

void checkpoint_order_deinit(struct checkpoint_order *order);

/* For a thread that may wait. Return: 0; or -errno and a sentence that names the file. */
int checkpoint_write(struct checkpoint_order *order, char *why, size_t why_size);
