/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hook that pushes a parameter's gradient and clears .grad, for client/python/zerod/gradients.py; in Python it
 * would take twice as long. The library links neither Python nor torch. It looks up the functions of Python's stable
 * ABI in the process, and gets torch's functions as objects.
 *
 * Python calls these two functions and holds the interpreter lock. A `struct _object` is Python's PyObject.
 */

#include <stdbool.h>
#include <stdint.h>

#include "zerod/client.h"

struct _object;

/* The values that all hooks of an optimizer share. Python owns and fills them; _lib.Hooks has the same fields. */
struct zerod_python_hooks {
    struct zerod *client;
    struct zerod_push push; /* describes the gradients of the present graph task; hooks set param and data */
    int64_t task;           /* that graph task's id. A hook that runs in another one calls its `careful` */
    uint8_t *pushed;        /* by parameter; not 0: `careful` decides. A hook that has pushed sets it to 1 */
    struct _object *none, *runtime_error;
    struct _object *grad, *dtype;             /* torch's descriptors of these attributes, both of one type */
    struct _object *current_task;             /* torch's function without arguments */
    struct _object *is_contiguous, *data_ptr; /* torch's functions of a tensor */
    struct _object *failed;                   /* called without arguments when a push has failed */
};

/* One parameter. */
struct zerod_python_hook {
    struct _object *owner;   /* owns the shared values; these three objects are kept alive */
    struct _object *dtype;   /* of its gradients */
    struct _object *careful; /* called with the parameter if this hook cannot push its gradient */
    unsigned param;
    bool is_large; /* its push is so long that other threads of Python should run meanwhile */
};

/* Return: true if the process has the functions of Python that hooks need. */
ZEROD_API bool zerod_has_python(void);

/*
 * zerod_has_python() must have returned true. all: must outlive the function, so it belongs to hook->owner. hook: is
 * copied. Return: a new function of Python; NULL if an exception is set.
 */
ZEROD_API struct _object *zerod_python_hook(struct zerod_python_hooks *all, const struct zerod_python_hook *hook);
