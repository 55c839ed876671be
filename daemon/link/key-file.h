/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The file with the key that all nodes of a job share (world.key_file). */

#include <stddef.h>

struct secure_stream_key;

enum {
    KEY_FILE_MIN_BYTES = 32,        /* size of the key, without the newline at the file's end */
    KEY_FILE_MAX_BYTES = 64 * 1024, /* picked: a larger file is the wrong file */
};

/*
 * Reads the key. Refuses a file that another user than root and this process's user owns, or can read or write. Return:
 * 0, or -errno with a sentence in why.
 */
int key_file_read(struct secure_stream_key *key, const char *path, char *why, size_t why_size);
