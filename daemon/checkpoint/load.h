/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Loads a checkpoint into the state of a job that has just been formed, whatever number of nodes and ranks, stage and
 * bucket size it was written with: tensors, and the boxes in which several nodes have written them, are found by their
 * names. Each MiB is compared with its hash, and given up with all the rest if wrong. A node of several loads what it
 * keeps (targets.h), and reads only the MiB in which that lies.
 *
 *     loading_open      finds the checkpoint, and a place for each of its tensors      one thread that may wait
 *     loading_read      piece by piece, in any order                                    workers
 *     loading_finish    counts, and what ranks have stored                              the owner
 *
 * After a failure of loading_read() the state holds something of it: another checkpoint must be loaded, or the state
 * given up.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/description.h"
#include "kernels/update.h"

struct loading;
struct state;

enum { LOADING_WHY_BYTES = 512 };

struct loading_options {
    const char *dir;      /* of the checkpoints; NULL: path is one */
    const char *path;     /* a checkpoint's folder */
    uint64_t before_step; /* of dir: only older ones; UINT64_MAX: all */
    struct state *state;  /* of this node's ranks */
    enum optimizer optimizer;
    const char *optimizer_name; /* as config_optimizer_name() has it */
    bool strict;                /* moments and step counts of all parameters are there, and no others */
};

enum {
    LOADING_NONE = 1,      /* there is no checkpoint */
    LOADING_NO_FOLDER = 2, /* options->dir cannot be read, and a sentence */
};

/* Return: 0; LOADING_NONE; LOADING_NO_FOLDER; or -errno and a sentence without a full stop. */
int loading_open(struct loading **out, const struct loading_options *options, char *why);
const struct description *loading_description(const struct loading *loading);
/* Return: its folder. */
const char *loading_path(const struct loading *loading);
/* Return: a sentence on what was ignored because strict is false; "": nothing was. */
const char *loading_note(const struct loading *loading);

uint32_t loading_n_pieces(const struct loading *loading);
/* Return: 0 or -errno; of the first failure loading_why() has a sentence. */
int loading_read(struct loading *loading, uint32_t piece);
const char *loading_why(struct loading *loading);

/* All pieces are read: the counts are set. */
void loading_finish(struct loading *loading);
/* The bytes that a rank had stored, borrowed from the loading. Return: NULL, it had stored nothing, or is no rank of
 * this node. */
const void *loading_blob(const struct loading *loading, unsigned rank, size_t *n_bytes);
void loading_free(struct loading *loading);
