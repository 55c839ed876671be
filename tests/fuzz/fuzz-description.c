/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as the description of a checkpoint, without a seal and with a valid one. A description that is read must be
 * printable, and the text must read back and print the same text.
 */

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/checkpoint/description.h"
#include "core/layout/layout.h"

enum { MAX_BYTES = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int parse(struct description *out, const char *text, size_t n_bytes)
{
    char why[256] = "";
    int r = description_parse(out, text, n_bytes, why, sizeof(why));

    assert(r == 0 ? !*why : r == -EINVAL && *why);
    return r;
}

static void check_read(struct description *d, const struct layout *layout)
{
    char *text = description_print(d, layout), *again;
    struct description read;
    int r;

    assert(text);
    for (size_t i = 0; i < d->n_files; i++)
        assert(!strchr(d->files[i].name, '/') && d->files[i].name[0] != '.' &&
               description_find(d, d->files[i].name) == &d->files[i]);
    r = parse(&read, text, strlen(text));
    assert(r == 0);
    again = description_print(&read, layout);
    assert(again && strcmp(text, again) == 0);
    description_deinit(&read);
    description_deinit(d);
    free(again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct layout no_params;
    static char text[MAX_BYTES + 128];
    char hash[HASH_TEXT_BYTES];
    struct description d;

    if (size > MAX_BYTES)
        return 0;
    if (parse(&d, (const char *)data, size) == 0)
        check_read(&d, &no_params);
    hash_text(hash, data, size);
    memcpy(text, data, size);
    sprintf(text + size, ",\"xxh128_of_the_above\":\"%s\"}\n", hash);
    if (parse(&d, text, size + strlen(text + size)) == 0)
        check_read(&d, &no_params);
    return 0;
}
