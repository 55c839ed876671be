/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* UTF-8, as in table 3-7 of the Unicode standard: no overlong forms, no surrogates, nothing above U+10FFFF. */

#include <stdbool.h>
#include <stddef.h>

/* Return: the length in bytes of the well-formed character at s, or 0 if there is none. n > 0 bytes may be read. */
size_t utf8_length(const char *s, size_t n);

/* Return: true if the well-formed character at s is a control character, also U+0080 to U+009F, because terminals obey
 * them. */
bool utf8_is_control(const char *s);

/* Return: true if a character begins at this byte of a well-formed text. */
static inline bool utf8_begins(char c)
{
    return ((unsigned char)c & 0xc0) != 0x80;
}
