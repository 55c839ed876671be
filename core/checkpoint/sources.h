/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Opens a checkpoint's files of tensors, from all nodes, and reads their headers. Does not open other files. Compares
 * each MiB that contains a part of a header with its hash.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/description.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/tensors.h"

struct source {
    enum tensor_file kind;
    const struct description_file *file; /* an element of description.files */
    int fd;
    struct safetensors header;
};

struct sources {
    struct source *list; /* owned */
    size_t n;
};

/*
 * Call sources_deinit() even after a failure. d must outlive the sources. Return: 0; -EBADMSG or -EIO if bytes are
 * wrong or cannot be read; or another -errno if there is no model, or a header is wrong. why: a message.
 */
int sources_open(struct sources *sources, int folder, const struct description *d, char *why, size_t why_size);
void sources_deinit(struct sources *sources);

/* Return: the size of the block: a MiB, or the rest of the file. */
size_t source_block_bytes(const struct source *source, uint64_t block);
/* Compares a block with its hash. r: the result of reading the block. Return: 0, or -errno with a message in why. */
int source_check_block(const struct source *source, uint64_t block, const uint8_t *bytes, int r, char *why,
                       size_t why_size);
