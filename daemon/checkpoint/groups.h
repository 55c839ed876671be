/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Collects 8-bit moments (kernels/group8.h) from files. Their elements arrive in pieces, which may end inside a group:
 * at the end of a MiB, of a row, or of another node's elements. The elements of a group share an exponent, so a group
 * is stored when all of its elements have arrived. Until then the group's pieces wait outside the array.
 */

#include <pthread.h>
#include <stdint.h>

#include "kernels/dtype.h"

struct waiting_group;

struct groups {
    pthread_mutex_t lock;
    struct waiting_group *first;
};

/* An array of n_elems elements of a grouped type. */
struct groups_array {
    uint8_t *at;
    enum dtype dtype;
    uint64_t n_elems;
};

void groups_init(struct groups *groups);
void groups_deinit(struct groups *groups);

/*
 * Adds elements [elem, elem + n) of the array. src: these elements in src_dtype, aligned to that type. Any thread may
 * call it. Each element must be added once. Return: 0 or -ENOMEM.
 */
int groups_put(struct groups *groups, const struct groups_array *array, uint64_t elem, size_t n, const void *src,
               enum dtype src_dtype);
