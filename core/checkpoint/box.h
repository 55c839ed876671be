/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A node owns a range of a tensor's elements, counted in row-major order. Readers of sharded files know boxes only: an
 * offset and a size in each dimension. So the range is cut into boxes whose elements follow one another: from the
 * inside out, first those that complete a row, a plane and so on, then whole ones, then what begins the next. Pure.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"

enum { BOX_MAX = 2 * LAYOUT_MAX_DIMS - 1 }; /* of one range: two for each dimension, but one for the outermost */

struct box {
    uint64_t offset[LAYOUT_MAX_DIMS], shape[LAYOUT_MAX_DIMS]; /* elements */
    uint64_t first_elem, n_elems;                             /* the range that it is */
};

/*
 * Elements [first_elem, end_elem) of a tensor, in order. A tensor without dimensions has one element; an empty range,
 * no box. Return: how many boxes, at most 2 x n_dims - 1, or 1.
 */
size_t box_cut(const uint64_t *shape, uint32_t n_dims, uint64_t first_elem, uint64_t end_elem, struct box *boxes);

/* Offset and shape are given. Return: whether the box lies in the tensor and is a range, which is set then. */
bool box_is_range(const uint64_t *shape, uint32_t n_dims, struct box *box);
