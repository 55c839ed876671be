/* SPDX-License-Identifier: Apache-2.0 */

/* The program zerodctl: it asks a running zerod for its state, and sends it commands. */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>

#include <json-c/json.h>

#include "client/ctl/ask.h"
#include "client/ctl/checkpoint.h"
#include "client/ctl/explain.h"
#include "client/ctl/metrics.h"
#include "client/ctl/plan-command.h"
#include "client/ctl/report-command.h"
#include "client/ctl/resize-command.h"
#include "client/ctl/show.h"
#include "client/ctl/top.h"
#include "client/ctl/trace-command.h"
#include "core/base/base.h"
#include "core/base/strbuf.h"
#include "core/config/config-table.h"

static const char help_text[] =
    "Usage: zerodctl [--socket PATH] [--json] COMMAND [ARGUMENTS]\n"
    "Looks at a running zerod and tells it what to do.\n"
    "\n"
    "  status [--watch [SECONDS]]   the job at a glance, again and again with --watch\n"
    "  top                          the job full screen, twice a second, until q is pressed\n"
    "  ranks                        who is attached, and whom each waits for\n"
    "  stacks                       where the program of each rank is: the Python stacks of its threads\n"
    "  params                       parameters: where they lie, who has pushed them in this step\n"
    "  diagnostics                  what was refused or warned of, in full\n"
    "  metrics                      figures for Prometheus, as OpenMetrics text\n"
    "  trace [--steps N] [--merge FILE]... [-o FILE]\n"
    "                               a timeline of the last steps (10), for ui.perfetto.dev or chrome://tracing;\n"
    "                               --merge adds that of another node, or one of torch.profiler\n"
    "  report [FILE]                all that an issue report needs, as one JSON file\n"
    "  drain                        attach no more ranks; the daemon ends with the last one\n"
    "  abort-step                   give the open step up, on all ranks; says what becomes of them\n"
    "  resize RANKS                 give the job another number of ranks, when no rank is attached: its state stays\n"
    "  drop                         forget the run and its state, when no rank is attached\n"
    "  plan --params N --ranks N [--stage N] [--config FILE] [--dtype T] [--grad-dtype T]\n"
    "       [--matrices ROWSxCOLUMNS[xN],...] [--offload]\n"
    "                               what a model takes; needs no daemon\n"
    "  checkpoint save [--no-wait]  write a checkpoint now, and wait until it is on the disk\n"
    "  checkpoint list [DIR]        the checkpoints of the daemon, or those in DIR\n"
    "  checkpoint verify [DIR|CHECKPOINT]\n"
    "                               read all their bytes, and name those that are not as they were written\n"
    "  checkpoint show [CHECKPOINT] what it says of itself; the newest whole one by default\n"
    "  explain [FILE]               what an error of DDP or DeepSpeed means; needs no daemon\n"
    "\n"
    "  --socket PATH                the daemon's socket (default: ZEROD_SOCKET)\n"
    "  --json                       the answer as JSON, as described in docs/schema/\n"
    "  -h, --help                   this text\n"
    "  -V, --version                the version\n"
    "\n"
    "Exit status: 0, or 64 usage, 65 nothing to explain or a bad checkpoint, 66 cannot be read, 69 no daemon, 73 not\n"
    "saved, 75 no answer, 77 not allowed, 78 bad configuration.\n";

enum {
    COMMAND_SIZE = 32,
    TOO_MANY_LETTERS = 3, /* picked: a command with this many wrong letters is not suggested */
};

struct options {
    const char *socket;
    bool json;
};

struct subcommand {
    const char *name;
    show_fn *show;
};

static const struct subcommand subcommands[] = {
    {"status", show_status}, {"ranks", show_ranks},        {"params", show_params}, {"diagnostics", show_diagnostics},
    {"drain", show_message}, {"abort-step", show_message}, {"drop", show_message},
};

/* ---- asking -------------------------------------------------------------------------------------------- */

static int ask_and_show(const struct options *options, const struct subcommand *subcommand)
{
    struct json_object *answer;
    int r = ctl_ask(options->socket, subcommand->name, options->json, &answer);

    if (r != 0)
        return r;
    if (!options->json && subcommand->show(stdout, answer) < 0)
        r = ctl_fail(strerror(ENOMEM), EX_OSERR);
    json_object_put(answer);
    return r ? r : ctl_flush();
}

/* ---- resize -------------------------------------------------------------------------------------------- */

static int resize(const struct options *options, const char *text)
{
    struct json_object *answer;
    unsigned n_ranks;
    char rest;
    int r;

    if (!text || *text < '1' || *text > '9' || sscanf(text, "%5u%c", &n_ranks, &rest) != 1)
        return ctl_fail("resize takes a number of ranks from 1 on, nothing else", EX_USAGE);
    r = resize_ask("zerodctl", options->socket, n_ranks, &answer);
    if (options->json && answer)
        puts(json_object_to_json_string_ext(answer, JSON_C_TO_STRING_NOSLASHESCAPE));
    else if (r == 0)
        (void)show_message(stdout, answer);
    json_object_put(answer);
    return r ? r : ctl_flush();
}

/* ---- status --watch ------------------------------------------------------------------------------------ */

/* Opens a connection for each poll, because the daemon closes a silent connection. */
static int watch_status(const struct options *options, double seconds)
{
    struct timespec pause = {.tv_sec = seconds, .tv_nsec = (seconds - (time_t)seconds) * 1e9};
    bool clear = !options->json && isatty(STDOUT_FILENO);
    int r = 0;

    while (r == 0) {
        if (clear)
            fputs("\033[H\033[J", stdout);
        r = ask_and_show(options, &subcommands[0]);
        if (r == 0) {
            nanosleep(&pause, NULL);
            if (!clear && !options->json)
                putchar('\n');
        }
    }
    return r;
}

/* argv[0] is "status". Return: 0, and *seconds > 0 if --watch is given; or EX_USAGE. */
static int parse_status(int argc, char **argv, double *seconds)
{
    const char *text = NULL;
    char *end;

    *seconds = 0;
    if (argc > 1 && strcmp(argv[1], "--watch") == 0)
        text = argc == 2 ? "2" : argc == 3 ? argv[2] : NULL;
    else if (argc == 2 && strncmp(argv[1], "--watch=", 8) == 0)
        text = argv[1] + 8;
    else if (argc == 1)
        return 0;
    if (text) {
        *seconds = strtod(text, &end);
        if (end != text && !*end && *seconds >= 0.01 && *seconds <= 86400)
            return 0;
    }
    return ctl_fail("status takes --watch and a number of seconds from 0.01 to 86400, nothing else", EX_USAGE);
}

/* ---- metrics ------------------------------------------------------------------------------------------- */

static int print_metrics(const struct metrics_source *source)
{
    struct strbuf text = {0};
    int r;

    metrics_print(&text, METRICS_OPENMETRICS, source, 1);
    if (text.cut) {
        r = ctl_fail(strerror(ENOMEM), EX_OSERR);
    } else {
        fputs(strbuf_text(&text), stdout);
        r = ctl_flush();
    }
    strbuf_deinit(&text);
    return r;
}

/* Prints metrics also without a daemon (zerod_up 0), because a collector of the text does not see the exit status. */
static int metrics(const struct options *options)
{
    struct metrics_source source = {.socket = options->socket};
    int r = ctl_ask(options->socket, "status", false, &source.status), printed;

    if (r == 0)
        r = ctl_ask(options->socket, "ranks", false, &source.ranks);
    printed = source.socket && r != EX_USAGE ? print_metrics(&source) : 0;
    json_object_put(source.status);
    json_object_put(source.ranks);
    return r ? r : printed;
}

/* ---- stacks -------------------------------------------------------------------------------------------- */

enum { STACKS_PAUSE_MS = 50, STACKS_ROUNDS = 60 }; /* the daemon gives a rank 2.5 seconds to answer */

static bool has_pending(struct json_object *stacks)
{
    size_t n = json_object_is_type(stacks, json_type_array) ? json_object_array_length(stacks) : 0;

    for (size_t i = 0; i < n; i++)
        if (json_object_get_boolean(json_object_object_get(json_object_array_get_idx(stacks, i), "pending")))
            return true;
    return false;
}

/* Makes the daemon ask its ranks for their stacks, and waits for the ranks' answers. Return: 0, and the caller frees
 * *stacks; or an error of ctl_ask(). */
static int ask_stacks(const struct options *options, struct json_object **stacks)
{
    int r = ctl_ask(options->socket, "look", false, stacks);

    for (int i = 0; r == 0 && i < STACKS_ROUNDS; i++) {
        json_object_put(*stacks);
        r = ctl_ask(options->socket, "stacks", false, stacks);
        if (r != 0 || !has_pending(*stacks))
            break;
        nanosleep(&(struct timespec){.tv_nsec = STACKS_PAUSE_MS * 1000000}, NULL);
    }
    return r;
}

static int stacks(const struct options *options)
{
    struct json_object *answer;
    int r = ask_stacks(options, &answer);

    if (r != 0)
        return r;
    if (options->json)
        puts(json_object_to_json_string_ext(answer, JSON_C_TO_STRING_NOSLASHESCAPE));
    else
        (void)show_stacks(stdout, answer);
    json_object_put(answer);
    return ctl_flush();
}

/* ---- report -------------------------------------------------------------------------------------------- */

static int write_report(const char *path, const char *text)
{
    _cleanup_close_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    size_t n = strlen(text);
    ssize_t n_written = 0;

    while (fd >= 0 && n > 0 && (n_written = write(fd, text, n)) > 0) {
        text += n_written;
        n -= n_written;
    }
    if (n > 0) {
        fprintf(stderr, "zerodctl: %s: %s\n", path, strerror(errno));
        return EX_CANTCREAT;
    }
    printf("%s\n", path);
    return 0;
}

static int report(const struct options *options, const char *path)
{
    _cleanup_free_ char *text = NULL, *name = NULL;
    struct json_object *answer;
    int r = ask_stacks(options, &answer); /* so that the report has the stacks */

    json_object_put(answer);
    if (r == 0 || r == EX_USAGE) /* an older daemon has no stacks */
        r = ctl_ask(options->socket, "report", false, &answer);
    if (r != 0)
        return r;
    name = path ? strdup(path) : report_name(answer);
    text = report_text(answer);
    if (!name || !text)
        return ctl_fail(strerror(ENOMEM), EX_OSERR);
    if (!options->json && strcmp(name, "-") != 0)
        return write_report(name, text);
    puts(text);
    return ctl_flush();
}

/* ---- the command line ---------------------------------------------------------------------------------- */

/* Removes --json and --socket from the arguments after the command, argv[0]. */
static void take_options(int *argc, char **argv, struct options *options)
{
    int i, n = 1;

    for (i = 1; i < *argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            options->json = true;
        else if (strcmp(argv[i], "--socket") == 0 && i + 1 < *argc)
            options->socket = argv[++i];
        else if (strncmp(argv[i], "--socket=", 9) == 0)
            options->socket = argv[i] + 9;
        else
            argv[n++] = argv[i];
    }
    argv[n] = NULL;
    *argc = n;
}

static bool wants_help(int argc, char **argv)
{
    int i;

    for (i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    return false;
}

/* Copies to name[] the command that is nearest to the typed one. Return: false if each differs in more than two
 * letters. */
static bool find_nearest(const char *typed, char name[static COMMAND_SIZE])
{
    unsigned least = TOO_MANY_LETTERS;

    for (const char *line = help_text; (line = strchr(line, '\n')); line++) {
        char command[COMMAND_SIZE];

        if (strncmp(line, "\n  ", 3) != 0 || sscanf(line + 3, "%31[a-z-]", command) != 1 || *command == '-')
            continue;
        if (config_distance(typed, command) < least) {
            least = config_distance(typed, command);
            strcpy(name, command);
        }
    }
    return least < TOO_MANY_LETTERS;
}

/* Refuses an unknown command, or a command with too many arguments. */
static int refuse_typed(const char *typed)
{
    char nearest[COMMAND_SIZE] = "";
    bool has_nearest = find_nearest(typed, nearest);

    if (has_nearest && strcmp(typed, nearest) == 0)
        fprintf(stderr, "zerodctl: too many arguments for '%s'. ", typed);
    else
        fprintf(stderr, "zerodctl: unknown command '%s'. ", typed);
    if (has_nearest && strcmp(typed, nearest) != 0)
        fprintf(stderr, "Did you mean '%s'? ", nearest);
    fputs("Try 'zerodctl --help'.\n", stderr);
    return EX_USAGE;
}

static int run_subcommand(int argc, char **argv, struct options *options)
{
    double seconds;
    size_t i;
    int r;

    if (wants_help(argc, argv)) {
        fputs(help_text, stdout);
        return ctl_flush();
    }
    if (strcmp(argv[0], "plan") == 0)
        return -plan_command(argc, argv, options->json);
    if (strcmp(argv[0], "explain") == 0)
        return explain_command(argc, argv, options->json);
    take_options(&argc, argv, options);
    if (strcmp(argv[0], "checkpoint") == 0)
        return checkpoint_command(argc, argv, options->socket, options->json);
    if (strcmp(argv[0], "trace") == 0)
        return trace_command(argc, argv, options->socket, options->json);
    if (strcmp(argv[0], "status") == 0) {
        r = parse_status(argc, argv, &seconds);
        if (r != 0 || seconds > 0)
            return r ? r : watch_status(options, seconds);
        argc = 1;
    }
    if (strcmp(argv[0], "top") == 0)
        return top_command(argc, argv, options->socket, options->json);
    if (strcmp(argv[0], "resize") == 0)
        return resize(options, argc == 2 ? argv[1] : NULL);
    if (strcmp(argv[0], "metrics") == 0 && argc == 1)
        return metrics(options);
    if (strcmp(argv[0], "stacks") == 0 && argc == 1)
        return stacks(options);
    if (strcmp(argv[0], "report") == 0 && argc <= 2)
        return report(options, argv[1]);
    for (i = 0; argc == 1 && i < ARRAY_SIZE(subcommands); i++)
        if (strcmp(argv[0], subcommands[i].name) == 0)
            return ask_and_show(options, &subcommands[i]);
    return refuse_typed(argv[0]);
}

int main(int argc, char **argv)
{
    static const struct option long_options[] = {
        {"socket", required_argument, NULL, 's'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {},
    };
    struct options options = {.socket = getenv("ZEROD_SOCKET")};
    int option;

    /* '+': parsing stops at the command, because the words after it are its arguments. */
    while ((option = getopt_long(argc, argv, "+hV", long_options, NULL)) >= 0) {
        switch (option) {
        case 's':
            options.socket = optarg;
            break;
        case 'j':
            options.json = true;
            break;
        case 'h':
            fputs(help_text, stdout);
            return ctl_flush();
        case 'V':
            puts("zerodctl " ZEROD_VERSION);
            return ctl_flush();
        default:
            fputs("Try 'zerodctl --help'.\n", stderr);
            return EX_USAGE;
        }
    }
    if (optind == argc) {
        fputs("zerodctl: no command. Try 'zerodctl --help'.\n", stderr);
        return EX_USAGE;
    }
    return run_subcommand(argc - optind, argv + optind, &options);
}
