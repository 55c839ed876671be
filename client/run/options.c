/* SPDX-License-Identifier: Apache-2.0 */

/* The command line of zerodrun, and its help. */

#include "client/run/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "client/run/restarts.h"
#include "core/base/base.h"
#include "core/config/config.h"

enum {
    OPTION_CONFIG = 256,
    OPTION_SOCKET,
    OPTION_ZEROD,
    OPTION_RUN_ID,
    OPTION_RESTARTS,
    OPTION_DAEMON_RESTARTS,
    OPTION_SERVE,
    OPTION_GRACE,
    OPTION_MASTER_ADDR,
    OPTION_MASTER_PORT,
    OPTION_NO_DAEMON,
    OPTION_JOBS,
    OPTION_COLOR,
    OPTION_TEE,
    OPTION_NODES,
    OPTION_NNODES,
    OPTION_NODE_RANK,
    OPTION_NODES_PORT,
    OPTION_KEY_FILE,
};

static const struct option long_options[] = {
    {"ranks", required_argument, NULL, 'n'},
    {"nproc-per-node", required_argument, NULL, 'n'},
    {"nproc_per_node", required_argument, NULL, 'n'},
    {"jobs", required_argument, NULL, OPTION_JOBS},
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"socket", required_argument, NULL, OPTION_SOCKET},
    {"zerod", required_argument, NULL, OPTION_ZEROD},
    {"run-id", required_argument, NULL, OPTION_RUN_ID},
    {"restarts", required_argument, NULL, OPTION_RESTARTS},
    {"max-restarts", required_argument, NULL, OPTION_RESTARTS},
    {"daemon-restarts", required_argument, NULL, OPTION_DAEMON_RESTARTS},
    {"serve", no_argument, NULL, OPTION_SERVE},
    {"grace", required_argument, NULL, OPTION_GRACE},
    {"master-addr", required_argument, NULL, OPTION_MASTER_ADDR},
    {"master_addr", required_argument, NULL, OPTION_MASTER_ADDR},
    {"master-port", required_argument, NULL, OPTION_MASTER_PORT},
    {"master_port", required_argument, NULL, OPTION_MASTER_PORT},
    {"no-daemon", no_argument, NULL, OPTION_NO_DAEMON},
    {"nodes", required_argument, NULL, OPTION_NODES},
    {"nnodes", required_argument, NULL, OPTION_NNODES},
    {"node-rank", required_argument, NULL, OPTION_NODE_RANK},
    {"node_rank", required_argument, NULL, OPTION_NODE_RANK},
    {"nodes-port", required_argument, NULL, OPTION_NODES_PORT},
    {"key-file", required_argument, NULL, OPTION_KEY_FILE},
    {"tee", required_argument, NULL, OPTION_TEE},
    {"color", required_argument, NULL, OPTION_COLOR},
    {"quiet", no_argument, NULL, 'q'},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'V'},
    {},
};

static const char help_text[] =
    "Usage: zerodrun [-n RANKS] [OPTIONS] -- PROGRAM [ARGUMENTS]\n"
    "       zerodrun --serve --config FILE [OPTIONS]\n"
    "Starts the ranks of a training job on this machine, and a zerod for them if none is running.\n"
    "In a job of several nodes, those of this node: run it on every node.\n"
    "\n"
    "  -n, --ranks N        ranks on this node (default: as the configuration or the running daemon\n"
    "                       says, else 1);\n"
    "                       --nproc-per-node is the same\n"
    "      --config FILE    configuration of the job (default: a small one, stage 2)\n"
    "      --jobs N         a daemon for each of N optimizers in every rank (default 1); a second --config\n"
    "                       is the second one's (default: the first's, on the socket with .1 behind it)\n"
    "      --socket PATH    socket of the daemon (default: the configuration's, else ZEROD_SOCKET,\n"
    "                       else a private one)\n"
    "      --run-id ID      whose state it is (default: ZEROD_RUN_ID, else a random one)\n"
    "      --restarts N     start a rank that fails again, up to N times each (default 0);\n"
    "                       --max-restarts is the same\n"
    "      --daemon-restarts N  start a daemon that ends too early again, up to N times in 10 minutes\n"
    "                       (default 3); 0: a daemon that ends ends the run\n"
    "      --serve          start and keep the daemon without ranks, until SIGTERM or SIGINT\n"
    "      --grace SECONDS  from SIGTERM to SIGKILL when ranks have to end (default 30)\n"
    "      --nodes H0,H1    hosts of several nodes, node 0 first, each with the ranks of -n; for a configuration\n"
    "                       that lists none (default: those of Slurm's step, if srun has started one\n"
    "                       zerodrun on each of several nodes)\n"
    "      --node-rank R    number of this node, from 0 (default: Slurm's)\n"
    "      --nnodes N       number of nodes; 1: Slurm's nodes are not used\n"
    "      --nodes-port P   port on which node 0's daemon listens (default 7700)\n"
    "      --key-file FILE  key that the daemons of several nodes share\n"
    "      --master-addr A  MASTER_ADDR of the ranks (default: on several nodes the host of node 0,\n"
    "                       else 127.0.0.1)\n"
    "      --master-port P  MASTER_PORT of the ranks (default: on several nodes 29500, else a free port)\n"
    "      --zerod PATH     the daemon to start (default: beside zerodrun, else in PATH)\n"
    "      --no-daemon      start no daemon\n"
    "      --tee DIR        the output also to DIR/rank0.log and so on, and DIR/zerod.log\n"
    "      --color WHEN     colours of the prefixes: auto (default: on a terminal, unless NO_COLOR is set),\n"
    "                       always, never\n"
    "  -q, --quiet          no word of its own but errors; ranks and daemon still speak\n"
    "  -h, --help           this text\n"
    "  -V, --version        the version\n"
    "\n"
    "The ranks get RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,\n"
    "ZEROD_SOCKET, ZEROD_RUN_ID and, with --jobs, ZEROD_SOCKET_1 and so on. Returns the first failure's exit status "
    "(128 + signal).\n";

/* Return: 0; or -EX_USAGE after an error message. */
static int parse_option_number(const char *name, const char *text, unsigned long min, unsigned long max,
                               unsigned long *value)
{
    char *end;

    errno = 0;
    *value = strtoul(text, &end, 10);
    if (errno == 0 && text[0] >= '0' && text[0] <= '9' && !*end && *value >= min && *value <= max)
        return 0;
    fprintf(stderr, "zerodrun: %s: '%s' is not a whole number from %lu to %lu\n", name, text, min, max);
    return -EX_USAGE;
}

static int parse_numeric(struct run_options *options, int option, const char *text)
{
    unsigned long value = 0;
    int r = 0;

    switch (option) {
    case 'n':
        r = parse_option_number("-n", text, 1, CONFIG_MAX_LOCAL_RANKS, &value);
        options->n_ranks = value;
        break;
    case OPTION_RESTARTS:
        r = parse_option_number("--restarts", text, 0, 1000000, &value);
        options->n_restarts = value;
        break;
    case OPTION_DAEMON_RESTARTS:
        r = parse_option_number("--daemon-restarts", text, 0, RESTARTS_MAX, &value);
        options->n_daemon_restarts = value;
        break;
    case OPTION_JOBS:
        r = parse_option_number("--jobs", text, 1, OPTIONS_MAX_JOBS, &value);
        options->n_jobs = value;
        break;
    case OPTION_GRACE:
        r = parse_option_number("--grace", text, 0, 1000000, &value);
        options->grace_ms = 1000 * (uint64_t)value;
        break;
    case OPTION_NNODES:
        r = parse_option_number("--nnodes", text, 1, CONFIG_MAX_NODES, &value);
        options->n_nodes = value;
        break;
    case OPTION_NODE_RANK:
        r = parse_option_number("--node-rank", text, 0, CONFIG_MAX_NODES - 1, &value);
        options->node_rank = (int)value;
        break;
    case OPTION_NODES_PORT:
        r = parse_option_number("--nodes-port", text, 1, 65535, &value);
        options->nodes_port = value;
        break;
    case OPTION_MASTER_PORT:
        r = parse_option_number("--master-port", text, 1, 65535, &value);
        options->master_port = value;
        break;
    }
    return r;
}

/* Adds a configuration. The first call is for the first job, the second for the second job, and so on. */
static int add_config(struct run_options *options, const char *path)
{
    if (options->n_configs == OPTIONS_MAX_JOBS) {
        fprintf(stderr, "zerodrun: --config: more than %d\n", OPTIONS_MAX_JOBS);
        return -EX_USAGE;
    }
    if (options->n_configs++ == 0)
        options->config_path = path;
    else
        options->more_config_paths[options->n_configs - 2] = path;
    return 0;
}

static int parse_color(const char *text, enum output_color *color)
{
    static const char *const names[] = {
        [OUTPUT_COLOR_AUTO] = "auto", [OUTPUT_COLOR_ALWAYS] = "always", [OUTPUT_COLOR_NEVER] = "never"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *color = (enum output_color)i;
            return 0;
        }
    }
    fprintf(stderr, "zerodrun: --color: '%s' is not auto, always or never\n", text);
    return -EX_USAGE;
}

static int parse_option(struct run_options *options, int option)
{
    switch (option) {
    case OPTION_CONFIG:
        return add_config(options, optarg);
    case OPTION_SOCKET:
        options->socket_path = optarg;
        return 0;
    case OPTION_ZEROD:
        options->zerod_path = optarg;
        return 0;
    case OPTION_MASTER_ADDR:
        options->master_addr = optarg;
        return 0;
    case OPTION_RUN_ID:
        options->run_id = optarg;
        return 0;
    case OPTION_NODES:
        options->nodes = optarg;
        return 0;
    case OPTION_KEY_FILE:
        options->key_path = optarg;
        return 0;
    case OPTION_TEE:
        options->tee_path = optarg;
        return 0;
    case OPTION_COLOR:
        return parse_color(optarg, &options->color);
    case OPTION_NO_DAEMON:
        options->no_daemon = true;
        return 0;
    case OPTION_SERVE:
        options->serve = true;
        return 0;
    case 'q':
        options->quiet = true;
        return 0;
    case 'h':
        fputs(help_text, stdout);
        return OPTIONS_DONE;
    case 'V':
        puts("zerodrun " ZEROD_VERSION);
        return OPTIONS_DONE;
    case '?':
        fputs("Try 'zerodrun --help'.\n", stderr);
        return -EX_USAGE;
    default:
        return parse_numeric(options, option, optarg);
    }
}

/* Return: NULL, or a sentence about options that exclude each other. */
static const char *find_contradiction(const struct run_options *options)
{
    if (!options->serve && !*options->command)
        return "no program to run. Try 'zerodrun --help'.";
    if (options->serve && *options->command)
        return "--serve starts no ranks, so it takes no program";
    if (options->serve && !options->config_path)
        return "--serve needs a --config";
    if (options->serve && options->no_daemon)
        return "--serve starts a daemon, --no-daemon none";
    if (options->run_id && (!*options->run_id || strlen(options->run_id) > 255))
        return "--run-id: 1 to 255 bytes are allowed";
    if (options->node_rank >= 0 && !options->nodes && options->n_nodes == 0)
        return "--node-rank is the number of a node among several: --nodes HOST0,HOST1,... is missing";
    if (options->tee_path && !*options->tee_path)
        return "--tee: a directory is needed";
    if (options->master_addr && !*options->master_addr)
        return "--master-addr: a host name or address is needed";
    return NULL;
}

int options_parse(struct run_options *options, int argc, char **argv)
{
    const char *wrong;
    int option, r;

    *options = (struct run_options){
        .n_jobs = 1,
        .node_rank = -1,
        .grace_ms = 1000 * OPTIONS_DEFAULT_GRACE_S,
        .n_daemon_restarts = OPTIONS_DEFAULT_DAEMON_RESTARTS,
    };
    /* '+': parsing stops at the first word that is not an option. This word is the program, and its arguments follow.
     * */
    while ((option = getopt_long(argc, argv, "+n:qhV", long_options, NULL)) >= 0) {
        r = parse_option(options, option);
        if (r != 0)
            return r;
    }
    if (options->n_configs > options->n_jobs) {
        fprintf(stderr, "zerodrun: %u times --config for %u job%s: --jobs %u\n", options->n_configs, options->n_jobs,
                options->n_jobs == 1 ? "" : "s", options->n_configs);
        return -EX_USAGE;
    }
    options->command = argv + optind;
    wrong = find_contradiction(options);
    if (wrong)
        fprintf(stderr, "zerodrun: %s\n", wrong);
    return wrong ? -EX_USAGE : 0;
}
