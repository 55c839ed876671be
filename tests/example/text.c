/* SPDX-License-Identifier: Apache-2.0 */

/* The text that the example learns, and batches of it. */

#include "tests/example/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/example/random.h"

static int by_bytes(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* Appends all bytes of the file. */
static int text_append(struct text *t, int fd)
{
    for (;;) {
        const size_t n_more = 1 << 16;
        uint8_t *grown = realloc(t->chars, t->n_chars + n_more);
        ssize_t n;

        if (!grown)
            return -ENOMEM;
        t->chars = grown;
        n = read(fd, t->chars + t->n_chars, n_more);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            return 0;
        for (ssize_t i = 0; i < n; i++)
            if (t->chars[t->n_chars + i] > TEXT_FOREIGN)
                t->chars[t->n_chars + i] = TEXT_FOREIGN;
        t->n_chars += n;
    }
}

/* Appends a regular file. Other files add nothing. */
static int text_append_file(struct text *t, int folder, const char *name)
{
    struct stat st;
    int fd, r;

    if (fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return 0;
    fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    r = text_append(t, fd);
    close(fd);
    return r;
}

static int text_load_entries(struct text *t, const char *folder, int folder_fd, struct dirent **entries, int n)
{
    int r = 0;

    for (int i = 0; i < n && r == 0; i++) {
        r = text_append_file(t, folder_fd, entries[i]->d_name);
        if (r < 0)
            fprintf(stderr, "text: %s/%s: %s\n", folder, entries[i]->d_name, strerror(-r));
    }
    if (r == 0 && t->n_chars == 0) {
        fprintf(stderr, "text: %s holds no text\n", folder);
        r = -ENODATA;
    }
    return r;
}

int text_load(struct text *t, const char *folder)
{
    struct dirent **entries = NULL;
    int fd, n, r;

    *t = (struct text){0};
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    n = fd < 0 ? -1 : scandirat(fd, ".", &entries, NULL, by_bytes);
    if (n < 0) {
        r = -errno;
        fprintf(stderr, "text: %s: %s\n", folder, strerror(-r));
    } else {
        r = text_load_entries(t, folder, fd, entries, n);
    }
    for (int i = 0; i < n; i++)
        free(entries[i]);
    free(entries);
    if (fd >= 0)
        close(fd);
    if (r < 0)
        text_deinit(t);
    return r;
}

void text_deinit(struct text *t)
{
    free(t->chars);
    *t = (struct text){0};
}

int text_fill(const struct text *t, const struct text_batch *b, uint8_t *tokens, uint8_t *targets)
{
    uint64_t key = random_mix(b->seed);

    if (t->n_chars <= b->seq_len) {
        fprintf(stderr, "text: %zu characters are too few for sequences of %u\n", t->n_chars, b->seq_len);
        return -ENODATA;
    }
    key = random_mix(key ^ b->step);
    key = random_mix(key ^ b->micro_batch);
    key = random_mix(key ^ b->rank);
    for (unsigned s = 0; s < b->n_seqs; s++) {
        size_t at = (size_t)(random_unit(key, s) * (double)(t->n_chars - b->seq_len));

        memcpy(tokens + (size_t)s * b->seq_len, t->chars + at, b->seq_len);
        memcpy(targets + (size_t)s * b->seq_len, t->chars + at + 1, b->seq_len);
    }
    return 0;
}
