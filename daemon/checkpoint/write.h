/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes a checkpoint, or leaves everything as it was:
 *
 *     .step-00001000.writing/   all files, each synced; the description last; then the folder is synced
 *     step-00001000/            renamed; then the folder around it is synced
 *
 * On several nodes the folder is one that all of them see. Its hidden name has the token of the save in it
 * (".step-00001000.0123456789abcdef.writing"), each node writes its own files, and a part of the description,
 * "node1.json". Then node 0 writes the description from these parts, and renames.
 *
 * If that last sync fails, the checkpoint is there, but a loss of power may take it away. A checkpoint of the same step
 * is replaced: the two exchange their names.
 *
 * After that the oldest other checkpoints beyond the limit are removed: renamed to a name with a dot, which is synced,
 * first. What an earlier daemon left behind under names with a dot is removed before anything else. docs/checkpoints.md
 * describes the files.
 */

#include <stdatomic.h>
#include <stdbool.h>
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
    int node;                  /* of several; -1: the job has one */
    bool slices_frozen;        /* several nodes: each has only its ranks' slices of frozen parameters */
    uint64_t token;            /* several nodes: the number of this save, the same on all of them */
    unsigned save_total_limit; /* 0: none is removed */
    /* Called when the checkpoint, or this node's part, is on the disk, before older ones are removed. May be NULL. */
    void (*on_disk)(void *userdata);
    void *userdata;
    bool follows_another; /* the daemon had a run before this one, which has not saved this step yet */
    /* Whose checkpoint of this step was there. "": its run has no id; NULL: there was none, or this run's. Owned. */
    char *replaced_run;
    atomic_bool cancelled; /* -ECANCELED soon, and no sentence */
    _Atomic(uint64_t) n_bytes_done;
    _Atomic(uint64_t) n_bytes; /* of all files but the description; known, but for headers, soon after it began */
};

void checkpoint_order_deinit(struct checkpoint_order *order);

/*
 * All of it, or, of several nodes, what this node owns. For a thread that may wait. Return: 0; or -errno and a sentence
 * that names the file.
 */
int checkpoint_write(struct checkpoint_order *order, char *why, size_t why_size);
/* Node 0 of several, when all have written what they own. Return: likewise. */
int checkpoint_publish(struct checkpoint_order *order, char *why, size_t why_size);

/* Makes the folder of the checkpoints, if need be, and syncs its name. If it was there already, its parent need not be
 * a folder that we can open. Return: 0 or -errno. */
int checkpoint_make_dir(const struct disk *disk, const char *dir);
