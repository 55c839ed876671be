/* SPDX-License-Identifier: Apache-2.0 */

/*
 * zerod, the ZeRO optimizer as a service. Reads options and configuration, runs the server, and exits with a code of
 * sysexits.h.
 */

#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sysexits.h>

#include "core/base/base.h"
#include "core/base/huge-pages.h"
#include "core/base/keep.h"
#include "core/base/log.h"
#include "core/base/notify.h"
#include "core/config/config.h"
#include "daemon/server/start-check.h"
#include "daemon/server/companion.h"
#include "daemon/server/server.h"
#include "daemon/server/service.h"
#include "kernels/gemm.h"

static const char usage[] =
    "usage: zerod --config FILE [--socket PATH] [--ranks N] [--no-successors] [--trace-dir DIR]\n"
    "             [--check [--user NAME] | --print-config]\n"
    "\n"
    "Holds the sharded optimizer state of one training job on this node: takes gradients\n"
    "from trainers over a local socket, reduces, updates, publishes the weights.\n"
    "\n"
    "  -c, --config FILE   configuration of the job (YAML)\n"
    "      --socket PATH   listen there, not on the configuration's listen.socket\n"
    "      --ranks N       world.size, if the configuration has none\n"
    "      --no-successors nobody starts a rank again that ends: one line says that it is gone\n"
    "      --trace-dir DIR as diagnostics.trace_dir, unless the file has it\n"
    "      --check         validate the configuration and exit\n"
    "      --user NAME     with --check: look at the machine as this user, too; root does so\n"
    "                      as zerod if FILE is in /etc/zerod\n"
    "      --print-config  print every effective value with its origin and exit\n"
    "  -V, --version       print the version and exit\n"
    "  -h, --help          print this and exit\n"
    "\n"
    "SIGTERM and SIGINT stop it cleanly. If a service manager keeps the run, the next daemon goes on\n"
    "with it after SIGTERM; SIGINT ends the run. See zerod(8), zerod.yaml(5).\n";

struct options {
    const char *config, *socket, *trace_dir, *user;
    unsigned n_ranks; /* 0: not given */
    bool check, print, no_successors;
    int exit_now; /* -1: continue */
};

/* Return: -1 if text is valid, else the exit code after a message on stderr. */
static int parse_ranks(const char *text, unsigned *n_ranks)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (text[0] < '0' || text[0] > '9' || *end || n < 1 || n > CONFIG_MAX_RANKS) {
        fprintf(stderr, "zerod: --ranks: '%s' is not a whole number from 1 to %d\n", text, CONFIG_MAX_RANKS);
        return EX_USAGE;
    }
    *n_ranks = n;
    return -1;
}

static struct options parse_options(int argc, char **argv)
{
    static const struct option longs[] = {
        {"no-successors", no_argument, NULL, 'n'},
        {"trace-dir", required_argument, NULL, 't'},
        {"config", required_argument, NULL, 'c'},
        {"check", no_argument, NULL, 'k'},
        {"print-config", no_argument, NULL, 'p'},
        {"version", no_argument, NULL, 'V'},
        {"help", no_argument, NULL, 'h'},
        {"socket", required_argument, NULL, 's'},
        {"ranks", required_argument, NULL, 'r'},
        {"user", required_argument, NULL, 'u'},
        {0},
    };
    struct options options = {.exit_now = -1};
    int c;

    while ((c = getopt_long(argc, argv, "c:Vh", longs, NULL)) != -1) {
        switch (c) {
        case 'c':
            options.config = optarg;
            break;
        case 's':
            options.socket = optarg;
            break;
        case 'r':
            options.exit_now = parse_ranks(optarg, &options.n_ranks);
            if (options.exit_now >= 0)
                return options;
            break;
        case 'n':
            options.no_successors = true;
            break;
        case 't':
            options.trace_dir = optarg;
            break;
        case 'u':
            options.user = optarg;
            break;
        case 'k':
            options.check = true;
            break;
        case 'p':
            options.print = true;
            break;
        case 'V':
            printf("zerod %s\n", service_version());
            options.exit_now = EX_OK;
            return options;
        case 'h':
            fputs(usage, stdout);
            options.exit_now = EX_OK;
            return options;
        default:
            fputs(usage, stderr);
            options.exit_now = EX_USAGE;
            return options;
        }
    }
    if (options.user && !options.check) {
        fputs("zerod: --user is for --check: systemd starts the daemon as its user\n", stderr);
        options.exit_now = EX_USAGE;
        return options;
    }
    if (!options.config || optind < argc) {
        fprintf(stderr, options.config ? "zerod: unexpected argument \"%s\"\n" : "zerod: --config FILE is missing\n",
                argv[optind]);
        fputs(usage, stderr);
        options.exit_now = EX_USAGE;
    }
    return options;
}

static int load_config(struct config **config, const struct options *options)
{
    const struct config_given given = {.socket = options->socket, .ranks = options->n_ranks};
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    int r = config_load(config, options->config, &given, &problems);

    config_problems_print(stderr, &problems);
    config_problems_deinit(&problems);
    if (r == 0)
        (*config)->no_successors = options->no_successors;
    if (r == 0 && options->trace_dir && !(*config)->diagnostics.trace_dir)
        (*config)->diagnostics.trace_dir = strdup(options->trace_dir); /* without memory, no traces */
    return r == 0 ? EX_OK : r == CONFIG_E_INVALID ? EX_CONFIG : EX_OSERR;
}

/* ---- state that was passed to this process ------------------------------------------------------------- */

static int take_descriptors(void)
{
    int r = keep_init();

    if (r < 0)
        fprintf(stderr, "zerod: LISTEN_FDS, LISTEN_FDNAMES: the passed descriptors cannot be taken: %s\n", strerror(-r));
    return r < 0 ? EX_OSERR : EX_OK;
}

/*
 * A daemon that receives the kept state of a run may be unable to start, because the configuration is wrong, or names
 * something that is missing or in use. If no daemon ran, the service manager would drop the state. So the first daemon
 * with this error stores this mark with the service manager and fails, so that systemctl restart reports the error.
 * systemd then starts another daemon, which receives the mark, and waits with the state until the configuration file
 * changes.
 */
#define TOLD_NAME "told"

enum { RETRY_MS = 10 * 1000 }; /* picked, because each start adds some lines to the journal */

/* Return: whether systemd started this process directly, and not through another program of the unit. */
static bool systemd_started_it(void)
{
    const char *pid = getenv("SYSTEMD_EXEC_PID");

    return pid && strtol(pid, NULL, 10) == getpid();
}

static bool was_told(void)
{
    _cleanup_close_ int fd = keep_take(TOLD_NAME);

    return fd >= 0;
}

/*
 * Stores the mark. Return: whether the mark is stored. Then this process may fail, because the next daemon will receive
 * the mark and hold the state.
 */
static bool may_tell(void)
{
    _cleanup_close_ int fd = systemd_started_it() ? open("/dev/null", O_RDONLY | O_CLOEXEC) : -1;

    if (fd < 0 || keep_put(TOLD_NAME, fd) < 0 || keep_confirm(KEEP_TIMEOUT_MS) < 0)
        return false;
    fprintf(stderr, "zerod: the state of a run is kept; the next daemon holds it until this error is fixed\n");
    return true;
}

/* The address of the socket that an earlier daemon made. */
static struct sockaddr_un kept_socket;

static void find_kept_socket(void)
{
    const struct keep_passed *passed;
    socklen_t size = sizeof(kept_socket) - 1;

    for (size_t i = 0; (passed = keep_passed(i)); i++)
        if (strcmp(passed->name, KEEP_SOCKET_NAME) == 0)
            (void)getsockname(passed->fd, (struct sockaddr *)&kept_socket, &size);
}

/*
 * Handles SIGINT while the state is held. Exits with 0, so that the service manager drops the state. Removes the path
 * of the kept socket, because no other daemon will listen on this socket.
 */
static void end_hold(int number)
{
    (void)number;
    if (kept_socket.sun_path[0])
        (void)unlink(kept_socket.sun_path);
    _exit(EX_OK);
}

/* Waits until the file at path differs from *last, or for retry_ms if that is not 0. */
static void wait_for_change(const char *path, struct stat *last, unsigned retry_ms)
{
    enum { LOOK_EVERY_MS = 200 };
    unsigned waited_ms = 0;
    struct stat now;

    do {
        if (retry_ms > 0 && waited_ms >= retry_ms)
            return;
        usleep(LOOK_EVERY_MS * 1000);
        waited_ms += LOOK_EVERY_MS;
        notify_state("WATCHDOG=1");
    } while (stat(path, &now) < 0 || (now.st_ino == last->st_ino && now.st_mtim.tv_sec == last->st_mtim.tv_sec &&
                                      now.st_mtim.tv_nsec == last->st_mtim.tv_nsec));
    *last = now;
}

/*
 * Starts to hold the state, and prints until when. is_in_use: an address is in use. Then the daemon also retries
 * regularly, because no event reports that the address is free.
 */
static void hold_until_changed(const char *path, struct stat *last, bool is_in_use)
{
    if (is_in_use)
        fprintf(stderr,
                "zerod: the state of a run is kept for this daemon: it holds the state, and tries again every %d s, or "
                "when %s has changed\n",
                RETRY_MS / 1000, path);
    else
        fprintf(stderr,
                "zerod: the state of a run is kept for this daemon: it holds the state until %s has changed and is "
                "right (touch it, if something else was wrong)\n",
                path);
    signal(SIGINT, end_hold);
    notify_state(is_in_use ? "READY=1\nSTATUS=holds the state of a run, and waits for an address that is in use"
                           : "READY=1\nSTATUS=holds the state of a run, and waits for a valid configuration");
    (void)stat(path, last);
}

static int wait_for_config(struct config **config, const struct options *options)
{
    struct stat last = {0};
    int r = EX_CONFIG;

    hold_until_changed(options->config, &last, false);
    while (r == EX_CONFIG || r == EX_OSERR) {
        wait_for_change(options->config, &last, 0);
        r = load_config(config, options);
    }
    return r;
}

/*
 * Handles an error of something that the configuration names. why: the exit code of the error, EX_UNAVAILABLE if an
 * address is in use. Holds the state if an earlier daemon has already failed (told) or the mark cannot be stored.
 * Return: the exit code that makes systemd start the next daemon.
 */
static int wait_and_start_again(const struct options *options, bool told, int why)
{
    bool is_in_use = why == EX_UNAVAILABLE;
    struct stat last = {0};

    if (told || !may_tell()) {
        hold_until_changed(options->config, &last, is_in_use);
        wait_for_change(options->config, &last, is_in_use ? RETRY_MS : 0);
    }
    return EX_TEMPFAIL;
}

/* Sets listen.socket to path, under the rules of the configuration. Return: an exit code. */
static int move_socket(struct config *config, const char *path)
{
    if (path[0] != '/' || strlen(path) > CONFIG_MAX_SOCKET_BYTES) {
        fprintf(stderr, "zerod: --socket %s: expected an absolute path of at most %d bytes\n", path,
                CONFIG_MAX_SOCKET_BYTES);
        return EX_USAGE;
    }
    free(config->listen.socket);
    config->listen.socket = strdup(path);
    return config->listen.socket ? EX_OK : EX_OSERR;
}

static int exit_code(int r)
{
    switch (r) {
    case -EADDRINUSE:
    case -EEXIST:
        return EX_UNAVAILABLE;
    case -EACCES:
    case -EPERM:
        return EX_NOPERM;
    case -ENOENT:
    case -ENOTDIR:
    case -EINVAL:
    case -ENOTSUP:
        return EX_CONFIG;
    default:
        return EX_OSERR;
    }
}

/*
 * Ignores all other signals that would end the daemon, because it holds the state of a job. The server handles SIGTERM,
 * SIGINT and SIGHUP. SIGQUIT and signals of faults dump core. libuv gives its child processes the default dispositions.
 */
static void ignore_signals(void)
{
    static const int ignored[] = {SIGHUP,  SIGPIPE,   SIGALRM, SIGUSR1,   SIGUSR2, SIGPOLL,
                                  SIGPROF, SIGVTALRM, SIGPWR,  SIGSTKFLT, SIGXCPU, SIGXFSZ};

    for (size_t i = 0; i < ARRAY_SIZE(ignored); i++)
        signal(ignored[i], SIG_IGN);
}

/*
 * Starts the companion (companion.h), so that trainers and the service manager notice this process's death at once.
 * Return: the companion's pid, or 0 if there is no companion.
 */
static int start_companion(void)
{
    int r = keep_is_on() ? companion_start() : 0;

    if (r < 0)
        log_notice("no companion process (%s): if this daemon is killed, trainers notice it some 50 ms later for each "
                   "GiB of state",
                   strerror(-r));
    return MAX(r, 0);
}

static int run_server(const struct config *config)
{
    struct server *server;
    char why[512];
    int r, companion, code;

    ignore_signals();
    log_init(config->job, config->log_level);
    r = server_new(&server, config, why, sizeof(why));
    if (r < 0) {
        log_error("%s", why);
        return exit_code(r);
    }
    keep_forget(TOLD_NAME);
    if (log_start() < 0)
        log_error("there is no thread for the log: a reader that is slow makes the daemon slow");
    companion = start_companion();
    code = server_run(server) == 0 ? EX_OK : EX_IOERR;
    if (server_may_be_replaced(server)) {
        if (code == EX_OK)
            log_notice("trainers are attached, and the state of their run is kept: the next daemon goes on with it, if "
                       "the service manager starts one");
        log_stop();
        _exit(code);
    }
    if (companion > 0)
        companion_stop(companion);
    server_free(server);
    log_stop();
    return code;
}

/*
 * Prints the result of zerod --check. user: the user as whom places are checked, or "" to check only the file. Return:
 * EX_OK, or EX_CONFIG after a message on stderr.
 */
static int say_checked(const struct config *config, const char *path, const char *user)
{
    char huge_pages[256], why[256];
    const struct gemm *gemm;

    if (config_needs_openblas(config, config->optimizer.type) && gemm_load(&gemm, why, sizeof(why)) < 0) {
        fprintf(stderr, "zerod: %s\n", why);
        return EX_CONFIG;
    }
    huge_pages_describe(NULL, huge_pages, sizeof(huge_pages));
    if (*user && !check_places(config)) {
        fprintf(stderr, "zerod: %s: looked at as user %s\n", path, user);
        return EX_CONFIG;
    }
    if (*user)
        printf("%s: ok, with users, groups, key and folders as user %s sees them\n", path, user);
    else
        printf("%s: ok (users, groups and the socket's folder are looked at when the daemon starts)\n", path);
    puts(huge_pages);
    return EX_OK;
}

int main(int argc, char **argv)
{
    struct options options = parse_options(argc, argv);
    struct config *config = NULL;
    const char *user = "";
    bool kept, told;
    int r;

    if (options.exit_now >= 0)
        return options.exit_now;
    umask(umask(0) | S_IWOTH); /* other users may never write to checkpoints and traces */
    gemm_one_thread();
    if (options.check)
        user = check_become(options.user, options.config);
    if (!user)
        return EX_USAGE;
    r = options.check || options.print ? EX_OK : take_descriptors();
    told = was_told();
    kept = keep_passed_state();
    find_kept_socket();
    if (r == EX_OK)
        r = load_config(&config, &options);
    if (r == EX_CONFIG && kept)
        r = !told && may_tell() ? EX_TEMPFAIL : wait_for_config(&config, &options);
    if (r == EX_OK && options.n_ranks > 0 && options.n_ranks != config->world.size) {
        fprintf(stderr, "zerod: --ranks %u, but %s has world.size %u\n", options.n_ranks, options.config,
                config->world.size);
        r = EX_USAGE;
    }
    if (r == EX_OK && options.socket)
        r = move_socket(config, options.socket);
    if (r == EX_OK && options.print)
        r = config_print(stdout, config) < 0 ? EX_IOERR : EX_OK;
    else if (r == EX_OK && options.check)
        r = say_checked(config, options.config, user);
    else if (r == EX_OK)
        r = run_server(config);
    if ((r == EX_CONFIG || r == EX_NOPERM || r == EX_UNAVAILABLE) && kept && systemd_started_it())
        r = wait_and_start_again(&options, told, r);
    config_free(config);
    keep_deinit();
    return r;
}
