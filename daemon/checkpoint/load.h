/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Loads a checkpoint into the state of a job that has just been formed. The checkpoint may have another number of
 * nodes or ranks, another stage or bucket size, because tensors and their boxes (box.h) are found by name. Each MiB is
 * compared with its hash; a wrong MiB ends the loading. If there are several nodes, each loads the elements that it
 * keeps (targets.h), and reads only the MiB with such elements.
 *
 *     loading_open      finds the checkpoint, and a place for each of its tensors      one thread that may wait
 *     loading_read      reads a piece; the pieces come in any order                     workers
 *     loading_finish    sets the step counts; then loading_blob() may be called         the owner
 *
 * If loading_read() fails, the state has parts of the checkpoint. The owner must then load another checkpoint, or free
 * the state.
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
    const char *dir;      /* folder of checkpoints; NULL: path is loaded */
    const char *path;     /* a checkpoint's folder */
    uint64_t before_step; /* dir: only checkpoints before this step; UINT64_MAX: all */
    struct state *state;  /* state of this node's ranks */
    enum optimizer optimizer;
    const char *optimizer_name; /* from config_optimizer_name() */
    bool strict;                /* fail if a moment or step count is missing, or a tensor is unknown */
};

enum {
    LOADING_NONE = 1,      /* options->dir does not exist, or has no checkpoint */
    LOADING_NO_FOLDER = 2, /* options->dir cannot be read; why has a message */
};

/* Opens a checkpoint. Return: 0; LOADING_NONE; or LOADING_NO_FOLDER or -errno with a message in why (no full stop). */
int loading_open(struct loading **out, const struct loading_options *options, char *why);
const struct description *loading_description(const struct loading *loading);
/* Return: the checkpoint's folder. */
const char *loading_path(const struct loading *loading);
/* Return: a message about tensors that were ignored because strict is false; "" if there are none. */
const char *loading_note(const struct loading *loading);

uint32_t loading_n_pieces(const struct loading *loading);
/* Reads a piece. Return: 0 or -errno; loading_why() has a message about the first failure. */
int loading_read(struct loading *loading, uint32_t piece);
const char *loading_why(struct loading *loading);

/* Sets the step counts, after all pieces have been read. */
void loading_finish(struct loading *loading);
/* Return: the bytes that a rank had stored, borrowed from the loading; NULL if the rank had stored nothing, or is not a
 * rank of this node. */
const void *loading_blob(const struct loading *loading, unsigned rank, size_t *n_bytes);
void loading_free(struct loading *loading);
