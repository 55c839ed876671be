/* SPDX-License-Identifier: Apache-2.0 */

/* The command `zerodctl checkpoint`: its arguments, and the subcommands that only read checkpoints. */

#include "client/ctl/checkpoint.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sysexits.h>
#include <time.h>

#include <json-c/json.h>

#include "client/ctl/ask.h"
#include "client/ctl/checkpoint-inside.h"
#include "client/ctl/table.h"
#include "core/base/base.h"
#include "core/base/json.h"

enum {
    PROGRESS_NS = 100 * 1000 * 1000,
    WRITTEN_BYTES = PRINT_SIZE + 8,
    DAY_S = 24 * 60 * 60,
    SCHEMA_VERSION = 1, /* docs/schema/checkpoint.json; raised when a key changes or disappears */
};

/* ---- places -------------------------------------------------------------------------------------------- */

/* Return: 0, and *dir is the daemon's checkpoint.dir, to be freed; or a code of sysexits.h after an error message. */
static int ask_dir(const char *socket, char **dir)
{
    struct json_object *status, *value;
    int r = ctl_ask(socket, "status", false, &status);

    if (r != 0)
        return r;
    value = json_object_object_get(json_object_object_get(status, "checkpoint"), "dir");
    if (!value)
        r = ctl_fail(
            "the daemon's configuration has no checkpoint.dir: name a folder, or set it and restart the daemon",
            EX_UNAVAILABLE);
    else if (!(*dir = strdup(json_object_get_string(value))))
        r = ctl_fail(strerror(ENOMEM), EX_OSERR);
    json_object_put(status);
    return r;
}

static int not_read(const char *path, int r)
{
    const char *hint = r == -EACCES ? "; ask as root, or as the daemon's user" : "";

    fprintf(stderr, "zerodctl: %s cannot be read: %s%s\n", path, strerror(-r), hint);
    return EX_NOINPUT;
}

int checkpoint_place_open(struct checkpoint_place *place, const struct checkpoint_options *options)
{
    int r = 0;

    *place = (struct checkpoint_place){.fd = -1};
    if (!options->path)
        r = ask_dir(options->socket, &place->dir);
    else if (!(place->dir = strdup(options->path)))
        r = ctl_fail(strerror(ENOMEM), EX_OSERR);
    if (r != 0)
        return r;
    place->fd = open(place->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (place->fd < 0 && errno == ENOENT && !options->path)
        return 0; /* the first save makes the folder */
    r = place->fd < 0 ? -errno : folder_list(place->fd, &place->list);
    if (r == 0)
        return 0;
    r = not_read(place->dir, r);
    checkpoint_place_close(place);
    return r;
}

void checkpoint_place_close(struct checkpoint_place *place)
{
    folder_list_deinit(&place->list);
    closep(&place->fd);
    free(place->dir);
}

int checkpoint_none(const struct checkpoint_place *place)
{
    fprintf(stderr, "zerodctl: %s has no %scheckpoint; zerodctl checkpoint save writes one\n", place->dir,
            place->list.n > 0 ? "whole " : "");
    return EX_NOINPUT;
}

char *checkpoint_path(const char *dir, uint64_t step)
{
    char name[FOLDER_NAME_BYTES], *path;

    folder_name(name, step);
    return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

int checkpoint_not_opened(const char *path, const char *why, int r)
{
    bool is_named = strncmp(why, path, strlen(path)) == 0;

    checkpoint_say(stderr, "zerodctl: %s%s%s\n", is_named ? "" : path, is_named ? "" : ": ", why);
    return is_named || r == -EACCES ? EX_NOINPUT : EX_DATAERR;
}

/* ---- printing ------------------------------------------------------------------------------------------ */

void checkpoint_say(FILE *file, const char *format, ...)
{
    _cleanup_free_ char *text = NULL, *clean = NULL;
    va_list args;
    int r;

    va_start(args, format);
    r = vasprintf(&text, format, args);
    va_end(args);
    if (r < 0)
        text = NULL;
    clean = text ? json_clean(text) : NULL;
    fputs(clean ? clean : "zerodctl: no memory\n", file);
}

int checkpoint_print_json(struct json *j, struct json_object *root)
{
    _cleanup_free_ char *text = json_text(j, root);

    if (!text)
        return ctl_fail(strerror(ENOMEM), EX_OSERR);
    puts(text);
    return ctl_flush();
}

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void checkpoint_progress_init(struct checkpoint_progress *progress, const char *what)
{
    *progress = (struct checkpoint_progress){.what = isatty(STDERR_FILENO) ? what : NULL};
}

void checkpoint_progress_show(struct checkpoint_progress *progress, uint64_t n_bytes_done, uint64_t n_bytes)
{
    char text[PRINT_SIZE];

    if (!progress->what || n_bytes == 0 || now_ns() - progress->shown_ns < PROGRESS_NS)
        return;
    fprintf(stderr, "\r\033[K%s: %.0f %% of %s", progress->what, 100.0 * (double)n_bytes_done / (double)n_bytes,
            print_bytes(text, n_bytes));
    progress->shown_ns = now_ns();
    progress->is_shown = true;
}

void checkpoint_progress_clear(struct checkpoint_progress *progress)
{
    if (progress->is_shown)
        fputs("\r\033[K", stderr);
    progress->is_shown = false;
}

/* "5 min 3 s ago", or a date. dst: WRITTEN_BYTES. */
static const char *print_written(char *dst, uint64_t written_s)
{
    time_t now = time(NULL), then = (time_t)written_s;
    char text[PRINT_SIZE];
    struct tm tm;

    if (then <= now && now - then < DAY_S)
        snprintf(dst, WRITTEN_BYTES, "%s ago", print_duration(text, (uint64_t)MAX(now - then, 1) * 1000000000u));
    else if (!localtime_r(&then, &tm) || strftime(dst, WRITTEN_BYTES, "%Y-%m-%d %H:%M", &tm) == 0)
        strcpy(dst, "-");
    return dst;
}

/* ---- list ---------------------------------------------------------------------------------------------- */

static struct json_object *entry_object(struct json *j, const struct checkpoint_place *place,
                                        const struct folder_entry *entry)
{
    _cleanup_free_ char *path = checkpoint_path(place->dir, entry->step);
    struct json_object *o = json_new_object(j);

    j->failed |= !path;
    json_put_u64(j, o, "step", entry->step);
    json_put_string(j, o, "path", path);
    json_put_bool(j, o, "whole", entry->whole);
    json_put_string(j, o, "why", entry->whole ? NULL : entry->why);
    if (entry->whole) {
        json_put_u64(j, o, "world_size", entry->world_size);
        json_put_u64(j, o, "bytes", entry->n_bytes);
        json_put_u64(j, o, "written_s", entry->written_s);
    } else {
        json_put_null(j, o, "world_size");
        json_put_null(j, o, "bytes");
        json_put_null(j, o, "written_s");
    }
    return o;
}

static int list_json(const struct checkpoint_place *place)
{
    struct json j = {0};
    struct json_object *o = json_new_object(&j), *array = json_new_array(&j);

    json_put_u64(&j, o, "schema_version", SCHEMA_VERSION);
    json_put_string(&j, o, "dir", place->dir);
    for (size_t i = 0; i < place->list.n; i++)
        json_push(&j, array, entry_object(&j, place, &place->list.entries[i]));
    json_put(&j, o, "checkpoints", array);
    return checkpoint_print_json(&j, o);
}

static int list_table(const struct checkpoint_place *place)
{
    static const char *const heads[] = {"STEP", "WHOLE", "RANKS", "SIZE", "WRITTEN"};
    char size[PRINT_SIZE], written[WRITTEN_BYTES];
    struct table table;
    int r;

    table_init(&table, heads, ARRAY_SIZE(heads));
    for (size_t i = 0; i < place->list.n; i++) {
        const struct folder_entry *entry = &place->list.entries[i];
        _cleanup_free_ char *why = json_clean(entry->why);

        table_cell(&table, "%" PRIu64, entry->step);
        table_cell(&table, "%s", entry->whole ? "yes" : why ? why : "no");
        if (entry->whole)
            table_cell(&table, "%u", entry->world_size);
        else
            table_cell(&table, "-");
        table_cell(&table, "%s", entry->whole ? print_bytes(size, entry->n_bytes) : "-");
        table_cell(&table, "%s", entry->whole ? print_written(written, entry->written_s) : "-");
    }
    r = table_print(&table, stdout);
    table_deinit(&table);
    return r < 0 ? ctl_fail(strerror(-r), EX_OSERR) : 0;
}

static int list(const struct checkpoint_options *options)
{
    struct checkpoint_place place;
    int r = checkpoint_place_open(&place, options);

    if (r != 0)
        return r;
    if (options->json)
        r = list_json(&place);
    else if (place.list.n == 0)
        printf("no checkpoint in %s\n", place.dir);
    else
        r = list_table(&place);
    checkpoint_place_close(&place);
    return r ? r : ctl_flush();
}

/* ---- show ---------------------------------------------------------------------------------------------- */

static void show_scale(const struct description_scale *scale)
{
    if (scale->dynamic)
        printf("scale     %.6g, dynamic: %" PRIu64 " steps, %" PRIu64 " overflows until it falls\n", scale->scale,
               scale->n_steps, scale->hysteresis_left);
    else
        printf("scale     %.6g, constant\n", scale->scale);
}

static int show_text(const char *path, const struct description *d, uint64_t written_s)
{
    size_t n = strlen(d->configuration);
    char text[PRINT_SIZE], written[WRITTEN_BYTES];

    printf("%s\n", path);
    checkpoint_say(stdout, "job       %s, run %s\n", d->job, d->run ? d->run : "-");
    printf("step      %" PRIu64 ": %" PRIu64 " applied\n", d->step, d->n_applied);
    printf("ranks     %u on %u node%s, stage %u\n", d->world_size, d->n_nodes, d->n_nodes == 1 ? "" : "s", d->stage);
    checkpoint_say(stdout, "optimizer %s\n", d->optimizer);
    show_scale(&d->loss_scale);
    checkpoint_say(stdout, "written   by zerod %s, %s\n", d->version, print_written(written, written_s));
    for (size_t i = 0; i < d->n_files; i++)
        checkpoint_say(stdout, "%-9s %s, %s (%" PRIu64 " bytes), xxh128 %s\n", i == 0 ? "files" : "", d->files[i].name,
                       print_bytes(text, d->files[i].n_bytes), d->files[i].n_bytes, d->files[i].hash.whole);
    checkpoint_say(stdout, "\n%s%s", d->configuration, n > 0 && d->configuration[n - 1] == '\n' ? "" : "\n");
    return ctl_flush();
}

static struct json_object *files_array(struct json *j, const struct description *d)
{
    struct json_object *array = json_new_array(j), *o;

    for (size_t i = 0; i < d->n_files; i++) {
        o = json_new_object(j);
        json_put_string(j, o, "name", d->files[i].name);
        json_put_u64(j, o, "bytes", d->files[i].n_bytes);
        json_put_string(j, o, "xxh128", d->files[i].hash.whole);
        json_push(j, array, o);
    }
    return array;
}

static int show_json(const char *path, const struct description *d, uint64_t written_s)
{
    struct json j = {0};
    struct json_object *o = json_new_object(&j);

    json_put_u64(&j, o, "schema_version", SCHEMA_VERSION);
    json_put_string(&j, o, "path", path);
    description_put_facts(&j, o, d);
    json_put_u64(&j, o, "written_s", written_s);
    json_put(&j, o, "files", files_array(&j, d));
    json_put_string(&j, o, "configuration", d->configuration);
    return checkpoint_print_json(&j, o);
}

static int show_path(const char *path, bool json)
{
    struct description d;
    char why[FOLDER_WHY_BYTES];
    struct stat st = {0};
    int fd = folder_open(AT_FDCWD, path, &d, why, sizeof(why)), r;

    if (fd < 0)
        return checkpoint_not_opened(path, why, fd);
    (void)fstatat(fd, CHECKPOINT_DESCRIPTION, &st, AT_SYMLINK_NOFOLLOW);
    close(fd);
    r = json ? show_json(path, &d, (uint64_t)st.st_mtime) : show_text(path, &d, (uint64_t)st.st_mtime);
    description_deinit(&d);
    return r;
}

static int show_newest(const struct checkpoint_options *options)
{
    _cleanup_free_ char *path = NULL;
    struct checkpoint_place place;
    size_t i = 0;
    int r = checkpoint_place_open(&place, options);

    if (r != 0)
        return r;
    while (i < place.list.n && !place.list.entries[i].whole)
        i++;
    if (i < place.list.n) {
        path = checkpoint_path(place.dir, place.list.entries[i].step);
        r = path ? show_path(path, options->json) : ctl_fail(strerror(ENOMEM), EX_OSERR);
    } else {
        r = checkpoint_none(&place);
    }
    checkpoint_place_close(&place);
    return r;
}

static int show_given_or_newest(const struct checkpoint_options *options)
{
    return options->path ? show_path(options->path, options->json) : show_newest(options);
}

/* ---- the command --------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int (*run)(const struct checkpoint_options *options);
    bool is_save; /* has --wait and --no-wait, but no path */
} subcommands[] = {
    {"save", checkpoint_save, true},
    {"list", list, false},
    {"verify", checkpoint_verify, false},
    {"show", show_given_or_newest, false},
};

/* Return: true if all options are valid. */
static bool parse_checkpoint_options(struct checkpoint_options *options, int argc, char **argv, bool is_save)
{
    for (int i = 0; i < argc; i++) {
        size_t n = strlen(argv[i]);

        if (is_save && strcmp(argv[i], "--wait") == 0)
            options->no_wait = false;
        else if (is_save && strcmp(argv[i], "--no-wait") == 0)
            options->no_wait = true;
        else if (is_save || options->path || !n || argv[i][0] == '-')
            return false;
        else
            options->path = argv[i];
        while (n > 1 && argv[i][n - 1] == '/') /* because open() follows a link whose path ends in a slash */
            argv[i][--n] = '\0';
    }
    return true;
}

int checkpoint_command(int argc, char **argv, const char *socket, bool json)
{
    struct checkpoint_options options = {.socket = socket, .json = json};

    for (size_t i = 0; argc > 1 && i < ARRAY_SIZE(subcommands); i++)
        if (strcmp(argv[1], subcommands[i].name) == 0 &&
            parse_checkpoint_options(&options, argc - 2, argv + 2, subcommands[i].is_save))
            return subcommands[i].run(&options);
    return ctl_fail("checkpoint takes save [--no-wait], list [DIR], verify [DIR|CHECKPOINT] or show [CHECKPOINT]",
                    EX_USAGE);
}
