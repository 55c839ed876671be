/* SPDX-License-Identifier: Apache-2.0 */

/* Places in a rank's pool. All parameters of a request have places at the same time, and no two places overlap. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/base/base.h"
#include "core/layout/manifest.h"
#include "core/wire/device-wire.h"
#include "daemon/engines/device-pool.h"

enum { N_PARAMS = 24 };

static struct layout *make_layout(const uint64_t *n_elems, uint32_t n)
{
    struct manifest manifest = {.n = 0};
    struct layout *layout;
    uint32_t bad;
    char name[16];

    for (uint32_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "p%u", i);
        assert_int_equal(manifest_add(&manifest, &(struct layout_decl){.name = name,
                                                                       .name_len = strlen(name),
                                                                       .dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32,
                                                                       .grad_dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32,
                                                                       .trainable = i % 3 != 0,
                                                                       .n_dims = 1,
                                                                       .shape = &n_elems[i]}),
                         0);
    }
    assert_int_equal(layout_new(&layout, manifest.decls, manifest.n, 2, 1000, &bad), 0);
    manifest_deinit(&manifest);
    return layout;
}

static uint64_t size_of(const struct layout *layout, uint32_t param)
{
    return layout->params[param].n_elems * dtype_size(layout->params[param].dtype);
}

static void test_one_behind_the_other(void **state)
{
    const uint64_t n_elems[] = {64, 64, 0, 100}; /* 256, 128, 0 and 200 bytes */
    const uint32_t all[] = {0, 1, 2, 3}, last[] = {3, 3};
    struct layout *layout = make_layout(n_elems, 4);
    struct device_pool *pool;
    uint32_t absent[4];

    (void)state;
    assert_int_equal(device_pool_new(&pool, layout, 768), 0);
    assert_true(device_pool_fits(pool, all, 4));
    assert_true(device_pool_offset(pool, 0) == DEVICE_POOL_NOWHERE);
    assert_int_equal(device_pool_place(pool, all, 4, absent), 3); /* one of the four has no elements */
    assert_int_equal(absent[2], 3);
    assert_int_equal(device_pool_offset(pool, 0), 0);
    assert_int_equal(device_pool_offset(pool, 1), 256);
    assert_int_equal(device_pool_offset(pool, 2), 0);
    assert_int_equal(device_pool_offset(pool, 3), 512);
    assert_int_equal(device_pool_place(pool, last, 2, absent), 0);

    device_pool_forget(pool);
    assert_true(device_pool_offset(pool, 0) == DEVICE_POOL_NOWHERE);
    assert_int_equal(device_pool_place(pool, last, 2, absent), 1); /* named twice, placed once */
    assert_int_equal(device_pool_offset(pool, 3), 0);
    device_pool_free(pool);
    layout_free(layout);
}

static void test_what_does_not_fit(void **state)
{
    const uint64_t n_elems[] = {64, 192};
    const uint32_t both[] = {0, 1}, second[] = {1}, often[] = {0, 0, 0};
    struct layout *layout = make_layout(n_elems, 2);
    struct device_pool *pool;

    (void)state;
    assert_int_equal(device_pool_new(&pool, layout, 512), 0);
    assert_false(device_pool_fits(pool, both, 2));
    assert_true(device_pool_fits(pool, second, 1));
    assert_false(device_pool_fits(pool, often, 3));
    device_pool_free(pool);
    layout_free(layout);
}

/* If a present parameter is in the way of a missing one, all parameters of the request get new places. */
static void test_in_the_way(void **state)
{
    const uint64_t n_elems[] = {64, 64, 192}; /* 256, 128 and 768 bytes: in places of 256, 256, 768 */
    const uint32_t first[] = {0}, second[] = {1}, large[] = {1, 2};
    struct layout *layout = make_layout(n_elems, 3);
    struct device_pool *pool;
    uint32_t absent[3];

    (void)state;
    assert_int_equal(device_pool_new(&pool, layout, 1024), 0);
    assert_int_equal(device_pool_place(pool, first, 1, absent), 1);
    assert_int_equal(device_pool_place(pool, second, 1, absent), 1);
    assert_int_equal(device_pool_place(pool, large, 2, absent), 2);
    assert_int_equal(device_pool_offset(pool, 1), 0);
    assert_int_equal(device_pool_offset(pool, 2), 256);
    assert_true(device_pool_offset(pool, 0) == DEVICE_POOL_NOWHERE);
    device_pool_free(pool);
    layout_free(layout);
}

/* Fills a parameter's place with bytes that tell which parameter was placed there last. */
static void fill(uint8_t *bytes, const struct layout *layout, uint64_t at, uint32_t param)
{
    memset(bytes + at, (int)param + 1, size_of(layout, param));
}

static void check(const uint8_t *bytes, const struct layout *layout, uint64_t at, uint32_t param, uint64_t n_bytes)
{
    assert_int_equal(at % DEVICE_POOL_ALIGN, 0);
    assert_true(at + size_of(layout, param) <= n_bytes);
    for (uint64_t i = 0; i < size_of(layout, param); i++)
        assert_int_equal(bytes[at + i], param + 1);
}

static uint32_t draw(uint32_t *seed)
{
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

/* Random requests. Every parameter that has a place has its own bytes there. */
static void test_any_requests(void **state)
{
    uint32_t seed = 7;

    (void)state;
    for (unsigned run = 0; run < 40; run++) {
        uint64_t n_elems[N_PARAMS], n_bytes = 4096 + draw(&seed) % 8192;
        struct layout *layout;
        struct device_pool *pool;
        uint8_t *bytes = calloc(n_bytes, 1);
        unsigned n_kept = 0;

        for (uint32_t i = 0; i < N_PARAMS; i++)
            n_elems[i] = draw(&seed) % 700;
        layout = make_layout(n_elems, N_PARAMS);
        assert_int_equal(device_pool_new(&pool, layout, n_bytes), 0);
        for (unsigned request = 0; request < 400; request++) {
            uint32_t params[6], absent[6];
            size_t n = 1 + draw(&seed) % 6, n_absent;

            for (size_t i = 0; i < n; i++)
                params[i] = draw(&seed) % N_PARAMS;
            if (draw(&seed) % 50 == 0)
                device_pool_forget(pool);
            if (!device_pool_fits(pool, params, n))
                continue;
            n_absent = device_pool_place(pool, params, n, absent);
            for (size_t i = 0; i < n_absent; i++)
                fill(bytes, layout, device_pool_offset(pool, absent[i]), absent[i]);
            n_kept += n - n_absent;
            for (size_t i = 0; i < n; i++)
                check(bytes, layout, device_pool_offset(pool, params[i]), params[i], n_bytes);
            for (uint32_t p = 0; p < N_PARAMS; p++)
                if (n_elems[p] > 0 && device_pool_offset(pool, p) != DEVICE_POOL_NOWHERE)
                    check(bytes, layout, device_pool_offset(pool, p), p, n_bytes);
        }
        assert_true(n_kept > 0); /* some were still present */
        device_pool_free(pool);
        layout_free(layout);
        free(bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_behind_the_other),
        cmocka_unit_test(test_what_does_not_fit),
        cmocka_unit_test(test_in_the_way),
        cmocka_unit_test(test_any_requests),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
