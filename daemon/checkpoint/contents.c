/* SPDX-License-Identifier: Apache-2.0 */

/* Plans which tensors each file of a checkpoint has (contents.h). */

#include "daemon/checkpoint/contents.h"

#include <assert.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/checkpoint/write.h"
#include "daemon/memory/state.h"

struct planning {
    struct contents *contents;
    const struct checkpoint_order *order;
    const struct layout *layout;
};

static struct contents_file *file_of(const struct planning *w, enum tensor_file kind, size_t box)
{
    assert(kind < TENSOR_N_FILES);
    assert(box < BOX_MAX);
    return &w->contents->files[(size_t)kind * BOX_MAX + box];
}

/* Return: true if this node writes the tensors that all nodes have. */
static bool writes_common(const struct planning *w)
{
    return w->order->node <= 0;
}

static int add_tensor(struct contents_file *file, const char *name, int dtype, const uint64_t *shape,
                      const uint64_t *starts, uint32_t n_dims, struct contents_tensor tensor)
{
    int r = name ? safetensors_add(&file->header, name, dtype, shape, starts, n_dims) : -ENOMEM;

    if (r == 0 && file->header.n > file->capacity) {
        struct contents_tensor *tensors = reallocarray(file->tensors, file->header.capacity, sizeof(*tensors));

        if (!tensors)
            return -ENOMEM;
        file->tensors = tensors;
        file->capacity = file->header.capacity;
    }
    assert(r != 0 || (file->header.n > 0 && file->header.n <= file->capacity));
    if (r == 0)
        file->tensors[file->header.n - 1] = tensor;
    return r;
}

/* Finds the elements of the parameter that this node writes: those it owns, or its slices of a frozen parameter. */
static void find_owned(const struct planning *w, uint32_t id, uint64_t *first, uint64_t *end)
{
    const struct state *state = w->order->state;
    const struct layout_param *p = &w->layout->params[id];
    uint64_t slice = layout_frozen_slice_elems(p->n_elems, w->layout->world_size);

    if (p->trainable) {
        state_owned_elems(state, id, first, end);
        return;
    }
    *first = MIN(state->first_rank * slice, p->n_elems);
    *end = MIN((state->first_rank + state->n_ranks) * slice, p->n_elems);
}

/* Adds an array of the parameter: the whole array, or the boxes that this node owns, each to its own file. */
static int add_array(const struct planning *w, enum tensor_file kind, const char *name, int dtype,
                     struct contents_tensor tensor)
{
    const struct layout_param *p = &w->layout->params[tensor.index];
    struct box boxes[BOX_MAX];
    size_t n;
    int r = 0;

    if ((tensor.source == FROM_FROZEN && !w->order->slices_frozen) || p->n_elems == 0) {
        tensor.end_elem = p->n_elems;
        return writes_common(w) ? add_tensor(file_of(w, kind, 0), name, dtype, p->shape, NULL, p->n_dims, tensor) : 0;
    }
    find_owned(w, tensor.index, &tensor.first_elem, &tensor.end_elem);
    assert(tensor.first_elem <= tensor.end_elem);
    assert(tensor.end_elem <= p->n_elems);
    n = box_cut(p->shape, p->n_dims, tensor.first_elem, tensor.end_elem, boxes);
    for (size_t i = 0; r == 0 && i < n; i++) {
        tensor.first_elem = boxes[i].first_elem;
        tensor.end_elem = boxes[i].first_elem + boxes[i].n_elems;
        r = add_tensor(file_of(w, kind, i), name, dtype, boxes[i].shape, boxes[i].offset, p->n_dims, tensor);
    }
    return r;
}

static int add_weights_tensor(const struct planning *w, enum tensor_file kind, uint32_t id)
{
    const struct layout_param *p = &w->layout->params[id];
    struct contents_tensor tensor = {.source = FROM_STATE, .index = id, .array = SNAPSHOT_MASTER};

    if (!p->trainable) {
        tensor.source = FROM_FROZEN;
    } else if (state_is_master24(w->order->state, p->bucket)) {
        tensor.array = SNAPSHOT_WEIGHTS;
        tensor.comes_again = tensor_is_of_model(p->name);
    } else if (p->dtype != DTYPE_F32 && w->order->state->stage == 3) {
        tensor.source = FROM_ROUNDED_MASTER;
        tensor.comes_again = tensor_is_of_model(p->name); /* other weights are written after the master */
    } else if (p->dtype != DTYPE_F32) {
        tensor.array = SNAPSHOT_WEIGHTS;
    }
    return add_array(w, kind, p->name, p->dtype, tensor);
}

/*
 * Adds the weights whose elements have elem_bytes bytes. of_model: true for the model's parameters; false for
 * parameters that clients have declared for their own use.
 */
static int add_all_weights(const struct planning *w, enum tensor_file kind, size_t elem_bytes, bool of_model)
{
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < w->layout->n_params; i++)
        if (dtype_size(w->layout->params[i].dtype) == elem_bytes &&
            tensor_is_of_model(w->layout->params[i].name) == of_model)
            r = add_weights_tensor(w, kind, i);
    return r;
}

static int add_state_tensor(const struct planning *w, const char *key, int dtype, struct contents_tensor tensor)
{
    _cleanup_free_ char *name = tensor_state_name(w->layout->params[tensor.index].name, key);

    assert(key); /* the optimizer has no such array, or its name would have "(null)" */
    if (!name)
        return -ENOMEM;
    if (tensor.source != FROM_COUNT)
        return add_array(w, TENSOR_OPTIMIZER, name, dtype, tensor);
    return writes_common(w) ? add_tensor(file_of(w, TENSOR_OPTIMIZER, 0), name, dtype, NULL, NULL, 0, tensor) : 0;
}

/* Return: the type of moments in a file. 8-bit moments become bf16, which is exact, because they have few digits and
 * fp32's exponents. */
static enum dtype moment_dtype(const struct state *state)
{
    return dtype_is_grouped(state->moments.dtype) ? DTYPE_BF16 : state->moments.dtype;
}

static int add_moments(const struct planning *w, uint32_t id)
{
    const struct state *state = w->order->state;
    const struct state_bucket *bucket = &state->buckets[w->layout->params[id].bucket];
    const enum optimizer optimizer = optimizer_of_param(w->order->optimizer, w->layout->params[id].muon);
    int r = 0;

    if (bucket->exp_avg)
        r = add_state_tensor(w, tensor_moment_key(optimizer, false), moment_dtype(state),
                             (struct contents_tensor){.source = FROM_STATE, .index = id, .array = SNAPSHOT_EXP_AVG});
    if (r == 0 && bucket->exp_avg_sq)
        r = add_state_tensor(w, tensor_moment_key(optimizer, true), moment_dtype(state),
                             (struct contents_tensor){.source = FROM_STATE, .index = id, .array = SNAPSHOT_EXP_AVG_SQ});
    return r;
}

/* Adds the master and the step count. Both are fp32 for any type of the moments. */
static int add_master_and_count(const struct planning *w, uint32_t id)
{
    const struct layout_param *p = &w->layout->params[id];
    bool master24 = state_is_master24(w->order->state, p->bucket);
    bool weights_read_it = master24 || w->order->state->stage == 3; /* the weights' tensor reads this array, too */
    int r = 0;

    if (p->dtype != DTYPE_F32)
        r = add_state_tensor(w, TENSOR_MASTER, DTYPE_F32,
                             (struct contents_tensor){.source = master24 ? FROM_MASTER24 : FROM_STATE,
                                                      .index = id,
                                                      .array = master24 ? SNAPSHOT_WEIGHTS : SNAPSHOT_MASTER,
                                                      .comes_again = weights_read_it && !tensor_is_of_model(p->name)});
    return r == 0 ? add_state_tensor(w, TENSOR_STEP, DTYPE_F32,
                                     (struct contents_tensor){.source = FROM_COUNT, .index = id})
                  : r;
}

/* Adds the optimizer's tensors whose elements have elem_bytes bytes. */
static int add_optimizer(const struct planning *w, size_t elem_bytes)
{
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < w->layout->n_params; i++) {
        if (!w->layout->params[i].trainable)
            continue;
        if (dtype_size(moment_dtype(w->order->state)) == elem_bytes)
            r = add_moments(w, i);
        if (r == 0 && elem_bytes == sizeof(float))
            r = add_master_and_count(w, i);
    }
    return r;
}

static int add_ranks(const struct planning *w)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < w->order->n_blobs; i++) {
        char name[32];

        tensor_rank_name(name, sizeof(name), w->order->blobs[i].rank);
        r = add_tensor(file_of(w, TENSOR_RANKS, 0), name, SAFETENSORS_U8, &(uint64_t){w->order->blobs[i].n_bytes}, NULL,
                       1, (struct contents_tensor){.source = FROM_BLOB, .index = (uint32_t)i});
    }
    return r;
}

int contents_plan(struct contents *contents, const struct checkpoint_order *order)
{
    const struct planning w = {.contents = contents, .order = order, .layout = order->state->layout};
    int r = 0;

    for (size_t i = 0; i < CONTENTS_FILES; i++) {
        enum tensor_file kind = (enum tensor_file)(i / BOX_MAX);

        assert(contents->files[i].header.n == 0);
        tensor_file_name(contents->files[i].name, kind, order->node, i % BOX_MAX);
        contents->files[i].header.sharded = order->node >= 0 && kind != TENSOR_RANKS;
    }
    for (size_t elem_bytes = 4; r == 0 && elem_bytes >= 2; elem_bytes -= 2) { /* larger elements first, to align them */
        r = add_all_weights(&w, TENSOR_MODEL, elem_bytes, true);
        if (r == 0)
            r = add_optimizer(&w, elem_bytes);
        if (r == 0)
            r = add_all_weights(&w, TENSOR_OPTIMIZER, elem_bytes, false);
    }
    return r == 0 ? add_ranks(&w) : r;
}

void contents_deinit(struct contents *contents)
{
    for (size_t i = 0; i < CONTENTS_FILES; i++) {
        safetensors_deinit(&contents->files[i].header);
        free(contents->files[i].tensors);
    }
}
