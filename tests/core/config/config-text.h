/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Helpers for tests of the configuration: they load a text, and load_valid() asserts that it is valid. */

#include "core/config/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MINIMAL "listen: {socket: /run/zerod/a.sock}\nworld: {size: 4}\n" /* appended text starts in line 3 */

static const struct config_build both_engines = {.have_gloo = true, .have_nccl = true};

static inline int load(struct config **config, const char *text, const struct config_build *build,
                       struct config_problems *problems)
{
    struct config_source source = {
        .text = {.name = "f.yaml", .text = text, .n_bytes = strlen(text)},
        .build = build,
    };

    return config_load_string(config, &source, problems);
}

static inline struct config *load_valid_with(const char *text, const struct config_build *build)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    int r = load(&config, text, build, &problems);

    if (r != 0)
        config_problems_print(stderr, &problems);
    assert_int_equal(r, 0);
    assert_int_equal(problems.n_errors, 0);
    config_problems_deinit(&problems);
    return config;
}

static inline struct config *load_valid(const char *text)
{
    return load_valid_with(text, NULL);
}

/* Not inlined, because gcc 12 would confuse the local `text` with the memory that getdelim() allocates for it. */
static __attribute__((noinline, unused)) char *read_whole_file(const char *path)
{
    const char *root = getenv("ZEROD_SOURCE_ROOT");
    char *text = NULL;
    char full[4096];
    size_t n_bytes = 0;
    FILE *file;

    snprintf(full, sizeof(full), "%s/%s", root ? root : ".", path);
    file = fopen(full, "r");
    if (!file)
        fail_msg("%s cannot be opened; ZEROD_SOURCE_ROOT must name the source tree", full);
    if (getdelim(&text, &n_bytes, '\0', file) < 0)
        fail_msg("%s cannot be read", full);
    fclose(file);
    return text;
}

static inline void print_problems(char *buffer, size_t n_bytes, const struct config_problems *problems)
{
    FILE *file = fmemopen(buffer, n_bytes, "w");

    config_problems_print(file, problems);
    fclose(file);
}
