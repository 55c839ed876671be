/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Conversations with a whole server of one rank, in stages 2 and 3. An input is a series of packets. Each begins with
 * two bytes: bit 15 says which of two connections, the other bits have the length. Seeds are the conversations of
 * make-conversations.c.
 */

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/base/log.h"
#include "core/config/config.h"
#include "core/wire/frame.h"
#include "daemon/job/job.h"
#include "daemon/job/model/model.h"
#include "daemon/job/state/gather.h"
#include "daemon/job/state/window.h"
#include "daemon/server/server.h"
#include "daemon/server/service.h"
#include "daemon/server/session.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { N_CONNECTIONS = 2 };

static struct server *start_server(unsigned stage)
{
    static const char format[] = "job: fuzz\n"
                                 "listen: {socket: /tmp/zerod-fuzz-%d-%u.sock}\n"
                                 "world: {size: 1}\n"
                                 "zero_optimization: {stage: %u, reduce_bucket_size: 128, stage3_on_one_node: gathered}\n"
                                 "limits: {memory: 64MiB, clients: 4}\n"
                                 "threads: 1\n";
    struct config_problems problems = CONFIG_PROBLEMS_NULL;
    struct config *config;
    struct server *server;
    char text[512], why[256];
    int r;

    snprintf(text, sizeof(text), format, getpid(), stage, stage);
    r = config_load_string(&config, &(struct config_source){.text = {"fuzz.yaml", text, strlen(text)}}, &problems);
    assert(r == 0);
    r = server_new(&server, config, why, sizeof(why));
    assert(r == 0);
    log_init("fuzz", LOG_EMERG);
    return server;
}

static void read_answers(int fd, struct frame_buffer *buffer)
{
    while (frame_receive_fds(fd, buffer) == 0)
        ;
}

/* Runs the loop until the workers have no more work. */
static void run(struct server *server)
{
    struct job *job = server_service(server)->job;
    uv_loop_t *loop = server_service(server)->loop;

    for (int i = 0; i < 3; i++)
        uv_run(loop, UV_RUN_NOWAIT);
    while (job->work.n_under_way || job->work.n_io || gather_is_busy(job) || job->phase == JOB_RESERVING ||
           job->phase == JOB_UPDATING || window_is_busy(job->window))
        uv_run(loop, UV_RUN_ONCE);
}

static void end(struct server *server, int *fds)
{
    char *why = NULL;

    for (int i = 0; i < N_CONNECTIONS; i++)
        close(fds[i]);
    for (int i = 0; i < 1000 && !job_is_idle(server_service(server)->job); i++)
        run(server);
    if (job_drop(server_service(server)->job, &why) != 0)
        abort(); /* a job without ranks can always be dropped */
    run(server);
}

static void converse(struct server *server, struct frame_buffer *buffer, const uint8_t *data, size_t size)
{
    int fds[N_CONNECTIONS];

    for (int i = 0; i < N_CONNECTIONS; i++) {
        struct session *session;
        int pair[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) < 0 ||
            session_new(&session, server_service(server), pair[1]) < 0)
            abort();
        fds[i] = pair[0];
    }
    while (size > 2) {
        unsigned head = data[0] | (unsigned)data[1] << 8;
        size_t n = head & 0x7fff;
        int fd = fds[head >> 15];

        data += 2;
        size -= 2;
        n = n < size ? n : size;
        if (n > 0)
            (void)frame_send(fd, data, n, NULL, 0);
        data += n;
        size -= n;
        run(server);
        read_answers(fds[0], buffer);
        read_answers(fds[1], buffer);
    }
    end(server, fds);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct server *servers[2];
    static struct frame_buffer buffer;

    if (!servers[0]) {
        servers[0] = start_server(2);
        servers[1] = start_server(3);
        frame_buffer_init(&buffer);
    }
    converse(servers[0], &buffer, data, size);
    converse(servers[1], &buffer, data, size);
    return 0;
}
