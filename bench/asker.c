/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A load of questions. --connections control connections each keep --in-flight questions unanswered until standard
 * input ends. Prints "ready" when all connections exist, and at the end the number of answers.
 *
 * bench-asker --socket PATH --command status [--connections N] [--in-flight K] [--never-read]
 *
 * --never-read: sends questions while the socket accepts them, reads nothing, and reconnects when the daemon closes the
 * connection.
 */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/control/control.h"
#include "core/wire/wire-reply.h"
#include "core/wire/wire-request.h"

enum { MAX_CONNECTIONS = 256 };

struct options {
    const char *socket, *command;
    unsigned n_connections, n_in_flight;
    bool never_read;
};

static uint8_t question[256], answer_bytes[FRAME_MAX_BYTES + 1];
static size_t n_question_bytes;

static struct options parse(int argc, char **argv)
{
    static const struct option longs[] = {
        {"socket", 1, NULL, 's'},    {"command", 1, NULL, 'c'},    {"connections", 1, NULL, 'n'},
        {"in-flight", 1, NULL, 'i'}, {"never-read", 0, NULL, 'r'}, {0},
    };
    struct options o = {.command = "status", .n_connections = 1, .n_in_flight = 1};
    int c;

    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == 's')
            o.socket = optarg;
        else if (c == 'c')
            o.command = optarg;
        else if (c == 'n')
            o.n_connections = (unsigned)atoi(optarg);
        else if (c == 'i')
            o.n_in_flight = (unsigned)atoi(optarg);
        else if (c == 'r')
            o.never_read = true;
        else
            exit(64);
    }
    if (o.n_connections == 0 || o.n_connections > MAX_CONNECTIONS)
        exit(64);
    return o;
}

static void open_connection(struct control *control, const struct options *o)
{
    if (control_init(control, o->socket) < 0 || fcntl(control->fd, F_SETFL, O_NONBLOCK) < 0) {
        fprintf(stderr, "bench-asker: %s\n", control->error);
        exit(1);
    }
}

static bool is_last(struct control *control, size_t n_bytes)
{
    struct reply reply;
    char why[WIRE_WHY_BYTES];

    return wire_unpack_reply(&control->arena, answer_bytes, n_bytes, &reply, why, sizeof(why)) == 0 &&
           reply.type == REPLY_ADMIN_PART && reply.admin_part.last;
}

/* Return: the number of answers read. */
static unsigned long read_answers(struct control *control)
{
    unsigned long n_answers = 0;
    ssize_t n;

    while ((n = recv(control->fd, answer_bytes, sizeof(answer_bytes), MSG_DONTWAIT)) > 0) {
        if (!is_last(control, (size_t)n))
            continue;
        n_answers++;
        (void)send(control->fd, question, n_question_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return n_answers;
}

static void ask_without_end(struct control *control, const struct options *o)
{
    while (send(control->fd, question, n_question_bytes, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
        ;
    if (errno == EAGAIN)
        return;
    control_deinit(control);
    open_connection(control, o);
}

static unsigned long load(struct control *controls, const struct options *o)
{
    struct pollfd polls[MAX_CONNECTIONS + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    unsigned long n_answers = 0;

    for (;;) {
        for (unsigned i = 0; i < o->n_connections; i++)
            polls[i + 1] = (struct pollfd){.fd = controls[i].fd, .events = o->never_read ? POLLOUT : POLLIN};
        if (poll(polls, o->n_connections + 1, -1) < 0 || polls[0].revents)
            return n_answers;
        for (unsigned i = 0; i < o->n_connections; i++) {
            if (!polls[i + 1].revents)
                continue;
            if (o->never_read)
                ask_without_end(&controls[i], o);
            else
                n_answers += read_answers(&controls[i]);
        }
    }
}

int main(int argc, char **argv)
{
    struct options o = parse(argc, argv);
    struct request request = {.type = REQUEST_ADMIN, .admin = {.command = o.command}};
    static struct control controls[MAX_CONNECTIONS];

    for (unsigned i = 0; i < o.n_connections; i++)
        open_connection(&controls[i], &o);
    n_question_bytes = (size_t)wire_pack_request(&controls[0].arena, &request, question, sizeof(question));
    for (unsigned i = 0; i < o.n_connections; i++)
        for (unsigned k = 0; k < o.n_in_flight; k++)
            (void)send(controls[i].fd, question, n_question_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    puts("ready");
    fflush(stdout);
    printf("%lu\n", load(controls, &o));
    for (unsigned i = 0; i < o.n_connections; i++)
        control_deinit(&controls[i]);
    return 0;
}
