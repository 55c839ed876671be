/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * The folder of the checkpoints is tried, and given to its readers, when the daemon starts, so that what is wrong
 * with it is not said only at the first save. A disk may hang, so a thread of libuv does it: a run that is kept goes on
 * meanwhile.
 */

#include <stddef.h>
#include <uv.h>

#include "daemon/server/accounts.h"

struct config_checkpoint;
struct job;

struct checkpoint_folder {
    uv_work_t work;
    const struct config_checkpoint *config;
    struct job *job; /* NULL: it is gone */
    struct accounts readers;
    int tried, given; /* 0 or -errno */
};

/*
 * Begins; what is wrong with the folder is said later, by E1701. folder: zeroed, valid until the job's loop has ended.
 * Return: 0, or -errno with a sentence: a group of checkpoint.allow_groups does not exist.
 */
int checkpoint_folder_try(struct checkpoint_folder *folder, struct job *job, char *why, size_t why_size);
/* The job is about to be freed. */
void checkpoint_folder_leave(struct checkpoint_folder *folder);
