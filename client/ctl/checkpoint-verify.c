/* SPDX-License-Identifier: Apache-2.0 */

/* `zerodctl checkpoint verify`: reads all bytes of checkpoints. Reports the bytes that differ from the written ones,
 * and other reasons for which a load would fail. */

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include <json-c/json.h>

#include "client/ctl/ask.h"
#include "client/ctl/checkpoint-inside.h"
#include "client/ctl/table.h"
#include "core/base/base.h"
#include "core/base/json.h"
#include "core/checkpoint/load-check.h"

/* Consecutive MiB of a file, all of which differ from the written ones. */
struct run {
    const char *file; /* NULL: none */
    uint64_t first, last;
};

/* The checkpoint that is being read. */
struct checked {
    const char *path;
    struct description description;
    struct run run;
    struct checkpoint_progress progress;
    bool print; /* print text, not JSON */
    struct json *j;
    struct json_object *differs;
};

/* All checkpoints that are verified. */
struct verification {
    bool print;
    struct json j;
    struct json_object *checkpoints;
    size_t n, n_bad;
};

/* ---- differences --------------------------------------------------------------------------------------- */

static void report_bad_blocks(struct checked *c)
{
    const struct description_file *file = c->run.file ? description_find(&c->description, c->run.file) : NULL;
    uint64_t first = c->run.first * HASH_BLOCK_BYTES, last;
    struct json_object *o;

    if (!file)
        return;
    last = MIN((c->run.last + 1) * HASH_BLOCK_BYTES, file->n_bytes) - 1;
    c->run.file = NULL;
    if (!c->print) {
        o = json_new_object(c->j);
        json_put_string(c->j, o, "file", file->name);
        json_put_u64(c->j, o, "first_byte", first);
        json_put_u64(c->j, o, "last_byte", last);
        json_push(c->j, c->differs, o);
        return;
    }
    checkpoint_progress_clear(&c->progress);
    if (c->run.first == c->run.last)
        checkpoint_say(stdout, "%s: %s: MiB %" PRIu64 " differs, bytes %" PRIu64 " to %" PRIu64 "\n", c->path,
                       file->name, c->run.first, first, last);
    else
        checkpoint_say(stdout, "%s: %s: MiB %" PRIu64 " to %" PRIu64 " differ, bytes %" PRIu64 " to %" PRIu64 "\n",
                       c->path, file->name, c->run.first, c->run.last, first, last);
}

static void on_bad(void *userdata, const char *file, uint64_t block)
{
    struct checked *c = userdata;

    if (c->run.file && strcmp(c->run.file, file) == 0 && c->run.last + 1 == block) {
        c->run.last = block;
        return;
    }
    report_bad_blocks(c);
    c->run = (struct run){.file = file, .first = block, .last = block};
}

static void on_progress(void *userdata, uint64_t n_bytes_done, uint64_t n_bytes)
{
    struct checked *c = userdata;

    checkpoint_progress_show(&c->progress, n_bytes_done, n_bytes);
}

/* ---- one checkpoint ------------------------------------------------------------------------------------ */

/* Reports one checkpoint. why: why a load fails; "" if a load works, or fails only because of MiB that differ. */
static void note_checked(struct verification *v, struct checked *c, int64_t n_differ, const char *why)
{
    uint64_t n_bytes = 0;
    char text[PRINT_SIZE];
    struct json_object *o;

    for (size_t i = 0; i < c->description.n_files; i++)
        n_bytes += c->description.files[i].n_bytes;
    v->n++;
    v->n_bad += n_differ != 0 || *why;
    if (v->print) {
        if (*why)
            checkpoint_say(stdout, "%s: cannot be loaded (E1702): %s\n", c->path, why);
        else if (n_differ == 0)
            printf("%s: whole and right, %s\n", c->path, print_bytes(text, n_bytes));
        return;
    }
    o = json_new_object(&v->j);
    json_put_string(&v->j, o, "path", c->path);
    json_put_bool(&v->j, o, "right", n_differ == 0 && !*why);
    json_put_string(&v->j, o, "why", *why ? why : NULL);
    json_put_u64(&v->j, o, "bytes", n_bytes);
    json_put(&v->j, o, "differs", c->differs);
    json_push(&v->j, v->checkpoints, o);
}

/* Return: true if the checkpoint no longer exists. The daemon removes the oldest ones. */
static bool is_gone(int dir, const char *name)
{
    return faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT;
}

/* Verifies the bytes and the contents of an open checkpoint. Return: the number of MiB that differ; or -errno, with a
 * sentence in why. */
static int64_t verify_open(int fd, struct checked *c, const struct folder_verifier *verifier, char *why,
                           size_t why_size)
{
    int64_t n_differ = folder_verify(fd, &c->description, verifier, why, why_size);

    report_bad_blocks(c);
    checkpoint_progress_clear(&c->progress);
    return n_differ == 0 ? checkpoint_check(fd, &c->description, why, why_size) : n_differ;
}

/* listed: the checkpoint's entry in the list of its folder; NULL if the user named the checkpoint. Return: 0; or a code
 * of sysexits.h after an error message if there is nothing to verify. */
static int verify_one(struct verification *v, int dir, const char *name, const char *path,
                      const struct folder_entry *listed)
{
    struct checked c = {
        .path = path, .print = v->print, .j = &v->j, .differs = v->print ? NULL : json_new_array(&v->j)};
    const struct folder_verifier verifier = {.bad = on_bad, .progress = on_progress, .userdata = &c};
    char why[FOLDER_WHY_BYTES] = "";
    int fd = folder_open(dir, name, &c.description, why, sizeof(why));
    int64_t n_differ = fd;

    checkpoint_progress_init(&c.progress, path);
    if (fd >= 0) {
        n_differ = verify_open(fd, &c, &verifier, why, sizeof(why));
        close(fd);
    }
    if (n_differ == 0 && listed && !listed->whole) { /* the files are right, but the folder's name is wrong */
        snprintf(why, sizeof(why), "%s", listed->why);
        n_differ = -EINVAL;
    }
    if (n_differ < 0 && is_gone(dir, name)) {
        json_object_put(c.differs);
        description_deinit(&c.description);
        return listed ? 0 : checkpoint_not_opened(path, why, -ENOENT);
    }
    note_checked(v, &c, n_differ, n_differ < 0 ? why : "");
    description_deinit(&c.description);
    return 0;
}

/* ---- all checkpoints ----------------------------------------------------------------------------------- */

static int verify_place(struct verification *v, const struct checkpoint_options *options)
{
    struct checkpoint_place place;
    int r = checkpoint_place_open(&place, options);

    if (r != 0)
        return r;
    for (size_t i = 0; r == 0 && i < place.list.n; i++) {
        _cleanup_free_ char *path = checkpoint_path(place.dir, place.list.entries[i].step);
        char name[FOLDER_NAME_BYTES];

        folder_name(name, place.list.entries[i].step);
        r = path ? verify_one(v, place.fd, name, path, &place.list.entries[i]) : ctl_fail(strerror(ENOMEM), EX_OSERR);
    }
    if (r == 0 && v->n == 0)
        r = checkpoint_none(&place);
    checkpoint_place_close(&place);
    return r;
}

/* Is the path a checkpoint, not a folder of checkpoints? */
static bool is_checkpoint(const char *path)
{
    const char *slash = strrchr(path, '/');
    _cleanup_free_ char *description = NULL;
    uint64_t step;

    if (folder_parse_name(slash ? slash + 1 : path, &step))
        return true;
    return asprintf(&description, "%s/%s", path, CHECKPOINT_DESCRIPTION) >= 0 && access(description, F_OK) == 0;
}

static int print_end(struct verification *v)
{
    struct json_object *o;
    int r;

    if (v->print) {
        r = ctl_flush();
    } else {
        o = json_new_object(&v->j);
        json_put_u64(&v->j, o, "schema_version", 1);
        json_put_bool(&v->j, o, "right", v->n_bad == 0);
        json_put(&v->j, o, "checkpoints", v->checkpoints);
        v->checkpoints = NULL;
        r = checkpoint_print_json(&v->j, o);
    }
    if (r != 0 || v->n_bad == 0)
        return r;
    fprintf(stderr,
            "zerodctl: %zu of %zu checkpoints %s not as written, and zerod will not load %s (E1702): restore the files "
            "from a copy, or remove the folder\n",
            v->n_bad, v->n, v->n_bad == 1 ? "is" : "are", v->n_bad == 1 ? "it" : "them");
    return EX_DATAERR;
}

int checkpoint_verify(const struct checkpoint_options *options)
{
    struct verification v = {.print = !options->json};
    int r;

    v.checkpoints = v.print ? NULL : json_new_array(&v.j);
    if (options->path && is_checkpoint(options->path))
        r = verify_one(&v, AT_FDCWD, options->path, options->path, NULL);
    else
        r = verify_place(&v, options);
    if (r == 0)
        return print_end(&v);
    json_object_put(v.checkpoints);
    return r;
}
