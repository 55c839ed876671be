/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The header of a safetensors file (huggingface/safetensors, format version of 2022): 8 bytes with its length, little
 * endian; JSON with each tensor's type, shape and place; then the bytes of all tensors, one after the other without
 * gaps. Pure: these functions neither read nor write files.
 *
 * To write a header, call safetensors_add() in the order of the tensors' bytes, then safetensors_header(). Tensors must
 * be aligned for their type, so those with larger elements come first.
 *
 * A file is *sharded* if its tensors are boxes (box.h) of larger tensors. __metadata__ says where each begins, in the
 * form of torch.distributed.checkpoint: DCP_SHARDING_INFO is JSON, {"NAME": {"saved_offsets": [0, 128]}} for all.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"

enum {
    SAFETENSORS_U8 = N_DTYPES, /* plain bytes */
    SAFETENSORS_OTHER,         /* a type that zerod does not use */
    SAFETENSORS_LENGTH_BYTES = 8,
    SAFETENSORS_MAX_HEADER_BYTES = 100 * 1000 * 1000, /* the reference implementation reads no larger header */
};

enum {
    SAFETENSORS_E_DUPLICATE = 1, /* the name is used already, or reserved by the format */
    SAFETENSORS_E_TOO_LARGE,     /* the header would be larger than readers accept */
    SAFETENSORS_E_INVALID,       /* not a safetensors file */
};

struct safetensors_tensor {
    char *name; /* owned; valid UTF-8 */
    int dtype;  /* enum dtype, or SAFETENSORS_* */
    uint32_t n_dims;
    uint64_t shape[LAYOUT_MAX_DIMS];
    uint64_t starts[LAYOUT_MAX_DIMS]; /* sharded: where the box begins in each dimension of the larger tensor; else 0 */
    uint64_t offset_bytes;            /* from the beginning of the file */
    uint64_t n_bytes;
};

struct safetensors {
    struct safetensors_tensor *tensors; /* n tensors, in the order of their bytes */
    size_t n, capacity;
    uint64_t file_bytes; /* size of the whole file */
    bool sharded;        /* the writer sets it before safetensors_header() */
    void *names;         /* a json-c object that maps names to indices */
};

void safetensors_deinit(struct safetensors *file);

/*
 * Adds a tensor. name: any text; bytes that are not UTF-8 become \xNN. dtype: enum dtype or SAFETENSORS_U8. starts:
 * NULL if all are 0. Return: 0, -ENOMEM, or SAFETENSORS_E_DUPLICATE.
 */
int safetensors_add(struct safetensors *file, const char *name, int dtype, const uint64_t *shape,
                    const uint64_t *starts, uint32_t n_dims);
/*
 * Makes the header, and sets the tensors' offsets. *bytes: length and header, *n_bytes in all, which the caller frees.
 * Return: 0, -ENOMEM, or SAFETENSORS_E_TOO_LARGE.
 */
int safetensors_header(struct safetensors *file, uint8_t **bytes, size_t *n_bytes);

/* bytes: the first SAFETENSORS_LENGTH_BYTES of a file. Return: the size in bytes of length and header; 0 if the file is
 * no safetensors file. */
uint64_t safetensors_header_bytes(const uint8_t *bytes, uint64_t file_bytes);
/*
 * Parses a header. n_bytes: from safetensors_header_bytes(). Return: 0; -ENOMEM; or SAFETENSORS_E_INVALID with a
 * message in why, without a full stop.
 */
int safetensors_parse(struct safetensors *out, const uint8_t *bytes, uint64_t n_bytes, uint64_t file_bytes, char *why,
                      size_t why_size);

/* Return: the tensor of that name, or NULL. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name);
/* Finds the last tensor that begins at or before the offset. Return: its index, or file->n if there is none. */
size_t safetensors_at(const struct safetensors *file, uint64_t offset_bytes);
