/* SPDX-License-Identifier: Apache-2.0 */

/* Cuts ranges of a tensor's elements into boxes (box.h). */

#include "core/checkpoint/box.h"

#include <assert.h>
#include <string.h>

#include "core/base/base.h"

/* Computes strides[d], the number of elements from one index of dimension d to the next. */
static void measure(const uint64_t *shape, uint32_t n_dims, uint64_t *strides)
{
    uint64_t n = 1;

    assert(n_dims <= LAYOUT_MAX_DIMS);
    for (uint32_t d = n_dims; d-- > 0;) {
        strides[d] = n;
        n *= shape[d];
    }
}

/* Makes the box with one index in each dimension before d, n indices in d, and all indices in later dimensions. */
static void make_box(struct box *box, const uint64_t *shape, uint32_t n_dims, const uint64_t *strides, uint32_t d,
                     uint64_t first_elem, uint64_t n)
{
    uint64_t rest = first_elem;

    *box = (struct box){.first_elem = first_elem, .n_elems = n_dims > 0 ? n * strides[d] : 1};
    for (uint32_t i = 0; i < n_dims; i++) {
        box->offset[i] = rest / strides[i];
        rest %= strides[i];
        box->shape[i] = i < d ? 1 : i == d ? n : shape[i];
    }
}

size_t box_cut(const uint64_t *shape, uint32_t n_dims, uint64_t first_elem, uint64_t end_elem, struct box *boxes)
{
    uint64_t strides[LAYOUT_MAX_DIMS] = {0}, at = first_elem;
    size_t n_boxes = 0;

    if (first_elem >= end_elem)
        return 0;
    measure(shape, n_dims, strides);
    assert(end_elem <= (n_dims > 0 ? strides[0] * shape[0] : 1));
    if (n_dims == 0)
        make_box(&boxes[n_boxes++], shape, 0, strides, 0, 0, 1);
    while (n_dims > 0 && at < end_elem) {
        uint32_t d = n_dims - 1;
        uint64_t n;

        /* Finds the outermost dimension that has a complete index from `at` on within the range. */
        while (d > 0 && at % strides[d - 1] == 0 && end_elem - at >= strides[d - 1])
            d--;
        n = (end_elem - at) / strides[d];
        if (d > 0)
            n = MIN(n, shape[d] - at / strides[d] % shape[d]);
        assert(n > 0);
        assert(n_boxes < BOX_MAX);
        make_box(&boxes[n_boxes++], shape, n_dims, strides, d, at, n);
        at += n * strides[d];
    }
    return n_boxes;
}

bool box_is_range(const uint64_t *shape, uint32_t n_dims, struct box *box)
{
    uint64_t strides[LAYOUT_MAX_DIMS];
    bool whole = false; /* all later dimensions must be complete */

    measure(shape, n_dims, strides);
    box->first_elem = 0;
    box->n_elems = 1;
    for (uint32_t d = 0; d < n_dims; d++) {
        if (box->offset[d] > shape[d] || box->shape[d] > shape[d] - box->offset[d] ||
            (whole && box->shape[d] != shape[d]))
            return false;
        whole |= box->shape[d] != 1;
        box->first_elem += box->offset[d] * strides[d];
        box->n_elems *= box->shape[d];
    }
    return true;
}
