/* SPDX-License-Identifier: Apache-2.0 */

/* The command "trace": asks the daemon for its last steps, and prints them as a timeline. */

#include "client/ctl/trace-command.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#include <json-c/json.h>

#include "client/ctl/ask.h"
#include "core/base/base.h"
#include "core/base/read-file.h"
#include "core/trace/trace.h"

enum {
    DEFAULT_STEPS = 10,
    MAX_STEPS = 1000000,
    MAX_MERGED = 64,
    MAX_MERGED_BYTES = 1 << 30, /* picked: size of a file; a profiler writes a fraction of this per step */
};

struct options {
    unsigned n_steps;
    const char *merge[MAX_MERGED];
    unsigned n_merged;
    const char *path; /* NULL: standard output */
};

/* ---- the command line ---------------------------------------------------------------------------------- */

static int parse_steps(const char *text, unsigned *n_steps)
{
    char rest;

    if (*text >= '1' && *text <= '9' && sscanf(text, "%9u%c", n_steps, &rest) == 1 && *n_steps <= MAX_STEPS)
        return 0;
    fprintf(stderr, "zerodctl: --steps: '%s' is not a whole number from 1 to %d\n", text, MAX_STEPS);
    return EX_USAGE;
}

/* Return: 0, or EX_USAGE after an error message. */
static int parse_trace_options(int argc, char **argv, struct options *options)
{
    static const struct option longs[] = {
        {"steps", required_argument, NULL, 's'},
        {"merge", required_argument, NULL, 'm'},
        {"output", required_argument, NULL, 'o'},
        {0},
    };
    int c;

    optind = 0; /* restarts getopt, which main() has used */
    while ((c = getopt_long(argc, argv, "o:", longs, NULL)) >= 0) {
        if (c == 's' && parse_steps(optarg, &options->n_steps) != 0)
            return EX_USAGE;
        if (c == 'm' && options->n_merged == MAX_MERGED)
            return ctl_fail("--merge: more than 64 files", EX_USAGE);
        if (c == 'm')
            options->merge[options->n_merged++] = optarg;
        if (c == 'o')
            options->path = optarg;
        if (c == '?')
            return EX_USAGE; /* getopt has printed the reason */
    }
    if (optind < argc)
        return ctl_fail("trace takes --steps N, --merge FILE and --output FILE, nothing else", EX_USAGE);
    if (!options->path && isatty(STDOUT_FILENO))
        return ctl_fail("the trace is a file for a browser: add > trace.json, or --output trace.json", EX_USAGE);
    return 0;
}

/* ---- printing ------------------------------------------------------------------------------------------ */

static char *print_to_memory(struct trace *trace)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);

    if (!file)
        return NULL;
    trace_print(file, trace);
    if (fclose(file) == 0)
        return text;
    free(text);
    return NULL;
}

static int merge_file(struct json_object *trace, const char *path)
{
    _cleanup_free_ char *text = NULL;
    size_t n_bytes = 0;
    int r = read_file(path, MAX_MERGED_BYTES, &text, &n_bytes);
    struct json_object *other = r == 0 && strlen(text) == n_bytes ? json_tokener_parse(text) : NULL;
    const char *why = r < 0    ? strerror(-r)
                      : !other ? "it is not JSON; a packed file (.gz) must be unpacked first"
                               : trace_merge(trace, other);

    json_object_put(other);
    if (!why)
        return 0;
    fprintf(stderr, "zerodctl: --merge %s: %s\n", path, why);
    return r < 0 ? EX_NOINPUT : EX_DATAERR;
}

static int print_merged(FILE *file, struct trace *trace, const struct options *options)
{
    _cleanup_free_ char *text = print_to_memory(trace);
    struct json_object *root = text ? json_tokener_parse(text) : NULL;
    int r = root ? 0 : ctl_fail(strerror(ENOMEM), EX_OSERR);

    for (unsigned i = 0; r == 0 && i < options->n_merged; i++)
        r = merge_file(root, options->merge[i]);
    if (r == 0)
        fputs(json_object_to_json_string_ext(root, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE), file);
    json_object_put(root);
    return r;
}

/* Return: 0, or a code of sysexits.h after an error message. */
static int print_trace(struct trace *trace, const struct options *options)
{
    FILE *file = options->path ? fopen(options->path, "we") : stdout;
    int r = 0, flushed;

    if (!file) {
        fprintf(stderr, "zerodctl: %s: %s\n", options->path, strerror(errno));
        return EX_CANTCREAT;
    }
    if (options->n_merged > 0)
        r = print_merged(file, trace, options);
    else
        trace_print(file, trace);
    if (file == stdout)
        return r ? r : ctl_flush();
    flushed = flush_file(file);
    if (fclose(file) != 0 && flushed == 0)
        flushed = -errno;
    if (flushed < 0 && r == 0) {
        fprintf(stderr, "zerodctl: %s: %s\n", options->path, strerror(-flushed));
        r = EX_IOERR;
    }
    return r;
}

/* Prints which steps the file has, and whether they are fewer than requested. */
static void say_traced_steps(const struct trace *trace, const struct options *options)
{
    uint64_t n = trace->step - MIN(trace->oldest, trace->step);

    if (trace->n_records == 0)
        fputs("zerodctl: nothing has happened yet: the trace is empty\n", stderr);
    else if (n == 0)
        fprintf(stderr, "zerodctl: traced step %" PRIu64 ", which is open", trace->step);
    else
        fprintf(stderr, "zerodctl: traced steps %" PRIu64 " to %" PRIu64 ", and what there is of step %" PRIu64,
                trace->oldest, trace->step - 1, trace->step);
    if (n < options->n_steps && n < trace->step && trace->n_records > 0)
        fprintf(stderr, "; the recorder keeps no more of the %u steps that you asked for", options->n_steps);
    if (trace->n_records > 0)
        fputs(". Open the file at ui.perfetto.dev or chrome://tracing\n", stderr);
}

int trace_command(int argc, char **argv, const char *socket, bool as_it_came)
{
    struct options options = {.n_steps = DEFAULT_STEPS};
    struct json_object *answer;
    struct trace trace;
    const char *why;
    char command[32];
    int r = parse_trace_options(argc, argv, &options);

    if (r != 0)
        return r;
    snprintf(command, sizeof(command), "trace %u", options.n_steps);
    r = ctl_ask(socket, command, as_it_came, &answer);
    if (r != 0 || as_it_came) {
        if (r == 0)
            json_object_put(answer);
        return r;
    }
    why = trace_unpack(&trace, answer);
    json_object_put(answer);
    if (why) {
        fprintf(stderr, "zerodctl: the daemon's answer cannot be read: %s\n", why);
        return EX_PROTOCOL;
    }
    r = print_trace(&trace, &options);
    if (r == 0)
        say_traced_steps(&trace, &options);
    trace_deinit(&trace);
    return r;
}
