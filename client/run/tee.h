/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A file of --tee with the output lines of one process and of its successors, without prefixes and colours. zerodrun's
 * own lines in the file begin with "zerodrun: ". All zero means no file; then all calls do nothing.
 */

#include <stdbool.h>

#include "client/run/sink.h"

struct tee_spec {
    const char *directory;             /* created with its parents if it does not exist */
    const char *name;                  /* name of the file, without ".log" */
    const char *run_id;                /* named in a first line, if the file already has text */
    void (*on_drained)(void *context); /* as in sink_init() */
    void *context;
};

struct tee {
    struct sink sink;
    char *path; /* owned */
    int fd;     /* owned */
    bool is_open;
    bool has_complained;
};

/*
 * spec is used only during the call. Return: 0; or a negative errno, with tee->path for a message, or NULL if memory is
 * short.
 */
int tee_init(struct tee *tee, uv_loop_t *loop, const struct tee_spec *spec);
/* If tee_init() has returned 0, call sink_close() first. */
void tee_deinit(struct tee *tee);

void tee_say(struct tee *tee, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Return: the negative errno of a failed write at the first call after it; otherwise 0. */
int tee_complaint(struct tee *tee);
