/* SPDX-License-Identifier: Apache-2.0 */

/* The table of strings that have an id in messages (strings.h). */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "client/lib/call.h"
#include "client/lib/strings.h"
#include "core/base/base.h"
#include "core/wire/wire-request.h"

static int grow_table(struct strings *strings)
{
    uint32_t capacity = MAX(strings->capacity * 2, 64u);
    struct interned *table = calloc(capacity, sizeof(*table));

    if (!table)
        return -ENOMEM;
    for (uint32_t i = 0; i < strings->capacity; i++) {
        const char *text = strings->table[i].text;
        uint32_t at;

        if (!text)
            continue;
        at = (uint32_t)XXH3_64bits(text, strlen(text)) & (capacity - 1);
        while (table[at].text)
            at = (at + 1) & (capacity - 1);
        table[at] = strings->table[i];
    }
    free(strings->table);
    strings->table = table;
    strings->capacity = capacity;
    return 0;
}

uint32_t strings_intern(struct strings *strings, struct call *call, const char *text)
{
    size_t n = text ? strlen(text) : 0;
    struct interned *entry;
    uint32_t at;

    if (n == 0 || n > WIRE_MAX_TEXT_BYTES || strings->n >= WIRE_MAX_STRING_ID ||
        (strings->n * 2 >= strings->capacity && grow_table(strings) < 0))
        return 0;
    at = (uint32_t)XXH3_64bits(text, n) & (strings->capacity - 1);
    for (; strings->table[at].text; at = (at + 1) & (strings->capacity - 1))
        if (strcmp(strings->table[at].text, text) == 0)
            return strings->table[at].id;
    entry = &strings->table[at];
    entry->text = strdup(text);
    if (!entry->text)
        return 0;
    entry->id = ++strings->n;
    (void)call_send(call, &(struct request){.type = REQUEST_INTERN, .intern = {.id = entry->id, .text = text}});
    return entry->id;
}

int strings_say_all(const struct strings *strings, struct call *call)
{
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < strings->capacity; i++) {
        const struct interned *entry = &strings->table[i];

        if (entry->text)
            r = call_say(call, &(struct request){.type = REQUEST_INTERN,
                                                 .intern = {.id = entry->id, .text = entry->text}});
    }
    return r;
}

void strings_deinit(struct strings *strings)
{
    for (uint32_t i = 0; i < strings->capacity; i++)
        free(strings->table[i].text);
    free(strings->table);
    *strings = (struct strings){0};
}
