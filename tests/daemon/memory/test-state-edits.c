/* SPDX-License-Identifier: Apache-2.0 */

/*
 * State edits. For each stage and dtype, marked masters, moments and counts become state with the same bits, and
 * published weights follow. Everything else is unchanged; if the edits are freed, everything is. Only owned partitions
 * are changed, and only reserved places have pages.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/state-edits.h"
#include "tests/golden/gradients.h"
#include "tests/group.h"

enum { WORLD = 3, N_PARAMS = 6, N_TRAINABLE = 5, LARGE_ELEMS = 200 * 1000 };

/* Parameter 0 has several chunks in each partition, 3 has no elements, and 5 is frozen. */
static const uint64_t shapes[N_PARAMS] = {LARGE_ELEMS, 1000, 700, 0, 65, 33};
static const enum dtype dtypes[N_PARAMS] = {DTYPE_BF16, DTYPE_F32, DTYPE_F16, DTYPE_F32, DTYPE_F32, DTYPE_F32};

struct fixture {
    struct layout *layout;
    struct state *state;
    struct state_edits *edits;
    struct worker_pool *pool;
    const struct kernels *kernels;
    unsigned n_done;
};

struct owned {
    unsigned stage, first, n;
    struct optimizer_moments moments;
};

static void ignore_notice(void *userdata)
{
    (void)userdata;
}

static void make(struct fixture *f, const struct owned *owned)
{
    struct layout_decl decls[N_PARAMS];
    char names[N_PARAMS][4];
    uint32_t bad;

    *f = (struct fixture){.kernels = kernels_nth(0)};
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){.name = names[p],
                                        .name_len = 2,
                                        .dtype = dtypes[p],
                                        .trainable = p < N_TRAINABLE,
                                        .n_dims = 1,
                                        .shape = &shapes[p]};
    }
    assert_int_equal(layout_new(&f->layout, decls, N_PARAMS, WORLD, 2000, &bad), 0);
    assert_int_equal(f->layout->params[1].bucket, f->layout->params[4].bucket); /* one bucket with several parameters */
    assert_int_equal(state_new(&f->state, &(struct state_options){.layout = f->layout,
                                                                  .stage = owned->stage,
                                                                  .first_rank = owned->first,
                                                                  .n_ranks = owned->n,
                                                                  .moments = owned->moments}),
                     0);
    assert_int_equal(state_edits_new(&f->edits, f->state, f->kernels), 0);
    assert_int_equal(worker_pool_new(&f->pool, 3, ignore_notice, NULL), 0);
    /* Makes bytes that must not change differ from zero. */
    memset(f->state->state.map, 0x11, f->state->state.n_bytes);
    if (f->state->weights.n_bytes > 0)
        memset(f->state->weights.map, 0x22, f->state->weights.n_bytes);
    for (uint32_t p = 0; p < N_PARAMS; p++)
        f->state->progress.counts[p] = 100 + p;
}

static void done_with(struct fixture *f)
{
    worker_pool_free(f->pool);
    state_edits_free(f->edits);
    state_free(f->state);
    layout_free(f->layout);
}

static float value_of(uint32_t param, enum state_kind kind, uint64_t elem)
{
    return gradient_value(gradient_weights_key(7 + kind, param), elem);
}

static void write_array(struct fixture *f, uint32_t param, enum state_kind kind)
{
    struct state_edits_place place = state_edits_place(f->edits, param, kind);
    float *values = (float *)(f->edits->segment.map + place.offset_bytes);

    assert_int_equal(state_edits_reserve(f->edits, &place), 0);
    for (uint64_t i = 0; i < shapes[param]; i++)
        values[i] = value_of(param, kind, i);
    state_edits_mark(f->edits, param, kind, true);
}

static void note_done(void *userdata)
{
    ((struct fixture *)userdata)->n_done++;
}

static void store(struct fixture *f)
{
    unsigned n_done = f->n_done;

    state_edits_store(f->edits, f->pool, note_done, f);
    assert_int_equal(f->n_done, n_done);
    while (f->n_done == n_done)
        assert_true(worker_pool_wait(f->pool) > 0);
    assert_int_equal(f->n_done, n_done + 1);
}

/* A copy of everything in a state. */
struct copy {
    uint8_t *state, *weights;
    uint64_t counts[N_PARAMS];
};

static uint8_t *copy_segment(const struct segment *segment)
{
    uint8_t *copy = malloc(segment->n_bytes + 1);

    assert_non_null(copy);
    if (segment->n_bytes > 0)
        memcpy(copy, segment->map, segment->n_bytes);
    return copy;
}

static struct copy copy_state(const struct state *state)
{
    struct copy copy = {.state = copy_segment(&state->state), .weights = copy_segment(&state->weights)};

    memcpy(copy.counts, state->progress.counts, sizeof(copy.counts));
    return copy;
}

static void assert_copy(const struct state *state, struct copy *copy)
{
    assert_memory_equal(copy->state, state->state.map, state->state.n_bytes);
    if (state->weights.n_bytes > 0)
        assert_memory_equal(copy->weights, state->weights.map, state->weights.n_bytes);
    assert_memory_equal(copy->counts, state->progress.counts, sizeof(copy->counts));
    free(copy->state);
    free(copy->weights);
}

/* ---- everything ---------------------------------------------------------------------------------------- */

/* Writes the whole group at its first element, and nothing at the others. */
static void expect_in_group(struct fixture *f, struct copy *copy, uint32_t param, enum state_kind kind, uint64_t i)
{
    const struct layout_param *p = &f->layout->params[param];
    float values[GROUP8_ELEMS];
    size_t n = MIN(shapes[param] - i, (uint64_t)GROUP8_ELEMS);
    const uint8_t *at;

    if (i % GROUP8_ELEMS != 0)
        return;
    for (size_t j = 0; j < n; j++)
        values[j] = value_of(param, kind, i + j);
    at = state_values(f->state, kind, p->bucket, p->offset_elems + i);
    f->kernels->convert_from_f32(copy->state + (at - f->state->state.map), values, state_dtype(f->state, kind), n);
}

/* Writes one array to the expected state, element by element, as a partition's owner has it. */
static void expect_array(struct fixture *f, struct copy *copy, uint32_t param, enum state_kind kind)
{
    const struct layout_param *p = &f->layout->params[param];
    uint64_t slice = layout_partition_elems(f->layout, p->bucket);

    for (uint64_t i = 0; i < shapes[param]; i++) {
        uint64_t elem = p->offset_elems + i;
        float value = value_of(param, kind, i);
        bool owned = state_owns(f->state, (unsigned)(elem / slice));
        const uint8_t *at = owned ? (const uint8_t *)state_values(f->state, kind, p->bucket, elem) : NULL;

        if (kind == STATE_MASTER && f->state->stage != 3)
            f->kernels->convert_from_f32(copy->weights + p->weight_offset_bytes + i * dtype_size(p->dtype), &value,
                                         p->dtype, 1);
        if (owned && dtype_is_grouped(state_dtype(f->state, kind)))
            expect_in_group(f, copy, param, kind, i);
        else if (owned && at >= f->state->state.map && at < f->state->state.map + f->state->state.n_bytes)
            f->kernels->convert_from_f32(copy->state + (at - f->state->state.map), &value, state_dtype(f->state, kind),
                                         1);
    }
}

static void all_of_it(const struct owned *owned)
{
    struct fixture f;
    struct copy copy;

    make(&f, owned);
    copy = copy_state(f.state);
    for (uint32_t p = 0; p < N_TRAINABLE; p++) {
        for (enum state_kind kind = STATE_MASTER; kind < STATE_N_KINDS; kind++) {
            if (shapes[p] > 0)
                write_array(&f, p, kind);
            expect_array(&f, &copy, p, kind);
        }
        state_edits_set_count(f.edits, p, 7 * p);
        copy.counts[p] = 7 * p;
    }
    store(&f);
    assert_copy(f.state, &copy);
    done_with(&f);
}

static void test_everything(void **state)
{
    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++) {
        all_of_it(&(struct owned){.stage = stage, .n = WORLD, .moments = {.m = true, .v = true}});
        all_of_it(&(struct owned){.stage = stage, .first = 1, .n = 1, .moments = {.m = true, .v = true}});
        all_of_it(&(struct owned){
            .stage = stage, .first = 1, .n = 1, .moments = {.m = true, .v = true, .type = {DTYPE_BF16}}});
        all_of_it(&(struct owned){
            .stage = stage, .first = 1, .n = 2, .moments = {.m = true, .v = true, .type = {DTYPE_SIGNED8}}});
        all_of_it(&(struct owned){.stage = stage, .first = 1, .n = 2, .moments = {.m = true, .v = true}});
    }
}

/* ---- some of it ---------------------------------------------------------------------------------------- */

static void some_of_it(unsigned stage)
{
    static const struct owned all = {.n = WORLD, .moments = {.v = true}};
    struct owned owned = all;
    struct fixture f;
    struct copy copy;

    owned.stage = stage;
    make(&f, &owned);
    copy = copy_state(f.state);
    write_array(&f, 0, STATE_MASTER);
    expect_array(&f, &copy, 0, STATE_MASTER);
    write_array(&f, 1, STATE_EXP_AVG_SQ);
    expect_array(&f, &copy, 1, STATE_EXP_AVG_SQ);
    state_edits_set_count(f.edits, 3, 4);
    state_edits_set_count(f.edits, 3, 5); /* the last write counts */
    copy.counts[3] = 5;
    assert_true(state_edits_is_marked(f.edits, 0, STATE_MASTER));
    assert_false(state_edits_is_marked(f.edits, 0, STATE_EXP_AVG_SQ));
    assert_false(state_edits_is_marked(f.edits, 3, STATE_MASTER));
    store(&f);
    assert_copy(f.state, &copy);
    done_with(&f);
}

static void test_some(void **state)
{
    (void)state;
    for (unsigned stage = 1; stage <= 3; stage++)
        some_of_it(stage);
}

/* Nothing changes if nothing is marked, or if places are filled but not marked. */
static void test_nothing(void **state)
{
    struct fixture f;
    struct copy copy;
    struct state_edits_place place;

    (void)state;
    make(&f, &(struct owned){.stage = 2, .n = WORLD, .moments = {.m = true, .v = true}});
    copy = copy_state(f.state);
    place = state_edits_place(f.edits, 1, STATE_EXP_AVG);
    assert_int_equal(state_edits_reserve(f.edits, &place), 0);
    memset(f.edits->segment.map + place.offset_bytes, 0x77, place.n_bytes);
    store(&f);
    assert_copy(f.state, &copy);
    done_with(&f);
}

/* Edits that are freed with all values in them change nothing. */
static void test_given_up(void **state)
{
    struct fixture f;
    struct copy copy;

    (void)state;
    make(&f, &(struct owned){.stage = 1, .n = WORLD, .moments = {.m = true, .v = true}});
    copy = copy_state(f.state);
    write_array(&f, 0, STATE_MASTER);
    write_array(&f, 0, STATE_EXP_AVG);
    state_edits_set_count(f.edits, 0, 9);
    state_edits_free(f.edits);
    f.edits = NULL;
    assert_copy(f.state, &copy);
    done_with(&f);
}

/* After state_edits_clear(), a successor begins again in the same segment. */
static void test_cleared(void **state)
{
    struct fixture f;
    struct copy copy;

    (void)state;
    make(&f, &(struct owned){.stage = 1, .n = WORLD, .moments = {.m = true, .v = true}});
    copy = copy_state(f.state);
    write_array(&f, 0, STATE_MASTER);
    state_edits_set_count(f.edits, 0, 9);
    state_edits_clear(f.edits);
    state_edits_punch(f.edits);
    assert_int_equal(state_edits_list(f.edits, NULL), 0);
    write_array(&f, 1, STATE_EXP_AVG);
    expect_array(&f, &copy, 1, STATE_EXP_AVG);
    store(&f);
    assert_copy(f.state, &copy);
    done_with(&f);
}

/* ---- places -------------------------------------------------------------------------------------------- */

static void test_places(void **state)
{
    uint64_t end = 0, held = 0;
    struct fixture f;
    struct stat st;

    (void)state;
    make(&f, &(struct owned){.stage = 3, .n = WORLD, .moments = {.m = true, .v = true}});
    for (uint32_t p = 0; p < N_TRAINABLE; p++) {
        for (enum state_kind kind = STATE_MASTER; kind < STATE_N_KINDS; kind++) {
            struct state_edits_place place = state_edits_place(f.edits, p, kind);

            assert_true(place.offset_bytes >= end);
            assert_int_equal(place.offset_bytes % page_size(), 0);
            assert_int_equal(place.n_bytes, round_up(shapes[p] * sizeof(float), page_size()));
            end = place.offset_bytes + place.n_bytes;
        }
    }
    assert_int_equal(f.edits->segment.n_bytes, end);
    for (uint32_t p = 1; p < 3; p++) {
        write_array(&f, p, STATE_EXP_AVG);
        held += state_edits_place(f.edits, p, STATE_EXP_AVG).n_bytes;
    }
    assert_int_equal(fstat(f.edits->segment.fd, &st), 0);
    assert_int_equal(st.st_blocks * 512, held);
    done_with(&f);
}

TEST_GROUP(state_edits)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everything), cmocka_unit_test(test_some),    cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_given_up),   cmocka_unit_test(test_cleared), cmocka_unit_test(test_places),
    };

    return cmocka_run_group_tests_name("state-edits", tests, NULL, NULL);
}
