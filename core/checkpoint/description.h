/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The description of a checkpoint, zerod.json: the facts that the other files do not have. It is written last; a folder
 * without it is no checkpoint. Its last field is a hash of the text before that field. Pure: prints and parses a text.
 * docs/checkpoints.md describes the fields.
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
    char *name; /* name in the folder; owned */
    uint64_t n_bytes;
    struct file_hash hash;
};

/* A parameter of the job that wrote the checkpoint. */
struct description_param {
    char *name; /* name as in the headers; owned */
    enum dtype dtype;
    bool trainable;
    uint32_t n_dims;
    uint64_t *shape; /* owned */
    uint64_t n_elems;
};

/* The fields of struct lossscale. A scale that is not dynamic uses only `scale`. */
struct description_scale {
    bool dynamic;
    double scale;
    uint64_t hysteresis_left, n_steps, window_start;
};

struct description {
    char *version, *job, *run; /* owned; run may be NULL */
    char *optimizer;           /* "AdamW"; owned */
    char *configuration;       /* text of config_shared_text(); owned */
    uint64_t step;             /* committed steps, skipped ones included; also the number of the next step */
    uint64_t n_applied;
    unsigned world_size, n_nodes, stage;
    struct description_scale loss_scale;
    struct description_param *params; /* owned; only from parsing: description_print() prints the layout's */
    size_t n_params;
    struct description_file *files; /* owned */
    size_t n_files;
    uint64_t digest; /* of the text from which the description was parsed */
};

void description_deinit(struct description *d);
void description_drop_files(struct description *d);

/* Adds a file. The caller fills in name, n_bytes and hash. Return: the file, or NULL without memory. */
struct description_file *description_add_file(struct description *d);

/* Prints a description, with the layout's parameters. Return: the text, which the caller frees; NULL without memory. */
char *description_print(const struct description *d, const struct layout *layout);

/* Adds the job, run, step, number of ranks and loss scale to the object, under the keys of zerod.json. */
void description_put_facts(struct json *j, struct json_object *object, const struct description *d);

/* Parses a description. Return: 0; or -ENOMEM or -EINVAL, with a message in why, without a full stop. */
int description_parse(struct description *out, const char *text, size_t n_bytes, char *why, size_t why_size);

/* Return: the file of that name, or NULL. */
const struct description_file *description_find(const struct description *d, const char *name);
