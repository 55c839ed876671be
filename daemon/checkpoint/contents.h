/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Plans the contents of a checkpoint's files before they are written: the tensors, their order, and the sources of
 * their bytes. If there are several nodes, each node writes the ranges that it owns. A range is cut into boxes (box.h):
 * its first box is in the first file of its kind, its second box in the second file, and so on. Node 0 writes the step
 * counts, and the frozen parameters unless the nodes have slices of them.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/box.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/tensors.h"
#include "daemon/memory/snapshot.h"

struct checkpoint_order;

/* Where the bytes of a tensor come from. */
enum contents_source {
    FROM_STATE, /* an array of the snapshot */
    FROM_ROUNDED_MASTER,
    FROM_MASTER24, /* the two arrays of a master with 24 bits */
    FROM_FROZEN,
    FROM_COUNT,
    FROM_BLOB,
};

struct contents_tensor {
    enum contents_source source;
    uint32_t index; /* number of the parameter, or with FROM_BLOB of the blob */
    enum snapshot_array array;
    bool comes_again;              /* a later tensor is read from the same array */
    uint64_t first_elem, end_elem; /* arrays: the tensor's range of the parameter's elements */
};

/* A file of tensors before it is written. `tensors` has the sources in the order of the header. */
struct contents_file {
    char name[TENSOR_FILE_BYTES];
    struct safetensors header;
    struct contents_tensor *tensors; /* owned */
    size_t capacity;
};

enum { CONTENTS_FILES = TENSOR_N_FILES * BOX_MAX };

struct contents {
    struct contents_file files[CONTENTS_FILES]; /* by kind; files without tensors are not written */
};

/* Return: 0, -ENOMEM, or a failure of safetensors_add(). The caller calls contents_deinit() in any case. */
int contents_plan(struct contents *contents, const struct checkpoint_order *order);
void contents_deinit(struct contents *contents);
