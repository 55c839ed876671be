/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Files that a user names: opening and reading them ends, whatever they are. */

#include <stddef.h>

/* Opens to read. A FIFO that nobody writes to is empty; opening it would wait otherwise. Return: a descriptor, which
 * blocks; or a negative errno. */
int read_file_open(const char *path);

/*
 * Reads all of it, for which a pipe waits. *text: n_bytes and a NUL, to be freed. Return: 0; -EFBIG, it has more than
 * max_bytes, as /dev/zero has; or a negative errno.
 */
int read_file(const char *path, size_t max_bytes, char **text, size_t *n_bytes);
