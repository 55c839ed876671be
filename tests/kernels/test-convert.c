/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Conversions of bf16 and fp16 are compared with arithmetic on their fields, with every table of kernels that this CPU
 * can run.
 */

#include "kernels/convert.h"

#include "kernels/group8.h"
#include "kernels/kernels.h"
#include "tests/group.h"
#include "tests/kernels/kernels-reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Return: x rounded to `digits` binary digits, of which the last is at least 2^unit. It overflows from 2^emax up. */
static double round_to(double x, int digits, int unit, int emax)
{
    int exponent;
    double scaled;

    if (x == 0 || !isfinite(x))
        return x;
    frexp(x, &exponent);
    exponent = MAX(exponent - digits, unit);
    scaled = ldexp(rint(ldexp(x, -exponent)), exponent);
    return fabs(scaled) >= ldexp(1, emax) ? copysign(INFINITY, x) : scaled;
}

static double narrow_reference(float x, enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? round_to((double)x, 8, -133, 128) : round_to((double)x, 11, -24, 16);
}

static void test_widen_all(void **state)
{
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        for (enum dtype dtype = DTYPE_BF16; dtype <= DTYPE_F16; dtype++) {
            static uint16_t in[65536], back[65536];
            static float out[65536], plain[65536];

            for (unsigned h = 0; h < 65536; h++)
                in[h] = (uint16_t)h;
            k->convert_to_f32(out, in, dtype, 65536);
            convert_to_f32(plain, in, dtype, 65536);
            assert_memory_equal(plain, out, sizeof(out));
            k->convert_from_f32(back, out, dtype, 65536);
            for (unsigned h = 0; h < 65536; h++) {
                assert_true(same(out[h], (float)widen_reference((uint16_t)h, dtype)));
                assert_int_equal(signbit(out[h]) != 0, h >> 15);
                if (!isnan(out[h]))
                    assert_int_equal(back[h], h);
                else
                    assert_true(isnan(widen_reference(back[h], dtype)) && back[h] >> 15 == h >> 15);
            }
        }
    }
}

static void check_narrow(const struct kernels *k, const float *in, size_t n, enum dtype dtype)
{
    _cleanup_free_ uint16_t *out = malloc(n * sizeof(*out) + 1), *plain = malloc(n * sizeof(*plain) + 1);

    k->convert_from_f32(out, in, dtype, n);
    convert_from_f32(plain, in, dtype, n);
    assert_memory_equal(plain, out, n * sizeof(*out));
    for (size_t i = 0; i < n; i++) {
        if (!same((float)widen_reference(out[i], dtype), (float)narrow_reference(in[i], dtype)) ||
            out[i] >> 15 != (signbit(in[i]) != 0))
            fail_msg("%s: %a became %#x", k->isa, (double)in[i], out[i]);
    }
}

/* Tests every number halfway between two 16-bit values, and its fp32 neighbours. */
static void test_narrow_halfway(void **state)
{
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        for (enum dtype dtype = DTYPE_BF16; dtype <= DTYPE_F16; dtype++) {
            static float in[6 * 32768];
            size_t n = 0;

            for (unsigned h = 0; h < 0x8000; h++) {
                double here = widen_reference((uint16_t)h, dtype), after = widen_reference((uint16_t)(h + 1), dtype);
                float middle;

                if (!isfinite(here))
                    break;
                if (!isfinite(after))
                    after = ldexp(1, dtype == DTYPE_BF16 ? 128 : 16);
                middle = (float)((here + after) / 2);
                in[n++] = middle;
                in[n++] = nextafterf(middle, 0);
                in[n++] = nextafterf(middle, INFINITY);
                in[n++] = -middle;
                in[n++] = -nextafterf(middle, 0);
                in[n++] = -nextafterf(middle, INFINITY);
            }
            check_narrow(k, in, n, dtype);
        }
    }
}

static void test_narrow_random(void **state)
{
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        static float in[1 << 18];
        uint64_t seed = 1;

        for (size_t j = 0; j < ARRAY_SIZE(in); j++)
            in[j] = f32_from_bits((uint32_t)next(&seed));
        in[0] = INFINITY;
        in[1] = -INFINITY;
        in[2] = f32_from_bits(0x7f800001);
        in[3] = f32_from_bits(0xffffffff);
        for (size_t s = 0; s < ARRAY_SIZE(sizes) && sizes[s] < ARRAY_SIZE(in); s++) {
            check_narrow(k, in + (sizes[s] & 3), sizes[s], DTYPE_BF16);
            check_narrow(k, in + (sizes[s] & 3), sizes[s], DTYPE_F16);
        }
        check_narrow(k, in, ARRAY_SIZE(in), DTYPE_BF16);
        check_narrow(k, in, ARRAY_SIZE(in), DTYPE_F16);
    }
}

/* ---- groups of 8 bits ------------------------------------------------------------------------------------ */

/* Return: a group with codes from first_code up. The last code is the one that requires this exponent. */
static struct group8 group_of(enum dtype dtype, uint32_t exponent, unsigned first_code)
{
    struct group8 group = {.exponent = exponent};

    for (unsigned i = 0; i < GROUP8_ELEMS; i++)
        group.codes[i] = (uint8_t)(first_code + i);
    group.codes[GROUP8_ELEMS - 1] = dtype == DTYPE_SIGNED8 ? 0x78 : 0xf8;
    return group;
}

static double value_of_code(uint8_t code, uint32_t exponent)
{
    unsigned bits = code + 8 * exponent;

    return code == 0 ? 0 : bits < 8 ? bits * 0x1p-129 : ldexp(1 + bits % 8 / 8.0, (int)(bits / 8) - 127);
}

/* Every table converts each code to the right number, and that number to the same code. */
static void test_groups_all(void **state)
{
    static const uint32_t exponents[] = {0, 1, 2, 100, 127, 223};
    static const enum dtype types[] = {DTYPE_SIGNED8, DTYPE_UNSIGNED8};
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        for (size_t e = 0; e < 2 * ARRAY_SIZE(exponents) * 8; e++) {
            enum dtype dtype = types[e % 2];
            struct group8 group = group_of(dtype, exponents[e / 2 % ARRAY_SIZE(exponents)],
                                           (unsigned)(e / 2 / ARRAY_SIZE(exponents)) * 32),
                          back = {0};
            float values[GROUP8_ELEMS];

            k->convert_to_f32(values, &group, dtype, GROUP8_ELEMS);
            for (unsigned j = 0; j < GROUP8_ELEMS; j++) {
                uint8_t code = group.codes[j], magnitude = dtype == DTYPE_SIGNED8 ? code & 0x7f : code;

                assert_true(fabs((double)values[j]) == value_of_code(magnitude, group.exponent));
                assert_int_equal(signbit(values[j]) != 0, dtype == DTYPE_SIGNED8 && code & 0x80);
            }
            k->convert_from_f32(&back, values, dtype, GROUP8_ELEMS);
            assert_memory_equal(&back, &group, sizeof(group));
        }
    }
}

/* Groups with numbers of all sizes, or of similar sizes. */
static void test_groups_random(void **state)
{
    static const enum dtype types[] = {DTYPE_SIGNED8, DTYPE_UNSIGNED8};
    static float in[1 << 16], got[1 << 16];
    static struct group8 groups[ARRAY_SIZE(in) / GROUP8_ELEMS];
    const struct kernels *k;

    for (unsigned i = 0; (k = kernels_nth(i)); i++) {
        for (size_t s = 0; s < 4 * ARRAY_SIZE(sizes); s++) {
            enum dtype dtype = types[s % 2];
            size_t n = MIN(sizes[s / 4], ARRAY_SIZE(in));
            uint64_t seed = s;

            for (size_t j = 0; j < n; j++) {
                uint32_t bits = (uint32_t)next(&seed);

                in[j] = f32_from_bits(s % 4 < 2 ? bits : (bits & 0x87ffffff) | 0x38000000);
                in[j] = bits % 16 == 0 ? 0 : in[j];
            }
            k->convert_from_f32(groups, in, dtype, n);
            k->convert_to_f32(got, groups, dtype, n);
            in_groups_reference(in, n, dtype, NULL);
            for (size_t j = 0; j < n; j++)
                if (f32_bits(in[j]) != f32_bits(got[j]))
                    fail_msg("%s, %zu of %zu: %a instead of %a", k->isa, j, n, (double)got[j], (double)in[j]);
        }
    }
}

TEST_GROUP(convert)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups_all),     cmocka_unit_test(test_groups_random), cmocka_unit_test(test_widen_all),
        cmocka_unit_test(test_narrow_halfway), cmocka_unit_test(test_narrow_random),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
