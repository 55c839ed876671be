/* SPDX-License-Identifier: Apache-2.0 */

/* Chooses the ranks, sockets and run id of a run, and writes a configuration if none is given. */

#include "client/run/run-place.h"

#include <dirent.h>
#include <fcntl.h>
#include <json-c/json.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sysexits.h>

#include "client/control/control.h"
#include "client/ctl/resize-command.h"
#include "client/run/answers.h"
#include "client/run/environment.h"
#include "client/run/made-config.h"
#include "client/run/options.h"
#include "core/base/base.h"
#include "core/config/config.h"

enum {
    TORCHRUN_PORT = 29500, /* the default on all nodes, without --master-port */
};

static const char directory_prefix[] = "zerodrun-";

enum {
    DIRECTORY_SUFFIX_BYTES = 6, /* size of mkdtemp()'s random suffix */
    MAX_REMOVED = 100,          /* most attempts, because another zerodrun may remove a directory before it is locked */
};

/* Opens and locks the directory of a zerodrun that has ended. Return: a descriptor; or -1 if a running zerodrun has
 * locked its directory, or the directory is not this user's. */
static int open_left(int base, const char *name)
{
    _cleanup_close_ int fd = openat(base, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0 || st.st_uid != geteuid() || (st.st_mode & 07777) != 0700 ||
        flock(fd, LOCK_EX | LOCK_NB) < 0)
        return -1;
    return steal_fd(&fd);
}

/* Removes the directory of a zerodrun that was killed, unless a daemon still answers at its socket. */
static void remove_left(const char *base_path, int base, const char *name)
{
    static const char *const files[] = {"zerod.sock", "zerod.yaml", "notify"};
    _cleanup_close_ int fd = open_left(base, name);
    _cleanup_free_ char *socket = NULL;

    if (fd < 0)
        return;
    if (asprintf(&socket, "%s/%s/zerod.sock", base_path, name) < 0) {
        socket = NULL;
        return;
    }
    if (answers_now(socket))
        return;
    for (size_t i = 0; i < ARRAY_SIZE(files); i++)
        (void)unlinkat(fd, files[i], 0);
    for (unsigned i = 1; i < OPTIONS_MAX_JOBS; i++) {
        char job[32];

        snprintf(job, sizeof(job), "zerod.sock.%u", i); /* the name that place_number_socket() makes */
        (void)unlinkat(fd, job, 0);
    }
    (void)unlinkat(base, name, AT_REMOVEDIR); /* fails if the directory is not empty */
}

static void remove_all_left(const char *base_path)
{
    const size_t n_prefix = sizeof(directory_prefix) - 1;
    const struct dirent *entry;
    DIR *base = opendir(base_path);

    while (base && (entry = readdir(base)))
        if (strncmp(entry->d_name, directory_prefix, n_prefix) == 0 &&
            strlen(entry->d_name) == n_prefix + DIRECTORY_SUFFIX_BYTES)
            remove_left(base_path, dirfd(base), entry->d_name);
    if (base)
        closedir(base);
}

/* Locks the directory until this process ends, if the file system supports locks. Return: 0; -ENOENT if another
 * zerodrun has removed the directory; or another -errno. */
static int hold_directory(const char *directory)
{
    _cleanup_close_ int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;

    if (fd < 0)
        return -errno;
    (void)flock(fd, LOCK_EX);
    if (fstat(fd, &st) < 0)
        return -errno;
    if (st.st_nlink == 0)
        return -ENOENT;
    (void)steal_fd(&fd);
    return 0;
}

/* Makes and locks a directory. Makes another one if a zerodrun that starts removes the directory before it is locked.
 * Return: the path, which the caller frees; or NULL, with an errno in *error. */
static char *make_directory_in(const char *base, int *error)
{
    for (unsigned attempt = 0; attempt < MAX_REMOVED; attempt++) {
        char *directory;

        if (asprintf(&directory, "%s/%sXXXXXX", base, directory_prefix) < 0) {
            *error = ENOMEM;
            return NULL;
        }
        if (!mkdtemp(directory)) {
            *error = errno;
            free(directory);
            return NULL;
        }
        *error = -hold_directory(directory);
        if (*error == 0)
            return directory;
        free(directory);
        if (*error != ENOENT)
            return NULL;
    }
    return NULL;
}

char *place_make_directory(void)
{
    const char *bases[] = {getenv("XDG_RUNTIME_DIR"), getenv("TMPDIR"), "/tmp"};
    int error = ENAMETOOLONG;

    for (size_t i = 0; i < ARRAY_SIZE(bases); i++) {
        char *directory;

        if (!bases[i] || bases[i][0] != '/' || strlen(bases[i]) > CONFIG_MAX_SOCKET_BYTES - 32)
            continue;
        remove_all_left(bases[i]);
        directory = make_directory_in(bases[i], &error);
        if (directory)
            return directory;
    }
    fprintf(stderr, "zerodrun: cannot make a directory for the socket in XDG_RUNTIME_DIR, TMPDIR or /tmp: %s\n",
            strerror(error));
    return NULL;
}

/*
 * Writes a configuration. base: the configuration of --config, which lists no nodes; NULL: no --config. Return: 0, or
 * -sysexits.h.
 */
static int place_make_config(struct place *place, const struct run_options *options, const struct config *base)
{
    _cleanup_free_ char *path = NULL, *key_path = NULL;
    int r;

    if (asprintf(&path, "%s/zerod.yaml", place->directory) < 0) {
        path = NULL;
        return -EX_OSERR;
    }
    r = place->nodes.n > 0 ? nodes_find_key(&place->nodes, options, &key_path) : 0;
    if (r < 0)
        return r;
    place->config_path = steal_ptr(path);
    place->made_config = true;
    return made_config_write(&(struct made_config){
        .path = place->config_path,
        .base_path = base ? base->file : NULL,
        .socket = place->socket,
        .n_ranks = place->n_ranks,
        .nodes = &place->nodes,
        .port = options->nodes_port,
        .key_path = key_path,
        .has_collective = base && config_file_has(base, "collective"),
    });
}

/* Return: the host of "host:port", without the brackets of "[::1]:7700". */
static char *host_of(const char *address)
{
    const char *end = strrchr(address, ':');
    size_t n = end ? (size_t)(end - address) : strlen(address);

    if (n > 2 && address[0] == '[' && address[n - 1] == ']')
        return strndup(address + 1, n - 2);
    return strndup(address, n);
}

/* Sets the host of rank 0. address: of node 0's daemon, which is on this host; NULL: the job has one node. */
static int place_choose_master(struct place *place, const struct run_options *options, const char *address)
{
    free(place->master_addr);
    place->master_addr = options->master_addr ? strdup(options->master_addr)
                         : address            ? host_of(address)
                                              : strdup("127.0.0.1");
    return place->master_addr ? 0 : -EX_OSERR;
}

static unsigned get_number(struct json_object *o, const char *key)
{
    return (unsigned)json_object_get_int64(json_object_object_get(o, key));
}

/* Reads the nodes and ranks of a job on several nodes from the daemon's status. Return: 0, or -sysexits.h. */
static int place_from_nodes(struct place *place, const struct run_options *options, struct json_object *nodes)
{
    struct json_object *list = json_object_object_get(nodes, "list"), *own;

    place->node = get_number(nodes, "node");
    place->n_nodes = (unsigned)json_object_array_length(list);
    own = json_object_array_get_idx(list, place->node);
    place->first_rank = get_number(own, "first_rank");
    place->n_ranks = get_number(own, "n_ranks");
    return place_choose_master(
        place, options, json_object_get_string(json_object_object_get(json_object_array_get_idx(list, 0), "address")));
}

/* Resizes the daemon's job to -n ranks, unless the daemon has another run's state. Return: 0, or -sysexits.h. */
static int place_resize(struct place *place, const struct run_options *options, const char *run_id)
{
    const char *own = options->run_id ? options->run_id : getenv("ZEROD_RUN_ID");
    struct json_object *answer;
    char *prefix;
    int r;

    if (place->n_nodes > 1) {
        fprintf(stderr, "zerodrun: -n %u, but the daemon on %s has %u ranks on this node (world.size %u)\n",
                options->n_ranks, place->socket, place->n_ranks, place->world_size);
        return -EX_USAGE;
    }
    if (run_id && (!own || strcmp(own, run_id) != 0)) {
        fprintf(
            stderr,
            "zerodrun: -n %u, but the daemon on %s has world.size %u and the state of run %s: with --run-id %s that "
            "run goes on with %u ranks, \"zerodctl drop\" forgets it\n",
            options->n_ranks, place->socket, place->world_size, run_id, run_id, options->n_ranks);
        return -EX_USAGE;
    }
    if (asprintf(&prefix, "zerodrun: -n %u, but the daemon on %s has world.size %u", options->n_ranks, place->socket,
                 place->world_size) < 0)
        return -EX_OSERR;
    r = resize_ask(prefix, place->socket, options->n_ranks, &answer);
    free(prefix);
    if (r == 0 && !options->quiet)
        fprintf(stderr, "zerodrun: %s\n", json_object_get_string(json_object_object_get(answer, "message")));
    json_object_put(answer);
    place->n_ranks = place->world_size = options->n_ranks;
    return -r;
}

/* Reads the ranks of the answering daemon's job, and resizes the job to -n. Return: 0, or -sysexits.h. */
static int place_ask_daemon(struct place *place, const struct run_options *options)
{
    struct answer answer = ANSWER_NULL;
    struct json_object *status = NULL, *nodes;
    int r = control_ask_once("zerodrun", place->socket, "status", &answer);

    if (r < 0)
        return r;
    status = json_tokener_parse(answer.json);
    place->n_ranks = place->world_size = get_number(status, "world_size");
    place->node = place->first_rank = 0;
    place->n_nodes = 1;
    nodes = json_object_object_get(status, "nodes");
    if (nodes)
        r = place_from_nodes(place, options, nodes);
    if (r == 0 && options->n_ranks > 0 && options->n_ranks != place->n_ranks)
        r = place_resize(place, options, json_object_get_string(json_object_object_get(status, "run_id")));
    json_object_put(status);
    answer_deinit(&answer);
    return r;
}

/* Makes a socket's path in a private directory. */
static int place_make_socket(struct place *place)
{
    place->directory = place_make_directory();
    if (!place->directory)
        return -EX_CANTCREAT;
    if (asprintf(&place->socket, "%s/zerod.sock", place->directory) < 0) {
        place->socket = NULL;
        return -EX_OSERR;
    }
    return 0;
}

/* Chooses the socket from the option, the file, the environment or a private directory, in this order. */
static int place_choose_socket(struct place *place, const char *option, const struct config *config)
{
    const char *variable = getenv("ZEROD_SOCKET");

    place->told.socket = !config_file_has(config, "listen.socket");
    if (!place->told.socket)
        place->socket = strdup(option ? option : config->listen.socket);
    else if (option || (variable && *variable))
        place->socket = strdup(option ? option : variable);
    else
        return place_make_socket(place);
    return place->socket ? 0 : -EX_OSERR;
}

/* ---- nodes that the configuration does not list ----------------------------------------------------------- */

/* Sets the ranks and the host of rank 0 from place->nodes. Return: 0, or -EX_OSERR. */
static int place_from_given_nodes(struct place *place, const struct run_options *options)
{
    const struct nodes *nodes = &place->nodes;

    place->n_ranks = MAX(options->n_ranks, 1u);
    place->n_nodes = MAX(nodes->n, 1u);
    place->node = nodes->node;
    place->first_rank = place->node * place->n_ranks;
    place->world_size = place->n_nodes * place->n_ranks;
    if (!nodes->hosts)
        return 0;
    place->master_addr = strdup(options->master_addr ? options->master_addr : nodes->hosts[0]);
    return place->master_addr ? 0 : -EX_OSERR;
}

/*
 * Checks that the answering daemon is that of the node which the command line or Slurm names. Return: 0, or -EX_CONFIG.
 */
static int place_compare_node(const struct place *place)
{
    const struct nodes *nodes = &place->nodes;

    if (nodes->n == 0 || (place->n_nodes == nodes->n && place->node == nodes->node))
        return 0;
    fprintf(stderr, "zerodrun: the daemon on %s is that of node %u of %u, but this is node %u of %u\n", place->socket,
            place->node, MAX(place->n_nodes, 1u), nodes->node, nodes->n);
    return -EX_CONFIG;
}

static int place_ask_and_compare(struct place *place, const struct run_options *options)
{
    int r = place_ask_daemon(place, options);

    return r < 0 ? r : place_compare_node(place);
}

/* Writes a configuration with the ranks for a new daemon. config: the one of --config, or NULL. */
static int place_prepare_daemon(struct place *place, const struct run_options *options, const struct config *config)
{
    place->told.ranks = false;
    if (!place->directory)
        place->directory = place_make_directory();
    return place->directory ? place_make_config(place, options, config) : -EX_CANTCREAT;
}

static int place_add_nodes(struct place *place, const struct run_options *options, const struct config *config)
{
    static const char *const keys[] = {"world.size", "world.node", "world.key_file"};
    bool is_slurm = place->nodes.is_from_slurm;
    int r;

    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        if (!config_file_has(config, keys[i]))
            continue;
        fprintf(
            stderr,
            "zerodrun: %u nodes%s, but %s has %s: expected a file without the section world, or with world.nodes%s\n",
            place->nodes.n, is_slurm ? ", as Slurm says" : "", options->config_path, keys[i],
            is_slurm ? "; --nnodes 1 makes a job of each node" : "");
        return -EX_CONFIG;
    }
    r = place_from_given_nodes(place, options);
    if (r == 0)
        r = place_choose_socket(place, options->socket_path, config);
    if (r < 0 || options->no_daemon)
        return r;
    r = answers_or_refuses(place->socket, !options->no_daemon);
    if (r > 0)
        r = place_ask_and_compare(place, options);
    else if (r == 0)
        r = place_prepare_daemon(place, options, config);
    return r;
}

static int place_from_config(struct place *place, const struct run_options *options, const struct config *config)
{
    const struct config_world *world = &config->world;
    int r, answers = 0;

    place->world_size = world->size;
    place->n_ranks = config_local_ranks(config);
    place->first_rank = config_first_rank(config);
    place->node = world->node;
    place->n_nodes = MAX(world->nodes.n_items, (size_t)1);
    place->config_path = strdup(options->config_path);
    if (!place->config_path)
        return -EX_OSERR;
    r = place_choose_socket(place, options->socket_path, config);
    if (r == 0)
        r = answers = answers_or_refuses(place->socket, !options->no_daemon);
    if (r < 0)
        return r;
    if (place->n_nodes == 1 && answers) /* the daemon's run may have another number of ranks */
        return place_ask_daemon(place, options);
    if (options->n_ranks > 0 && options->n_ranks != place->n_ranks) {
        fprintf(stderr, "zerodrun: -n %u, but %s has %u ranks on this node (world.size %u)\n", options->n_ranks,
                options->config_path, place->n_ranks, world->size);
        return -EX_USAGE;
    }
    if (place->n_nodes > 1 && place_choose_master(place, options, world->nodes.items[0].address) < 0)
        return -EX_OSERR;
    if (place->told.socket || strcmp(place->socket, config->listen.socket) == 0 || options->no_daemon || answers)
        return 0;
    fprintf(stderr, "zerodrun: no daemon answers on %s; a daemon started with %s would listen on %s\n", place->socket,
            place->config_path, config->listen.socket);
    return -EX_USAGE;
}

static int place_refuse_nodes(const struct run_options *options)
{
    fprintf(stderr, "zerodrun: %s lists nodes (world.nodes), so --nodes, --nnodes and --node-rank are not allowed\n",
            options->config_path);
    return -EX_USAGE;
}

static int place_load_config(struct place *place, const struct run_options *options)
{
    /* A DeepSpeed file has neither socket nor ranks, so usual ones are passed for the check. With --serve the socket
     * must be configured, because other programs must know it. */
    const struct config_given given = {.socket = options->socket_path ? options->socket_path
                                                 : options->serve     ? NULL
                                                                      : "/run/zerod/zerod.sock",
                                       .ranks = options->n_ranks,
                                       .usual_ranks = 1};
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config = NULL;
    int r;

    r = config_load(&config, options->config_path, &given, &problems);
    if (r != 0) /* notes of a valid file are printed by the daemon */
        config_problems_print(stderr, &problems);
    config_problems_deinit(&problems);
    if (r != 0)
        return r < 0 ? -EX_OSERR : -EX_CONFIG;
    place->told.ranks = !config_file_has(config, "world.size");
    if (config->world.nodes.n_items == 0 && place->nodes.n > 0)
        r = place_add_nodes(place, options, config);
    else if (place->nodes.n > 0 && !place->nodes.is_from_slurm)
        r = place_refuse_nodes(options);
    else
        r = place_from_config(place, options, config);
    config_free(config);
    return r;
}

static int place_without_config(struct place *place, const struct run_options *options)
{
    const char *socket_path = options->socket_path ? options->socket_path : getenv("ZEROD_SOCKET");
    int r = place_from_given_nodes(place, options);

    if (r < 0)
        return r;
    if (socket_path && *socket_path)
        place->socket = strdup(socket_path);
    r = answers_or_refuses(place->socket, !options->no_daemon);
    if (r > 0)
        return place_ask_and_compare(place, options);
    if (r == 0 && !options->no_daemon && !place->socket)
        r = place_make_socket(place);
    return r < 0 || options->no_daemon ? r : place_prepare_daemon(place, options, NULL);
}

static int place_choose_run_id(struct place *place, const struct run_options *options)
{
    const char *run_id = options->run_id ? options->run_id : getenv("ZEROD_RUN_ID");
    unsigned char random[8];
    size_t i;

    if (!run_id || !*run_id)
        run_id = place->nodes.run_id;
    if (run_id && *run_id) {
        place->run_id = strdup(run_id);
        return place->run_id ? 0 : -EX_OSERR;
    }
    if (place->n_nodes > 1 && place->nodes.n > 0 && !options->no_daemon) {
        fprintf(stderr, "zerodrun: %u nodes: --run-id is missing, any name of this run, the same on every node\n",
                place->n_nodes);
        return -EX_USAGE;
    }
    place->run_id = calloc(2, sizeof(random) + 1);
    if (!place->run_id || getrandom(random, sizeof(random), 0) != sizeof(random))
        return -EX_OSERR;
    for (i = 0; i < sizeof(random); i++)
        sprintf(place->run_id + 2 * i, "%02x", random[i]);
    return 0;
}

/* Sets *port to a free port if it is 0. Return: true if a program could listen on the port now. */
static bool place_try_port(uint16_t *port)
{
    _cleanup_close_ int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(*port)};
    socklen_t n_bytes = sizeof(address);

    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
        getsockname(fd, (struct sockaddr *)&address, &n_bytes) < 0)
        return false;
    *port = ntohs(address.sin_port);
    return true;
}

/* Reads the range of ports that the kernel uses for outgoing connections. */
static void place_read_ephemeral_ports(unsigned *low, unsigned *high)
{
    FILE *file = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");

    if (!file || fscanf(file, "%u %u", low, high) != 2) {
        *low = 32768;
        *high = 60999;
    }
    if (file)
        fclose(file);
}

/*
 * Finds a port that is free now. Rank 0 listens on the port only seconds later, when its imports are done. So the port
 * is outside the range of outgoing connections, if possible. If another process listens on the port first, rank 0
 * reports that.
 */
static int place_find_port(struct place *place)
{
    enum { FIRST_PORT = 10000, LAST_PORT = 65535, N_TRIES = 64 };
    unsigned low, high, n_below, n_all;
    uint16_t port = 0;

    place_read_ephemeral_ports(&low, &high);
    n_below = low > FIRST_PORT ? low - FIRST_PORT : 0;
    n_all = n_below + (high < LAST_PORT ? LAST_PORT - high : 0);
    for (unsigned i = 0; n_all > 0 && i < N_TRIES; i++) {
        uint32_t random;
        unsigned at;

        if (getrandom(&random, sizeof(random), 0) != sizeof(random))
            break;
        at = random % n_all;
        port = (uint16_t)(at < n_below ? FIRST_PORT + at : high + 1 + at - n_below);
        if (place_try_port(&port))
            break;
        port = 0;
    }
    if (port == 0 && !place_try_port(&port)) {
        fprintf(stderr, "zerodrun: cannot find a free port: %s\n", strerror(errno));
        return -EX_OSERR;
    }
    place->master_port = port;
    return 0;
}

/* ---- further jobs ---------------------------------------------------------------------------------------- */

/*
 * Checks that a further job has the first job's ranks. name: the further job's configuration or socket. Return: 0, or
 * -EX_CONFIG.
 */
static int place_compare_ranks(const struct place *place, const char *name, unsigned world_size, unsigned first_rank,
                               unsigned n_ranks)
{
    if (world_size == place->world_size && first_rank == place->first_rank && n_ranks == place->n_ranks)
        return 0;
    fprintf(stderr, "zerodrun: %s has other ranks than the first job: one program is a rank of all its jobs\n", name);
    return -EX_CONFIG;
}

/* Makes the path of a further job's socket: the socket of job 0 with .1, .2, ... appended. Return: 0, or -EX_OSERR. */
static int place_number_socket(const struct place *place, unsigned number, char **path)
{
    if (asprintf(path, "%s.%u", place->socket, number) >= 0)
        return 0;
    *path = NULL;
    return -EX_OSERR;
}

static int place_load_job(struct place *place, const struct run_options *options, struct place_job *job,
                          unsigned number)
{
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    _cleanup_free_ char *otherwise = NULL;
    struct config *config = NULL;
    int r = place->socket ? place_number_socket(place, number, &otherwise) : 0;

    if (r < 0)
        return r;
    r = config_load(&config, job->config_path, &(struct config_given){.socket = otherwise, .ranks = place->world_size},
                    &problems);

    if (r != 0) /* notes of a valid file are printed by the daemon */
        config_problems_print(stderr, &problems);
    config_problems_deinit(&problems);
    if (r != 0)
        return r < 0 ? -EX_OSERR : -EX_CONFIG;
    job->told.socket = !config_file_has(config, "listen.socket");
    job->told.ranks = !config_file_has(config, "world.size");
    job->socket = strdup(config->listen.socket);
    if (!job->socket) {
        r = -EX_OSERR;
    } else if (place->socket && strcmp(job->socket, place->socket) == 0) {
        fprintf(stderr, "zerodrun: %s has the socket of the first job, %s: each job needs its own\n", job->config_path,
                job->socket);
        r = -EX_CONFIG;
    } else if ((r = answers_or_refuses(job->socket, !options->no_daemon)) ==
               0) { /* otherwise place_fit_job() asks the daemon */
        r = place_compare_ranks(place, job->config_path, config->world.size, config_first_rank(config),
                                config_local_ranks(config));
    }
    config_free(config);
    return r;
}

/* Sets up a further job with the first job's configuration and a socket of its own. */
static int place_copy_job(struct place *place, const struct run_options *options, struct place_job *job,
                          unsigned number)
{
    int r;

    if (place->n_nodes > 1) {
        fprintf(stderr, "zerodrun: on several nodes each job needs a --config of its own, with other ports\n");
        return -EX_USAGE;
    }
    if (!place->socket)
        return 0;
    if (place_number_socket(place, number, &job->socket) < 0)
        return -EX_OSERR;
    job->config_path = place->config_path;
    job->told = (struct place_told){.socket = true, .ranks = place->told.ranks};
    r = answers_or_refuses(job->socket, !options->no_daemon);
    if (r != 0 || options->no_daemon || job->config_path)
        return r;
    fprintf(stderr, "zerodrun: nobody answers on %s, and there is no --config to start a daemon with\n", job->socket);
    return -EX_USAGE;
}

/*
 * If a daemon answers for a further job, checks that it has the ranks of the first job. On one node, resizes it first.
 */
static int place_fit_job(const struct place *place, const struct run_options *options, const struct place_job *job)
{
    struct run_options with_ranks = *options;
    struct place its = {.socket = job->socket, .n_nodes = 1};
    int r;

    if (!answers_now(job->socket))
        return 0;
    with_ranks.n_ranks = place->n_nodes == 1 ? place->n_ranks : 0;
    r = place_ask_daemon(&its, &with_ranks);
    free(its.master_addr);
    return r < 0 ? r : place_compare_ranks(place, job->socket, its.world_size, its.first_rank, its.n_ranks);
}

static int place_add_jobs(struct place *place, const struct run_options *options)
{
    int r = 0;

    place->n_jobs = options->n_jobs;
    for (unsigned i = 1; r >= 0 && i < place->n_jobs; i++) {
        struct place_job *job = &place->more[i - 1];

        job->config_path = options->more_config_paths[i - 1];
        r = job->config_path ? place_load_job(place, options, job, i) : place_copy_job(place, options, job, i);
        if (r >= 0)
            r = place_fit_job(place, options, job);
    }
    return r;
}

int place_init(struct place *place, const struct run_options *options)
{
    int r;

    *place = (struct place){.master_port = options->master_port};
    r = nodes_init(&place->nodes, options);
    if (r < 0)
        return r;
    r = options->config_path ? place_load_config(place, options) : place_without_config(place, options);
    if (r == 0)
        r = place_add_jobs(place, options);
    if (r == 0 && !place->master_addr)
        r = place_choose_master(place, options, NULL);
    if (r < 0)
        return r;
    if (place->master_port == 0 && place->n_nodes > 1)
        place->master_port = TORCHRUN_PORT;
    if (place->master_port == 0)
        r = place_find_port(place);
    return r < 0 ? r : place_choose_run_id(place, options);
}

/* Removes a socket in the private directory, because a killed daemon has not removed it. */
static void place_remove_socket(const struct place *place, const char *path)
{
    if (path && strncmp(path, place->directory, strlen(place->directory)) == 0)
        unlink(path);
}

void place_deinit(struct place *place)
{
    if (place->directory) {
        if (place->made_config)
            unlink(place->config_path);
        place_remove_socket(place, place->socket);
        for (unsigned i = 1; i < place->n_jobs; i++)
            place_remove_socket(place, place->more[i - 1].socket);
        rmdir(place->directory);
    }
    for (unsigned i = 1; i < place->n_jobs; i++)
        free(place->more[i - 1].socket);
    free(place->socket);
    free(place->config_path);
    free(place->directory);
    free(place->run_id);
    free(place->master_addr);
    nodes_deinit(&place->nodes);
    *place = (struct place){};
}

int place_describe(const struct place *place, unsigned local, struct environment *env)
{
    int r = 0;

    r |= environment_set(env, "RANK", "%u", place->first_rank + local);
    r |= environment_set(env, "LOCAL_RANK", "%u", local);
    r |= environment_set(env, "GROUP_RANK", "%u", place->node);
    r |= environment_set(env, "WORLD_SIZE", "%u", place->world_size);
    r |= environment_set(env, "LOCAL_WORLD_SIZE", "%u", place->n_ranks);
    r |= environment_set(env, "MASTER_ADDR", "%s", place->master_addr);
    r |= environment_set(env, "MASTER_PORT", "%u", place->master_port);
    r |= environment_set(env, "ZEROD_RUN_ID", "%s", place->run_id);
    if (place->socket)
        r |= environment_set(env, "ZEROD_SOCKET", "%s", place->socket);
    for (unsigned i = 1; i < place->n_jobs; i++) {
        char name[32];

        snprintf(name, sizeof(name), "ZEROD_SOCKET_%u", i);
        if (place->more[i - 1].socket)
            r |= environment_set(env, name, "%s", place->more[i - 1].socket);
    }
    /* As in torchrun, because several ranks, each with one thread per core, would slow each other down. */
    if (place->n_ranks > 1 && !environment_get(env, "OMP_NUM_THREADS"))
        r |= environment_set(env, "OMP_NUM_THREADS", "1");
    /* The variable may be set if torchrun has started zerodrun. Then torch would use torchrun's store instead of rank
     * 0's. */
    environment_unset(env, "TORCHELASTIC_USE_AGENT_STORE");
    return r < 0 ? -ENOMEM : 0;
}
