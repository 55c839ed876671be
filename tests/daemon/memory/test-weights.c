/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reading and writing weights. For each stage, dtype and instruction set, a stored range is fetched unchanged, and
 * nothing next to it changes. If a stored weight differs, its master gets its value. If not, the master keeps the bits
 * that 16-bit weights lack.
 */

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/layout.h"
#include "daemon/memory/state.h"
#include "daemon/memory/weights.h"
#include "tests/golden/gradients.h"
#include "tests/group.h"

enum { WORLD = 3, N_PARAMS = 8, MAX_ELEMS = 3 * 1024 + 100, BF16 = 0, F16 = 1, F32 = 2, FROZEN = 3 };

/*
 * The first two parameters are in several partitions, and longer than a block of weights_store(). Parameters 3 to 5 are
 * frozen. The last two are trainable; parameter 0 shares their bucket, and is not its first parameter.
 */
static const uint64_t shapes[N_PARAMS] = {MAX_ELEMS, 1500, 700, 130, 65, 33, 0, 200};
static const enum dtype dtypes[N_PARAMS] = {DTYPE_BF16, DTYPE_F16, DTYPE_F32,  DTYPE_BF16,
                                            DTYPE_F16,  DTYPE_F32, DTYPE_BF16, DTYPE_BF16};

struct fixture {
    struct layout *layout;
    struct state *state;
    const struct kernels *kernels;
};

static void make_with(struct fixture *f, unsigned stage, unsigned isa, bool master24)
{
    struct layout_decl decls[N_PARAMS];
    char names[N_PARAMS][4];
    uint32_t bad;

    *f = (struct fixture){.kernels = kernels_nth(isa)};
    for (unsigned p = 0; p < N_PARAMS; p++) {
        snprintf(names[p], sizeof(names[p]), "p%u", p);
        decls[p] = (struct layout_decl){.name = names[p],
                                        .name_len = 2,
                                        .dtype = dtypes[p],
                                        .n_dims = 1,
                                        .trainable = p < FROZEN || p >= 6,
                                        .shape = &shapes[p]};
    }
    assert_int_equal(layout_new(&f->layout, decls, N_PARAMS, WORLD, 2 * MAX_ELEMS, &bad), 0);
    assert_true(f->layout->params[BF16].offset_elems > 0);
    assert_int_equal(state_new(&f->state, &(struct state_options){.layout = f->layout,
                                                                  .stage = stage,
                                                                  .n_ranks = WORLD,
                                                                  .moments = {.master24 = master24}}),
                     0);
}

static void make(struct fixture *f, unsigned stage, unsigned isa)
{
    make_with(f, stage, isa, false);
}

static void done_with(struct fixture *f)
{
    state_free(f->state);
    layout_free(f->layout);
}

static float *master_of(const struct fixture *f, uint32_t param, uint64_t elem)
{
    const struct layout_param *p = &f->layout->params[param];

    return state_master(f->state, p->bucket, p->offset_elems + elem);
}

/* Return: a master, of 32 or 24 bits. */
static float get_master(const struct fixture *f, uint32_t param, uint64_t elem)
{
    const struct layout_param *p = &f->layout->params[param];
    const struct layout_chunk *chunk;
    uint32_t id = p->first_chunk;
    float *masters, master;

    while (elem >= f->layout->chunks[id].start_elem + f->layout->chunks[id].n_elems)
        id++;
    chunk = &f->layout->chunks[id];
    masters = malloc(chunk->n_elems * sizeof(*masters));
    assert_non_null(masters);
    weights_widen(f->state, f->kernels, id, STATE_MASTER, masters);
    master = masters[elem - chunk->start_elem];
    free(masters);
    return master;
}

static void set_master(const struct fixture *f, uint32_t param, uint64_t elem, float master)
{
    const struct layout_param *p = &f->layout->params[param];

    if (state_is_master24(f->state, p->bucket))
        master24_from_f32(state_master24(f->state, p->bucket, p->offset_elems + elem), &master, 1);
    else
        *master_of(f, param, elem) = master;
}

static void store(const struct fixture *f, uint32_t param, uint64_t start, uint64_t n_elems, const void *src)
{
    weights_store(f->state, f->kernels, param, start, n_elems, src);
}

static void fetch(const struct fixture *f, uint32_t param, uint64_t start, uint64_t n_elems, void *dst)
{
    weights_fetch(f->state, f->kernels, param, start, n_elems, dst);
}

/* ---- ranges -------------------------------------------------------------------------------------------- */

/* Draws bits of any number except NaNs, which may lose bits on the way through fp32. */
static void draw(uint8_t *dst, enum dtype dtype, uint64_t n_elems, uint64_t seed)
{
    for (uint64_t i = 0; i < n_elems; i++) {
        uint64_t random = gradient_mix(gradient_mix(seed) + i);

        if (dtype == DTYPE_F32) {
            uint32_t bits = (uint32_t)random;

            bits = (bits & 0x7f800000) == 0x7f800000 ? bits & 0xff800000 : bits;
            memcpy(dst + 4 * i, &bits, 4);
        } else {
            uint16_t bits = (uint16_t)random, all = dtype == DTYPE_BF16 ? 0x7f80 : 0x7c00;

            bits = (bits & all) == all ? bits & (0x8000 | all) : bits;
            memcpy(dst + 2 * i, &bits, 2);
        }
    }
}

/* The bytes that were last stored for each parameter. */
static uint8_t model[N_PARAMS][MAX_ELEMS * 4];

static void store_at_random(const struct fixture *f, uint32_t param, uint64_t seed)
{
    uint64_t n = shapes[param], start = n ? gradient_mix(seed) % n : 0;
    uint64_t n_elems = n ? gradient_mix(seed + 1) % (n - start + 1) : 0;
    size_t size = dtype_size(dtypes[param]);
    uint8_t src[MAX_ELEMS * 4];

    draw(src, dtypes[param], n_elems, seed);
    store(f, param, start, n_elems, src);
    memcpy(model[param] + start * size, src, n_elems * size);
}

static void check_ranges(const struct fixture *f, uint64_t seed)
{
    for (uint32_t param = 0; param < N_PARAMS; param++) {
        uint64_t n = shapes[param], start = n ? gradient_mix(seed + 2) % n : 0;
        uint64_t n_elems = n ? gradient_mix(seed + 3) % (n - start + 1) : 0;
        size_t size = dtype_size(dtypes[param]);
        uint8_t dst[MAX_ELEMS * 4 + 1];

        dst[n * size] = 0x5a;
        fetch(f, param, 0, n, dst);
        assert_memory_equal(dst, model[param], n * size);
        assert_int_equal(dst[n * size], 0x5a);
        dst[n_elems * size] = 0x5a;
        fetch(f, param, start, n_elems, dst);
        assert_memory_equal(dst, model[param] + start * size, n_elems * size);
        assert_int_equal(dst[n_elems * size], 0x5a);
    }
}

/* Asserts that masters are the exact values of their weights, as they are before any update. */
static void check_masters(const struct fixture *f)
{
    for (uint32_t param = 0; param < FROZEN; param++) {
        for (uint64_t i = 0; i < shapes[param]; i++) {
            float exact;

            f->kernels->convert_to_f32(&exact, model[param] + i * dtype_size(dtypes[param]), dtypes[param], 1);
            assert_int_equal(gradient_bits(get_master(f, param, i)), gradient_bits(exact));
        }
    }
}

static void test_ranges(void **state)
{
    (void)state;
    for (unsigned isa = 0; kernels_nth(isa); isa++) {
        for (unsigned i = 0; i < 6; i++) {
            struct fixture f;

            make_with(&f, 1 + i % 3, isa, i / 3);
            memset(model, 0, sizeof(model));
            check_ranges(&f, 0);
            for (uint64_t seed = 100; seed < 100 + 64 * 7; seed += 7) {
                store_at_random(&f, (uint32_t)(seed / 7 % N_PARAMS), seed);
                check_ranges(&f, seed);
            }
            check_masters(&f);
            done_with(&f);
        }
    }
}

/* ---- masters ------------------------------------------------------------------------------------------- */

/* Writes the weights that stages 1 and 2 publish, as an update does. */
static void publish(const struct fixture *f, uint32_t param)
{
    bool is_part = state_is_master24(f->state, f->layout->params[param].bucket); /* weights are part of masters */

    for (uint64_t i = 0; f->state->stage != 3 && !is_part && i < shapes[param]; i++)
        f->kernels->convert_from_f32(state_weights(f->state, param, i), master_of(f, param, i), dtypes[param], 1);
}

/* Return: a value that needs more than 16 bits, but not more than 24. */
static float fine(uint64_t i)
{
    return 1.0f + (float)(i % 97) / 64 + 0x1p-14f;
}

/* A trainer that writes back what it read changes nothing, not even the bits that it could not read. */
static void test_masters_survive(void **state)
{
    uint16_t weights[MAX_ELEMS];

    (void)state;
    for (unsigned kind = 0; kind < 6; kind++) {
        struct fixture f;

        make_with(&f, 1 + kind % 3, 0, kind / 3);
        for (uint32_t param = BF16; param <= F16; param++) {
            for (uint64_t i = 0; i < shapes[param]; i++)
                set_master(&f, param, i, fine(i));
            publish(&f, param);
            fetch(&f, param, 0, shapes[param], weights);
            store(&f, param, 0, shapes[param], weights);
            store(&f, param, 5, 1100, weights + 5);
            for (uint64_t i = 0; i < shapes[param]; i++)
                assert_int_equal(gradient_bits(get_master(&f, param, i)), gradient_bits(fine(i)));
        }
        done_with(&f);
    }
}

/* Storing a range changes only the masters of weights that differ, wherever they are in the range. */
static void test_masters_change_with_their_weights(void **state)
{
    static const uint64_t changed[] = {0, 63, 64, 1023, 1024, 1025, 1499};
    uint16_t weights[MAX_ELEMS], now[MAX_ELEMS];

    (void)state;
    for (unsigned kind = 0; kind < 6; kind++) {
        for (uint32_t param = BF16; param <= F16; param++) {
            struct fixture f;

            make_with(&f, 1 + kind % 3, 0, kind / 3);
            for (uint64_t i = 0; i < shapes[param]; i++)
                set_master(&f, param, i, fine(i));
            publish(&f, param);
            fetch(&f, param, 0, shapes[param], weights);
            for (size_t i = 0; i < ARRAY_SIZE(changed); i++)
                weights[changed[i]] = 0xc000; /* -2 in both dtypes */
            store(&f, param, 0, shapes[param], weights);
            fetch(&f, param, 0, shapes[param], now);
            assert_memory_equal(now, weights, shapes[param] * sizeof(now[0]));
            for (uint64_t i = 0, k = 0; i < shapes[param]; i++) {
                bool here = k < ARRAY_SIZE(changed) && changed[k] == i;

                k += here;
                assert_int_equal(gradient_bits(get_master(&f, param, i)), gradient_bits(here ? -2.0f : fine(i)));
            }
            done_with(&f);
        }
    }
}

static sigjmp_buf after_death;

static void die(int number)
{
    siglongjmp(after_death, number);
}

/* Stores an element whose published weight cannot be written. Return: whether the store died at that write. */
static bool dies_at_weight(const struct fixture *f, uint32_t param, uint64_t elem, const uint16_t *weight)
{
    const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *at = state_weights(f->state, param, elem), *page = at - (uintptr_t)at % page_bytes;
    struct sigaction action = {.sa_handler = die}, before;
    int number;

    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    assert_int_equal(mprotect(page, page_bytes, PROT_READ), 0);
    number = sigsetjmp(after_death, 1);
    if (number == 0)
        store(f, param, elem, 1, weight);
    assert_int_equal(mprotect(page, page_bytes, PROT_READ | PROT_WRITE), 0);
    assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
    return number == SIGSEGV;
}

/*
 * A store of a 24-bit master that dies at the weight has cleared the lower byte already. The next daemon stores again,
 * but only where the weight differs. With the old byte, the master would differ from the weight.
 */
static void test_killed_store(void **state)
{
    const uint16_t minus_two = 0xc000;
    struct fixture f;

    (void)state;
    make_with(&f, 2, 0, true);
    set_master(&f, BF16, 7, fine(7));
    assert_true(dies_at_weight(&f, BF16, 7, &minus_two));
    assert_int_equal(gradient_bits(get_master(&f, BF16, 7)), gradient_bits(fine(7) - 0x1p-14f));
    store(&f, BF16, 7, 1, &minus_two);
    assert_int_equal(gradient_bits(get_master(&f, BF16, 7)), gradient_bits(-2.0f));
    done_with(&f);
}

/* A weight that differs only in the sign of zero is stored. */
static void test_signed_zero(void **state)
{
    const uint16_t minus_zero = 0x8000;

    (void)state;
    for (unsigned kind = 0; kind < 6; kind++) {
        struct fixture f;
        uint16_t now = 0;

        make_with(&f, 1 + kind % 3, 0, kind / 3);
        store(&f, BF16, 7, 1, &minus_zero);
        fetch(&f, BF16, 7, 1, &now);
        assert_int_equal(now, minus_zero);
        assert_int_equal(gradient_bits(get_master(&f, BF16, 7)), 0x80000000);
        done_with(&f);
    }
}

/* Without a published copy, a weight is its master, rounded to nearest with ties to even. */
static void test_rounding(void **state)
{
    static const float masters[] = {1.0f + 0x1p-8f, 1.0f + 0x3p-8f, 1.0f + 0x1p-8f + 0x1p-20f, -1.0f - 0x1p-8f,
                                    0x1p-9f};
    static const uint16_t expected[] = {0x3f80, 0x3f82, 0x3f81, 0xbf80, 0x3b00};
    uint16_t now[ARRAY_SIZE(masters)];
    struct fixture f;

    (void)state;
    make(&f, 3, 0);
    for (size_t i = 0; i < ARRAY_SIZE(masters); i++)
        *master_of(&f, BF16, 1000 + i) = masters[i];
    fetch(&f, BF16, 1000, ARRAY_SIZE(masters), now);
    assert_memory_equal(now, expected, sizeof(now));
    done_with(&f);
}

/* In stages 1 and 2 a fetch returns the published weights. A store changes them and their masters. */
static void test_published(void **state)
{
    const uint16_t stale = 0x4000;
    struct fixture f;
    uint16_t now, rounded;
    float value;

    (void)state;
    for (unsigned stage = 1; stage <= 2; stage++) {
        make(&f, stage, 0);
        *master_of(&f, BF16, 11) = fine(11);
        publish(&f, BF16);
        f.kernels->convert_from_f32(&rounded, master_of(&f, BF16, 11), DTYPE_BF16, 1);
        memcpy(state_weights(f.state, BF16, 11), &stale, sizeof(stale));
        fetch(&f, BF16, 11, 1, &now);
        assert_int_equal(now, stale);
        store(&f, BF16, 11, 1, &rounded);
        fetch(&f, BF16, 11, 1, &now);
        assert_int_equal(now, rounded);
        assert_int_equal(gradient_bits(*master_of(&f, BF16, 11)), gradient_bits(fine(11)));

        /* A weight in fp32 is its own master, so both change together. */
        store(&f, F32, 3, 1, &(float){0.1f});
        assert_int_equal(gradient_bits(*master_of(&f, F32, 3)), gradient_bits(0.1f));
        *master_of(&f, F32, 3) = 0.7f;
        fetch(&f, F32, 3, 1, &value);
        assert_int_equal(gradient_bits(value), gradient_bits(0.7f));
        done_with(&f);
    }
}

TEST_GROUP(weights)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_masters_survive),
        cmocka_unit_test(test_masters_change_with_their_weights),
        cmocka_unit_test(test_killed_store),
        cmocka_unit_test(test_signed_zero),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_published),
    };

    return cmocka_run_group_tests_name("weights", tests, NULL, NULL);
}
