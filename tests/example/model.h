/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A small language model, forward and backward written out by hand: a
 * transformer in the manner of GPT-2 over single characters (layer norm first,
 * causal attention, a squared-ReLU MLP, learnt positions, untied head).
 *
 * The model owns its activations and nothing else. It reads the weights from memory of the caller. Each backward writes
 * each gradient once, into memory of the caller, and announces the gradient as soon as it is final. So neither weights
 * nor gradients exist twice.
 *
 * Parameters are numbered in forward order. Consecutive parameters form a segment (the embeddings, each block, the
 * head). One piece of the forward or backward needs exactly one segment. Gradients become final in about the reverse
 * order.
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
    unsigned width;   /* of the residual stream, a multiple of 8 and of n_heads */
    unsigned n_heads; /* width / n_heads is a multiple of 8 */
    unsigned n_seqs;  /* sequences in a batch */
    unsigned seq_len; /* characters in each sequence, a multiple of 8 */
};

struct model_param {
    char name[64];
    unsigned ndim;
    uint64_t shape[2];
    size_t n_elems;
};

struct model_segment {
    char name[24];
    unsigned first; /* number of its first parameter */
    unsigned n_params;
    const char *site; /* call site of the segment's last forward, "file:line"; NULL before the first */
};

/*
 * Hooks that the model calls. A hook's result that is not 0 ends the forward or backward at once, which returns that
 * result.
 */
struct model_hooks {
    void *ctx;
    /* Called around each use of a segment's weights, in both directions. leave follows each enter that returned 0. */
    int (*enter)(void *ctx, unsigned segment);
    int (*leave)(void *ctx, unsigned segment);
    /* Provides the memory for the gradient of a parameter: n_elems floats of any content. */
    int (*grad)(void *ctx, unsigned param, float **out);
    /* Called when the gradient of the parameter is written and final. */
    int (*grad_ready)(void *ctx, unsigned param);
};

/* Return: 0, -EINVAL if the shape breaks a rule of struct model_shape, or -ENOMEM. */
int model_new(struct model **out, const struct model_shape *shape);
void model_free(struct model *m);

unsigned model_n_params(const struct model *m);
unsigned model_n_segments(const struct model *m);
size_t model_n_elems(const struct model *m);
const struct model_param *model_param(const struct model *m, unsigned i);
const struct model_segment *model_segment(const struct model *m, unsigned i);

/* The segment of a parameter. */
unsigned model_segment_of(const struct model *m, unsigned param);

/*
 * Writes the n_elems initial weights of parameter i. They depend only on the seed, the parameter's number and the
 * shape.
 */
void model_init_weights(const struct model *m, uint64_t seed, unsigned i, float *out);

/*
 * Computes the loss. Reads weights[i] only between enter and leave of its segment. tokens and targets have n_seqs x
 * seq_len values each, below MODEL_VOCABULARY; they must stay unchanged until the backward ends.
 */
int model_forward(struct model *m, const float *const *weights, const struct model_hooks *hooks, const uint8_t *tokens,
                  const uint8_t *targets, double *loss);

/*
 * Computes the gradients of (the last forward's loss times scale). The activations stay, so the backward can be
 * repeated.
 */
int model_backward(struct model *m, const float *const *weights, const struct model_hooks *hooks, double scale);
