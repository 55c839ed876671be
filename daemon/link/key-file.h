/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The file with the key that all nodes of a job share (world.key_file). */

#include <stddef.h>

struct secure_stream_key;

enum {
    KEY_FILE_MIN_BYTES = 32,        /* without the newline at its end */
    KEY_FILE_MAX_BYTES = 64 * 1024, /* picked: a larger file is the wrong file */
};

/*
 * Reads the key. Refuses a file if a user other than root and this process's user owns it, or may read or write it.
 * Return: 0, or -errno with a sentence in why.
 */
int key_file_read(struct secure_stream_key *key, const char *path, char *why, size_t why_size);
