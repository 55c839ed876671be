/* SPDX-License-Identifier: Apache-2.0 */

/* The check that bytes are valid UTF-8. */

#include "core/base/utf8.h"

#include <assert.h>

#include "core/base/base.h"

size_t utf8_length(const char *s, size_t n)
{
    static const struct {
        unsigned char first, last, low, high; /* ranges of the first byte, of the second byte */
        size_t n;
    } rows[] = {
        {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3}, {0xe1, 0xec, 0x80, 0xbf, 3},
        {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3}, {0xf0, 0xf0, 0x90, 0xbf, 4},
        {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    const unsigned char *u = (const unsigned char *)s;

    assert(n > 0);
    if (u[0] < 0x80)
        return 1;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        if (u[0] < rows[i].first || u[0] > rows[i].last)
            continue;
        if (rows[i].n > n || u[1] < rows[i].low || u[1] > rows[i].high)
            return 0;
        for (size_t k = 2; k < rows[i].n; k++)
            if (utf8_begins(s[k]))
                return 0;
        return rows[i].n;
    }
    return 0;
}

bool utf8_is_control(const char *s)
{
    unsigned char c = (unsigned char)*s;

    return c < 0x20 || c == 0x7f || (c == 0xc2 && (unsigned char)s[1] < 0xa0);
}
