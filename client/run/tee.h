/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * A file with the output of one process and of its successors (--tee): their lines without prefixes and colours. Lines
 * of zerodrun in it begin with "zerodrun: ". A zero struct is no file: all calls do nothing.
 */

#include <stdbool.h>

#include "client/run/sink.h"

struct tee_spec {
    const char *directory;             /* created with its parents if it does not exist */
    const char *name;                  /* of the file, without ".log" */
    const char *run_id;                /* if the file has text already, a line announces this run */
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

/* spec is used only during the call. Return: 0 or a negative errno; then path is set for a message, if memory
 * sufficed. */
int tee_init(struct tee *tee, uv_loop_t *loop, const struct tee_spec *spec);
/* If tee_init() has returned 0, the caller calls sink_close() first. */
void tee_deinit(struct tee *tee);

void tee_say(struct tee *tee, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Return: the negative errno of a failed write, only once; else 0. */
int tee_complaint(struct tee *tee);
