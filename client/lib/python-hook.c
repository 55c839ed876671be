/* SPDX-License-Identifier: Apache-2.0 */

/* The hook of the Python package (python-hook.h). */

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "client/lib/python-hook.h"
#include "core/base/base.h"

typedef struct _object PyObject;
typedef PyObject *get_descriptor(PyObject *descriptor, PyObject *object, PyObject *type);
typedef int set_descriptor(PyObject *descriptor, PyObject *object, PyObject *value);

/* PyMethodDef */
struct method {
    const char *name;
    PyObject *(*function)(PyObject *self, PyObject *argument);
    int flags;
    const char *doc;
};

/* Python's constants, from its documentation of the stable ABI. */
enum { METH_O = 8, PY_TP_DESCR_GET = 54, PY_TP_DESCR_SET = 55 };

/* Functions of the stable ABI. PyType_GetSlot() works for static types since Python 3.10. */
#define PYTHON_CALLS(CALL)                                                                                             \
    CALL(void, hold, "Py_IncRef", (PyObject * object))                                                                 \
    CALL(void, release, "Py_DecRef", (PyObject * object))                                                              \
    CALL(PyObject *, type_of, "PyObject_Type", (PyObject * object))                                                    \
    CALL(void *, slot_of, "PyType_GetSlot", (PyObject * type, int slot))                                               \
    CALL(PyObject *, call, "PyObject_CallFunctionObjArgs", (PyObject * function, ...))                                 \
    CALL(int, is_true, "PyObject_IsTrue", (PyObject * object))                                                         \
    CALL(long long, as_number, "PyLong_AsLongLong", (PyObject * object))                                               \
    CALL(PyObject *, exception, "PyErr_Occurred", (void))                                                              \
    CALL(int, is_exception, "PyErr_ExceptionMatches", (PyObject * type))                                               \
    CALL(void, forget_exception, "PyErr_Clear", (void))                                                                \
    CALL(PyObject *, new_capsule, "PyCapsule_New", (void *what, const char *name, void (*destroy)(PyObject *)))        \
    CALL(void *, open_capsule, "PyCapsule_GetPointer", (PyObject * capsule, const char *name))                         \
    CALL(PyObject *, new_function, "PyCFunction_NewEx", (struct method * method, PyObject * self, PyObject * module))  \
    CALL(PyObject *, out_of_memory, "PyErr_NoMemory", (void))                                                          \
    CALL(void *, unlock, "PyEval_SaveThread", (void))                                                                  \
    CALL(void, lock, "PyEval_RestoreThread", (void *state))

static struct {
#define AS_POINTER(type, field, name, arguments) type(*field) arguments;
    PYTHON_CALLS(AS_POINTER)
#undef AS_POINTER
} py;

static bool have_python;

static void find_python(void)
{
    have_python = true;
#define FIND(type, field, name, arguments)                                                                             \
    *(void **)&py.field = dlsym(RTLD_DEFAULT, name);                                                                   \
    have_python &= py.field != NULL;
    PYTHON_CALLS(FIND)
#undef FIND
}

bool zerod_has_python(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    return pthread_once(&once, find_python) == 0 && have_python;
}

static const char capsule_name[] = "zerod.hook";

struct hook {
    struct zerod_python_hook is;
    struct zerod_python_hooks *all;
    get_descriptor *get;
    set_descriptor *set;
};

static void release_hook(struct hook *h)
{
    py.release(h->is.owner);
    py.release(h->is.dtype);
    py.release(h->is.careful);
    free(h);
}

static void destroy(PyObject *capsule)
{
    release_hook(py.open_capsule(capsule, capsule_name));
}

/* Releases the object. Return: true if it exists and is true in Python. */
static bool consume_bool(PyObject *object)
{
    bool is_true = object && py.is_true(object) == 1;

    if (object)
        py.release(object);
    return is_true;
}

/* Sets *number and releases the object. Return: true if the object exists and is a number. */
static bool consume_number(PyObject *object, long long *number)
{
    if (!object)
        return false;
    *number = py.as_number(object);
    py.release(object);
    return *number != -1 || !py.exception();
}

/*
 * Return: true if this gradient is the parameter's first in this micro-batch, belongs to all->task, and is dense,
 * contiguous and of the declared dtype. Return: false if not, or if a call raised an exception, which remains set.
 */
static bool is_simple(const struct hook *h, PyObject *grad)
{
    const struct zerod_python_hooks *all = h->all;
    PyObject *dtype;
    long long task;

    if (grad == all->none || all->pushed[h->is.param] || !consume_number(py.call(all->current_task, NULL), &task) ||
        task != all->task)
        return false;
    dtype = h->get(all->dtype, grad, NULL);
    if (dtype)
        py.release(dtype); /* torch keeps the only object of each dtype */
    return dtype == h->is.dtype && consume_bool(py.call(all->is_contiguous, grad, NULL));
}

static int push(const struct hook *h)
{
    void *state;
    int r;

    if (!h->is.is_large)
        return zerod_push(h->all->client, &h->all->push);
    state = py.unlock();
    r = zerod_push(h->all->client, &h->all->push);
    py.lock(state);
    return r;
}

/* Return: 0, or -1 with an exception set. */
static int push_simple(const struct hook *h, PyObject *param, const void *data)
{
    PyObject *told;

    h->all->push.param = h->is.param;
    h->all->push.data = data;
    if (push(h) != 0) {
        told = py.call(h->all->failed, NULL);
        if (!told)
            return -1;
        py.release(told);
    }
    h->all->pushed[h->is.param] = 1;
    return h->set(h->all->grad, param, h->all->none);
}

/*
 * Calls `careful`, and first clears a RuntimeError, which a sparse gradient raises because it has no is_contiguous().
 * Returns NULL with any other exception, because the program has to handle it.
 */
static PyObject *push_with_care(const struct hook *h, PyObject *param)
{
    if (py.exception()) {
        if (!py.is_exception(h->all->runtime_error))
            return NULL;
        py.forget_exception();
    }
    return py.call(h->is.careful, param, NULL);
}

static PyObject *push_from_hook(PyObject *self, PyObject *param)
{
    const struct hook *h = py.open_capsule(self, capsule_name);
    PyObject *grad = h->get(h->all->grad, param, NULL);
    long long data;
    bool simple;
    int r = 0;

    if (!grad)
        return NULL;
    simple = is_simple(h, grad) && consume_number(py.call(h->all->data_ptr, grad, NULL), &data) && data != 0;
    if (simple)
        r = push_simple(h, param, (const void *)(uintptr_t)data);
    py.release(grad);
    if (!simple)
        return push_with_care(h, param);
    if (r < 0)
        return NULL;
    py.hold(h->all->none);
    return h->all->none;
}

struct _object *zerod_python_hook(struct zerod_python_hooks *all, const struct zerod_python_hook *hook)
{
    static struct method method = {.name = "push", .function = push_from_hook, .flags = METH_O};
    PyObject *type, *capsule, *function;
    struct hook *h = malloc(sizeof(*h));

    if (!h)
        return py.out_of_memory();
    type = py.type_of(all->grad);
    *h = (struct hook){.is = *hook, .all = all};
    h->get = (get_descriptor *)py.slot_of(type, PY_TP_DESCR_GET);
    h->set = (set_descriptor *)py.slot_of(type, PY_TP_DESCR_SET);
    py.release(type);
    py.hold(h->is.owner);
    py.hold(h->is.dtype);
    py.hold(h->is.careful);
    capsule = py.new_capsule(h, capsule_name, destroy);
    if (!capsule) {
        release_hook(h);
        return NULL;
    }
    function = py.new_function(&method, capsule, NULL);
    py.release(capsule);
    return function;
}
