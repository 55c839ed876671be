/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* UTF-8, as the Unicode standard's table 3-7 has it: no overlong forms, no surrogates, nothing above U+10FFFF. */

#include <stdbool.h>
#include <stddef.h>

/* Return: bytes of the well-formed character at s, where n > 0 bytes may be read; 0: there is none. */
size_t utf8_length(const char *s, size_t n);

/* Is the well-formed character at s a control character? U+0080 to U+009F are, too: terminals obey them. */
bool utf8_is_control(const char *s);

/* Does a character begin at this byte of a well-formed text? */
static inline bool utf8_begins(char c)
{
    return ((unsigned char)c & 0xc0) != 0x80;
}
