/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The problems of a configuration file are a list, each with its place, the key and a sentence,
 * printed as E1601 with the source line and a caret. Notes are of the same form and stop nobody: keys of
 * DeepSpeed that have no effect here.
 */

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum {
    CONFIG_MAX_PROBLEMS = 100, /* picked: more than anybody reads, few enough for a hostile file */
};

/* A text with the name it goes by in messages. */
struct config_text {
    const char *name;
    const char *text;
    size_t n_bytes;
};

/* Return: the offset of the brace with which a text of JSON begins, behind comments; n_bytes: it is not JSON. */
size_t config_find_brace(const struct config_text *text);

/* A place in a text, lines and columns (code points) from 1. line 0: the text as a whole. */
struct config_spot {
    unsigned line;
    unsigned column;
    unsigned n_columns; /* how much to underline, 0 and 1 are a bare caret */
};

struct config_problem {
    bool note;   /* does not keep the daemon from starting */
    char *place; /* "file:line:column", or "file" */
    unsigned line, column;
    char *key;    /* full path of the key, or NULL */
    char *text;   /* the fault, the allowed values, and a similar name */
    char *source; /* the line (or the part of it around the place) and below it the caret, or NULL */
};

struct config_problems {
    struct config_problem *items;
    size_t n_items;
    size_t n_errors;  /* items that are no notes */
    size_t n_dropped; /* errors beyond CONFIG_MAX_PROBLEMS, not kept */
    int r;            /* sticky: -ENOMEM when a problem could not be kept */
};

#define CONFIG_PROBLEMS_NULL ((struct config_problems){0})

void config_problems_deinit(struct config_problems *problems);

/* key may be NULL; text may be NULL, then there is no source line. Lack of memory is remembered in
 * problems->r. */
void config_problems_add(struct config_problems *problems, const struct config_text *text,
                         const struct config_spot *spot, const char *key, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
void config_problems_note(struct config_problems *problems, const struct config_text *text,
                          const struct config_spot *spot, const char *key, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Those from the first on, by place in their file; for one place the order of discovery stays. */
void config_problems_sort(struct config_problems *problems, size_t first);

/* "E1601 config: file:line:column: key: text", source line and caret, for each; notes begin with "note", and are one
 * line. */
void config_problems_print(FILE *file, const struct config_problems *problems);
