/* SPDX-License-Identifier: Apache-2.0 */

/* Keeps the parameters that one rank declares, and compares them with those of another rank. */

#include "core/layout/manifest.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "core/base/base.h"

static void decl_deinit(struct layout_decl *decl)
{
    free((char *)decl->name);
    free((uint64_t *)decl->shape);
}

void manifest_deinit(struct manifest *manifest)
{
    for (uint32_t i = 0; i < manifest->n; i++)
        decl_deinit(&manifest->decls[i]);
    free(manifest->decls);
    *manifest = (struct manifest){0};
}

static int grow_decls(struct manifest *manifest)
{
    uint32_t capacity = MAX(manifest->capacity * 2, 64u);
    struct layout_decl *decls;

    assert(manifest->n <= manifest->capacity);
    if (manifest->n < manifest->capacity)
        return 0;
    decls = reallocarray(manifest->decls, capacity, sizeof(*decls));
    if (!decls)
        return -ENOMEM;
    manifest->decls = decls;
    manifest->capacity = capacity;
    return 0;
}

int manifest_add(struct manifest *manifest, const struct layout_decl *decl)
{
    _cleanup_free_ uint64_t *shape = NULL;
    _cleanup_free_ char *name = NULL;
    size_t shape_bytes, n_bytes;
    struct layout_decl *own;

    assert(decl->n_dims <= LAYOUT_MAX_DIMS); /* the wire refuses more dimensions */
    assert(manifest->n_bytes <= MANIFEST_MAX_BYTES);
    if (manifest->n == MANIFEST_MAX_PARAMS)
        return MANIFEST_E_FULL;
    if (!size_mul(&shape_bytes, decl->n_dims, sizeof(*shape)) || !size_add(&n_bytes, shape_bytes, decl->name_len) ||
        !size_add(&n_bytes, n_bytes, sizeof(*decl) + 1) || n_bytes > MANIFEST_MAX_BYTES - manifest->n_bytes)
        return MANIFEST_E_FULL;

    name = malloc(decl->name_len + 1);
    shape = shape_bytes ? malloc(shape_bytes) : NULL;
    if (!name || (shape_bytes && !shape) || grow_decls(manifest) < 0)
        return -ENOMEM;
    if (decl->name_len)
        memcpy(name, decl->name, decl->name_len);
    name[decl->name_len] = '\0';
    if (shape_bytes)
        memcpy(shape, decl->shape, shape_bytes);

    own = &manifest->decls[manifest->n++];
    *own = *decl;
    own->name = steal_ptr(name);
    own->shape = steal_ptr(shape);
    manifest->n_bytes += n_bytes;
    return 0;
}

/* Writes the value as little-endian on every machine, so that nodes agree. Return: the end of the written bytes. */
static uint8_t *put_u64(uint8_t *at, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        *at++ = (uint8_t)(value >> 8 * i);
    return at;
}

/* Each hash seeds the next hash, and lengths precede their data, so the digest depends on order and boundaries. */
uint64_t manifest_digest(const struct manifest *manifest)
{
    uint64_t digest = 0;

    for (uint32_t p = 0; p < manifest->n; p++) {
        const struct layout_decl *decl = &manifest->decls[p];
        uint8_t fields[(6 + LAYOUT_MAX_DIMS) * sizeof(uint64_t)], *at = fields;

        assert(decl->n_dims <= LAYOUT_MAX_DIMS);
        at = put_u64(at, decl->name_len);
        at = put_u64(at, decl->dtype);
        at = put_u64(at, decl->grad_dtype);
        at = put_u64(at, decl->group);
        at = put_u64(at, decl->trainable + 2 * decl->muon); /* without Muon, equal to the digest of earlier versions */
        at = put_u64(at, decl->n_dims);
        for (uint32_t i = 0; i < decl->n_dims; i++)
            at = put_u64(at, decl->shape[i]);
        digest = XXH3_64bits_withSeed(fields, (size_t)(at - fields), digest);
        digest = XXH3_64bits_withSeed(decl->name, decl->name_len, digest);
    }
    return digest;
}

bool manifest_entry_equal(const struct layout_decl *a, const struct layout_decl *b)
{
    return a->name_len == b->name_len && (a->name_len == 0 || memcmp(a->name, b->name, a->name_len) == 0) &&
           a->dtype == b->dtype && a->grad_dtype == b->grad_dtype && a->group == b->group &&
           a->trainable == b->trainable && a->muon == b->muon && a->n_dims == b->n_dims &&
           (a->n_dims == 0 || memcmp(a->shape, b->shape, a->n_dims * sizeof(*a->shape)) == 0);
}

uint32_t manifest_first_difference(const struct manifest *a, const struct manifest *b)
{
    uint32_t n = MIN(a->n, b->n);

    for (uint32_t i = 0; i < n; i++)
        if (!manifest_entry_equal(&a->decls[i], &b->decls[i]))
            return i;
    return a->n == b->n ? UINT32_MAX : n;
}

static const char *dtype_print(enum dtype dtype)
{
    static const char *const names[] = {[DTYPE_F32] = "fp32", [DTYPE_BF16] = "bf16", [DTYPE_F16] = "fp16"};

    return (size_t)dtype < ARRAY_SIZE(names) ? names[dtype] : "unknown type";
}

/* Appends the part of the text that fits, NUL-terminated. */
static void append_text(char *dst, size_t size, size_t *at, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void append_text(char *dst, size_t size, size_t *at, const char *format, ...)
{
    va_list args;
    int n;

    if (*at + 1 >= size)
        return;
    va_start(args, format);
    n = vsnprintf(dst + *at, size - *at, format, args);
    va_end(args);
    if (n > 0)
        *at = MIN(*at + (size_t)n, size - 1);
}

void manifest_print_entry(char *dst, size_t size, const struct layout_decl *decl)
{
    char form[512];
    size_t n = 0, at = 0;

    /* The form in brackets is printed first, because it is never cut. The name gets the remaining room. */
    append_text(form, sizeof(form), &n, " [");
    for (uint32_t i = 0; i < decl->n_dims && i < LAYOUT_MAX_DIMS; i++)
        append_text(form, sizeof(form), &n, "%s%" PRIu64, i ? ", " : "", decl->shape[i]);
    append_text(form, sizeof(form), &n, "] %s, gradient %s, group %" PRIu32 ", %s%s", dtype_print(decl->dtype),
                dtype_print(decl->grad_dtype), decl->group, decl->trainable ? "trainable" : "frozen",
                decl->muon ? ", by Muon" : "");
    if (size == 0)
        return;
    dst[0] = '\0';
    if (size > n + 1) {
        layout_print_name(dst, size - n, decl->name, decl->name_len);
        at = strlen(dst);
    }
    append_text(dst, size, &at, "%s", form);
}
