/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as a message to the keeper of zerodrun. An accepted name must be valid in LISTEN_FDNAMES and have the same
 * meaning there. Other lines before or after the message must change nothing.
 */

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "client/run/keeper.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool is_equal(const struct keeper_message *a, const struct keeper_message *b)
{
    return a->store == b->store && a->remove == b->remove && a->barrier == b->barrier && strcmp(a->name, b->name) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char before[] = "READY=1\nSTATUS=FDSTORE=1\n", after[] = "\nFDPOLL=0\n";
    char *text = malloc(sizeof(before) + size + sizeof(after)), *at = text;
    struct keeper_message message, again;
    int r = keeper_parse(&message, (const char *)data, size);

    assert(text && (r == 0 || r == -EINVAL));
    at = mempcpy(at, before, sizeof(before) - 1);
    at = mempcpy(at, data, size);
    at = mempcpy(at, after, sizeof(after) - 1);
    assert(keeper_parse(&again, text, (size_t)(at - text)) == r);
    if (r == 0) {
        assert(keep_is_name(message.name) && !strpbrk(message.name, ":\n") && is_equal(&message, &again));
        at = text + sprintf(text, "FDNAME=");
        assert(size + sizeof(before) > strlen(message.name));
        at = stpcpy(at, message.name);
        assert(keeper_parse(&again, text, (size_t)(at - text)) == 0 && strcmp(again.name, message.name) == 0);
    }
    free(text);
    return 0;
}
