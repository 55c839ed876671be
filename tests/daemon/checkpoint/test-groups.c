/* SPDX-License-Identifier: Apache-2.0 */

/*
 * 8-bit moments that arrive in pieces, cut anywhere, in any order and from several threads, have the same bits as if
 * they arrive in one piece.
 */

#include "daemon/checkpoint/groups.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "kernels/convert.h"
#include "tests/group.h"

#include <cmocka.h>

enum { N_ELEMS = 5 * GROUP8_ELEMS + 22, MAX_PIECES = 40, N_THREADS = 4 };

struct piece {
    uint64_t first, end;
};

struct pieces {
    struct groups groups;
    struct groups_array array;
    struct piece list[MAX_PIECES];
    unsigned n, next;
    pthread_mutex_t lock;
    const void *values;
    enum dtype dtype; /* dtype of the values */
};

static uint64_t seed;

static uint64_t next(void)
{
    seed = seed * 6364136223846793005 + 1442695040888963407;
    return seed >> 33;
}

/* Cuts all elements into random pieces, and shuffles the pieces. */
static void cut(struct pieces *p)
{
    uint64_t first = 0;

    for (p->n = p->next = 0; first < N_ELEMS; p->n++) {
        uint64_t n = p->n == MAX_PIECES - 1 ? N_ELEMS : 1 + next() % (next() % 2 ? 20 : 200);

        p->list[p->n] = (struct piece){first, MIN(first + n, (uint64_t)N_ELEMS)};
        first = p->list[p->n].end;
    }
    for (unsigned i = p->n; i > 1; i--) {
        unsigned other = (unsigned)(next() % i);
        struct piece piece = p->list[other];

        p->list[other] = p->list[i - 1];
        p->list[i - 1] = piece;
    }
}

static void *put_pieces(void *arg)
{
    struct pieces *p = arg;

    for (;;) {
        const struct piece *piece;

        pthread_mutex_lock(&p->lock);
        piece = p->next < p->n ? &p->list[p->next++] : NULL;
        pthread_mutex_unlock(&p->lock);
        if (!piece)
            return NULL;
        if (groups_put(&p->groups, &p->array, piece->first, piece->end - piece->first,
                       (const uint8_t *)p->values + piece->first * dtype_size(p->dtype), p->dtype) < 0)
            return p;
    }
}

static void test_pieces(void **state)
{
    static float wide[N_ELEMS];
    static uint16_t narrow[N_ELEMS];
    static uint8_t got[8 * GROUP8_BYTES], expected[sizeof(got)];
    struct pieces p = {.lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[N_THREADS];

    (void)state;
    for (unsigned turn = 0; turn < 400; turn++) {
        p.dtype = turn % 2 ? DTYPE_BF16 : DTYPE_F32;
        p.array = (struct groups_array){
            .at = got, .dtype = turn % 4 < 2 ? DTYPE_SIGNED8 : DTYPE_UNSIGNED8, .n_elems = N_ELEMS};
        p.values = turn % 2 ? (const void *)narrow : (const void *)wide;
        for (unsigned i = 0; i < N_ELEMS; i++) {
            narrow[i] = (uint16_t)(next() % 0x8000 < 0x7f80 ? next() % 0x7f80 : 0);
            wide[i] = f32_from_bf16(narrow[i]) * (turn % 2 ? 1 : 0.7f);
        }
        memset(got, 0x5a, sizeof(got)); /* as a load that was given up left it */
        memset(expected, 0x5a, sizeof(expected));
        convert_from_f32(expected, wide, p.array.dtype, N_ELEMS);
        cut(&p);
        groups_init(&p.groups);
        for (unsigned i = 0; i < N_THREADS; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, put_pieces, &p), 0);
        for (unsigned i = 0; i < N_THREADS; i++) {
            void *failed;

            pthread_join(threads[i], &failed);
            assert_null(failed);
        }
        assert_null(p.groups.first);
        groups_deinit(&p.groups);
        assert_memory_equal(got, expected, sizeof(got));
    }
}

/* If a part of a group never arrives, the group is left unchanged, and its memory is freed. */
static void test_part_never_comes(void **state)
{
    struct groups groups;
    uint8_t array[GROUP8_BYTES] = {0}, untouched[GROUP8_BYTES] = {0};
    const float values[3] = {1, 2, 3};

    (void)state;
    groups_init(&groups);
    assert_int_equal(groups_put(&groups,
                                &(struct groups_array){.at = array, .dtype = DTYPE_SIGNED8, .n_elems = GROUP8_ELEMS}, 5,
                                3, values, DTYPE_F32),
                     0);
    assert_non_null(groups.first);
    groups_deinit(&groups);
    assert_memory_equal(array, untouched, sizeof(array));
}

TEST_GROUP(groups)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_part_never_comes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
