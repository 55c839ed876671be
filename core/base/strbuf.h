/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A text that grows. If memory runs out, the text is cut short and no function fails: earlier additions stay, later
 * ones are left out. {0} is an empty text.
 */

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

struct strbuf {
    char *data;     /* owned, NUL-terminated; NULL while empty */
    size_t n_bytes; /* without the NUL */
    size_t capacity;
    bool cut;
};

void strbuf_deinit(struct strbuf *buf);

void strbuf_add(struct strbuf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));
void strbuf_vadd(struct strbuf *buf, const char *format, va_list args) __attribute__((format(printf, 2, 0)));
void strbuf_add_bytes(struct strbuf *buf, const char *bytes, size_t n_bytes);

/* Adds foreign text. Newlines stay; other bytes that are not printable ASCII become \xNN. NULL adds nothing. */
void strbuf_add_foreign(struct strbuf *buf, const char *text);

/* Return: the text so far, never NULL; valid until the next change. */
static inline const char *strbuf_text(const struct strbuf *buf)
{
    return buf->data ? buf->data : "";
}
