/* SPDX-License-Identifier: Apache-2.0 */

/* Finds, opens and verifies checkpoints. */

#include "core/checkpoint/folder.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/base.h"

enum { READ_BYTES = HASH_BLOCK_BYTES };

_Static_assert((int)FOLDER_NAME_BYTES >= (int)sizeof("step-18446744073709551615"), "a name has room for any step");
_Static_assert((int)FOLDER_NAME_BYTES >= (int)sizeof("node4294967295.json"), "a name has room for any node");

/* ---- names --------------------------------------------------------------------------------------------- */

void folder_name(char *dst, uint64_t step)
{
    snprintf(dst, FOLDER_NAME_BYTES, "step-%08" PRIu64, step);
}

void folder_part_name(char *dst, unsigned node)
{
    snprintf(dst, FOLDER_NAME_BYTES, "node%u.json", node);
}

bool folder_parse_name(const char *name, uint64_t *step)
{
    char again[FOLDER_NAME_BYTES];

    if (sscanf(name, "step-%" SCNu64, step) != 1)
        return false;
    folder_name(again, *step);
    return strcmp(again, name) == 0;
}

/* ---- one checkpoint ------------------------------------------------------------------------------------ */

static int explain_errno(char *why, size_t why_size, const char *file, int r)
{
    if (r == -ELOOP || r == -ENOTDIR)
        snprintf(why, why_size, "%s is a link, or not what it should be: links are not followed", file);
    else
        snprintf(why, why_size, "%s: %s", file, strerror(-r));
    return r;
}

/* Opens a file. Return: a descriptor, or -errno, also if the file is not regular. */
static int open_regular(int dir, const char *name, uint64_t *n_bytes)
{
    /* O_NONBLOCK, because opening a pipe would block. */
    _cleanup_close_ int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return -ENOTDIR;
    *n_bytes = (uint64_t)st.st_size;
    return steal_fd(&fd);
}

int folder_read(int fd, void *dst, uint64_t n_bytes, uint64_t offset)
{
    uint8_t *at = dst;

    while (n_bytes > 0) {
        ssize_t n = pread(fd, at, n_bytes, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        at += n;
        offset += (uint64_t)n;
        n_bytes -= (uint64_t)n;
    }
    return 0;
}

static int read_description(int checkpoint, const char *name, struct description *out, char *why, size_t why_size)
{
    uint64_t n_bytes = 0;
    _cleanup_close_ int fd = open_regular(checkpoint, name, &n_bytes);
    _cleanup_free_ char *text = NULL;
    char what[FOLDER_WHY_BYTES / 2];
    int r = fd < 0 ? fd : 0;

    if (r == 0 && n_bytes > DESCRIPTION_MAX_BYTES)
        r = -EFBIG;
    if (r == 0) {
        text = malloc(n_bytes + 1);
        r = text ? folder_read(fd, text, n_bytes, 0) : -ENOMEM;
    }
    if (r < 0)
        return explain_errno(why, why_size, name, r);
    text[n_bytes] = '\0';
    r = description_parse(out, text, n_bytes, what, sizeof(what));
    if (r < 0)
        snprintf(why, why_size, "%s: %s", name, what);
    return r;
}

int folder_open_file(int checkpoint, const struct description_file *file, char *why, size_t why_size)
{
    uint64_t n_bytes = 0;
    _cleanup_close_ int fd = open_regular(checkpoint, file->name, &n_bytes);

    if (fd < 0)
        return explain_errno(why, why_size, file->name, fd);
    if (n_bytes != file->n_bytes) {
        snprintf(why, why_size, "%s has %" PRIu64 " bytes instead of %" PRIu64, file->name, n_bytes, file->n_bytes);
        return -EIO;
    }
    return steal_fd(&fd);
}

int folder_open_part(int checkpoint, const char *name, struct description *out, char *why, size_t why_size)
{
    int r;

    *out = (struct description){0};
    r = read_description(checkpoint, name, out, why, why_size);
    for (size_t i = 0; r == 0 && i < out->n_files; i++) {
        _cleanup_close_ int file = folder_open_file(checkpoint, &out->files[i], why, why_size);

        r = MIN(file, 0);
    }
    if (r < 0)
        description_deinit(out);
    return r;
}

int folder_open(int dir, const char *name, struct description *out, char *why, size_t why_size)
{
    _cleanup_close_ int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    int r;

    *out = (struct description){0};
    if (fd < 0)
        return explain_errno(why, why_size, name, -errno);
    r = folder_open_part(fd, CHECKPOINT_DESCRIPTION, out, why, why_size);
    return r < 0 ? r : steal_fd(&fd);
}

/* ---- all of them --------------------------------------------------------------------------------------- */

static void read_entry(int dir, const char *name, struct folder_entry *entry)
{
    struct description d;
    struct stat st;
    _cleanup_close_ int fd = folder_open(dir, name, &d, entry->why, sizeof(entry->why));

    if (fd < 0)
        return;
    entry->whole = d.step == entry->step;
    if (!entry->whole)
        snprintf(entry->why, sizeof(entry->why), CHECKPOINT_DESCRIPTION " is of step %" PRIu64, d.step);
    entry->world_size = d.world_size;
    for (size_t i = 0; i < d.n_files; i++)
        entry->n_bytes += d.files[i].n_bytes;
    if (fstatat(fd, CHECKPOINT_DESCRIPTION, &st, AT_SYMLINK_NOFOLLOW) == 0)
        entry->written_s = (uint64_t)st.st_mtime;
    description_deinit(&d);
}

static int compare_steps(const void *a, const void *b)
{
    uint64_t x = ((const struct folder_entry *)a)->step, y = ((const struct folder_entry *)b)->step;

    return x > y ? -1 : x < y;
}

static int add_entry(struct folder_list *list, int dir, const char *name, uint64_t step)
{
    struct folder_entry *entries = reallocarray(list->entries, list->n + 1, sizeof(*entries));

    if (!entries)
        return -ENOMEM;
    list->entries = entries;
    entries[list->n] = (struct folder_entry){.step = step};
    read_entry(dir, name, &entries[list->n++]);
    return 0;
}

int folder_list(int dir, struct folder_list *out)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *entry;
    uint64_t step;

    *out = (struct folder_list){0};
    if (!stream) {
        r = -errno;
        if (fd >= 0)
            close(fd);
        return r;
    }
    while (r == 0 && (errno = 0, entry = readdir(stream)))
        if (folder_parse_name(entry->d_name, &step))
            r = add_entry(out, dir, entry->d_name, step);
    if (r == 0)
        r = -errno;
    closedir(stream);
    if (r < 0)
        folder_list_deinit(out);
    else if (out->n > 0)
        qsort(out->entries, out->n, sizeof(*out->entries), compare_steps);
    return r;
}

void folder_list_deinit(struct folder_list *list)
{
    free(list->entries);
    *list = (struct folder_list){0};
}

/* ---- bytes --------------------------------------------------------------------------------------------- */

struct verification {
    const struct folder_verifier *verifier;
    uint64_t n_done, n_bytes;
    int64_t n_bad;
    uint8_t *buffer;
};

static int verify_file(struct verification *v, int fd, const struct description_file *file)
{
    for (size_t block = 0; block < file->hash.n_blocks; block++) {
        uint64_t at = (uint64_t)block * HASH_BLOCK_BYTES, n = MIN(file->n_bytes - at, (uint64_t)READ_BYTES);
        int r = folder_read(fd, v->buffer, n, at);

        assert(at < file->n_bytes); /* description_parse() has compared the number of blocks with the size */
        if (r < 0)
            return r;
        if (hash_block(v->buffer, n) != file->hash.blocks[block]) {
            v->verifier->bad(v->verifier->userdata, file->name, block);
            v->n_bad++;
        }
        v->n_done += n;
        if (v->verifier->progress)
            v->verifier->progress(v->verifier->userdata, v->n_done, v->n_bytes);
    }
    return 0;
}

int64_t folder_verify(int checkpoint, const struct description *d, const struct folder_verifier *verifier, char *why,
                      size_t why_size)
{
    _cleanup_free_ uint8_t *buffer = malloc(READ_BYTES);
    struct verification v = {.verifier = verifier, .buffer = buffer};
    int r = buffer ? 0 : -ENOMEM;

    if (r < 0)
        return explain_errno(why, why_size, "memory", r);
    for (size_t i = 0; i < d->n_files; i++)
        v.n_bytes += d->files[i].n_bytes;
    for (size_t i = 0; r == 0 && i < d->n_files; i++) {
        _cleanup_close_ int fd = folder_open_file(checkpoint, &d->files[i], why, why_size);

        if (fd < 0)
            return fd;
        r = verify_file(&v, fd, &d->files[i]);
        if (r < 0)
            return explain_errno(why, why_size, d->files[i].name, r);
    }
    return v.n_bad;
}
