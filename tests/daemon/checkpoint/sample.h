/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job's state for tests of checkpoints: a few parameters of all kinds. Each value depends only on the seed, the
 * parameter and the element, whatever the number of ranks, the stage and the size of buckets. For tests with cmocka.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "daemon/checkpoint/load.h"
#include "daemon/memory/state.h"
#include "kernels/update.h"

struct disk;

enum { SAMPLE_WHY_BYTES = LOADING_WHY_BYTES };

struct sample_param {
    const char *name;
    enum dtype dtype;
    bool frozen;
    uint32_t n_dims;
    uint64_t shape[3];
};

struct sample_options {
    const struct sample_param *params; /* NULL means all kinds; some have several chunks */
    size_t n_params;
    unsigned world_size, stage;
    unsigned first_rank, n_local; /* this node's ranks; n_local 0: all */
    uint64_t bucket_elems;
    enum optimizer optimizer;
    bool no_momentum; /* with SGD */
    enum dtype moments;
    bool master24;
    bool short_masters; /* values that fit into 24 bits, whatever their dtype */
    bool short_moments; /* values that fit into 8 bits, whatever their dtype */
};

struct sample {
    struct sample_options options;
    struct layout *layout;
    struct state *state;
};

/* Three small parameters: bf16, fp32, and frozen fp16. */
extern const struct sample_param sample_small[3];

struct sample *sample_new(const struct sample_options *options);
void sample_free(struct sample *sample);
void sample_fill(struct sample *sample, uint64_t seed);
/* Return: whether all masters, moments, weights and counts of this node have exactly the bits of the seed. */
bool sample_is(const struct sample *sample, uint64_t seed);

struct sample_save {
    const char *dir;
    const struct disk *disk; /* NULL: a disk that does not sync */
    uint64_t step;
    unsigned save_total_limit;
    bool cancelled;
    unsigned n_nodes, node; /* n_nodes 0: one node */
    uint64_t token;         /* the token in checkpoint_order */
};

/*
 * Fills the state with the seed's values and saves it. Return: the result of checkpoint_write(), whose sentence is in
 * why.
 */
int sample_save(struct sample *sample, uint64_t seed, const struct sample_save *save, char *why);
/* On node 0, makes a checkpoint of what all nodes have saved. Return: the result of checkpoint_publish(). */
int sample_publish(const struct sample *sample, const struct sample_save *save, char *why);

struct sample_load {
    const char *dir, *path;
    uint64_t before_step; /* only checkpoints of earlier steps; 0: all */
    bool strict;
    uint64_t seed; /* seed of the ranks' blobs; 0: they are not compared */
};

/*
 * Loads a checkpoint, and compares the ranks' blobs. Return: 0 with *step set, 1 if there is none, or -errno. why has
 * the reason of a failure, or the note.
 */
int sample_load(struct sample *sample, const struct sample_load *load, uint64_t *step, char *why);

/* disk_system without fsync() and O_DIRECT, for tests with many saves. */
extern const struct disk disk_hasty;

/* Makes an empty folder, in memory if possible. path has room for 64 bytes. */
void scratch_new(char *path);
void scratch_remove(const char *path);
/* Return: the number of entries in a folder, or -1 if there is no such folder. */
int scratch_count(const char *path);
