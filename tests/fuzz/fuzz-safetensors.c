/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any bytes as the header of a safetensors file: four bytes with the size of the data behind it, little endian, then
 * the JSON. If the header is read, its tensors must fill the data, and must be found by name. If zerod writes all their
 * types, the tensors are written, and must read back the same.
 */

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/checkpoint/safetensors.h"

enum { SIZE_BYTES = 4, MAX_BYTES = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int parse(struct safetensors *out, const uint8_t *text, size_t n_text, uint64_t n_data)
{
    uint64_t n_bytes = SAFETENSORS_LENGTH_BYTES + n_text;
    _cleanup_free_ uint8_t *bytes = malloc(n_bytes);
    char why[256] = "";
    int r;

    for (unsigned i = 0; i < SAFETENSORS_LENGTH_BYTES; i++)
        bytes[i] = (uint8_t)((uint64_t)n_text >> 8 * i);
    memcpy(bytes + SAFETENSORS_LENGTH_BYTES, text, n_text);
    assert(safetensors_header_bytes(bytes, n_bytes + n_data) == n_bytes);
    r = safetensors_parse(out, bytes, n_bytes, n_bytes + n_data, why, sizeof(why));
    assert(r == 0 ? !*why : r == SAFETENSORS_E_INVALID && *why);
    return r;
}

static void check_places(const struct safetensors *file, uint64_t data_at)
{
    uint64_t end = data_at;

    for (size_t i = 0; i < file->n; i++) {
        const struct safetensors_tensor *tensor = &file->tensors[i];

        assert(tensor->offset_bytes == end && tensor->n_dims <= LAYOUT_MAX_DIMS);
        assert(safetensors_find(file, tensor->name) == tensor);
        assert(tensor->n_bytes == 0 || safetensors_at(file, end) == i);
        assert(tensor->n_bytes == 0 || safetensors_at(file, end + tensor->n_bytes - 1) == i);
        end += tensor->n_bytes;
    }
    assert(end == file->file_bytes);
}

static bool is_ours(const struct safetensors *file)
{
    for (size_t i = 0; i < file->n; i++)
        if (file->tensors[i].dtype == SAFETENSORS_OTHER)
            return false;
    return true;
}

static void check_again(const struct safetensors *file)
{
    struct safetensors written = {.sharded = file->sharded}, again;
    uint8_t *bytes = NULL;
    size_t n = 0;
    int r = 0;

    for (size_t i = 0; r == 0 && i < file->n; i++) {
        const struct safetensors_tensor *t = &file->tensors[i];

        r = safetensors_add(&written, t->name, t->dtype, t->shape, t->starts, t->n_dims);
    }
    assert(r == 0);
    r = safetensors_header(&written, &bytes, &n);
    assert(r == 0);
    r = parse(&again, bytes + SAFETENSORS_LENGTH_BYTES, n - SAFETENSORS_LENGTH_BYTES, written.file_bytes - n);
    assert(r == 0 && again.n == file->n && again.sharded == file->sharded);
    check_places(&again, n);
    for (size_t i = 0; i < file->n; i++) {
        const struct safetensors_tensor *a = &file->tensors[i], *b = safetensors_find(&again, a->name);

        assert(b && a->dtype == b->dtype && a->n_dims == b->n_dims && a->n_bytes == b->n_bytes);
        assert(memcmp(a->shape, b->shape, sizeof(a->shape)) == 0);
        assert(memcmp(a->starts, b->starts, sizeof(a->starts)) == 0);
    }
    safetensors_deinit(&again);
    safetensors_deinit(&written);
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors file;
    uint32_t n_data;

    if (size < SIZE_BYTES || size > MAX_BYTES)
        return 0;
    memcpy(&n_data, data, sizeof(n_data));
    if (size >= SIZE_BYTES + SAFETENSORS_LENGTH_BYTES)
        (void)safetensors_header_bytes(data + SIZE_BYTES, n_data);
    if (parse(&file, data + SIZE_BYTES, size - SIZE_BYTES, n_data) != 0)
        return 0;
    check_places(&file, SAFETENSORS_LENGTH_BYTES + size - SIZE_BYTES);
    if (is_ours(&file))
        check_again(&file);
    safetensors_deinit(&file);
    return 0;
}
