/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Compares texts with tests/golden-texts/NAME.txt, or with ZEROD_UPDATE_GOLDEN=1 writes these files. Paths are relative
 * to ZEROD_SOURCE_ROOT, or to the working directory. Include cmocka.h before this.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Return: a path below the source root. The caller frees it. */
static inline char *source_path(const char *format, const char *name)
{
    const char *root = getenv("ZEROD_SOURCE_ROOT");
    char relative[512], path[4096];
    char *s;

    assert_true(snprintf(relative, sizeof(relative), "%s/%s", format, name) < (int)sizeof(relative));
    assert_true(snprintf(path, sizeof(path), "%s/%s", root ? root : ".", relative) < (int)sizeof(path));
    s = strdup(path);
    assert_non_null(s);
    return s;
}

/* Return: the file as a string, which the caller frees, or NULL if the file cannot be opened. */
static inline char *read_text(const char *path)
{
    FILE *file = fopen(path, "re");
    char *text = NULL;
    size_t size = 0;

    if (!file)
        return NULL;
    if (getdelim(&text, &size, '\0', file) < 0) {
        free(text);
        text = strdup("");
    }
    fclose(file);
    return text;
}

/* A build with sanitizers compares nothing, because a build without sanitizers compares the same texts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static inline void golden_check(const char *name, const char *text)
{
    assert_non_null(name);
    assert_non_null(text);
}
#else
static inline void golden_check(const char *name, const char *text)
{
    char file_name[256], *path, *expected;
    FILE *file;

    snprintf(file_name, sizeof(file_name), "%s.txt", name);
    path = source_path("tests/golden-texts", file_name);
    if (getenv("ZEROD_UPDATE_GOLDEN")) {
        file = fopen(path, "we");
        assert_non_null(file);
        fputs(text, file);
        assert_int_equal(fclose(file), 0);
    }
    expected = read_text(path);
    if (!expected)
        fail_msg("%s is not there; ZEROD_UPDATE_GOLDEN=1 writes it. Text:\n%s", path, text);
    if (strcmp(expected, text) != 0)
        fail_msg("%s\n---- expected ----\n%s---- got ----\n%s", path, expected, text);
    free(expected);
    free(path);
}
#endif
