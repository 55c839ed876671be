/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The kept memory of a step (step-kept.h): its arrays, the workers' slots, and chunks that a killed daemon left
 * unfinished ("torn").
 */

#include "daemon/step/step-kept.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"
#include "core/base/failpoint.h"
#include "core/base/keep.h"
#include "core/config/config.h"
#include "daemon/memory/spare.h"

/*
 * Two copies of step->finding, so that a kill during a store leaves one valid copy. `current` is the index of the valid
 * copy.
 */
struct kept_findings {
    _Atomic(uint64_t) current;
    struct {
        uint64_t opened_op; /* step->opened_op when the finding was stored */
        struct step_finding finding;
    } copies[2];
};

/* ---- places -------------------------------------------------------------------------------------------- */

_Static_assert(_Alignof(struct step_slot) <= 64 && _Alignof(struct kept_findings) <= 64, "place() aligns to 64 bytes");

struct places {
    uint64_t findings, stamps, results, sums, squares, slots, turns, end;
};

static uint64_t place(uint64_t *end, uint64_t n, uint64_t n_bytes)
{
    uint64_t at = *end;

    *end += round_up(n * n_bytes, 64);
    return at;
}

static struct places find_places(const struct step *step)
{
    const struct layout *layout = step->layout;
    struct places places = {0};

    places.findings = place(&places.end, 1, sizeof(struct kept_findings));
    places.stamps = place(&places.end, layout->n_chunks + 1, sizeof(*step->stamps));
    places.results = place(&places.end, layout->n_chunks + 1, sizeof(*step->results));
    places.sums = place(&places.end, (uint64_t)layout->n_chunks * step->n_local + 1, sizeof(*step->sums));
    places.squares = place(&places.end, 2 * (uint64_t)layout->n_params, sizeof(*step->squares));
    places.slots = place(&places.end, CONFIG_MAX_THREADS, sizeof(*step->slots));
    places.turns = place(&places.end, step->state->spares ? layout->n_chunks : 0, sizeof(*step->turns));
    return places;
}

static void use_squares(struct step *step, unsigned copy)
{
    struct exact_sum *copies = (struct exact_sum *)(void *)(step->kept.map + find_places(step).squares);

    step->squares_copy = copy;
    step->squares = copies + copy * (size_t)step->layout->n_params;
    step->measured = copies + (1 - copy) * (size_t)step->layout->n_params;
}

int step_keep(struct step *step)
{
    struct places places = find_places(step);
    char name[SEGMENT_NAME_BYTES];
    uint8_t *map;
    int r;

    /* While the number of ranks changes (daemon/job/resize.h), both segments exist, so their names must differ. */
    snprintf(name, sizeof(name), "step.%u", step->n_local);
    r = segment_init_kept(&step->kept, name, places.end);
    if (r < 0)
        return r;
    map = step->kept.map;
    step->findings = (struct kept_findings *)(void *)(map + places.findings);
    step->stamps = (_Atomic(uint64_t) *)(void *)(map + places.stamps);
    step->results = (struct reduce_result *)(void *)(map + places.results);
    step->sums = (struct position_sum *)(void *)(map + places.sums);
    step->slots = keep_is_on() ? (struct step_slot *)(void *)(map + places.slots) : NULL;
    if (step->state->spares) {
        step->turns = (_Atomic(uint64_t) *)(void *)(map + places.turns);
        spare_use(step->state, step->turns);
    }
    use_squares(step, 0);
    return 0;
}

/* ---- chunks -------------------------------------------------------------------------------------------- */

static void store(_Atomic(uint64_t) *word, uint64_t value)
{
    undo_order();
    atomic_store_explicit(word, value, memory_order_relaxed);
    undo_order();
}

bool step_is_done(const struct step *step, uint64_t op, uint32_t chunk)
{
    return step->slots && op > 0 && atomic_load_explicit(&step->stamps[chunk], memory_order_relaxed) == op;
}

bool step_begin_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot **slot)
{
    *slot = NULL;
    if (!step->slots || op == 0)
        return true;
    if (step_is_done(step, op, chunk))
        return false;
    assert(worker_number() > 0); /* only workers have slots */
    *slot = &step->slots[worker_number() - 1];
    store(&(*slot)->op, 0);
    (*slot)->chunk = chunk;
    (*slot)->accepts = 0;
    undo_mark(&(*slot)->undo, 0, false);
    store(&(*slot)->op, op);
    return true;
}

void step_accept_in_slot(struct step_slot *slot)
{
    if (!slot)
        return;
    undo_order();
    slot->accepts = 1;
    undo_order();
}

void step_end_chunk(struct step *step, uint64_t op, uint32_t chunk, struct step_slot *slot)
{
    if (!slot)
        return;
    assert(slot->chunk == chunk);
    assert(atomic_load_explicit(&slot->op, memory_order_relaxed) == op);
    (void)failpoint("stamp");
    store(&step->stamps[chunk], op);
    (void)failpoint("stamped");
    store(&slot->op, 0);
}

bool step_find_torn(const struct step *step, uint64_t op, unsigned *i, struct step_slot **slot, uint32_t *chunk)
{
    for (; step->slots && op > 0 && *i < CONFIG_MAX_THREADS; (*i)++) {
        *slot = &step->slots[*i];
        *chunk = (*slot)->chunk;
        if (atomic_load_explicit(&(*slot)->op, memory_order_relaxed) != op || step_is_done(step, op, *chunk))
            continue;
        assert(*chunk < step->layout->n_chunks);
        (*i)++;
        return true;
    }
    return false;
}

/* ---- kernels ------------------------------------------------------------------------------------------- */

/* Computes the results of the whole chunk. Used after a kernel has reduced only the rest of a torn chunk. */
static void measure(const struct step *step, const struct reduce_args *args, struct reduce_result *result)
{
    enum { BLOCK_ELEMS = 2048 };

    float block[BLOCK_ELEMS];
    struct reduce_result of_block;
    const void *leaf;
    struct reduce_args again = {.dtype = DTYPE_F32, .n_leaves = 1, .leaves = &leaf, .acc = block, .first = true};

    exact_sum_reset(&result->squares);
    result->nonfinite = false;
    for (uint64_t at = 0; at < args->n_elems; at += again.n_elems) {
        again.n_elems = MIN((size_t)BLOCK_ELEMS, args->n_elems - at);
        again.start_elem = args->start_elem + at;
        leaf = args->acc + at;
        of_block.sums = NULL;
        step->kernels->reduce(&again, &of_block);
        exact_sum_carry(&of_block.squares);
        exact_sum_merge(&result->squares, &of_block.squares);
        exact_sum_carry(&result->squares);
        result->nonfinite |= of_block.nonfinite;
    }
    for (unsigned i = 0; i < args->n_leaves; i++) {
        result->sums[i] = (struct position_sum){0};
        step->kernels->position_sum_update(&result->sums[i], args->dtype, args->leaves[i], args->n_elems,
                                           args->start_elem);
    }
}

void step_reduce_in_slot(const struct step *step, struct step_slot *slot, const struct reduce_args *args,
                         struct reduce_result *result)
{
    const void *leaves[REDUCE_MAX_LEAVES];
    struct reduce_args rest = *args;

    rest.undo = &slot->undo;
    rest.undo_elem = 0;
    if (args->first || undo_next_elem(&slot->undo) == 0) {
        if (!args->first)
            reduce_put_back(&rest, leaves);
        step->kernels->reduce(&rest, result);
        return;
    }
    reduce_put_back(&rest, leaves);
    if (rest.n_elems > 0)
        step->kernels->reduce(&rest, result);
    measure(step, args, result);
}

void step_update_in_slot(struct step_slot *slot, step_kernel *kernel, const struct update_args *args)
{
    struct update_args rest = *args;

    if (!slot) {
        kernel(args);
        return;
    }
    rest.undo = &slot->undo;
    rest.undo_elem = 0;
    update_put_back(&rest);
    if (rest.n_elems > 0)
        kernel(&rest);
}

/* ---- findings ------------------------------------------------------------------------------------------ */

void step_keep_found(struct step *step)
{
    uint64_t other = 1 - atomic_load_explicit(&step->findings->current, memory_order_relaxed);

    assert(other < ARRAY_SIZE(step->findings->copies));
    step->findings->copies[other].opened_op = step->opened_op;
    step->findings->copies[other].finding = step->finding;
    store(&step->findings->current, other);
}

void step_found(struct step *step, uint64_t n_ops, unsigned squares_copy, double norm_scale)
{
    uint64_t current = atomic_load_explicit(&step->findings->current, memory_order_relaxed) % 2;

    use_squares(step, squares_copy);
    step->norm_scale = norm_scale;
    step->n_ops = n_ops;
    step_open(step);
    if (step->findings->copies[current].opened_op == n_ops)
        step->finding = step->findings->copies[current].finding;
}

void step_go_on_from(struct step *step, struct step *before)
{
    size_t n_bytes = step->layout->n_params * sizeof(*step->squares);

    assert(step->layout->n_params == before->layout->n_params);
    assert(step->ops == before->ops);
    use_squares(step, before->squares_copy);
    memcpy(step->squares, before->squares, n_bytes);
    memcpy(step->measured, before->measured, n_bytes);
    step_found(step, before->n_ops, before->squares_copy, before->norm_scale);
    if (step->ops->go_on_from)
        step->ops->go_on_from(step, before);
}
