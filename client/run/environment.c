/* SPDX-License-Identifier: Apache-2.0 */

/* The environment of a process that zerodrun starts. */

#include "client/run/environment.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/base/base.h"

static int environment_add(struct environment *env, char *var)
{
    size_t n = env->n_allocated ? 2 * env->n_allocated : 64;
    char **vars;

    if (env->n_vars + 1 >= env->n_allocated) {
        vars = reallocarray(env->vars, n, sizeof(*vars));
        if (!vars)
            return -ENOMEM;
        env->vars = vars;
        env->n_allocated = n;
    }
    env->vars[env->n_vars++] = var;
    env->vars[env->n_vars] = NULL;
    return 0;
}

int environment_init(struct environment *env)
{
    _cleanup_free_ char *copy = NULL;
    size_t i;
    int r;

    *env = (struct environment){};
    for (i = 0; environ[i]; i++) {
        copy = strdup(environ[i]);
        if (!copy)
            return -ENOMEM;
        r = environment_add(env, copy);
        if (r < 0)
            return r;
        steal_ptr(copy);
    }
    return 0;
}

void environment_deinit(struct environment *env)
{
    size_t i;

    for (i = 0; i < env->n_vars; i++)
        free(env->vars[i]);
    free(env->vars);
    *env = (struct environment){};
}

/* Return: the index of the variable, or n_vars if it is not set. */
static size_t environment_find(const struct environment *env, const char *name)
{
    size_t n = strlen(name), i;

    for (i = 0; i < env->n_vars; i++)
        if (strncmp(env->vars[i], name, n) == 0 && env->vars[i][n] == '=')
            break;
    return i;
}

const char *environment_get(const struct environment *env, const char *name)
{
    size_t i = environment_find(env, name);

    return i < env->n_vars ? env->vars[i] + strlen(name) + 1 : NULL;
}

void environment_unset(struct environment *env, const char *name)
{
    size_t i = environment_find(env, name);

    if (i == env->n_vars)
        return;
    free(env->vars[i]);
    env->vars[i] = env->vars[--env->n_vars];
    env->vars[env->n_vars] = NULL;
}

int environment_set(struct environment *env, const char *name, const char *format, ...)
{
    _cleanup_free_ char *value = NULL, *var = NULL;
    va_list args;
    int r;

    va_start(args, format);
    r = vasprintf(&value, format, args);
    va_end(args);
    if (r < 0) {
        value = NULL;
        return -ENOMEM;
    }
    if (asprintf(&var, "%s=%s", name, value) < 0) {
        var = NULL;
        return -ENOMEM;
    }
    environment_unset(env, name);
    r = environment_add(env, var);
    if (r == 0)
        steal_ptr(var);
    return r;
}
