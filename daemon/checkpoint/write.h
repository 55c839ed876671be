/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Writes a checkpoint, or leaves everything as it was:
 *
 *     .step-00001000.writing/   gets all files, the description last; each file, then the folder is synced
 *     step-00001000/            is the folder's name after a rename; then the parent folder is synced
 *
 * Several nodes write into one such folder. Its hidden name contains the token of the save
 * (".step-00001000.0123456789abcdef.writing"). Each node writes its own files, and a part of the description,
 * "node1.json". Then node 0 writes the description from these parts, and renames the folder.
 *
 * If the last sync fails, the checkpoint exists, but a power loss may remove it. To replace a checkpoint of the same
 * step, the two folders exchange their names.
 *
 * A finished save removes the oldest other checkpoints beyond save_total_limit. It first renames each of them to a
 * hidden name, which begins with a dot, and syncs the rename. A new save first removes the hidden folders that an
 * earlier daemon has left. docs/checkpoints.md describes the files.
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
    const char *dir; /* folder of the checkpoints; it is made if only the last part of its path is missing */
    const struct disk *disk;
    const struct state *state;     /* only frozen elements are read from it; all others are read from `snapshot` */
    const struct kernels *kernels; /* to convert masters and moments to the types of the files */
    enum optimizer optimizer;
    struct snapshot *snapshot;
    struct description description; /* owned; checkpoint_write() adds the files to it */
    uint64_t *counts;               /* number of applied steps of each parameter; owned */
    struct checkpoint_blob *blobs;  /* owned */
    size_t n_blobs;
    int node;                  /* -1: the job has one node */
    bool slices_frozen;        /* several nodes: each node has only its ranks' slices of frozen parameters */
    uint64_t token;            /* several nodes: the number of this save, equal on all nodes */
    unsigned save_total_limit; /* 0: no limit */
    /* Called when the checkpoint, or this node's part of it, is on the disk. Old checkpoints are removed afterwards.
     * May be NULL. */
    void (*on_disk)(void *userdata);
    void *userdata;
    bool follows_another; /* the daemon had an earlier run, and the present run has not saved this step yet */
    /* The id of the other run whose checkpoint was replaced; "" if it has no id; NULL if none was replaced. Owned. */
    char *replaced_run;
    atomic_bool cancelled; /* lets checkpoint_write() soon return -ECANCELED, without a message */
    _Atomic(uint64_t) n_bytes_done;
    _Atomic(uint64_t) n_bytes; /* of all files except the description; a header is added when its file begins */
};

void checkpoint_order_deinit(struct checkpoint_order *order);

/*
 * Writes the checkpoint, or, with several nodes, this node's part of it. Call it on a thread that may block. Return: 0,
 * or -errno with a message that names the file.
 */
int checkpoint_write(struct checkpoint_order *order, char *why, size_t why_size);
/* Publishes the checkpoint of several nodes. Node 0 calls it when all nodes have written their parts. Return: as
 * checkpoint_write(). */
int checkpoint_publish(struct checkpoint_order *order, char *why, size_t why_size);

/* Makes the folder of the checkpoints if it is missing, and syncs its name. If the folder exists, a failed sync is
 * ignored, because its parent may not be readable. Return: 0 or -errno. */
int checkpoint_make_dir(const struct disk *disk, const char *dir);
