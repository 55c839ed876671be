/* SPDX-License-Identifier: Apache-2.0 */

/* The loader reads a file or a text into a configuration. */

#include "core/config/config.h"

#include "core/base/base.h"
#include "core/config/config-deepspeed.h"
#include "core/config/config-read.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

DEFINE_CLEANUP(struct config *, config_free);

int config_load_string(struct config **out, const struct config_source *source, struct config_problems *problems)
{
    _cleanup_(config_freep) struct config *config = calloc(1, sizeof(*config));
    int r;

    *out = NULL;
    if (!config)
        return -ENOMEM;
    r = config_read(config, source, problems);
    if (r)
        return r;
    *out = steal_ptr(config);
    return 0;
}

/* Reads at most one byte more than a file may have, so that the parser can report a file that is too long. */
static int read_file(const char *path, char **text, size_t *n_bytes)
{
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    _cleanup_free_ char *buffer = NULL;
    struct stat st;
    size_t n = 0;

    if (fd < 0 || fstat(fd, &st) < 0)
        return -errno;
    if (S_ISDIR(st.st_mode))
        return -EISDIR;
    buffer = malloc(CONFIG_MAX_BYTES + 1);
    if (!buffer)
        return -ENOMEM;
    while (n < CONFIG_MAX_BYTES + 1) {
        ssize_t got = read(fd, buffer + n, CONFIG_MAX_BYTES + 1 - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            break;
        n += (size_t)got;
    }
    *text = steal_ptr(buffer);
    *n_bytes = n;
    return 0;
}

/*
 * Reads the source's file. The caller frees *text. Return: 0, -ENOMEM, or CONFIG_E_INVALID after adding a problem of
 * the whole file.
 */
static int read_source_file(struct config_source *source, char **text, struct config_problems *problems)
{
    struct config_spot nowhere = {0};
    int r = read_file(source->text.name, text, &source->text.n_bytes);

    if (r == -ENOMEM)
        return r;
    if (r < 0) {
        config_problems_add(problems, &source->text, &nowhere, NULL, "cannot be read: %s", strerror(-r));
        return problems->r < 0 ? problems->r : CONFIG_E_INVALID;
    }
    source->text.text = *text;
    return 0;
}

/*
 * Finds the named file from the working folder, as accelerate does, or else in the folder of the file that names it,
 * because a daemon may have another working folder.
 */
static int find_named(char **found, const char *named, const char *by)
{
    const char *slash = strrchr(by, '/');

    *found = NULL;
    if (*named == '/' || access(named, R_OK) == 0 || !slash)
        *found = strdup(named);
    else if (asprintf(found, "%.*s%s", (int)(slash + 1 - by), by, named) < 0)
        *found = NULL;
    return *found ? 0 : -ENOMEM;
}

/* Reads the configuration from the named file, and the number of ranks from accelerate's file, the cover. Reports
 * problems of both files. */
static int load_named(struct config **out, const struct config_source *cover, const char *named,
                      struct config_problems *problems)
{
    _cleanup_(config_freep) struct config *ranks = calloc(1, sizeof(*ranks));
    _cleanup_free_ char *path = NULL, *text = NULL;
    struct config_source source = {.given = cover->given};
    int r_cover, r;

    if (!ranks || find_named(&path, named, cover->text.name) < 0)
        return -ENOMEM;
    r_cover = config_read_cover(ranks, cover, problems);
    if (r_cover < 0)
        return r_cover;
    source.text.name = path;
    if (source.given.ranks == 0)
        source.given.ranks = ranks->world.size;
    r = read_source_file(&source, &text, problems);
    if (r == 0)
        r = config_load_string(out, &source, problems);
    if (r == 0 && r_cover > 0) {
        config_free(*out);
        *out = NULL;
    }
    return r ? r : r_cover;
}

int config_load(struct config **out, const char *path, const struct config_given *given,
                struct config_problems *problems)
{
    _cleanup_free_ char *text = NULL, *named = NULL;
    struct config_source source = {.text = {.name = path}, .given = given ? *given : (struct config_given){0}};
    int r;

    *out = NULL;
    r = read_source_file(&source, &text, problems);
    if (r == 0)
        r = deepspeed_named_file(&named, &source.text);
    if (r)
        return r;
    return named ? load_named(out, &source, named, problems) : config_load_string(out, &source, problems);
}
