/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Reads files that a user names, of any kind: opening never waits, and a file without an end is an error. */

#include <stddef.h>

/* Opens a file to read. A FIFO without a writer is empty, and opening it does not wait. Return: a blocking descriptor,
 * or -errno. */
int read_file_open(const char *path);

/*
 * Reads a whole file; waits for the end of a pipe. *text: n_bytes and a NUL, which the caller frees. Return: 0; -EFBIG
 * if the file has more than max_bytes, as /dev/zero does; or another -errno.
 */
int read_file(const char *path, size_t max_bytes, char **text, size_t *n_bytes);
