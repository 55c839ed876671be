/* SPDX-License-Identifier: Apache-2.0 */

/* Growing text that is cut short when memory runs out. */

#include "core/base/strbuf.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"

/* Longer texts are cut. A text goes into one message, and no honest text is nearly as long. */
enum { STRBUF_MAX_BYTES = 1 << 20 };

void strbuf_deinit(struct strbuf *buf)
{
    free(buf->data);
    *buf = (struct strbuf){0};
}

/* Makes room for n_bytes more. Return: false, after marking the text as cut, if there is no room. */
static bool ensure_room(struct strbuf *buf, size_t n_bytes)
{
    size_t needed, capacity = MAX(buf->capacity, (size_t)128);
    char *data;

    assert(buf->data ? buf->n_bytes < buf->capacity : buf->capacity == 0); /* capacity includes the NUL */
    if (buf->cut)
        return false;
    if (!size_add(&needed, buf->n_bytes, n_bytes) || needed >= STRBUF_MAX_BYTES) {
        buf->cut = true;
        return false;
    }
    needed++;
    if (needed <= buf->capacity)
        return true;
    while (capacity < needed)
        capacity *= 2;
    data = realloc(buf->data, capacity);
    if (!data) {
        buf->cut = true;
        return false;
    }
    buf->data = data;
    buf->capacity = capacity;
    return true;
}

void strbuf_add_bytes(struct strbuf *buf, const char *bytes, size_t n_bytes)
{
    if (!ensure_room(buf, n_bytes))
        return;
    memcpy(buf->data + buf->n_bytes, bytes, n_bytes);
    buf->n_bytes += n_bytes;
    buf->data[buf->n_bytes] = '\0';
}

void strbuf_vadd(struct strbuf *buf, const char *format, va_list args)
{
    va_list again;
    int n;

    va_copy(again, args);
    n = vsnprintf(NULL, 0, format, args);
    if (n >= 0 && ensure_room(buf, (size_t)n)) {
        vsnprintf(buf->data + buf->n_bytes, (size_t)n + 1, format, again);
        buf->n_bytes += (size_t)n;
    }
    va_end(again);
}

void strbuf_add(struct strbuf *buf, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    strbuf_vadd(buf, format, args);
    va_end(args);
}

void strbuf_add_foreign(struct strbuf *buf, const char *text)
{
    if (!text)
        return;
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;

        if (c == '\n' || (c >= ' ' && c < 0x7f))
            strbuf_add_bytes(buf, text, 1);
        else
            strbuf_add(buf, "\\x%02x", c);
    }
}
