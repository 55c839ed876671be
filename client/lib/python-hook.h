/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hook that pushes a parameter's gradient and clears .grad, for client/python/zerod/gradients.py: in Python it
 * would take twice as long. Nothing is linked to Python or torch. The functions of Python's stable ABI are looked up in
 * the process, and torch's are given as objects.
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
    uint8_t *pushed;        /* by parameter; if it is not 0, `careful` decides. A hook that has pushed sets it to 1 */
    struct _object *none, *runtime_error;
    struct _object *grad, *dtype;             /* of torch: the descriptors of these attributes, both of one type */
    struct _object *current_task;             /* torch's function without arguments */
    struct _object *is_contiguous, *data_ptr; /* torch's functions of a tensor */
    struct _object *failed; /* is called without arguments when a push has failed */
};

/* One parameter. */
struct zerod_python_hook {
    struct _object *owner;   /* of the shared values; these three objects are kept alive */
    struct _object *dtype;   /* of its gradients */
    struct _object *careful; /* is called with the parameter if its gradient is not one that this hook knows */
    unsigned param;
    bool is_large; /* its push takes so long that other threads of Python should run meanwhile */
};

/* Return: does the process have the functions of Python that hooks need? */
ZEROD_API bool zerod_has_python(void);

/*
 * Only after zerod_has_python() was true. all: must outlive the function, so it belongs to hook->owner. hook: is
 * copied. Return: a function of Python, new; NULL: an exception is set.
 */
ZEROD_API struct _object *zerod_python_hook(struct zerod_python_hooks *all, const struct zerod_python_hook *hook);
