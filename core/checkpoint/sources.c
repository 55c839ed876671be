/* SPDX-License-Identifier: Apache-2.0 */

/* Opens the files of tensors of a checkpoint (sources.h). */

#include "core/checkpoint/sources.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/base.h"
#include "core/checkpoint/folder.h"

/* The buffer for a message. */
struct words {
    char *why;
    size_t size;
};

static int fail(const struct words *words, int r, const char *format, ...) __attribute__((format(printf, 3, 4)));

static int fail(const struct words *words, int r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(words->why, words->size, format, args);
    va_end(args);
    return r;
}

/* ---- headers ------------------------------------------------------------------------------------------- */

size_t source_block_bytes(const struct source *source, uint64_t block)
{
    assert(block * HASH_BLOCK_BYTES <= source->file->n_bytes);
    return MIN(source->file->n_bytes - block * HASH_BLOCK_BYTES, (uint64_t)HASH_BLOCK_BYTES);
}

int source_check_block(const struct source *source, uint64_t block, const uint8_t *bytes, int r, char *why,
                       size_t why_size)
{
    const struct words words = {why, why_size};

    assert(block < source->file->hash.n_blocks);
    if (r < 0)
        return fail(&words, r, "%s: %s", source->file->name, strerror(-r));
    if (hash_block(bytes, source_block_bytes(source, block)) != source->file->hash.blocks[block])
        return fail(&words, -EBADMSG, "%s: the MiB from byte %" PRIu64 " is not as it was written", source->file->name,
                    block * HASH_BLOCK_BYTES);
    return 0;
}

static int read_block(const struct source *source, uint64_t block, uint8_t *dst, const struct words *words)
{
    int r = folder_read(source->fd, dst, source_block_bytes(source, block), block * HASH_BLOCK_BYTES);

    return source_check_block(source, block, dst, r, words->why, words->size);
}

/* Reads the blocks that contain the header. *n: size of length and header. Return: the blocks' bytes, which the caller
 * frees; or NULL after setting *r. */
static uint8_t *read_header_bytes(const struct source *source, uint64_t *n, int *r, const struct words *words)
{
    uint8_t *bytes = calloc(1, MAX(source_block_bytes(source, 0), (size_t)SAFETENSORS_LENGTH_BYTES)), *more;

    *n = 0;
    *r = !bytes                      ? fail(words, -ENOMEM, "no memory")
         : source->file->n_bytes > 0 ? read_block(source, 0, bytes, words)
                                     : 0;
    if (*r == 0) {
        *n = safetensors_header_bytes(bytes, source->file->n_bytes);
        if (*n == 0)
            *r = fail(words, -EINVAL, "%s is no safetensors file", source->file->name);
    }
    if (*r == 0 && *n > HASH_BLOCK_BYTES) {
        more = realloc(bytes, round_up(*n, HASH_BLOCK_BYTES));
        if (!more)
            *r = fail(words, -ENOMEM, "no memory");
        bytes = more ? more : bytes;
    }
    for (uint64_t block = 1; *r == 0 && block * HASH_BLOCK_BYTES < *n; block++)
        *r = read_block(source, block, bytes + block * HASH_BLOCK_BYTES, words);
    if (*r == 0)
        return bytes;
    free(bytes);
    return NULL;
}

static int read_header(struct source *source, const struct words *words)
{
    char what[FOLDER_WHY_BYTES / 2];
    uint64_t n;
    int r;
    _cleanup_free_ uint8_t *bytes = read_header_bytes(source, &n, &r, words);

    if (!bytes)
        return r;
    r = safetensors_parse(&source->header, bytes, n, source->file->n_bytes, what, sizeof(what));
    if (r == SAFETENSORS_E_INVALID)
        return fail(words, -EINVAL, "%s: %s", source->file->name, what);
    return r < 0 ? fail(words, r, "no memory") : 0;
}

/* ---- opening ------------------------------------------------------------------------------------------- */

static int open_source(struct sources *sources, int folder, enum tensor_file kind, const struct description_file *file,
                       const struct words *words)
{
    struct source *source = &sources->list[sources->n++];

    *source = (struct source){.kind = kind, .file = file};
    source->fd = folder_open_file(folder, file, words->why, words->size);
    return source->fd < 0 ? source->fd : read_header(source, words);
}

static bool has_model(const struct description *d)
{
    for (size_t i = 0; i < d->n_files; i++)
        if (tensor_file_kind(d->files[i].name) == TENSOR_MODEL)
            return true;
    return false;
}

int sources_open(struct sources *sources, int folder, const struct description *d, char *why, size_t why_size)
{
    const struct words words = {why, why_size};
    char model[TENSOR_FILE_BYTES];
    int r = 0;

    *sources = (struct sources){0};
    if (!has_model(d)) {
        tensor_file_name(model, TENSOR_MODEL, -1, 0);
        return fail(&words, -EINVAL, "it has no %s", model);
    }
    sources->list = calloc(d->n_files, sizeof(*sources->list));
    if (!sources->list)
        return fail(&words, -ENOMEM, "no memory");
    for (size_t i = 0; r == 0 && i < d->n_files; i++) {
        enum tensor_file kind = tensor_file_kind(d->files[i].name);

        assert(sources->n <= i); /* the list has room for all files of the description */
        if (kind != TENSOR_N_FILES)
            r = open_source(sources, folder, kind, &d->files[i], &words);
    }
    return r;
}

void sources_deinit(struct sources *sources)
{
    for (size_t i = 0; i < sources->n; i++) {
        safetensors_deinit(&sources->list[i].header);
        closep(&sources->list[i].fd);
    }
    free(sources->list);
    *sources = (struct sources){0};
}
