/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A small language model, forward and backward written out by hand: a
 * transformer in the manner of GPT-2 over single characters (layer norm first,
 * causal attention, a squared-ReLU MLP, learnt positions, untied head).
 *
 * The model owns its activations and nothing else. Weights are read where
 * the caller says that they are; each gradient is written once per backward,
 * where the caller says, and announced as soon as it is final. So neither
 * weights nor gradients exist twice.
 *
 * Parameters are numbered in forward order. Consecutive ones form a segment (the
 * embeddings, each block, the head): all that a piece of the forward or backward
 * needs. Gradients become final in about the reverse order.
 *
 * Not thread-safe; different models are independent.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_VOCABULARY 128 /* ASCII; see text.h */

struct model;

struct model_shape {
    unsigned n_layers;
    unsigned width;   /* of the residual stream: a multiple of 8 and of n_heads */
    unsigned n_heads; /* width / n_heads is a multiple of 8 */
    unsigned n_seqs;  /* sequences in a batch */
    unsigned seq_len; /* characters in each: a multiple of 8 */
};

struct model_param {
    char name[64];
    unsigned ndim;
    uint64_t shape[2];
    size_t n_elems;
};

struct model_segment {
    char name[24];
    unsigned first; /* parameter */
    unsigned n_params;
    const char *site; /* call site of its last forward, "file:line"; NULL before the first */
};

/*
 * Hooks by which the model calls its surroundings. A result that is not 0 ends the forward or backward at once, which
 * returns that result.
 */
struct model_hooks {
    void *ctx;
    /* Around each use of a segment's weights, in both directions; leave follows each enter that gave 0. */
    int (*enter)(void *ctx, unsigned segment);
    int (*leave)(void *ctx, unsigned segment);
    /* Provides the memory for the gradient of a parameter: n_elems floats of any content. */
    int (*grad)(void *ctx, unsigned param, float **out);
    /* The gradient of the parameter is written, and final. */
    int (*grad_ready)(void *ctx, unsigned param);
};

/* Return: 0, -EINVAL when a rule of struct model_shape is broken, -ENOMEM. */
int model_new(struct model **out, const struct model_shape *shape);
void model_free(struct model *m);

unsigned model_n_params(const struct model *m);
unsigned model_n_segments(const struct model *m);
size_t model_n_elems(const struct model *m);
const struct model_param *model_param(const struct model *m, unsigned i);
const struct model_segment *model_segment(const struct model *m, unsigned i);

/* The segment of a parameter. */
unsigned model_segment_of(const struct model *m, unsigned param);

/* Initial weights of parameter i, n_elems floats: a function of seed, name order and shape alone. */
void model_init_weights(const struct model *m, uint64_t seed, unsigned i, float *out);

/*
 * weights[i] is read only between enter and leave of its segment. tokens and targets: n_seqs x seq_len each,
 * below MODEL_VOCABULARY; they must stay until the backward is done.
 */
int model_forward(struct model *m, const float *const *weights, const struct model_hooks *hooks, const uint8_t *tokens,
                  const uint8_t *targets, double *loss);

/* Computes the gradients of the last forward's loss times scale. Activations stay, so it can be run again. */
int model_backward(struct model *m, const float *const *weights, const struct model_hooks *hooks, double scale);
