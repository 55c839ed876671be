/* SPDX-License-Identifier: Apache-2.0 */

/* The program zerod-exporter serves the metrics of all daemons of a machine over HTTP. */

#include <getopt.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sysexits.h>
#include <time.h>

#include "client/exporter/scrape.h"
#include "client/exporter/http.h"
#include "client/exporter/address.h"
#include "core/base/base.h"

static const char help_text[] =
    "Usage: zerod-exporter [--listen ADDRESS:PORT] [--sockets PATTERN] [--timeout SECONDS]\n"
    "Serves the metrics of all zerods of this machine to Prometheus, at /metrics.\n"
    "\n"
    "  --listen ADDRESS:PORT   where to listen (default: 127.0.0.1:17700); :PORT is all addresses\n"
    "  --sockets PATTERN       the daemons' sockets (default: /run/zerod/*.sock)\n"
    "  --timeout SECONDS       how long a daemon may take to answer, 0.1 to 60 (default: 2)\n"
    "  -h, --help              this text\n"
    "  -V, --version           the version\n"
    "\n"
    "Exit status: 0 after SIGTERM or SIGINT, 64 usage, 68 no such address, 69 cannot listen, 71 no memory, 77 not "
    "allowed\n"
    "to listen.\n";

struct options {
    const char *listen;
    struct gather_options gather;
};

/* Return: 0, or EX_USAGE after an error message. */
static int parse_timeout(const char *text, unsigned *timeout_ms)
{
    char *end;
    double seconds = strtod(text, &end);

    if (end == text || *end || !(seconds >= 0.1 && seconds <= 60)) {
        fprintf(stderr, "zerod-exporter: --timeout: '%s' is no number of seconds from 0.1 to 60\n", text);
        return EX_USAGE;
    }
    *timeout_ms = (unsigned)(seconds * 1000);
    return 0;
}

/*
 * Return: 0; negative after --help or --version, when the program ends; or a code of sysexits.h, after an error
 * message.
 */
static int parse_exporter_options(int argc, char **argv, struct options *options)
{
    static const struct option long_options[] = {
        {"listen", required_argument, NULL, 'l'},  {"sockets", required_argument, NULL, 's'},
        {"timeout", required_argument, NULL, 't'}, {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},       {},
    };
    int option, r = 0;

    while (r == 0 && (option = getopt_long(argc, argv, "hV", long_options, NULL)) >= 0) {
        if (option == 'l')
            options->listen = optarg;
        else if (option == 's')
            options->gather.pattern = optarg;
        else if (option == 't')
            r = parse_timeout(optarg, &options->gather.timeout_ms);
        else if (option == 'h' || option == 'V')
            r = fputs(option == 'h' ? help_text : "zerod-exporter " ZEROD_VERSION "\n", stdout) == EOF ? EX_IOERR : -1;
        else
            r = EX_USAGE;
    }
    if (r == 0 && optind < argc) {
        fprintf(stderr, "zerod-exporter: what is '%s'?\n", argv[optind]);
        r = EX_USAGE;
    }
    if (r == EX_USAGE)
        fputs("Try 'zerod-exporter --help'.\n", stderr);
    return r;
}

static uid_t find_zerod(void)
{
    const struct passwd *zerod = getpwnam("zerod");

    return zerod ? zerod->pw_uid : (uid_t)-1;
}

/* Waits until a signal ends the program, and drops slow clients meanwhile. */
static void wait_for_signal(struct http *http, const sigset_t *signals)
{
    const struct timespec pause = {.tv_nsec = HTTP_CHECK_MS * 1000000L};
    int number;

    do {
        number = sigtimedwait(signals, NULL, &pause);
        http_drop_slow(http);
    } while (number < 0); /* no signal yet; http_drop_slow() may have changed errno */
}

static int serve_until_signal(const struct options *options, const sigset_t *signals)
{
    struct gather *gather = gather_new(&options->gather);
    struct http_content content = {
        .gather = gather, .title = options->gather.pattern, .timeout_ms = options->gather.timeout_ms};
    int fd = place_listen(options->listen);
    struct http *http = gather && fd >= 0 ? http_new(fd, &content) : NULL;

    if (http)
        wait_for_signal(http, signals);
    else if (fd >= 0)
        fputs("zerod-exporter: no memory for the server\n", stderr);
    http_free(http);
    gather_free(gather);
    return fd < 0 ? -fd : http ? 0 : EX_OSERR;
}

int main(int argc, char **argv)
{
    struct options options = {.listen = "127.0.0.1:17700",
                              .gather = {.pattern = "/run/zerod/*.sock", .timeout_ms = 2000, .zerod = find_zerod()}};
    sigset_t signals;
    int r = parse_exporter_options(argc, argv, &options);

    if (r != 0)
        return r < 0 ? 0 : r;
    /* The signals are blocked before any thread starts, because threads inherit the mask. */
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    (void)signal(SIGPIPE, SIG_IGN);
    return serve_until_signal(&options, &signals);
}
