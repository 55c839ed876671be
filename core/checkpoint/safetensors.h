/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The header of a safetensors file (huggingface/safetensors, format version of 2022): 8 bytes with its length, little
 * endian; JSON that names each tensor's type, shape and place; then the bytes of all tensors, one after the other
 * without gaps. Pure: files are read and written elsewhere.
 *
 * Writing: safetensors_add() in the order in which the tensors' bytes follow, then safetensors_header(). Tensors must
 * be aligned for their type, so those with larger elements come first.
 *
 * A file is *sharded* if its tensors are boxes (box.h) of larger ones. Where they begin stands in __metadata__ as
 * torch.distributed.checkpoint has it: DCP_SHARDING_INFO is JSON, {"NAME": {"saved_offsets": [0, 128]}} for all of
 * them.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"

enum {
    SAFETENSORS_U8 = N_DTYPES, /* plain bytes */
    SAFETENSORS_OTHER,         /* a type that zerod has no use for */
    SAFETENSORS_LENGTH_BYTES = 8,
    SAFETENSORS_MAX_HEADER_BYTES = 100 * 1000 * 1000, /* the reference implementation reads no more */
};

enum {
    SAFETENSORS_E_DUPLICATE = 1, /* a tensor of that name is there already, or the format uses the name itself */
    SAFETENSORS_E_TOO_LARGE,     /* the header would be larger than readers take */
    SAFETENSORS_E_INVALID,       /* not such a file */
};

struct safetensors_tensor {
    char *name; /* owned; valid UTF-8 */
    int dtype;  /* enum dtype, or SAFETENSORS_* */
    uint32_t n_dims;
    uint64_t shape[LAYOUT_MAX_DIMS];
    uint64_t starts[LAYOUT_MAX_DIMS]; /* sharded: its first index in each dimension of the whole tensor; else 0 */
    uint64_t offset_bytes;            /* in the file */
    uint64_t n_bytes;
};

struct safetensors {
    struct safetensors_tensor *tensors; /* n, in the order of their bytes */
    size_t n, capacity;
    uint64_t file_bytes; /* in all */
    bool sharded;        /* before the header is made, the writer's to set */
    void *names;         /* json-c's: name to index */
};

void safetensors_deinit(struct safetensors *file);

/*
 * name: any text; bytes that are not UTF-8 become \xNN. dtype: enum dtype or SAFETENSORS_U8. starts: NULL, all of it
 * are 0. Return: 0, -ENOMEM, or SAFETENSORS_E_DUPLICATE.
 */
int safetensors_add(struct safetensors *file, const char *name, int dtype, const uint64_t *shape,
                    const uint64_t *starts, uint32_t n_dims);
/*
 * The tensors have places now. *bytes: length and header, the caller's; *n_bytes of them. Return: 0, -ENOMEM, or
 * SAFETENSORS_E_TOO_LARGE.
 */
int safetensors_header(struct safetensors *file, uint8_t **bytes, size_t *n_bytes);

/* How long length and header are, by the first SAFETENSORS_LENGTH_BYTES of a file. Return: 0: it is no such file. */
uint64_t safetensors_header_bytes(const uint8_t *bytes, uint64_t file_bytes);
/*
 * bytes: safetensors_header_bytes() of them. Return: 0; -ENOMEM; or SAFETENSORS_E_INVALID and a sentence without a full
 * stop.
 */
int safetensors_parse(struct safetensors *out, const uint8_t *bytes, uint64_t n_bytes, uint64_t file_bytes, char *why,
                      size_t why_size);

/* Return: NULL, there is none. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name);
/* The last tensor that does not begin behind the offset. Return: its index, or file->n: there is none. */
size_t safetensors_at(const struct safetensors *file, uint64_t offset_bytes);
