/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reads the standard error of a child process through a pipe, and logs its lines. Keeps the last line, because the
 * dynamic loader names a missing library only there. One thread calls the functions.
 */

#include <stdbool.h>
#include <stddef.h>

enum { LAST_WORDS_MAX_BYTES = 511 };

struct last_words {
    int fd, child_fd; /* ends of the pipe; child_fd is closed when the child runs; -1: closed */
    size_t n_bytes;
    bool line_ended;
    char line[LAST_WORDS_MAX_BYTES + 1];
};

#define LAST_WORDS_NULL ((struct last_words){.fd = -1, .child_fd = -1})

/* Return: 0, or -errno. */
int last_words_init(struct last_words *words);
/* Logs the remaining lines, and closes the pipe. */
void last_words_deinit(struct last_words *words);

/* Logs the lines that have arrived. Return: false if no more lines will arrive. */
bool last_words_read(struct last_words *words);
