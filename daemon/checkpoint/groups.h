/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * 8-bit moments (kernels/group8.h) out of files, whose elements come in pieces that end anywhere: at the end of a MiB, of
 * a row, of what another node wrote. The elements of a group share an exponent, so a group is stored when all of it has
 * come; what came first waits beside the array.
 */

#include <pthread.h>
#include <stdint.h>

#include "kernels/dtype.h"

struct waiting_group;

struct groups {
    pthread_mutex_t lock;
    struct waiting_group *first;
};

/* An array of n_elems, of a grouped type. */
struct groups_array {
    uint8_t *at;
    enum dtype dtype;
    uint64_t n_elems;
};

void groups_init(struct groups *groups);
void groups_deinit(struct groups *groups);

/*
 * Elements [elem, elem + n) of the array have come; src: they, of src_dtype, aligned to it. Any thread; each element
 * comes once. Return: 0 or -ENOMEM.
 */
int groups_put(struct groups *groups, const struct groups_array *array, uint64_t elem, size_t n, const void *src,
               enum dtype src_dtype);
