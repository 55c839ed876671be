/* SPDX-License-Identifier: Apache-2.0 */

/* Removes terminal commands and control characters from a text. */

#include "client/run/plain.h"

#include <string.h>

#include "core/base/base.h"
#include "core/base/utf8.h"

/*
 * Return: the size of the escape sequence (ECMA-48) at text. It is ESC [, parameters and a letter (colours, cursor), or
 * ESC and one byte. An incomplete sequence ends with the text.
 */
static size_t escape_length(const char *text, size_t n_bytes)
{
    size_t n = 2;

    if (n_bytes < 2 || text[1] != '[')
        return MIN(n, n_bytes);
    while (n < n_bytes && text[n] >= 0x20 && text[n] < 0x40)
        n++;
    return MIN(n + 1, n_bytes);
}

bool plain_text(char *to, size_t size, const char *text, size_t n_bytes)
{
    const char *end = text + n_bytes;
    size_t n_to = 0, n;
    bool fits = true;

    for (; text < end && fits; text += n) {
        n = utf8_length(text, (size_t)(end - text));
        if (*text == '\033') {
            n = escape_length(text, (size_t)(end - text));
        } else if (n == 0) {
            n = 1;
        } else if (*text == '\t' || !utf8_is_control(text)) {
            fits = n_to + n < size;
            if (fits)
                memcpy(to + n_to, *text == '\t' ? " " : text, n);
            n_to += fits ? n : 0;
        }
    }
    while (n_to > 0 && to[n_to - 1] == ' ')
        n_to--;
    to[n_to] = '\0';
    return !fits;
}
