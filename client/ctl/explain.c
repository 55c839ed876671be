/* SPDX-License-Identifier: Apache-2.0 */

/* The command `zerodctl explain`. */

#include "client/ctl/explain.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sysexits.h>

#include "core/base/base.h"
#include "core/base/read-file.h"
#include "core/diagnosis/diagnosis.h"
#include "core/wire/status.h"

/*
 * Limits pipes and other inputs that are not files, because /dev/zero never ends. Picked: far more than a run prints.
 */
static const uint64_t max_read_bytes = UINT64_C(1) << 30;

/* Reads all input and keeps its last EXPLAIN_MAX_BYTES, because an error is at the end of a log. Return: 0 or
 * -errno. */
static int read_end(FILE *file, char *text, size_t *n_bytes)
{
    size_t n, filled = 0;
    uint64_t n_read = 0;
    struct stat st;

    if (fstat(fileno(file), &st) == 0 && S_ISREG(st.st_mode) && st.st_size > EXPLAIN_MAX_BYTES)
        (void)fseeko(file, -(off_t)EXPLAIN_MAX_BYTES, SEEK_END);
    /* The buffer has room for 2 * EXPLAIN_MAX_BYTES, so its older half is dropped only when it is full. */
    while ((n = fread(text + filled, 1, 2 * EXPLAIN_MAX_BYTES - filled, file)) > 0) {
        filled += n;
        n_read += n;
        if (n_read > max_read_bytes)
            return -EFBIG;
        if (filled < 2 * EXPLAIN_MAX_BYTES)
            continue;
        memcpy(text, text + EXPLAIN_MAX_BYTES, EXPLAIN_MAX_BYTES);
        filled = EXPLAIN_MAX_BYTES;
    }
    *n_bytes = filled;
    return ferror(file) ? -errno : 0;
}

/* Unlike a daemon's diagnostics, these have neither number nor age. */
static int print_json(struct diagnostic *const *found, size_t n)
{
    _cleanup_free_ char *text = diagnostics_json((const struct diagnostic *const *)found, n, NULL, 0);

    if (!text)
        return EX_OSERR;
    puts(text);
    return 0;
}

static int print_found(struct diagnostic *const *found, size_t n, bool json)
{
    int r = 0;

    if (json)
        r = print_json(found, n);
    else
        for (size_t i = 0; i < n; i++)
            printf("%s%s", i ? "\n" : "", found[i]->text);
    if (r == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        r = EX_IOERR;
    return r;
}

static int explain_file(FILE *file, const char *name, bool json)
{
    _cleanup_free_ char *text = malloc(2 * EXPLAIN_MAX_BYTES);
    struct diagnostic *found[EXPLAIN_MAX_FOUND];
    struct explain_messages messages = {0};
    size_t n_bytes = 0;
    int r = text ? read_end(file, text, &n_bytes) : -ENOMEM;

    if (r < 0) {
        fprintf(stderr, "zerodctl: %s: %s\n", name, strerror(-r));
        return r == -ENOMEM ? EX_OSERR : EX_NOINPUT;
    }
    if (explain_read(&messages, text, n_bytes) < 0) {
        fprintf(stderr, "zerodctl: %s\n", strerror(ENOMEM));
        return EX_OSERR;
    }
    for (size_t i = 0; i < messages.n; i++)
        found[i] = explain_say(&messages.items[i], &messages);
    if (messages.n == 0)
        fprintf(stderr,
                "zerodctl: no error in %s that explain knows: it knows those of DDP and DeepSpeed about "
                "gradients, and zerod's own codes\n",
                name);
    r = messages.n || json ? print_found(found, messages.n, json) : 0;
    for (size_t i = 0; i < messages.n; i++)
        diagnostic_unref(found[i]);
    r = r ? r : messages.n ? 0 : EX_DATAERR;
    explain_messages_deinit(&messages);
    return r;
}

int explain_command(int argc, char **argv, bool json)
{
    const char *name = NULL;
    FILE *file;
    int fd, r;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            json = true;
        } else if (name || (argv[i][0] == '-' && argv[i][1])) {
            fprintf(stderr, "zerodctl: explain takes one file or none, and --json; '%s' is neither\n", argv[i]);
            return EX_USAGE;
        } else {
            name = argv[i];
        }
    }
    if (!name || strcmp(name, "-") == 0)
        return explain_file(stdin, "the input", json);
    fd = read_file_open(name);
    file = fd < 0 ? NULL : fdopen(fd, "r");
    if (!file) {
        fprintf(stderr, "zerodctl: %s: %s\n", name, strerror(fd < 0 ? -fd : errno));
        return EX_NOINPUT;
    }
    r = explain_file(file, name, json);
    fclose(file);
    return r;
}
