/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hook that pushes a parameter's gradient and clears .grad, for client/python/zerod/gradients.py. Python code takes
 * 8 us for it, of which libzerod needs 0.3; this takes 3. Nothing is linked to Python or torch: the functions of
 * Python's stable ABI are looked up in the process, and torch's are given as objects.
 *
 * Python calls these two functions and holds the interpreter lock. A `struct _object` is Python's PyObject.
 */

#include <stdbool.h>
#include <stdint.h>

#include "zerod/client.h"

struct _object;

/* What the hooks of an optimizer share. Python owns it and fills it; _lib.Hooks has the same fields. */
struct zerod_python_hooks {
    struct zerod *client;
    struct zerod_push push; /* what describes the gradients of the present graph task; hooks set param and data */
    int64_t task;           /* that graph task's id. A hook that runs in another one calls its `careful` */
    uint8_t *pushed;        /* by parameter: other than 0, it was pushed in the open micro-batch */
    struct _object *none;
    /* Functions of torch: of no argument; the descriptors of Tensor.grad and .dtype; of a tensor */
    struct _object *current_task, *grad, *dtype, *is_contiguous, *data_ptr;
    struct _object *failed; /* is called without arguments when a push has failed */
};

/* One parameter. */
struct zerod_python_hook {
    struct _object *owner;   /* of the shared values; kept alive */
    struct _object *dtype;   /* of its gradients */
    struct _object *careful; /* is called with the parameter if its gradient is not one that this hook knows */
    unsigned param;
    bool is_large; /* its push takes so long that other threads of Python should run meanwhile */
};

/* Return: does the process have the functions of Python that hooks need? */
ZEROD_API bool zerod_has_python(void);

/* hook: is copied. Return: a function of Python, new; NULL: an exception is set. */
ZEROD_API struct _object *zerod_python_hook(struct zerod_python_hooks *all, const struct zerod_python_hook *hook);
