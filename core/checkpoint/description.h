/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The description of a checkpoint, zerod.json: what the files beside it cannot say of themselves. It is written last; a
 * folder without it is no checkpoint. Its last field is a hash of the text before that field. Pure: a struct to text
 * and back. docs/checkpoints.md describes the fields.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/hash.h"
#include "kernels/dtype.h"

struct json;
struct json_object;
struct layout;

#define CHECKPOINT_DESCRIPTION "zerod.json"

enum {
    DESCRIPTION_FORMAT = 1,
    DESCRIPTION_MAX_BYTES = 1 << 30,
};

struct description_file {
    char *name; /* in the folder; owned */
    uint64_t n_bytes;
    struct file_hash hash;
};

/* A parameter of the job that wrote it. */
struct description_param {
    char *name; /* as headers have it; owned */
    enum dtype dtype;
    bool trainable;
    uint32_t n_dims;
    uint64_t *shape; /* owned */
    uint64_t n_elems;
};

/* As struct lossscale has them; of a scale that is not dynamic only `scale` counts. */
struct description_scale {
    bool dynamic;
    double scale;
    uint64_t hysteresis_left, n_steps, window_start;
};

struct description {
    char *version, *job, *run; /* owned; run may be NULL */
    char *optimizer;           /* "AdamW"; owned */
    char *configuration;       /* config_shared_text(); owned */
    uint64_t step;             /* committed steps, skipped ones included: the next one has this number */
    uint64_t n_applied;
    unsigned world_size, n_nodes, stage;
    struct description_scale loss_scale;
    struct description_param *params; /* owned; a description that is written takes them from the layout */
    size_t n_params;
    struct description_file *files; /* owned */
    size_t n_files;
    uint64_t digest; /* of the text from which it was read */
};

void description_deinit(struct description *d);
void description_drop_files(struct description *d);

/* The caller fills in name, n_bytes and hash. Return: NULL without memory. */
struct description_file *description_add_file(struct description *d);

/* layout: its parameters are listed. Return: the text, the caller's; NULL without memory. */
char *description_print(const struct description *d, const struct layout *layout);

/* Adds job, run, step, number of ranks and loss scale to the object, under the keys of zerod.json. */
void description_put_facts(struct json *j, struct json_object *object, const struct description *d);

/* Return: 0; -ENOMEM; or -EINVAL and a sentence without a full stop. */
int description_parse(struct description *out, const char *text, size_t n_bytes, char *why, size_t why_size);

/* Return: NULL, there is no such file. */
const struct description_file *description_find(const struct description *d, const char *name);
