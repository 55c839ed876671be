/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any text as a configuration, in a build with engines and in one without. An accepted configuration must print as YAML
 * that reads back as an equal configuration. A refused text must have a bounded list of problems with their reasons.
 */

#include "core/config/config-deepspeed.h"
#include "core/config/config-read.h"
#include "core/config/config.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static char *print(const struct config *config, size_t *n_bytes)
{
    char *text = NULL;
    FILE *file = open_memstream(&text, n_bytes);

    if (!file || config_print(file, config) != 0 || fclose(file) != 0)
        abort();
    return text;
}

/* Removes the comments with the origins: on each line everything from the last " # ". */
static void cut_origins(char *text)
{
    char *to = text, *rest = text, *line;

    while ((line = strsep(&rest, "\n"))) {
        char *cut = NULL;
        size_t n;

        for (char *at = line; (at = strstr(at, "  # ")); at++)
            cut = at;
        if (cut)
            *cut = '\0';
        n = strlen(line);
        memmove(to, line, n);
        to += n;
        if (rest)
            *to++ = '\n';
    }
    *to = '\0';
}

static void check_round_trip(const struct config *config, const struct config_build *build)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config_source source = {.text.name = "printed", .build = build};
    char *first = print(config, &source.text.n_bytes), *second;
    struct config *again;
    size_t n_bytes;

    source.text.text = first;
    if (config_load_string(&again, &source, &problems) != 0 || problems.n_errors > 0) {
        config_problems_print(stderr, &problems);
        abort();
    }
    second = print(again, &n_bytes);
    cut_origins(first);
    cut_origins(second);
    if (strcmp(first, second) != 0)
        abort();
    free(first);
    free(second);
    config_free(again);
    config_problems_deinit(&problems);
}

static void read_with(const uint8_t *data, size_t n_bytes, const struct config_build *build)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config_source source = {
        .text = {.name = "fuzz", .text = (const char *)data, .n_bytes = n_bytes},
        .build = build,
    };
    struct config *config;
    char *text = NULL;
    size_t n_text;
    FILE *file = open_memstream(&text, &n_text);
    int r = config_load_string(&config, &source, &problems);

    if (!file || r < 0 || (r == 0) != (problems.n_errors == 0) || (r == 0) != (config != NULL) ||
        problems.n_errors > CONFIG_MAX_PROBLEMS)
        abort();
    config_problems_print(file, &problems);
    fclose(file);
    free(text);
    if (config)
        check_round_trip(config, build);
    config_free(config);
    config_problems_deinit(&problems);
}

/* Reads the bytes as accelerate's file, which may name another file. */
static void read_as_cover(const uint8_t *data, size_t n_bytes)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config_source source = {.text = {.name = "fuzz", .text = (const char *)data, .n_bytes = n_bytes}};
    struct config *config = calloc(1, sizeof(*config));
    char *named = NULL;

    if (!config || deepspeed_named_file(&named, &source.text) < 0)
        abort();
    if (config_read_cover(config, &source, &problems) < 0)
        abort();
    free(named);
    config_free(config);
    config_problems_deinit(&problems);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const struct config_build neither, both = {.have_gloo = true, .have_nccl = true};

    read_with(data, n_bytes, &neither);
    read_with(data, n_bytes, &both);
    read_as_cover(data, n_bytes);
    return 0;
}
