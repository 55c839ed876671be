/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The environment of a process that zerodrun starts: a copy of zerodrun's own environment, with changes. */

#include <stddef.h>

struct environment {
    char **vars; /* "NAME=value", NULL at the end */
    size_t n_vars, n_allocated;
};

/* Copies zerodrun's own environment. Return: 0 or -ENOMEM, as environment_set(). */
int environment_init(struct environment *env);
void environment_deinit(struct environment *env);

int environment_set(struct environment *env, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void environment_unset(struct environment *env, const char *name);
const char *environment_get(const struct environment *env, const char *name); /* NULL: not set */
