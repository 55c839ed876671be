/* SPDX-License-Identifier: Apache-2.0 */

/*
 * zerodctl trace with any daemon's answer, and any files to merge. Everything that can be read must be printed as JSON,
 * and must remain JSON after merging.
 */

#include <stdlib.h>
#include <string.h>

#include <json-c/json.h>

#include "client/ctl/trace-command.h"
#include "core/base/base.h"
#include "core/trace/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct json_object *parse(const char *text, size_t n_bytes)
{
    struct json_tokener *tokener = json_tokener_new();
    struct json_object *object = json_tokener_parse_ex(tokener, text, (int)n_bytes);

    json_tokener_free(tokener);
    return object;
}

static struct json_object *print(struct trace *trace)
{
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    struct json_object *printed;

    if (!file)
        return NULL;
    trace_print(file, trace);
    fclose(file);
    printed = parse(text, size);
    if (!printed)
        abort();
    free(text);
    return printed;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _cleanup_free_ char *text = strndup((const char *)data, size);
    struct json_object *object = text ? parse(text, strlen(text)) : NULL, *printed, *copy = NULL;
    struct trace trace;

    if (trace_unpack(&trace, object) == NULL) {
        printed = print(&trace);
        json_object_deep_copy(printed, &copy, NULL);
        (void)trace_merge(printed, copy);
        json_object_put(copy);
        json_object_put(printed);
        trace_deinit(&trace);
    } else {
        trace = (struct trace){.job = NULL};
        printed = print(&trace);
        (void)trace_merge(printed, object);
        json_object_put(printed);
    }
    json_object_put(object);
    return 0;
}
