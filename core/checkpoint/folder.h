/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Checkpoints in a folder. Each checkpoint is a folder in it, such as "step-00001000". A checkpoint is written under a
 * name that begins with a dot, and renamed when all of it is on the disk. A checkpoint to be removed is renamed first.
 * So a folder with a checkpoint's name was whole when it got that name. A checkpoint is *whole* if it has a
 * description, and all files of the description have their sizes; only folder_verify() reads their bytes.
 *
 * Links are not followed: a checkpoint is a folder, and its files are regular files.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checkpoint/description.h"

enum { FOLDER_NAME_BYTES = 32, FOLDER_WHY_BYTES = 320 };

/* Prints a checkpoint's name, such as "step-00001000". */
void folder_name(char *dst, uint64_t step);
/* Reads the step from a checkpoint's name. Return: false if the name has another form. */
bool folder_parse_name(const char *name, uint64_t *step);

/* Opens a checkpoint in dir and reads its description. Return: the checkpoint's descriptor; or -errno, with a message
 * in why that names the file. */
int folder_open(int dir, const char *name, struct description *out, char *why, size_t why_size);

/* Prints the name "node1.json": the part of a node, if the job has several, in the form of a description. dst:
 * FOLDER_NAME_BYTES. */
void folder_part_name(char *dst, unsigned node);
/* Reads a node's part in an open checkpoint. Return: 0, or -errno with a message in why. */
int folder_open_part(int checkpoint, const char *name, struct description *out, char *why, size_t why_size);

/* Opens a file of an open checkpoint for reading. Return: a descriptor, or -errno with a message in why. */
int folder_open_file(int checkpoint, const struct description_file *file, char *why, size_t why_size);

/* Reads n_bytes at the offset. Return: 0 or -errno; -EIO if the file has fewer bytes. */
int folder_read(int fd, void *dst, uint64_t n_bytes, uint64_t offset);

struct folder_entry {
    uint64_t step;
    bool whole;
    uint64_t n_bytes; /* size of its files */
    unsigned world_size;
    uint64_t written_s;         /* in seconds since 1970 */
    char why[FOLDER_WHY_BYTES]; /* the reason if the checkpoint is not whole */
};

struct folder_list {
    struct folder_entry *entries; /* owned; the newest step first */
    size_t n;
};

/* Lists the checkpoints in a folder. Return: 0, or -errno if the folder cannot be read. */
int folder_list(int dir, struct folder_list *out);
void folder_list_deinit(struct folder_list *list);

/*
 * folder_verify() reads all bytes of a checkpoint and compares their hashes. It calls bad() with the number of each MiB
 * of a file that differs, and progress() after each MiB. progress may be NULL. Return: the number of MiB that differ,
 * or -errno with a message in why.
 */
struct folder_verifier {
    void (*bad)(void *userdata, const char *file, uint64_t block);
    void (*progress)(void *userdata, uint64_t n_bytes_done, uint64_t n_bytes);
    void *userdata;
};
int64_t folder_verify(int checkpoint, const struct description *d, const struct folder_verifier *verifier, char *why,
                      size_t why_size);
