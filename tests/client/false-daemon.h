/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A daemon that answers what a script says, true or false, in a thread of this process. It accepts connections and
 * answers each request that has an answer with the next answer of the script. After the script's end it refuses
 * requests and says that it closes. The thread ends when the last connection is closed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/wire/frame.h"
#include "core/wire/wire-reply.h"

/* An answer: one packet. */
struct false_answer {
    const uint8_t *data;
    size_t n_bytes;
    int fds[FRAME_MAX_FDS]; /* n_fds descriptors, which the caller closes */
    size_t n_fds;
    bool more; /* the next answer is sent with this one */
};

struct false_daemon;

/* Listens at path, which false_daemon_free() removes. Return: NULL if it cannot. */
struct false_daemon *false_daemon_new(const char *path);
void false_daemon_free(struct false_daemon *daemon);

/* Serves connections until the last one is closed. The n answers must live until false_daemon_join(). */
void false_daemon_serve(struct false_daemon *daemon, const struct false_answer *answers, size_t n);
void false_daemon_join(struct false_daemon *daemon);

/* Return: a memfd, which the caller closes. is_sealed: its size cannot change, like that of a daemon's memory. */
int false_memory(size_t n_bytes, bool is_sealed);
