/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Measures the time of a message for a trainer, and of a message over a bare socket for comparison, in turn:
 *
 *     bench-latency push --socket PATH
 *
 * measures one way: zerod_push() of a gradient that is already in its slot, and send() of as many bytes to a process
 * that reads and discards them.
 *
 *     bench-latency round --socket PATH
 *
 * measures both ways: zerod_grad_norm() of a job with one rank, and a ping-pong over a socketpair under epoll with
 * another process.
 *
 *     bench-latency probe --socket PATH
 *
 * asks on a control connection repeatedly until standard input ends. It prints one line per answer: when the question
 * was sent, and how long the answer took.
 *
 * Between two messages the process computes for --pause-us, as a trainer does. With --cores A,B it runs on core A, and
 * the process at the other end of the bare socket runs on core B. The daemon should then run on core B, too. Times are
 * ns.
 */

#include "client/control/control.h"
#include "core/base/base.h"
#include "core/wire/wire-request.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include <zerod/client.h>

enum {
    PUSH_PARAMS = 512,
    PUSH_ELEMS = 1024, /* elements of a parameter; the value does not matter, because nothing is copied */
    MAX_MESSAGE = 4096,
};

struct options {
    const char *socket;
    unsigned n_rounds;    /* pairs of blocks, one block per side */
    unsigned n_per_round; /* messages of each side in a block */
    unsigned pause_us;
    int own_core, peer_core; /* -1: any core */
};

struct samples {
    uint64_t *ns;
    size_t n;
};

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void pause_us(unsigned us)
{
    uint64_t until = now_ns() + us * UINT64_C(1000);

    while (us && now_ns() < until)
        ;
}

static int fail(const struct zerod *c, const char *what)
{
    fprintf(stderr, "bench-latency: %s: %s\n", what, zerod_error(c)->text);
    return 1;
}

/* ---- figures ------------------------------------------------------------------------------------------- */

static int samples_init(struct samples *samples, const struct options *o)
{
    *samples = (struct samples){.ns = calloc((size_t)o->n_rounds * o->n_per_round, sizeof(uint64_t))};
    return samples->ns ? 0 : -ENOMEM;
}

static void samples_add(struct samples *samples, uint64_t ns)
{
    samples->ns[samples->n++] = ns;
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void print_quantiles(const char *name, struct samples *samples, const char *end)
{
    qsort(samples->ns, samples->n, sizeof(*samples->ns), compare);
    printf("\"%s\": {\"p50\": %" PRIu64 ", \"p90\": %" PRIu64 ", \"p99\": %" PRIu64 "}%s", name,
           samples->ns[samples->n / 2], samples->ns[samples->n * 9 / 10], samples->ns[samples->n * 99 / 100], end);
    free(samples->ns);
}

static int print_both(struct samples *zerod, struct samples *peer, size_t n_bytes)
{
    printf("{\"n\": %zu, \"n_bytes\": %zu, ", zerod->n, n_bytes);
    print_quantiles("zerod", zerod, ", ");
    print_quantiles("peer", peer, "}\n");
    return 0;
}

/* ---- the other process --------------------------------------------------------------------------------- */

static void discard(int fd)
{
    char data[MAX_MESSAGE];
    struct iovec place = {.iov_base = data, .iov_len = sizeof(data)};
    struct msghdr header = {.msg_iov = &place, .msg_iovlen = 1};

    while (recvmsg(fd, &header, 0) > 0)
        ;
}

static int watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    int epoll = epoll_create1(EPOLL_CLOEXEC);

    if (epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
        return -1;
    return epoll;
}

static ssize_t wait_and_receive(int epoll, int fd, char *data)
{
    struct epoll_event event;

    while (epoll_wait(epoll, &event, 1, -1) < 0)
        if (errno != EINTR)
            return -1;
    return recv(fd, data, MAX_MESSAGE, 0);
}

static void pong(int fd)
{
    char data[MAX_MESSAGE];
    int epoll = watch(fd);
    ssize_t n;

    while (epoll >= 0 && (n = wait_and_receive(epoll, fd, data)) > 0)
        if (send(fd, data, (size_t)n, MSG_NOSIGNAL) < 0)
            break;
}

static void pin(int core)
{
    cpu_set_t set;

    if (core < 0)
        return;
    CPU_ZERO(&set);
    CPU_SET((unsigned)core, &set);
    if (sched_setaffinity(0, sizeof(set), &set) < 0)
        perror("bench-latency: core");
}

/* Starts a process that runs serve(). Return: this process's side of the socketpair, or -1. */
static int start_peer(const struct options *o, void (*serve)(int fd), pid_t *pid)
{
    int fds[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        return -1;
    *pid = fork();
    if (*pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pin(o->peer_core);
        close(fds[0]);
        serve(fds[1]);
        _exit(0);
    }
    close(fds[1]);
    return *pid < 0 ? -1 : fds[0];
}

static void stop_peer(int fd, pid_t pid)
{
    close(fd);
    waitpid(pid, NULL, 0);
}

/* ---- a rank -------------------------------------------------------------------------------------------- */

static int attach(struct zerod **c, const struct options *o, unsigned n_params)
{
    uint64_t shape = PUSH_ELEMS;
    char name[32];

    if (zerod_connect(c, &(struct zerod_options){.rank = 0, .socket = o->socket}) != 0)
        return fail(NULL, "connect");
    for (unsigned i = 0; i < n_params; i++) {
        snprintf(name, sizeof(name), "layers.%u.weight", i);
        if (zerod_declare(*c, &(struct zerod_param){.name = name, .ndim = 1, .shape = &shape, .trainable = true}, 1) !=
            0)
            return fail(*c, "declare");
    }
    return zerod_form(*c) < 0 ? fail(*c, "form") : 0;
}

static void detach(struct zerod *c)
{
    zerod_leave(c);
    zerod_close(c);
}

/* Return: the bytes that zerod_push() sends in the middle of such a job. */
static size_t push_bytes(void)
{
    struct wire_arena arena;
    uint8_t buffer[MAX_MESSAGE];
    struct request request = {
        .type = REQUEST_PUSH,
        .push = {.sequence = 5000, .step = 10, .param = PUSH_PARAMS / 2, .ordinal = 1, .use = 10},
    };
    int n = -1;

    if (wire_arena_init(&arena) == 0) {
        n = wire_pack_request(&arena, &request, buffer, sizeof(buffer));
        wire_arena_deinit(&arena);
    }
    return n < 0 ? 0 : (size_t)n;
}

/* Pushes n_per_round gradients, in as many steps as that needs, and times each push. */
static int push_round(struct zerod *c, const struct options *o, struct samples *samples)
{
    for (unsigned i = 0; i < o->n_per_round;) {
        if (zerod_begin_backward(c, NULL) != 0)
            return fail(c, "begin_backward");
        for (unsigned p = PUSH_PARAMS; p-- > 0 && i < o->n_per_round; i++) {
            uint64_t start;

            if (!zerod_slot(c, p))
                return fail(c, "slot");
            pause_us(o->pause_us);
            start = now_ns();
            if (zerod_push(c, &(struct zerod_push){.param = p}) != 0)
                return fail(c, "push");
            samples_add(samples, now_ns() - start);
        }
        if (zerod_end_backward(c, NULL, 0) != 0 || zerod_step(c, NULL, NULL) != 0)
            return fail(c, "step");
    }
    return 0;
}

static int send_round(int fd, size_t n_bytes, const struct options *o, struct samples *samples)
{
    char data[MAX_MESSAGE] = {0};

    for (unsigned i = 0; i < o->n_per_round; i++) {
        uint64_t start;

        pause_us(o->pause_us);
        start = now_ns();
        if (send(fd, data, n_bytes, MSG_NOSIGNAL) < 0) {
            perror("bench-latency: send");
            return 1;
        }
        samples_add(samples, now_ns() - start);
    }
    return 0;
}

static int bench_push(const struct options *o)
{
    struct samples zerod, peer;
    size_t n_bytes = push_bytes();
    struct zerod *c;
    pid_t pid;
    int fd = start_peer(o, discard, &pid), r = 0;

    if (fd < 0 || n_bytes == 0 || samples_init(&zerod, o) < 0 || samples_init(&peer, o) < 0) {
        fprintf(stderr, "bench-latency: no process or memory to compare with\n");
        return 1;
    }
    if (attach(&c, o, PUSH_PARAMS) != 0 || push_round(c, o, &zerod) != 0)
        return 1;
    zerod.n = 0; /* the messages until now were a warm-up */
    for (unsigned round = 0; r == 0 && round < o->n_rounds; round++) {
        r = push_round(c, o, &zerod);
        if (r == 0)
            r = send_round(fd, n_bytes, o, &peer);
    }
    stop_peer(fd, pid);
    detach(c);
    return r == 0 ? print_both(&zerod, &peer, n_bytes) : r;
}

/* ---- both ways ----------------------------------------------------------------------------------------- */

static int ask_round(struct zerod *c, const struct options *o, struct samples *samples)
{
    double norm;

    for (unsigned i = 0; i < o->n_per_round; i++) {
        uint64_t start;

        pause_us(o->pause_us);
        start = now_ns();
        if (zerod_grad_norm(c, &norm) != 0)
            return fail(c, "grad_norm");
        samples_add(samples, now_ns() - start);
    }
    return 0;
}

static int ping_round(int epoll, int fd, const struct options *o, struct samples *samples)
{
    char data[MAX_MESSAGE] = {0};

    for (unsigned i = 0; i < o->n_per_round; i++) {
        uint64_t start;

        pause_us(o->pause_us);
        start = now_ns();
        if (send(fd, data, 16, MSG_NOSIGNAL) < 0 || wait_and_receive(epoll, fd, data) < 0) {
            perror("bench-latency: ping");
            return 1;
        }
        samples_add(samples, now_ns() - start);
    }
    return 0;
}

static int bench_round(const struct options *o)
{
    struct samples zerod, peer;
    struct zerod *c;
    pid_t pid;
    int fd = start_peer(o, pong, &pid), epoll = fd < 0 ? -1 : watch(fd), r = 0;

    if (epoll < 0 || samples_init(&zerod, o) < 0 || samples_init(&peer, o) < 0) {
        fprintf(stderr, "bench-latency: no process or memory to compare with\n");
        return 1;
    }
    if (attach(&c, o, 1) != 0 || ask_round(c, o, &zerod) != 0)
        return 1;
    zerod.n = 0; /* the messages until now were a warm-up */
    for (unsigned round = 0; r == 0 && round < o->n_rounds; round++) {
        r = ask_round(c, o, &zerod);
        if (r == 0)
            r = ping_round(epoll, fd, o, &peer);
    }
    stop_peer(fd, pid);
    detach(c);
    return r == 0 ? print_both(&zerod, &peer, 16) : r;
}

/* ---- the time of answers to another client ------------------------------------------------------------- */

static bool input_has_ended(int timeout_ms)
{
    struct pollfd pollfd = {.fd = 0, .events = POLLIN};

    return poll(&pollfd, 1, timeout_ms) != 0;
}

static int bench_probe(const struct options *o)
{
    struct control control;
    struct answer answer;
    int r = control_init(&control, o->socket);

    puts("ready");
    fflush(stdout);
    while (r == 0 && !input_has_ended(1)) {
        uint64_t start = now_ns();

        r = control_ask(&control, "ranks", &answer);
        if (r < 0)
            break;
        printf("%" PRIu64 " %" PRIu64 "\n", start, now_ns() - start);
        answer_deinit(&answer);
    }
    if (r < 0)
        fprintf(stderr, "bench-latency: %s\n", control.error);
    control_deinit(&control);
    return r < 0;
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {
        {"socket", 1, NULL, 's'},   {"rounds", 1, NULL, 'r'}, {"messages", 1, NULL, 'm'},
        {"pause-us", 1, NULL, 'p'}, {"cores", 1, NULL, 'c'},  {0},
    };
    struct options o = {.n_rounds = 8, .n_per_round = 2 * PUSH_PARAMS, .pause_us = 20, .own_core = -1, .peer_core = -1};
    int c;

    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == 's')
            o.socket = optarg;
        else if (c == 'r')
            o.n_rounds = (unsigned)atoi(optarg);
        else if (c == 'm')
            o.n_per_round = (unsigned)atoi(optarg);
        else if (c == 'p')
            o.pause_us = (unsigned)atoi(optarg);
        else if (c != 'c' || sscanf(optarg, "%d,%d", &o.own_core, &o.peer_core) != 2)
            optind = argc; /* shows the usage */
    }
    pin(o.own_core);
    if (optind + 1 == argc && o.socket && o.n_rounds > 0 && o.n_per_round > 0) {
        if (strcmp(argv[optind], "push") == 0)
            return bench_push(&o);
        if (strcmp(argv[optind], "round") == 0)
            return bench_round(&o);
        if (strcmp(argv[optind], "probe") == 0)
            return bench_probe(&o);
    }
    fprintf(stderr, "usage: bench-latency push|round|probe --socket PATH [--rounds N] [--messages N] [--pause-us N]"
                    " [--cores A,B]\n");
    return 64;
}
