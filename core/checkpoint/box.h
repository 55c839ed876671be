/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A node owns a range of a tensor's elements, counted in row-major order. Readers of sharded files know only boxes: an
 * offset and a size in each dimension. So the range is cut into consecutive boxes: first those that complete a begun
 * row, plane and so on; then those of complete ones; then those that begin the last ones. Pure.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"

enum { BOX_MAX = 2 * LAYOUT_MAX_DIMS - 1 }; /* boxes of one range: two for each dimension, one for the outermost */

struct box {
    uint64_t offset[LAYOUT_MAX_DIMS], shape[LAYOUT_MAX_DIMS]; /* elements */
    uint64_t first_elem, n_elems;                             /* the range of elements in the box */
};

/*
 * Cuts elements [first_elem, end_elem) of a tensor into boxes, in order. A tensor without dimensions has one element.
 * An empty range has no box. Return: the number of boxes, at most 2 x n_dims - 1, or 1.
 */
size_t box_cut(const uint64_t *shape, uint32_t n_dims, uint64_t first_elem, uint64_t end_elem, struct box *boxes);

/* Finds the range of a box whose offset and shape are given. Return: true if the box is inside the tensor, and its
 * elements are consecutive. */
bool box_is_range(const uint64_t *shape, uint32_t n_dims, struct box *box);
