/* SPDX-License-Identifier: Apache-2.0 */

/* The example model, forward and backward. */

#include "tests/example/model.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/example/ops.h"
#include "tests/example/random.h"

/* Parameters of a block, in order. */
enum block_param {
    NORM1_WEIGHT,
    NORM1_BIAS,
    QKV_WEIGHT,
    QKV_BIAS,
    PROJ_WEIGHT,
    PROJ_BIAS,
    NORM2_WEIGHT,
    NORM2_BIAS,
    UP_WEIGHT,
    UP_BIAS,
    DOWN_WEIGHT,
    DOWN_BIAS,
    N_BLOCK_PARAMS,
};

enum embed_param { TOKENS_WEIGHT, POSITIONS_WEIGHT, N_EMBED_PARAMS };
enum head_param { NORM_WEIGHT, NORM_BIAS, HEAD_WEIGHT, N_HEAD_PARAMS };

/* The results of a layer norm that its backward needs. The caller keeps the norm's input. */
struct norm_acts {
    float *out, *mean, *rstd;
};

/* The activations that a block's forward keeps for its backward. N is the number of rows, one per character. */
struct block_acts {
    float *in; /* N x width: the residual stream before the block */
    struct norm_acts norm1;
    float *qkv;   /* N x 3 width: query, key, value, each n_heads x head_dim */
    float *probs; /* n_seqs x n_heads x seq_len x seq_len */
    float *mixed; /* N x width: attention's output before its projection */
    float *mid;   /* N x width: the residual stream between attention and MLP */
    struct norm_acts norm2;
    float *up;    /* N x 4 width */
    float *relu2; /* N x 4 width */
};

struct model {
    struct model_shape shape;
    unsigned n_rows; /* n_seqs x seq_len */
    unsigned head_dim;

    struct model_param *params;
    unsigned n_params;
    struct model_segment *segments;
    unsigned n_segments;
    size_t n_elems;

    float *memory; /* holds all arrays below */
    struct block_acts *blocks;
    float *last; /* N x width: the residual stream after the last block */
    struct norm_acts norm;
    float *probs; /* N x vocabulary */
    const uint8_t *tokens, *targets;

    /* Scratch memory of the current forward or backward. */
    float *d_stream; /* N x width: gradient of the residual stream */
    float *d_narrow; /* N x width */
    float *d_wide;   /* N x 4 width */
    float *flipped;  /* a transposed weight, or a head's key or value */
    float *d_probs;  /* seq_len x seq_len */
    float *d_logits; /* N x vocabulary */
};

/* The arguments of one forward or backward, for the functions that it calls. */
struct pass {
    struct model *m;
    const float *const *weights; /* of the segment, from its first parameter on */
    const struct model_hooks *hooks;
    unsigned first; /* the segment's first parameter */
};

static void param_add(struct model *m, const char *prefix, const char *name, unsigned rows, unsigned cols)
{
    struct model_param *p = &m->params[m->n_params++];

    snprintf(p->name, sizeof(p->name), "%s%s", prefix, name);
    p->ndim = rows ? 2 : 1;
    p->shape[0] = rows ? rows : cols;
    p->shape[1] = rows ? cols : 0;
    p->n_elems = rows ? (size_t)rows * cols : cols;
    m->n_elems += p->n_elems;
}

static void segment_begin(struct model *m, const char *name)
{
    struct model_segment *s = &m->segments[m->n_segments++];

    snprintf(s->name, sizeof(s->name), "%s", name);
    s->first = m->n_params;
}

static void segment_end(struct model *m)
{
    struct model_segment *s = &m->segments[m->n_segments - 1];

    s->n_params = m->n_params - s->first;
}

/* In the order of enum block_param. */
static void block_describe(struct model *m, unsigned layer)
{
    unsigned w = m->shape.width;
    char name[24], prefix[26];

    snprintf(name, sizeof(name), "blocks.%u", layer);
    snprintf(prefix, sizeof(prefix), "%s.", name);
    segment_begin(m, name);
    param_add(m, prefix, "norm1.weight", 0, w);
    param_add(m, prefix, "norm1.bias", 0, w);
    param_add(m, prefix, "attn.qkv.weight", w, 3 * w);
    param_add(m, prefix, "attn.qkv.bias", 0, 3 * w);
    param_add(m, prefix, "attn.proj.weight", w, w);
    param_add(m, prefix, "attn.proj.bias", 0, w);
    param_add(m, prefix, "norm2.weight", 0, w);
    param_add(m, prefix, "norm2.bias", 0, w);
    param_add(m, prefix, "mlp.up.weight", w, 4 * w);
    param_add(m, prefix, "mlp.up.bias", 0, 4 * w);
    param_add(m, prefix, "mlp.down.weight", 4 * w, w);
    param_add(m, prefix, "mlp.down.bias", 0, w);
    segment_end(m);
}

static int model_describe(struct model *m)
{
    unsigned w = m->shape.width, n_layers = m->shape.n_layers;

    m->params = calloc(N_EMBED_PARAMS + (size_t)n_layers * N_BLOCK_PARAMS + N_HEAD_PARAMS, sizeof(*m->params));
    m->segments = calloc((size_t)n_layers + 2, sizeof(*m->segments));
    if (!m->params || !m->segments)
        return -ENOMEM;
    segment_begin(m, "embed");
    param_add(m, "embed.", "tokens.weight", MODEL_VOCABULARY, w);
    param_add(m, "embed.", "positions.weight", m->shape.seq_len, w);
    segment_end(m);
    for (unsigned l = 0; l < n_layers; l++)
        block_describe(m, l);
    segment_begin(m, "head");
    param_add(m, "head.", "norm.weight", 0, w);
    param_add(m, "head.", "norm.bias", 0, w);
    param_add(m, "head.", "weight", w, MODEL_VOCABULARY);
    segment_end(m);
    return 0;
}

/*
 * Advances *n_taken. If at is NULL, it only counts, so that one list of calls serves for the size and for the places.
 */
static float *take(float *at, size_t *n_taken, size_t n_elems)
{
    float *p = at ? at + *n_taken : NULL;

    *n_taken += (n_elems + 15) / 16 * 16; /* whole cache lines */
    return p;
}

static void take_norm(struct norm_acts *n, float *at, size_t *n_taken, size_t rows, size_t width)
{
    n->out = take(at, n_taken, rows * width);
    n->mean = take(at, n_taken, rows);
    n->rstd = take(at, n_taken, rows);
}

/* Places all arrays in the memory at at. Return: the number of elements needed. */
static size_t model_place(struct model *m, float *at)
{
    const struct model_shape *s = &m->shape;
    size_t rows = m->n_rows, w = s->width, n_taken = 0;
    size_t n_flipped = w * s->seq_len;

    if (n_flipped < 4 * w * w)
        n_flipped = 4 * w * w;
    if (n_flipped < w * MODEL_VOCABULARY)
        n_flipped = w * MODEL_VOCABULARY;
    for (unsigned l = 0; l < s->n_layers; l++) {
        struct block_acts *b = &m->blocks[l];

        b->in = take(at, &n_taken, rows * w);
        take_norm(&b->norm1, at, &n_taken, rows, w);
        b->qkv = take(at, &n_taken, rows * 3 * w);
        b->probs = take(at, &n_taken, rows * s->n_heads * s->seq_len);
        b->mixed = take(at, &n_taken, rows * w);
        b->mid = take(at, &n_taken, rows * w);
        take_norm(&b->norm2, at, &n_taken, rows, w);
        b->up = take(at, &n_taken, rows * 4 * w);
        b->relu2 = take(at, &n_taken, rows * 4 * w);
    }
    m->last = take(at, &n_taken, rows * w);
    take_norm(&m->norm, at, &n_taken, rows, w);
    m->probs = take(at, &n_taken, rows * MODEL_VOCABULARY);
    m->d_stream = take(at, &n_taken, rows * w);
    m->d_narrow = take(at, &n_taken, rows * w);
    m->d_wide = take(at, &n_taken, rows * 4 * w);
    m->flipped = take(at, &n_taken, n_flipped);
    m->d_probs = take(at, &n_taken, (size_t)s->seq_len * s->seq_len);
    m->d_logits = take(at, &n_taken, rows * MODEL_VOCABULARY);
    return n_taken;
}

/* The upper bounds are far above what a CPU trains, and they keep all products within 64 bits. */
static bool shape_valid(const struct model_shape *s)
{
    return s->n_layers > 0 && s->n_layers <= 1000 && s->n_heads > 0 && s->width > 0 && s->width <= 1 << 14 &&
           s->width % s->n_heads == 0 && s->width / s->n_heads % MATMUL_COLS == 0 && s->n_seqs > 0 &&
           s->n_seqs <= 1 << 12 && s->seq_len > 0 && s->seq_len <= 1 << 12 && s->seq_len % MATMUL_COLS == 0;
}

static int model_fill(struct model *m, const struct model_shape *shape)
{
    int r;

    m->shape = *shape;
    m->n_rows = shape->n_seqs * shape->seq_len;
    m->head_dim = shape->width / shape->n_heads;
    m->blocks = calloc(shape->n_layers, sizeof(*m->blocks));
    if (!m->blocks)
        return -ENOMEM;
    r = model_describe(m);
    if (r < 0)
        return r;
    m->memory = aligned_alloc(64, model_place(m, NULL) * sizeof(float));
    if (!m->memory)
        return -ENOMEM;
    model_place(m, m->memory);
    return 0;
}

int model_new(struct model **out, const struct model_shape *shape)
{
    struct model *m;
    int r;

    if (!shape_valid(shape))
        return -EINVAL;
    m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    r = model_fill(m, shape);
    if (r < 0) {
        model_free(m);
        return r;
    }
    *out = m;
    return 0;
}

void model_free(struct model *m)
{
    if (!m)
        return;
    free(m->memory);
    free(m->blocks);
    free(m->segments);
    free(m->params);
    free(m);
}

unsigned model_n_params(const struct model *m)
{
    return m->n_params;
}

unsigned model_n_segments(const struct model *m)
{
    return m->n_segments;
}

size_t model_n_elems(const struct model *m)
{
    return m->n_elems;
}

const struct model_param *model_param(const struct model *m, unsigned i)
{
    assert(i < m->n_params);
    return &m->params[i];
}

const struct model_segment *model_segment(const struct model *m, unsigned i)
{
    assert(i < m->n_segments);
    return &m->segments[i];
}

unsigned model_segment_of(const struct model *m, unsigned param)
{
    unsigned s = 0;

    while (s + 1 < m->n_segments && param >= m->segments[s + 1].first)
        s++;
    return s;
}

/*
 * Matrices are uniform with standard deviation 0.02. Matrices that write into the residual stream have a smaller one,
 * so that the stream's variance does not grow with depth. Norms start as the identity, biases at zero.
 */
void model_init_weights(const struct model *m, uint64_t seed, unsigned i, float *out)
{
    const struct model_param *p = model_param(m, i);
    bool to_stream = strstr(p->name, "proj.weight") || strstr(p->name, "down.weight");
    double std = to_stream ? 0.02 / sqrt(2.0 * m->shape.n_layers) : 0.02;
    double reach = std * sqrt(3.0);
    uint64_t key = random_mix(seed ^ random_mix(i));

    for (size_t e = 0; e < p->n_elems; e++)
        if (p->ndim == 2)
            out[e] = (float)(reach * (2.0 * random_unit(key, e) - 1.0));
        else
            out[e] = strstr(p->name, "norm") && strstr(p->name, ".weight") ? 1.0f : 0.0f;
}

static struct mat dense(const float *at, size_t cols)
{
    return (struct mat){at, cols, 1};
}

/* out = in weight + bias; weight is n_in x n_out; bias may be NULL. */
static void linear_forward(const struct model *m, float *out, const float *in, const float *weight, const float *bias,
                           unsigned n_in, unsigned n_out)
{
    matmul(out, n_out,
           &(struct matmul){
               .a = dense(in, n_in),
               .b = dense(weight, n_out),
               .start = {bias, 0, 1},
               .rows = m->n_rows,
               .depth = n_in,
               .cols = n_out,
           });
}

/*
 * Attention for one head of one sequence. Query, key and value are columns of qkv; probs is seq_len x seq_len; mixed
 * points to the first of this head's columns in the output.
 */
static void head_forward(struct model *m, const float *qkv, float *probs, float *mixed)
{
    unsigned n = m->shape.seq_len, w = m->shape.width, dim = m->head_dim;
    struct mat query = {qkv, 3 * w, 1}, key = {qkv + w, 3 * w, 1}, value = {qkv + 2 * w, 3 * w, 1};

    transpose(m->flipped, key, n, dim);
    matmul(probs, n, &(struct matmul){.a = query, .b = dense(m->flipped, n), .rows = n, .depth = dim, .cols = n});
    softmax_causal_forward(probs, 1.0f / sqrtf((float)dim), n);
    matmul(mixed, w, &(struct matmul){.a = dense(probs, n), .b = value, .rows = n, .depth = n, .cols = dim});
}

static void attention_forward(struct model *m, struct block_acts *acts)
{
    unsigned n = m->shape.seq_len, w = m->shape.width, n_heads = m->shape.n_heads;

    for (unsigned s = 0; s < m->shape.n_seqs; s++)
        for (unsigned h = 0; h < n_heads; h++)
            head_forward(m, acts->qkv + (size_t)s * n * 3 * w + h * m->head_dim,
                         acts->probs + ((size_t)s * n_heads + h) * n * n,
                         acts->mixed + (size_t)s * n * w + h * m->head_dim);
}

static void embed_forward(const struct pass *p, float *out)
{
    const struct model *m = p->m;
    unsigned w = m->shape.width;

    for (unsigned i = 0; i < m->n_rows; i++, out += w) {
        memcpy(out, p->weights[TOKENS_WEIGHT] + (size_t)m->tokens[i] * w, w * sizeof(*out));
        add_to(out, p->weights[POSITIONS_WEIGHT] + (size_t)(i % m->shape.seq_len) * w, w);
    }
}

static void block_forward(const struct pass *p, struct block_acts *acts, float *out)
{
    struct model *m = p->m;
    const float *const *weights = p->weights;
    unsigned w = m->shape.width;
    size_t n_stream = (size_t)m->n_rows * w;

    layernorm_forward(acts->norm1.out, acts->norm1.mean, acts->norm1.rstd, acts->in, weights[NORM1_WEIGHT],
                      weights[NORM1_BIAS], m->n_rows, w);
    linear_forward(m, acts->qkv, acts->norm1.out, weights[QKV_WEIGHT], weights[QKV_BIAS], w, 3 * w);
    attention_forward(m, acts);
    linear_forward(m, acts->mid, acts->mixed, weights[PROJ_WEIGHT], weights[PROJ_BIAS], w, w);
    add_to(acts->mid, acts->in, n_stream);

    layernorm_forward(acts->norm2.out, acts->norm2.mean, acts->norm2.rstd, acts->mid, weights[NORM2_WEIGHT],
                      weights[NORM2_BIAS], m->n_rows, w);
    linear_forward(m, acts->up, acts->norm2.out, weights[UP_WEIGHT], weights[UP_BIAS], w, 4 * w);
    relu2_forward(acts->relu2, acts->up, 4 * n_stream);
    linear_forward(m, out, acts->relu2, weights[DOWN_WEIGHT], weights[DOWN_BIAS], 4 * w, w);
    add_to(out, acts->mid, n_stream);
}

static void head_of_model_forward(const struct pass *p, double *loss)
{
    struct model *m = p->m;
    unsigned w = m->shape.width;

    layernorm_forward(m->norm.out, m->norm.mean, m->norm.rstd, m->last, p->weights[NORM_WEIGHT], p->weights[NORM_BIAS],
                      m->n_rows, w);
    linear_forward(m, m->probs, m->norm.out, p->weights[HEAD_WEIGHT], NULL, w, MODEL_VOCABULARY);
    *loss = cross_entropy_forward(m->probs, m->targets, m->n_rows, MODEL_VOCABULARY);
}

static void segment_forward(const struct pass *p, unsigned segment, double *loss)
{
    struct model *m = p->m;
    unsigned n_layers = m->shape.n_layers;

    if (segment == 0)
        embed_forward(p, m->blocks[0].in);
    else if (segment <= n_layers)
        block_forward(p, &m->blocks[segment - 1], segment < n_layers ? m->blocks[segment].in : m->last);
    else
        head_of_model_forward(p, loss);
}

#define SITE_TEXT(line) "model.c:" #line
#define SITE_OF(line) SITE_TEXT(line)

int model_forward(struct model *m, const float *const *weights, const struct model_hooks *hooks, const uint8_t *tokens,
                  const uint8_t *targets, double *loss)
{
    int r;

    m->tokens = tokens;
    m->targets = targets;
    for (unsigned s = 0; s < m->n_segments; s++) {
        struct model_segment *segment = &m->segments[s];
        struct pass pass = {m, weights + segment->first, hooks, segment->first};

        r = hooks->enter(hooks->ctx, s);
        if (r)
            return r;
        segment->site = SITE_OF(__LINE__);
        segment_forward(&pass, s, loss);
        r = hooks->leave(hooks->ctx, s);
        if (r)
            return r;
    }
    return 0;
}

static int grad_begin(const struct pass *p, unsigned i, float **out)
{
    return p->hooks->grad(p->hooks->ctx, p->first + i, out);
}

static int grad_end(const struct pass *p, unsigned i)
{
    return p->hooks->grad_ready(p->hooks->ctx, p->first + i);
}

/* d_bias = column sums of d_out. */
static int bias_backward(const struct pass *p, unsigned i, const float *d_out, unsigned n_out)
{
    float *d_bias;
    int r = grad_begin(p, i, &d_bias);

    if (r)
        return r;
    sum_rows(d_bias, d_out, p->m->n_rows, n_out);
    return grad_end(p, i);
}

/* d_weight = in' d_out, n_in x n_out. */
static int weight_backward(const struct pass *p, unsigned i, const float *d_out, const float *in, unsigned n_in,
                           unsigned n_out)
{
    float *d_weight;
    int r = grad_begin(p, i, &d_weight);

    if (r)
        return r;
    matmul(d_weight, n_out,
           &(struct matmul){
               .a = {in, 1, n_in},
               .b = dense(d_out, n_out),
               .rows = n_in,
               .depth = p->m->n_rows,
               .cols = n_out,
           });
    return grad_end(p, i);
}

/* d_in = d_out weight'; weight is n_in x n_out. */
static void linear_backward_input(const struct pass *p, unsigned i, float *d_in, const float *d_out, unsigned n_in,
                                  unsigned n_out)
{
    struct model *m = p->m;

    transpose(m->flipped, dense(p->weights[i], n_out), n_in, n_out);
    matmul(d_in, n_in,
           &(struct matmul){
               .a = dense(d_out, n_out),
               .b = dense(m->flipped, n_in),
               .rows = m->n_rows,
               .depth = n_out,
               .cols = n_in,
           });
}

/*
 * The backward of a layer norm with the parameters i (weight) and i + 1 (bias). Computes their gradients, and adds the
 * input's gradient to d_stream.
 */
static int norm_backward(const struct pass *p, unsigned i, const struct norm_acts *acts, const float *d_out,
                         const float *in)
{
    struct model *m = p->m;
    unsigned w = m->shape.width;
    float *d_weight;
    int r;

    layernorm_backward_input(m->d_stream, d_out, in, p->weights[i], acts->mean, acts->rstd, m->n_rows, w);
    r = bias_backward(p, i + 1, d_out, w);
    if (r)
        return r;
    r = grad_begin(p, i, &d_weight);
    if (r)
        return r;
    layernorm_backward_weight(d_weight, d_out, in, acts->mean, acts->rstd, m->n_rows, w);
    return grad_end(p, i);
}

/*
 * The backward of head_forward(). d_mixed is the gradient of this head's columns of the output. Writes the gradients of
 * query, key and value to d_qkv.
 */
static void head_backward(struct model *m, const float *qkv, const float *probs, const float *d_mixed, float *d_qkv)
{
    unsigned n = m->shape.seq_len, w = m->shape.width, dim = m->head_dim;
    struct mat query = {qkv, 3 * w, 1}, key = {qkv + w, 3 * w, 1}, value = {qkv + 2 * w, 3 * w, 1};
    struct mat d_out = {d_mixed, w, 1}, probs_flipped = {probs, 1, n}, d_scores_flipped = {m->d_probs, 1, n};

    transpose(m->flipped, value, n, dim);
    matmul(m->d_probs, n, &(struct matmul){.a = d_out, .b = dense(m->flipped, n), .rows = n, .depth = dim, .cols = n});
    matmul(d_qkv + 2 * w, 3 * w, &(struct matmul){.a = probs_flipped, .b = d_out, .rows = n, .depth = n, .cols = dim});
    softmax_causal_backward(m->d_probs, probs, 1.0f / sqrtf((float)dim), n);
    matmul(d_qkv, 3 * w, &(struct matmul){.a = dense(m->d_probs, n), .b = key, .rows = n, .depth = n, .cols = dim});
    matmul(d_qkv + w, 3 * w, &(struct matmul){.a = d_scores_flipped, .b = query, .rows = n, .depth = n, .cols = dim});
}

static void attention_backward(struct model *m, const struct block_acts *acts, const float *d_mixed, float *d_qkv)
{
    unsigned n = m->shape.seq_len, w = m->shape.width, n_heads = m->shape.n_heads;

    for (unsigned s = 0; s < m->shape.n_seqs; s++)
        for (unsigned h = 0; h < n_heads; h++) {
            size_t wide = (size_t)s * n * 3 * w + h * m->head_dim;
            size_t narrow = (size_t)s * n * w + h * m->head_dim;

            head_backward(m, acts->qkv + wide, acts->probs + ((size_t)s * n_heads + h) * n * n, d_mixed + narrow,
                          d_qkv + wide);
        }
}

/* On entry d_stream holds the gradient of the block's output, on return the gradient of mid. */
static int mlp_backward(const struct pass *p, const struct block_acts *acts)
{
    struct model *m = p->m;
    unsigned w = m->shape.width;
    int r;

    r = bias_backward(p, DOWN_BIAS, m->d_stream, w);
    if (r)
        return r;
    r = weight_backward(p, DOWN_WEIGHT, m->d_stream, acts->relu2, 4 * w, w);
    if (r)
        return r;
    linear_backward_input(p, DOWN_WEIGHT, m->d_wide, m->d_stream, 4 * w, w);
    relu2_backward(m->d_wide, acts->up, (size_t)m->n_rows * 4 * w);
    r = bias_backward(p, UP_BIAS, m->d_wide, 4 * w);
    if (r)
        return r;
    r = weight_backward(p, UP_WEIGHT, m->d_wide, acts->norm2.out, w, 4 * w);
    if (r)
        return r;
    linear_backward_input(p, UP_WEIGHT, m->d_narrow, m->d_wide, w, 4 * w);
    return norm_backward(p, NORM2_WEIGHT, &acts->norm2, m->d_narrow, acts->mid);
}

/* On entry d_stream holds the gradient of mid, on return the gradient of the block's input. */
static int block_backward(const struct pass *p, const struct block_acts *acts)
{
    struct model *m = p->m;
    unsigned w = m->shape.width;
    int r;

    r = mlp_backward(p, acts);
    if (r)
        return r;
    r = bias_backward(p, PROJ_BIAS, m->d_stream, w);
    if (r)
        return r;
    r = weight_backward(p, PROJ_WEIGHT, m->d_stream, acts->mixed, w, w);
    if (r)
        return r;
    linear_backward_input(p, PROJ_WEIGHT, m->d_narrow, m->d_stream, w, w);
    attention_backward(m, acts, m->d_narrow, m->d_wide);
    r = bias_backward(p, QKV_BIAS, m->d_wide, 3 * w);
    if (r)
        return r;
    r = weight_backward(p, QKV_WEIGHT, m->d_wide, acts->norm1.out, w, 3 * w);
    if (r)
        return r;
    linear_backward_input(p, QKV_WEIGHT, m->d_narrow, m->d_wide, w, 3 * w);
    return norm_backward(p, NORM1_WEIGHT, &acts->norm1, m->d_narrow, acts->in);
}

static int head_of_model_backward(const struct pass *p, double scale)
{
    struct model *m = p->m;
    unsigned w = m->shape.width;
    _Static_assert(MODEL_VOCABULARY % MATMUL_COLS == 0, "the head is a matrix product");
    int r;

    cross_entropy_backward(m->d_logits, m->probs, m->targets, scale, m->n_rows, MODEL_VOCABULARY);
    r = weight_backward(p, HEAD_WEIGHT, m->d_logits, m->norm.out, w, MODEL_VOCABULARY);
    if (r)
        return r;
    linear_backward_input(p, HEAD_WEIGHT, m->d_narrow, m->d_logits, w, MODEL_VOCABULARY);
    memset(m->d_stream, 0, (size_t)m->n_rows * w * sizeof(*m->d_stream));
    return norm_backward(p, NORM_WEIGHT, &m->norm, m->d_narrow, m->last);
}

static int embed_backward(const struct pass *p)
{
    struct model *m = p->m;
    unsigned w = m->shape.width;
    float *d_weight;
    int r;

    for (unsigned i = N_EMBED_PARAMS; i-- > 0;) {
        r = grad_begin(p, i, &d_weight);
        if (r)
            return r;
        memset(d_weight, 0, m->params[p->first + i].n_elems * sizeof(*d_weight));
        for (unsigned row = 0; row < m->n_rows; row++) {
            size_t at = i == TOKENS_WEIGHT ? m->tokens[row] : row % m->shape.seq_len;

            add_to(d_weight + at * w, m->d_stream + (size_t)row * w, w);
        }
        r = grad_end(p, i);
        if (r)
            return r;
    }
    return 0;
}

static int segment_backward(const struct pass *p, unsigned segment, double scale)
{
    struct model *m = p->m;

    if (segment == 0)
        return embed_backward(p);
    if (segment <= m->shape.n_layers)
        return block_backward(p, &m->blocks[segment - 1]);
    return head_of_model_backward(p, scale);
}

int model_backward(struct model *m, const float *const *weights, const struct model_hooks *hooks, double scale)
{
    int r, left;

    for (unsigned s = m->n_segments; s-- > 0;) {
        unsigned first = m->segments[s].first;
        struct pass pass = {m, weights + first, hooks, first};

        r = hooks->enter(hooks->ctx, s);
        if (r)
            return r;
        r = segment_backward(&pass, s, scale);
        left = hooks->leave(hooks->ctx, s);
        if (r || left)
            return r ? r : left;
    }
    return 0;
}
