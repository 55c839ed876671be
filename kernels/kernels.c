/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses a table of kernels by the CPU's features, and checks the floating-point environment. */

#include "kernels/kernels.h"

#include "kernels/convert.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const struct kernels kernels_baseline;
#ifdef __x86_64__
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;
#endif

enum {
    KERNELS_MAX_TABLES = 3,
};

/* A compiled table, and whether this CPU runs it. Lists of candidates begin with the narrowest instruction set. */
struct candidate {
    const struct kernels *kernels;
    bool runs;
};

static unsigned candidates(struct candidate out[KERNELS_MAX_TABLES])
{
    unsigned n = 0;

    out[n++] = (struct candidate){&kernels_baseline, true};
#ifdef __x86_64__
    /*
     * Tests the features that distinguish the levels for which meson.build compiles, because clang 14 knows no names
     * for whole levels. __builtin_cpu_supports() also tests whether the operating system lets processes use the
     * registers.
     */
    bool avx2, avx512;

    __builtin_cpu_init();
    avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("fma");
    avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    out[n++] = (struct candidate){&kernels_avx2, avx2};
    out[n++] = (struct candidate){&kernels_avx512, avx512};
#endif
    return n;
}

const struct kernels *kernels_nth(unsigned i)
{
    struct candidate all[KERNELS_MAX_TABLES];
    unsigned n = candidates(all);

    for (unsigned j = 0; j < n; j++) {
        if (all[j].runs && i-- == 0)
            return all[j].kernels;
    }
    return NULL;
}

static const struct kernels *kernels_widest(void)
{
    const struct kernels *widest = NULL, *next;

    for (unsigned i = 0; (next = kernels_nth(i)); i++)
        widest = next;
    return widest;
}

/* Writes the names of the tables that this CPU runs, for example "baseline, avx2". */
static void list_available(char *text, size_t size)
{
    const struct kernels *kernels;
    size_t used = 0;

    text[0] = '\0';
    for (unsigned i = 0; (kernels = kernels_nth(i)) && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", kernels->isa);
}

int kernels_select(const struct kernels **out, const char *isa, char *err, size_t err_size)
{
    const char *source = isa ? "instruction set" : "ZEROD_ISA";
    struct candidate all[KERNELS_MAX_TABLES];
    unsigned n = candidates(all);
    char available[64];

    if (!isa)
        isa = getenv("ZEROD_ISA");
    if (!isa || !*isa) {
        *out = kernels_widest();
        return 0;
    }
    list_available(available, sizeof(available));
    for (unsigned i = 0; i < n; i++) {
        if (strcmp(all[i].kernels->isa, isa) != 0)
            continue;
        if (!all[i].runs) {
            snprintf(err, err_size, "%s: this CPU does not run \"%s\"; it runs: %s", source, isa, available);
            return -ENOTSUP;
        }
        *out = all[i].kernels;
        return 0;
    }
    snprintf(err, err_size, "%s: \"%s\" is not known; this CPU runs: %s", source, isa, available);
    return -EINVAL;
}

int kernels_assert_float_env(char *err, size_t err_size)
{
    /* Tests with arithmetic, because libc's fegetround() reads the x87 unit, which zerod does not use. */
    volatile float smallest = 0x1p-149f, small = 0x1p-126f, one = 1, half_ulp = 0x1p-24f;
    volatile float three_quarter_ulp = 0x1.8p-24f;

    /* compares bits, because a float comparison may read a subnormal as zero, too */
    if (f32_bits(small * 0.5f) == 0) {
        snprintf(err, err_size,
                 "subnormal results become zero in this thread (flush-to-zero is set); "
                 "a library linked with -ffast-math does that");
        return -ENOTSUP;
    }
    if (f32_bits(smallest * 0x1p60f) == 0) {
        snprintf(err, err_size,
                 "subnormal numbers are read as zero in this thread (denormals-are-zero is set); "
                 "a library linked with -ffast-math does that");
        return -ENOTSUP;
    }
    if (one + half_ulp != one || -one - half_ulp != -one || one + three_quarter_ulp != 0x1.000002p0f ||
        -one - three_quarter_ulp != -0x1.000002p0f) {
        snprintf(err, err_size, "this thread does not round to nearest even");
        return -ENOTSUP;
    }
    return 0;
}

/* The plain functions, for callers without a table: libzerod's copies, tests, tools. */

void convert_to_f32(float *dst, const void *src, enum dtype dtype, size_t n_elems)
{
    kernels_baseline.convert_to_f32(dst, src, dtype, n_elems);
}

void convert_from_f32(void *dst, const float *src, enum dtype dtype, size_t n_elems)
{
    kernels_baseline.convert_from_f32(dst, src, dtype, n_elems);
}

void position_sum_update(struct position_sum *sum, enum dtype dtype, const void *elems, size_t n_elems,
                         size_t start_elem)
{
    kernels_baseline.position_sum_update(sum, dtype, elems, n_elems, start_elem);
}
