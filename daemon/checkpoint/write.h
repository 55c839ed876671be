/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes a checkpoint, or leaves everything as it was:
 *
 *     .step-00001000.writing/   all files, each synced; the description last; then the folder is synced
 *     step-00001000/            renamed; then the folder around it is synced
 *
 * Several nodes share one folder. Its hidden name contains the token of the save
 * (".step-00001000.0123456789abcdef.writing"). Each node writes its own files, and a part of the description,
 * "node1.json". Then node 0 writes the description from these parts, and renames the folder.
 *
 * If the last sync fails, the checkpoint exists, but a power loss may remove it. A checkpoint of the same step is
 * replaced: the two folders exchange their names.
 *
 * After that, the oldest other checkpoints beyond the limit are removed. Each of them is first renamed to a name with a
 * dot, which is synced. Before a save begins, it removes the folders with a dot that an earlier daemon has left.
 * docs/checkpoints.md describes the files.
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
    struct description description; /* without its files; owned */
    uint64_t *counts;               /* per parameter, of applied steps; owned */
    struct checkpoint_blob *blobs;  /* owned */
    size_t n_blobs;
    int node;                  /* -1: the job has one node */
    bool slices_frozen;        /* several nodes: each has only its ranks' slices of frozen parameters */
    uint64_t token;            /* several nodes: the number of this save, the same on all of them */
    unsigned save_total_limit; /* 0: no limit */
    /* Called when the checkpoint, or this node's part, is on the disk, before older ones are removed. May be NULL. */
    void (*on_disk)(void *userdata);
    void *userdata;
    bool follows_another; /* the daemon had a run before this one, which has not saved this step yet */
    /* The run of a replaced checkpoint; "" if it has no id; NULL if no other run's checkpoint was replaced. Owned. */
    char *replaced_run;
    atomic_bool cancelled; /* checkpoint_write() soon returns -ECANCELED, without a message */
    _Atomic(uint64_t) n_bytes_done;
    _Atomic(uint64_t) n_bytes; /* of all files except the description; headers are added as files begin */
};

void checkpoint_order_deinit(struct checkpoint_order *order);

/*
 * Writes the checkpoint, or, on several nodes, what this node owns. For a thread that may block. Return: 0, or -errno
 * with a message that names the file.
 */
int checkpoint_write(struct checkpoint_order *order, char *why, size_t why_size);
/* Publishes the checkpoint of several nodes. Node 0 calls it when all nodes have written what they own. Return: as
 * checkpoint_write(). */
int checkpoint_publish(struct checkpoint_order *order, char *why, size_t why_size);

/* Makes the folder of the checkpoints if it is missing, and syncs its name. The parent of an existing folder may be one
 * that we cannot open. Return: 0 or -errno. */
int checkpoint_make_dir(const struct disk *disk, const char *dir);
