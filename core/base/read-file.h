/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Files that a user names. Opening and reading them ends, whatever kind of file they are. */

#include <stddef.h>

/* Opens a file to read. A FIFO without a writer is empty, and opening it does not wait. Return: a blocking descriptor,
 * or -errno. */
int read_file_open(const char *path);

/*
 * Reads a whole file; waits for the end of a pipe. *text: n_bytes and a NUL, which the caller frees. Return: 0; -EFBIG
 * if it has more than max_bytes, as /dev/zero does; or another -errno.
 */
int read_file(const char *path, size_t max_bytes, char **text, size_t *n_bytes);
