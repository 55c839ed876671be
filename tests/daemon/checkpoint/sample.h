/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A job's state for tests of checkpoints: a few parameters of all kinds, whose every value follows from a seed, the
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
    const struct sample_param *params; /* NULL: all kinds; some have several chunks */
    size_t n_params;
    unsigned world_size, stage;
    unsigned first_rank, n_local; /* ranks of this node; n_local 0: all */
    uint64_t bucket_elems;
    enum optimizer optimizer;
    bool no_momentum; /* of SGD */
    enum dtype moments;
    bool master24;
    bool short_masters; /* their values are those of 24 bits, whatever they lie in */
    bool short_moments; /* their values are those of 8 bits, whatever they lie in */
};

struct sample {
    struct sample_options options;
    struct layout *layout;
    struct state *state;
};

/* Three small ones: bf16, fp32, and frozen fp16. */
extern const struct sample_param sample_small[3];

struct sample *sample_new(const struct sample_options *options);
void sample_free(struct sample *sample);
void sample_fill(struct sample *sample, uint64_t seed);
/* Return: whether masters, moments, weights and counts that this node keeps are those of the seed, bit for bit. */
bool sample_is(const struct sample *sample, uint64_t seed);

struct sample_save {
    const char *dir;
    const struct disk *disk; /* NULL: one that does not sync */
    uint64_t step;
    unsigned save_total_limit;
    bool cancelled;
    unsigned n_nodes, node; /* n_nodes 0: the job is on one node */
    uint64_t token;         /* as checkpoint_order has it */
};

/* Fills the state with the seed and saves it. Return: as checkpoint_write(); the sentence is in why. */
int sample_save(struct sample *sample, uint64_t seed, const struct sample_save *save, char *why);
/* Node 0 of several: what all of them have saved becomes a checkpoint. Return: as checkpoint_publish(). */
int sample_publish(const struct sample *sample, const struct sample_save *save, char *why);

struct sample_load {
    const char *dir, *path;
    uint64_t before_step; /* 0: all */
    bool strict;
    uint64_t seed; /* of what ranks have stored; 0: not compared */
};

/* Loads, and compares what ranks have stored. Return: 0 and *step; 1: there is none; or -errno. why: of a failure; else
 * the note. */
int sample_load(struct sample *sample, const struct sample_load *load, uint64_t *step, char *why);

/* disk_system without fsync() and O_DIRECT, for tests with many saves. */
extern const struct disk disk_hasty;

/* An empty folder, in memory if that can be. path: 64 bytes. */
void scratch_new(char *path);
void scratch_remove(const char *path);
/* Return: how many entries a folder has; -1: there is no such folder. */
int scratch_count(const char *path);
