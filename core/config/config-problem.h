/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The problems of a configuration file are a list. Each has its place, the key and a sentence, and is printed as E1601
 * with the source line and a caret. Notes have the same form but do not stop the daemon: DeepSpeed's keys without
 * effect are notes.
 */

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum {
    CONFIG_MAX_PROBLEMS = 100, /* picked: more than a person reads, and a hostile file causes no more */
};

/* A text, and the name that messages use for it. */
struct config_text {
    const char *name;
    const char *text;
    size_t n_bytes;
};

/* Return: the offset of the brace that begins a JSON text, after any comments; n_bytes if the text is not JSON. */
size_t config_find_brace(const struct config_text *text);

/* A place in a text. Lines and columns (code points) start at 1. Line 0 means the whole text. */
struct config_spot {
    unsigned line;
    unsigned column;
    unsigned n_columns; /* columns to underline; 0 and 1 give a bare caret */
};

struct config_problem {
    bool note;   /* does not stop the daemon from starting */
    char *place; /* "file:line:column", or "file" */
    unsigned line, column;
    char *key;    /* full path of the key, or NULL */
    char *text;   /* the fault, the allowed values, and a similar name */
    char *source; /* the line, or a part of it around the place, with a caret below; NULL: none */
};

struct config_problems {
    struct config_problem *items;
    size_t n_items;
    size_t n_errors;  /* items that are not notes */
    size_t n_dropped; /* errors beyond CONFIG_MAX_PROBLEMS, not kept */
    int r;            /* sticky: -ENOMEM when a problem could not be kept */
};

#define CONFIG_PROBLEMS_NULL ((struct config_problems){0})

void config_problems_deinit(struct config_problems *problems);

/* Add a problem or a note. key may be NULL. If text->text is NULL, there is no source line. If memory runs out,
 * problems->r is set. */
void config_problems_add(struct config_problems *problems, const struct config_text *text,
                         const struct config_spot *spot, const char *key, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
void config_problems_note(struct config_problems *problems, const struct config_text *text,
                          const struct config_spot *spot, const char *key, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Sorts the problems from index first on by their places in the file. The sort is stable. */
void config_problems_sort(struct config_problems *problems, size_t first);

/*
 * Prints each problem as "E1601 config: file:line:column: key: text", with source line and caret. A note begins with
 * "note" and is one line.
 */
void config_problems_print(FILE *file, const struct config_problems *problems);
