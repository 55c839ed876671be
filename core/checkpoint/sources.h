/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The files of tensors of an open checkpoint, as many as nodes have written, and their headers. Other files are not
 * opened. The MiB in which headers lie are compared with their hashes.
 */

#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/description.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/tensors.h"

struct source {
    enum tensor_file kind;
    const struct description_file *file; /* the description's */
    int fd;
    struct safetensors header;
};

struct sources {
    struct source *list; /* owned */
    size_t n;
};

/*
 * The description must outlive them. Return: 0; -EBADMSG or -EIO: bytes are wrong, or cannot be read; or -errno: there
 * is no model, or a header is wrong; and a sentence. Then, too, sources_deinit() is called.
 */
int sources_open(struct sources *sources, int folder, const struct description *d, char *why, size_t why_size);
void sources_deinit(struct sources *sources);

/* Return: the size of the block: a MiB, or the rest of the file. */
size_t source_block_bytes(const struct source *source, uint64_t block);
/* Compares its hash. r: of reading it. Return: 0; or -errno and a sentence. */
int source_check_block(const struct source *source, uint64_t block, const uint8_t *bytes, int r, char *why,
                       size_t why_size);
