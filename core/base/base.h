/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Helpers for every file of the project: cleanup at the end of a scope, transfer of ownership, checked size arithmetic,
 * small macros. No function of this file allocates or logs.
 */

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/param.h> /* defines MIN and MAX, which evaluate their arguments twice */
#include <unistd.h>

#undef MIN
#undef MAX

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

#define MIN(a, b)                                                                                                      \
    __extension__({                                                                                                    \
        __auto_type min_a_ = (a);                                                                                      \
        __auto_type min_b_ = (b);                                                                                      \
        min_a_ < min_b_ ? min_a_ : min_b_;                                                                             \
    })

#define MAX(a, b)                                                                                                      \
    __extension__({                                                                                                    \
        __auto_type max_a_ = (a);                                                                                      \
        __auto_type max_b_ = (b);                                                                                      \
        max_a_ > max_b_ ? max_a_ : max_b_;                                                                             \
    })

#define container_of(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))

/* Frees the memory of a local pointer at the end of its scope: _cleanup_free_ char *s = strdup(t); */
#define _cleanup_free_ _cleanup_(freep)
#define _cleanup_close_ _cleanup_(closep)
#define _cleanup_(f) __attribute__((cleanup(f), unused))

/* DEFINE_CLEANUP(struct x *, x_free) makes _cleanup_(x_freep) usable on a local of that type. */
#define DEFINE_CLEANUP(type, func)                                                                                     \
    static inline void func##p(type *p)                                                                                \
    {                                                                                                                  \
        if (*p)                                                                                                        \
            func(*p);                                                                                                  \
    }                                                                                                                  \
    struct define_cleanup_swallows_semicolon

static inline void freep(void *p)
{
    free(*(void **)p);
}

/* Closes a descriptor and sets it to -1, because its number may soon belong to another file. */
static inline void closep(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Return the pointer or descriptor, and set the variable to NULL or -1. */
#define steal_ptr(p)                                                                                                   \
    __extension__({                                                                                                    \
        __auto_type steal_p_ = &(p);                                                                                   \
        __auto_type steal_v_ = *steal_p_;                                                                              \
        *steal_p_ = NULL;                                                                                              \
        steal_v_;                                                                                                      \
    })

static inline int steal_fd(int *fd)
{
    int v = *fd;

    *fd = -1;
    return v;
}

/* Flushes a file. Return: 0 if all output was written; else -errno, or -EIO for an earlier failure, whose errno is
 * lost. */
static inline int flush_file(FILE *file)
{
    if (fflush(file) != 0)
        return -errno;
    return ferror(file) ? -EIO : 0;
}

/* Return: false if the result does not fit; *res is then undefined. */
static inline bool size_add(size_t *res, size_t a, size_t b)
{
    return !__builtin_add_overflow(a, b, res);
}

static inline bool size_mul(size_t *res, size_t a, size_t b)
{
    return !__builtin_mul_overflow(a, b, res);
}

/* n rounded up to a multiple of align (> 0). Only for values that are known to be far from SIZE_MAX. */
static inline size_t round_up(size_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

static inline size_t div_round_up(size_t n, size_t d)
{
    return (n + d - 1) / d;
}
