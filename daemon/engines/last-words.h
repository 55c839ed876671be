/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The standard error of a child process: a pipe. Its lines go into this process's log. The last line is kept, because
 * only there the dynamic loader names a library that it does not find. One thread.
 */

#include <stdbool.h>
#include <stddef.h>

enum { LAST_WORDS_MAX_BYTES = 511 };

struct last_words {
    int fd, child_fd; /* ours, and the child's until it runs; -1: none */
    size_t n_bytes;
    bool line_ended;
    char line[LAST_WORDS_MAX_BYTES + 1];
};

#define LAST_WORDS_NULL ((struct last_words){.fd = -1, .child_fd = -1})

/* Return: 0, or -errno. */
int last_words_init(struct last_words *words);
/* Logs the remaining lines first. */
void last_words_deinit(struct last_words *words);

/* Logs the lines that have come. Return: false if no more will come. */
bool last_words_read(struct last_words *words);
