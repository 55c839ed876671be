/* SPDX-License-Identifier: Apache-2.0 */

/* Prints numbers as people read them. */

#include "core/base/print-number.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/base/base.h"

/* Prints three digits: 1.23, 12.3, 123. */
static void print_scaled(char *dst, double value, const char *unit)
{
    int n_decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;

    snprintf(dst, PRINT_SIZE, "%.*f %s", n_decimals, value, unit);
}

static void print_two(char *dst, uint64_t large, const char *large_unit, uint64_t small, const char *small_unit)
{
    snprintf(dst, PRINT_SIZE, "%" PRIu64 " %s %" PRIu64 " %s", large, large_unit, small, small_unit);
}

char *print_duration(char *dst, uint64_t ns)
{
    uint64_t s = ns / 1000000000;

    if (ns < 1000)
        snprintf(dst, PRINT_SIZE, "%" PRIu64 " ns", ns);
    else if (ns < 1000000)
        print_scaled(dst, ns / 1e3, "us");
    else if (ns < 1000000000)
        print_scaled(dst, ns / 1e6, "ms");
    else if (s < 60)
        print_scaled(dst, ns / 1e9, "s");
    else if (s < 3600)
        print_two(dst, s / 60, "min", s % 60, "s");
    else if (s < 86400)
        print_two(dst, s / 3600, "h", s % 3600 / 60, "min");
    else
        print_two(dst, s / 86400, "d", s % 86400 / 3600, "h");
    return dst;
}

static char *print_prefixed(char *dst, uint64_t n, double base, const char *const *units, size_t n_units)
{
    double value = n;
    size_t i = 0;

    /* Values from base - 0.5 get the next unit, because 999.5 would be printed as 1000. */
    while (i + 1 < n_units && value >= (i == 0 ? base : base - 0.5)) {
        value /= base;
        i++;
    }
    if (i == 0)
        snprintf(dst, PRINT_SIZE, "%" PRIu64 "%s%s", n, *units[0] ? " " : "", units[0]);
    else
        print_scaled(dst, value, units[i]);
    return dst;
}

char *print_bytes(char *dst, uint64_t n_bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};

    return print_prefixed(dst, n_bytes, 1024, units, ARRAY_SIZE(units));
}

char *print_count(char *dst, uint64_t n)
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P", "E"};

    return print_prefixed(dst, n, 1000, units, ARRAY_SIZE(units));
}
