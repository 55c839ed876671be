/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Collects 8-bit moments (kernels/group8.h) from files. Their elements arrive in pieces that end anywhere: at the end
 * of a MiB, of a row, of what another node wrote. The elements of a group share an exponent, so a group is stored when
 * all of it has arrived. Until then its pieces wait outside the array.
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
 * Adds elements [elem, elem + n) of the array. src: these elements in src_dtype, aligned to it. Any thread; each
 * element is added once. Return: 0 or -ENOMEM.
 */
int groups_put(struct groups *groups, const struct groups_array *array, uint64_t elem, size_t n, const void *src,
               enum dtype src_dtype);
