/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The hook that pushes a parameter's gradient and clears .grad, for client/python/zerod/gradients.py. It is in C
 * because Python takes twice as long. The library links neither Python nor torch: it looks up the functions of Python's
 * stable ABI in the process, and the caller passes torch's functions as objects.
 *
 * Call both functions with the interpreter lock held. A `struct _object` is Python's PyObject.
 */

#include <stdbool.h>
#include <stdint.h>

#include "zerod/client.h"

struct _object;

/* The values that all hooks of an optimizer share. Python owns and fills them; _lib.Hooks has the same fields. */
struct zerod_python_hooks {
    struct zerod *client;
    struct zerod_push push; /* describes the gradients of the present graph task; hooks set param and data */
    int64_t task;           /* id of this graph task. A hook in another graph task calls its `careful` */
    uint8_t *pushed;        /* per parameter; 0: the hook pushes, then sets 1; else the hook calls `careful` */
    struct _object *none, *runtime_error;
    struct _object *grad, *dtype;             /* torch's descriptors of a tensor's attributes, both of one type */
    struct _object *current_task;             /* torch's function that returns the graph task's id */
    struct _object *is_contiguous, *data_ptr; /* torch's functions, called with a tensor */
    struct _object *failed;                   /* called without arguments when a push has failed */
};

/* The hook of one parameter. It holds references to the three objects. */
struct zerod_python_hook {
    struct _object *owner;   /* owns the struct zerod_python_hooks */
    struct _object *dtype;   /* dtype of the parameter's gradients */
    struct _object *careful; /* called with the parameter if this hook cannot push its gradient */
    unsigned param;
    bool is_large; /* the push takes so long that it releases the interpreter lock */
};

/* Return: true if the process has the functions of Python that hooks need. */
ZEROD_API bool zerod_has_python(void);

/*
 * Makes the hook of one parameter. Call it only after zerod_has_python() has returned true. all: must live as long as
 * hook->owner. hook: copied. Return: a new Python function; NULL with an exception set.
 */
ZEROD_API struct _object *zerod_python_hook(struct zerod_python_hooks *all, const struct zerod_python_hook *hook);
