/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A file with the output of one process, and of those that are started in its place (--tee): its lines without prefixes
 * and colours. Lines of zerodrun in it begin with "zerodrun: ". A zero struct is no file, and then nothing is written.
 */

#include <stdbool.h>

#include "client/run/sink.h"

struct tee_spec {
    const char *directory;             /* made if it is not there, with its parents */
    const char *name;                  /* of the file, without ".log" */
    const char *run_id;                /* if the file has text already, a line says that this run begins */
    void (*on_drained)(void *context); /* as sink_init() has it */
    void *context;
};

struct tee {
    struct sink sink;
    char *path; /* owned */
    int fd;     /* owned */
    bool is_open;
    bool has_complained;
};

/* spec is used during the call. Return: 0 or a negative errno, then path is set for a message, if there was memory. */
int tee_init(struct tee *tee, uv_loop_t *loop, const struct tee_spec *spec);
/* If tee_init() has returned 0, sink_close() comes first. */
void tee_deinit(struct tee *tee);

void tee_say(struct tee *tee, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Return: once after a write has failed, the negative errno; else 0. */
int tee_complaint(struct tee *tee);
