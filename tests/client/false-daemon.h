/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A daemon that answers what a script says, whether it is true or not: a thread of this process. It takes connections,
 * and gives each request that has an answer the next one of the script; when the script is at its end, it refuses and
 * says that it closes. It ends when the last connection has been closed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/frame.h"
#include "core/wire/wire-reply.h"

/* A packet. */
struct false_answer {
    const uint8_t *data;
    size_t n_bytes;
    int fds[FRAME_MAX_FDS]; /* n_fds, not owned */
    size_t n_fds;
    bool more; /* the next answer follows without a request */
};

struct false_daemon;

/* Listens. The path is removed by false_daemon_free(). Return: NULL, it cannot. */
struct false_daemon *false_daemon_new(const char *path);
void false_daemon_free(struct false_daemon *daemon);

/* Serves connections until the last one has been closed. answers: n, must live until false_daemon_join(). */
void false_daemon_serve(struct false_daemon *daemon, const struct false_answer *answers, size_t n);
void false_daemon_join(struct false_daemon *daemon);

/* A memfd, to be closed. is_sealed: it cannot be cut, as the daemon's. */
int false_memory(size_t n_bytes, bool is_sealed);
