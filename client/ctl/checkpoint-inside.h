/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Shared by the files of `zerodctl checkpoint` (checkpoint.h). */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/checkpoint/folder.h"

struct json;
struct json_object;

struct checkpoint_options {
    const char *socket;
    const char *path; /* NULL: not given */
    bool json;
    bool no_wait; /* only for save */
};

/* A folder of checkpoints. */
struct checkpoint_place {
    char *dir; /* owned */
    struct folder_list list;
    int fd; /* -1: the daemon's folder, which does not exist yet */
};

/* Opens options->path or, if it is NULL, the daemon's checkpoint.dir. Return: 0, or a code of sysexits.h after an error
 * message. */
int checkpoint_place_open(struct checkpoint_place *place, const struct checkpoint_options *options);
void checkpoint_place_close(struct checkpoint_place *place);
/* Reports that the folder has no complete checkpoint. Return: EX_NOINPUT. */
int checkpoint_none(const struct checkpoint_place *place);

/* The path of a checkpoint in a folder, to be freed; NULL if memory is short. */
char *checkpoint_path(const char *dir, uint64_t step);
/* Reports why folder_open(path) failed with r. Return: a code of sysexits.h. */
int checkpoint_not_opened(const char *path, const char *why, int r);

/* Prints a text without control characters, because parts of it come from foreign files. */
void checkpoint_say(FILE *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints the root and frees it. Return: 0, or a code of sysexits.h after an error message. */
int checkpoint_print_json(struct json *j, struct json_object *root);

/* A line on a terminal that shows the progress; {0} shows nothing. */
struct checkpoint_progress {
    const char *what; /* NULL: nothing is shown */
    uint64_t shown_ns;
    bool is_shown;
};

/* The string `what` must outlive the progress. */
void checkpoint_progress_init(struct checkpoint_progress *progress, const char *what);
void checkpoint_progress_show(struct checkpoint_progress *progress, uint64_t n_bytes_done, uint64_t n_bytes);
/* Removes the line. The caller calls it before other output and at the end. */
void checkpoint_progress_clear(struct checkpoint_progress *progress);

int checkpoint_save(const struct checkpoint_options *options);
int checkpoint_verify(const struct checkpoint_options *options);
